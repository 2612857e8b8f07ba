"""Describes a model: encoders that feed one LLM, as dimensions and flags."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from optimus.job.attention import Attention, constant
from optimus.job.typed import Amount, Count, Share, Whole

Recompute = Literal["none", "selective", "full", "auto"]
Modality = Literal["vision", "audio", "video"]
NormKind = Literal["layernorm", "rmsnorm"]
BF16_BYTES = 2
FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """MLP of two matrices, or three when gated.

    With `merge`, so many tokens are concatenated to one before its norm; later layers have as many fewer.
    """

    width: Count
    gated: bool = True
    bias: bool = False
    activation: str | None = constant(None)  # as transformers names it; None: silu if gated, else gelu
    merge: Count = constant(1)

    @property
    def activation_name(self) -> str:
        return self.activation or ("silu" if self.gated else "gelu")

    @property
    def up_width(self) -> int:
        """Outputs of the first matrix (gate and up together when gated)."""
        return self.width * (2 if self.gated else 1)

    def parameters(self, hidden: int) -> int:
        biases = self.up_width + hidden if self.bias else 0
        return hidden * self.merge * self.up_width + self.width * hidden + biases


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
class Linear:
    """A matrix that a layer applies to every token besides attention and MLP."""

    inputs: Count
    outputs: Count


@dataclass(frozen=True, kw_only=True)
class LayerVariant:
    """Layers of a stack that differ from its others; what is left out is as in the stack."""

    layers: tuple[Whole, ...]
    attention: Attention | None = None
    mlp: Mlp | None = None
    experts: bool = True  # false: an MLP where the stack has experts


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Transformer layers, equal but for windows, leading dense layers and `variants`."""

    hidden: Count
    layers: Count
    attention: Attention
    mlp: Mlp
    experts: Experts | None = None
    norm: NormKind = "rmsnorm"
    dropout: bool = False  # keeps a mask of one byte per dropped-out element
    dropout_rate: Share = constant(0.1)  # of elements, in stacks with dropout
    norm_eps: Amount = constant(1e-6)
    norm_offset: bool = constant(False)  # norms multiply by 1 + weight
    post_norms: bool = constant(False)  # attention and MLP each have a norm behind them too
    layer_scale: bool = constant(False)  # learned factors on the outputs of attention and MLP
    variants: tuple[LayerVariant, ...] = constant(())  # layers of other kinds
    linears: tuple[Linear, ...] = constant(())  # of every layer, replicated over a TP group
    extra_parameters: Whole = constant(0)  # of every layer: convolutions, gates, further norms

    def variant_of(self, layer: int) -> int | None:
        """Returns the index of a layer's variant, or None for a layer like most."""
        return next((at for at, variant in enumerate(self.variants) if layer in variant.layers), None)

    def at(self, layer: int) -> Stack:
        """Returns the stack whose layers are all like this one."""
        place = self.variant_of(layer)
        if place is None:
            return self
        variant = self.variants[place]
        return replace(
            self,
            attention=variant.attention or self.attention,
            mlp=variant.mlp or self.mlp,
            experts=self.experts if variant.experts else None,
            variants=(),
        )

    def has_experts(self, layer: int) -> bool:
        experts = self.at(layer).experts
        return experts is not None and layer >= experts.leading_dense_layers

    def merge_of(self, layer: int) -> int:
        """Returns the tokens that a layer's MLP makes one."""
        return 1 if self.has_experts(layer) else self.at(layer).mlp.merge

    def merge_before(self, layer: int) -> int:
        """Returns the tokens of the first layer that are one token of this layer."""
        mlps = (self.mlp, *(variant.mlp for variant in self.variants if variant.mlp))
        return prod(map(self.merge_of, range(layer))) if any(mlp.merge > 1 for mlp in mlps) else 1

    @property
    def norm_parameters(self) -> int:
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    def layer_parameters(self, layer: int, *, active: bool = False) -> int:
        here = self.at(layer)
        parameters = here.attention.parameters(self.hidden) + self.extra_parameters
        parameters += sum(linear.inputs * linear.outputs for linear in self.linears)
        norms = (4 if self.post_norms else 2) + self.merge_of(layer) - 1  # a merging MLP's is wider
        parameters += norms * self.norm_parameters
        parameters += 2 * self.hidden if self.layer_scale else 0
        if self.experts and self.has_experts(layer):
            experts = self.experts
            return parameters + (experts.active_parameters if active else experts.parameters)(self.hidden)
        return parameters + here.mlp.parameters(self.hidden)

    def expert_parameters(self, layer: int) -> int:
        """The part of a layer that expert parallelism divides."""
        if not (self.experts and self.has_experts(layer)):
            return 0
        return 3 * self.hidden * self.experts.count * self.experts.width

    def replicated_parameters(self, layer: int) -> int:
        """The part of a layer that every rank of a TP group holds: what is latent, the router, `linears`."""
        latent = self.at(layer).attention.latent
        down = self.hidden * latent.width if latent else 0
        down += sum(linear.inputs * linear.outputs for linear in self.linears)
        router = self.hidden * self.experts.count if self.experts and self.has_experts(layer) else 0
        return down + router

    def parameters(self, *, active: bool = False) -> int:
        return sum(self.layer_parameters(layer, active=active) for layer in range(self.layers))


@dataclass(frozen=True, kw_only=True)
class Projector:
    """Linear layers from encoder width to LLM width; `widths` are their outputs.

    `merge` tokens of the last layer become one LLM token (4 for a 2x2 merger), concatenated
    before the first linear when `concatenates`. `norm` is between merge and first linear.
    """

    widths: tuple[Count, ...]
    merge: Count = 1
    concatenates: bool = True
    bias: bool = True
    train: bool = True
    activation: str = constant("gelu")  # between linear layers, as transformers names it
    norm: NormKind | None = constant(None)
    norm_eps: Amount = constant(1e-6)
    deepstack_norm: bool = constant(False)  # projectors behind the first have `norm`, and no final norm

    def input_width(self, hidden: int) -> int:
        return hidden * self.merge if self.concatenates else hidden

    def linears(self, hidden: int) -> tuple[tuple[int, int], ...]:
        """(input, output) widths of every linear layer."""
        inputs = (self.input_width(hidden), *self.widths[:-1])
        return tuple(zip(inputs, self.widths, strict=True))

    def norm_parameters(self, hidden: int) -> int:
        return 0 if self.norm is None else self.input_width(hidden) * (2 if self.norm == "layernorm" else 1)

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
    patch_bias: bool = constant(True)
    class_token: bool = constant(False)
    drops_first_row: bool = constant(False)  # of its output: the class token, or the first patch without one
    pre_norm: bool = constant(False)  # a norm before the first layer
    final_norm: bool = constant(True)  # a norm behind the last layer, before the merge
    interpolates_positions: bool = constant(False)  # learned positions fit any grid
    tokens_per_second: Amount | None = constant(
        None
    )  # positions in time of a second of video; None: of a frame
    deepstack_layers: tuple[Whole, ...] = constant(())  # its own layers whose outputs go to feeds[1:]
    tokens_per_item: Whole = constant(0)  # LLM tokens of an image, where the family fixes them

    @property
    def merge(self) -> int:
        """Tokens of its first layer that become one LLM token."""
        return self.stack.merge_before(self.stack.layers) * self.projector.merge

    @property
    def rotary(self) -> bool:
        """True if heads are rotated."""
        stated = self.stack.attention.rotary
        return not self.positions and self.modality != "audio" if stated is None else stated

    @property
    def embedding_parameters(self) -> int:
        rows = self.patch_inputs + self.positions + self.patch_bias + self.class_token
        return rows * self.stack.hidden + (self.stack.norm_parameters if self.pre_norm else 0)

    @property
    def projector_parameters(self) -> int:
        projector, hidden, count = self.projector, self.stack.hidden, len(self.feeds)
        norms = projector.norm_parameters(hidden) * (count - projector.deepstack_norm)
        return projector.parameters(hidden) * count + norms

    def parameters(self, *, active: bool = False) -> int:
        return (
            self.embedding_parameters
            + self.stack.parameters(active=active)
            + (self.stack.norm_parameters if self.final_norm else 0)
            + self.projector_parameters
        )


@dataclass(frozen=True, kw_only=True)
class PerLayerInputs:
    """A second embedding (Gemma 4): `width` values for every layer, from a table and from the first one."""

    vocab: Count
    width: Count


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
    embedding_scale: Amount = constant(1.0)  # of token embeddings
    logit_softcap: Amount | None = constant(None)
    per_layer_inputs: PerLayerInputs | None = constant(None)

    @property
    def rotary(self) -> bool:
        """True if heads are rotated."""
        stated = self.stack.attention.rotary
        return not self.positions if stated is None else stated

    @property
    def embedding_linears(self) -> tuple[Linear, ...]:
        """Matrices applied to embeddings before the first layer."""
        if self.per_layer_inputs is None:
            return ()
        outputs = self.stack.layers * self.per_layer_inputs.width
        return (Linear(inputs=self.stack.hidden, outputs=outputs),)

    @property
    def embedding_parameters(self) -> int:
        parameters = (self.vocab + self.positions) * self.stack.hidden
        if extra := self.per_layer_inputs:
            parameters += extra.vocab * self.stack.layers * extra.width + extra.width
        return parameters + sum(linear.inputs * linear.outputs for linear in self.embedding_linears)

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
    family: str = constant("")  # model_type of its config.json; empty: written by hand
    derived: tuple[str, ...] = field(default=(), compare=False)  # values that its config.json leaves out

    @property
    def modules(self) -> tuple[Encoder | Llm, ...]:
        return (*self.encoders, self.llm)

    def encoder(self, name: str) -> Encoder:
        return next(encoder for encoder in self.encoders if encoder.name == name)

    def parameters(self, *, active: bool = False) -> int:
        return sum(module.parameters(active=active) for module in self.modules)
