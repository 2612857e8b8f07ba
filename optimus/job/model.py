"""Describes a model: encoders that feed one LLM, as dimensions and flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from optimus.job.typed import Count, Whole

Recompute = Literal["none", "selective", "full", "auto"]
Modality = Literal["vision", "audio", "video"]
BF16_BYTES = 2
FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): queries and keys through low-rank projections."""

    query_rank: Count
    key_value_rank: Count
    nope_head_dim: Count
    rope_head_dim: Count
    value_head_dim: Count

    @property
    def width(self) -> int:
        """Outputs of the down-projections."""
        return self.query_rank + self.key_value_rank + self.rope_head_dim


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Grouped-query attention, or latent attention if `latent` is given."""

    heads: Count
    kv_heads: Count
    head_dim: Count
    bias: bool = False  # of queries, keys and values
    output_bias: bool | None = None  # of the output; as `bias` when left out
    qk_norm: bool = False
    causal: bool = True
    window_tokens: Count | None = None  # encoder tokens a token attends to in windowed layers
    full_layers: tuple[Whole, ...] = ()  # layers without the window
    latent: LatentAttention | None = None

    @property
    def score_dim(self) -> int:
        """Width of one query or key head."""
        return self.latent.nope_head_dim + self.latent.rope_head_dim if self.latent else self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of one value head."""
        return self.latent.value_head_dim if self.latent else self.head_dim

    @property
    def query_width(self) -> int:
        return self.heads * self.score_dim

    @property
    def key_value_width(self) -> int:
        """Width of keys and values together."""
        heads = self.heads if self.latent else self.kv_heads
        return heads * (self.score_dim + self.value_dim)

    @property
    def output_width(self) -> int:
        return self.heads * self.value_dim

    def window_of(self, layer: int) -> int | None:
        return None if layer in self.full_layers else self.window_tokens

    def parameters(self, hidden: int) -> int:
        if self.latent:
            latent = self.latent
            down = hidden * (latent.query_rank + latent.key_value_rank + latent.rope_head_dim)
            queries = latent.query_rank * self.query_width
            keys = latent.key_value_rank * self.heads * (latent.nope_head_dim + latent.value_head_dim)
            norms = latent.query_rank + latent.key_value_rank
            return down + queries + keys + norms + self.output_width * hidden
        weights = hidden * (self.query_width + self.key_value_width) + self.output_width * hidden
        biases = self.query_width + self.key_value_width if self.bias else 0
        biases += hidden if (self.bias if self.output_bias is None else self.output_bias) else 0
        return weights + biases + (2 * self.head_dim if self.qk_norm else 0)


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """MLP of two matrices, or three when gated."""

    width: Count
    gated: bool = True
    bias: bool = False

    @property
    def up_width(self) -> int:
        """Outputs of the first matrix (gate and up together when gated)."""
        return self.width * (2 if self.gated else 1)

    def parameters(self, hidden: int) -> int:
        biases = self.up_width + hidden if self.bias else 0
        return hidden * self.up_width + self.width * hidden + biases


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture of experts in place of the MLP, after `leading_dense_layers` ordinary layers."""

    count: Count
    active: Count
    width: Count
    shared_width: Whole = 0  # of all shared experts together
    leading_dense_layers: Whole = 0

    def parameters(self, hidden: int) -> int:
        router = hidden * self.count
        return router + 3 * hidden * (self.count * self.width + self.shared_width)

    def active_parameters(self, hidden: int) -> int:
        router = hidden * self.count
        return router + 3 * hidden * (self.active * self.width + self.shared_width)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Equal transformer layers; a mixture of experts may begin with dense ones."""

    hidden: Count
    layers: Count
    attention: Attention
    mlp: Mlp
    experts: Experts | None = None
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    dropout: bool = False  # keeps a mask of one byte per dropped-out element

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.leading_dense_layers

    @property
    def norm_parameters(self) -> int:
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    def layer_parameters(self, layer: int, *, active: bool = False) -> int:
        parameters = self.attention.parameters(self.hidden) + 2 * self.norm_parameters
        if self.experts and self.has_experts(layer):
            experts = self.experts
            return parameters + (experts.active_parameters if active else experts.parameters)(self.hidden)
        return parameters + self.mlp.parameters(self.hidden)

    def expert_parameters(self, layer: int) -> int:
        """The part of a layer that expert parallelism divides."""
        if not (self.experts and self.has_experts(layer)):
            return 0
        return 3 * self.hidden * self.experts.count * self.experts.width

    def replicated_parameters(self, layer: int) -> int:
        """The part of a layer that every rank of a TP group holds: latent down-projections, the router."""
        latent = self.attention.latent
        down = self.hidden * latent.width if latent else 0
        router = self.hidden * self.experts.count if self.experts and self.has_experts(layer) else 0
        return down + router

    def parameters(self, *, active: bool = False) -> int:
        return sum(self.layer_parameters(layer, active=active) for layer in range(self.layers))


@dataclass(frozen=True, kw_only=True)
class Projector:
    """Linear layers from encoder width to LLM width; `widths` are their outputs.

    `merge` encoder tokens become one LLM token (4 for a 2x2 merger), concatenated
    before the first linear when `concatenates`.
    """

    widths: tuple[Count, ...]
    merge: Count = 1
    concatenates: bool = True
    bias: bool = True
    train: bool = True

    def input_width(self, hidden: int) -> int:
        return hidden * self.merge if self.concatenates else hidden

    def linears(self, hidden: int) -> tuple[tuple[int, int], ...]:
        """(input, output) widths of every linear layer."""
        inputs = (self.input_width(hidden), *self.widths[:-1])
        return tuple(zip(inputs, self.widths, strict=True))

    def parameters(self, hidden: int) -> int:
        return sum(a * b + (b if self.bias else 0) for a, b in self.linears(hidden))


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A module that turns images, video or sound into LLM tokens."""

    name: str
    stack: Stack
    projector: Projector
    modality: Modality = "vision"
    patch_inputs: Count = 588  # numbers per input token: 3 * 14 * 14 for an image patch
    positions: Whole = 0  # learned position embeddings
    feeds: tuple[Whole, ...] = (0,)  # LLM layers that receive its output (several: deepstack)
    train: bool = True
    recompute: Recompute = "auto"
    source: str = field(default="", compare=False)

    @property
    def embedding_parameters(self) -> int:
        return (self.patch_inputs + 1 + self.positions) * self.stack.hidden

    @property
    def projector_parameters(self) -> int:
        return self.projector.parameters(self.stack.hidden) * len(self.feeds)

    def parameters(self, *, active: bool = False) -> int:
        return (
            self.embedding_parameters
            + self.stack.parameters(active=active)
            + self.stack.norm_parameters
            + self.projector_parameters
        )


@dataclass(frozen=True, kw_only=True)
class Llm:
    """The language model that every encoder feeds."""

    stack: Stack
    vocab: Count
    tied: bool = False
    positions: Whole = 0  # learned position embeddings (0: rotary)
    train: bool = True
    recompute: Recompute = "auto"
    name: Literal["llm"] = "llm"
    source: str = field(default="", compare=False)

    @property
    def embedding_parameters(self) -> int:
        return (self.vocab + self.positions) * self.stack.hidden

    @property
    def head_parameters(self) -> int:
        return self.stack.norm_parameters + (0 if self.tied else self.vocab * self.stack.hidden)

    def parameters(self, *, active: bool = False) -> int:
        return self.embedding_parameters + self.stack.parameters(active=active) + self.head_parameters


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes per value in compute and gradients, and of optimizer state per parameter."""

    compute: Literal["bf16"] = "bf16"
    gradients: Literal["fp32", "bf16"] = "fp32"
    optimizer: Literal["adamw-fp32"] = "adamw-fp32"

    @property
    def parameter_bytes(self) -> int:
        return BF16_BYTES

    @property
    def gradient_bytes(self) -> int:
        return FP32_BYTES if self.gradients == "fp32" else BF16_BYTES

    @property
    def optimizer_bytes(self) -> int:
        return 3 * FP32_BYTES  # master copy and two moments


@dataclass(frozen=True, kw_only=True)
class Model:
    """Encoders and the LLM that they feed."""

    name: str
    encoders: tuple[Encoder, ...]
    llm: Llm
    precision: Precision = field(default_factory=Precision)
    source: str = field(default="", compare=False)

    @property
    def modules(self) -> tuple[Encoder | Llm, ...]:
        return (*self.encoders, self.llm)

    def encoder(self, name: str) -> Encoder:
        return next(encoder for encoder in self.encoders if encoder.name == name)

    def parameters(self, *, active: bool = False) -> int:
        return sum(module.parameters(active=active) for module in self.modules)
