"""Describes the attention of a layer: grouped-query, latent or linear, with its rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeVar

from optimus.job.typed import Amount, Count, Share, Whole

T = TypeVar("T")


def constant(default: T) -> T:
    """Declares a constant of a model family, which changes no schedule.

    A plan is bound to it only where it differs from its default, so that plans from before it stay bound.
    """
    value: T = field(default=default, metadata={"constant": True})
    return value


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the trained length, by the names of `rope_parameters`."""

    type: str  # linear, dynamic, yarn, longrope, llama3, ...
    factor: Amount | None = constant(None)
    original_max_position_embeddings: Count | None = constant(None)
    attention_factor: Amount | None = constant(None)
    beta_fast: Amount | None = constant(None)
    beta_slow: Amount | None = constant(None)
    low_freq_factor: Amount | None = constant(None)
    high_freq_factor: Amount | None = constant(None)
    mscale: Amount | None = constant(None)
    mscale_all_dim: Amount | None = constant(None)
    short_factor: tuple[Amount, ...] = constant(())
    long_factor: tuple[Amount, ...] = constant(())
    truncate: bool | None = constant(None)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding; `sections` are its frequencies per axis (time, height, width)."""

    theta: Amount = constant(10_000.0)
    local_theta: Amount | None = constant(None)  # of layers with a window; None: as others
    scaling: RopeScaling | None = constant(None)
    sections: tuple[Whole, ...] = constant(())  # empty: one axis
    interleaved_sections: bool = constant(False)  # axes take turns, frequency by frequency
    partial_factor: Share = constant(1.0)  # share of a head that is rotated
    interleaved: bool = constant(False)  # rotates neighbours (2i, 2i + 1) instead of (i, i + dim / 2)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): queries and keys through low-rank projections."""

    query_rank: Whole  # 0: queries straight from the hidden states
    key_value_rank: Count
    nope_head_dim: Count
    rope_head_dim: Count
    value_head_dim: Count

    @property
    def width(self) -> int:
        """Outputs of the down-projections."""
        return self.query_rank + self.key_value_rank + self.rope_head_dim


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """Gated delta rule (Qwen3.5): `heads` value heads over `kv_heads` heads of queries and keys.

    A causal convolution over `kernel` tokens precedes the recurrence, which is computed in chunks.
    """

    value_head_dim: Count
    kernel: Count = 4
    chunk: Count = 64


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Grouped-query attention; latent attention if `latent` is given, linear attention if `linear` is."""

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
    linear: LinearAttention | None = constant(None)
    output_gate: bool = constant(False)  # queries come with a gate of the output
    kv_projection: Literal["both", "keys", "none"] = constant("both")
    """`keys`: values are the keys; `none`: keys and values are those of an earlier layer."""
    rotary: bool | None = constant(None)  # None: where no positions are learned, but not of sounds
    rope: Rope = constant(Rope())
    qk_norm_kind: Literal["layernorm", "rmsnorm", "l2"] = constant("rmsnorm")
    qk_norm_over: Literal["head", "hidden"] = constant("head")
    softmax_scale: Amount | None = constant(None)  # None: 1 / sqrt(score_dim)
    softcap: Amount | None = constant(None)  # of attention scores

    @property
    def score_dim(self) -> int:
        """Width of one query or key head."""
        return self.latent.nope_head_dim + self.latent.rope_head_dim if self.latent else self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of one value head."""
        if self.linear:
            return self.linear.value_head_dim
        return self.latent.value_head_dim if self.latent else self.head_dim

    @property
    def query_width(self) -> int:
        return (self.kv_heads if self.linear else self.heads) * self.score_dim

    @property
    def key_value_width(self) -> int:
        """Width of keys and values together."""
        if self.linear:
            return self.kv_heads * self.score_dim + self.heads * self.value_dim
        heads = self.heads if self.latent else self.kv_heads
        return heads * (self.score_dim + self.value_dim)

    @property
    def output_width(self) -> int:
        return self.heads * self.value_dim

    def projected_width(self, heads: int, kv_heads: int) -> int:
        """Returns the outputs of the projections before attention (not latent) for so many of its heads."""
        if self.linear:  # queries, keys, values; the output's gate; decay and learning rate of every head
            return 2 * kv_heads * self.score_dim + 2 * heads * (self.value_dim + 1)
        queries = heads * self.score_dim * (2 if self.output_gate else 1)
        keys = 0 if self.kv_projection == "none" else self.score_dim
        values = self.value_dim if self.kv_projection == "both" else 0
        return queries + kv_heads * (keys + values)

    @property
    def saved_width(self) -> int:
        """Values per token that attention saves for its backward."""
        if self.latent:
            return self.query_width + self.key_value_width + self.output_width + self.latent.width
        width = self.projected_width(self.heads, self.kv_heads) + self.output_width
        return width + (self.query_width + self.key_value_width if self.linear else 0)  # convolved

    def window_of(self, layer: int) -> int | None:
        return None if layer in self.full_layers else self.window_tokens

    def parameters(self, hidden: int) -> int:
        if self.latent:
            latent = self.latent
            down = hidden * (latent.query_rank + latent.key_value_rank + latent.rope_head_dim)
            queries = (latent.query_rank or hidden) * self.query_width
            keys = latent.key_value_rank * self.heads * (latent.nope_head_dim + latent.value_head_dim)
            norms = latent.query_rank + latent.key_value_rank
            return down + queries + keys + norms + self.output_width * hidden
        projected = self.projected_width(self.heads, self.kv_heads)
        weights = hidden * projected + self.output_width * hidden
        biases = projected if self.bias else 0
        biases += hidden if (self.bias if self.output_bias is None else self.output_bias) else 0
        return weights + biases + self._qk_norm_parameters + self._linear_parameters

    @property
    def _linear_parameters(self) -> int:
        """Parameters of linear attention besides its projections: convolution, decay, norm of the output."""
        if not self.linear:
            return 0
        convolved = self.query_width + self.key_value_width
        return self.linear.kernel * convolved + 2 * self.heads + self.value_dim

    @property
    def _qk_norm_parameters(self) -> int:
        if not self.qk_norm or self.qk_norm_kind == "l2":
            return 0
        queries, keys = (self.heads, self.kv_heads) if self.qk_norm_over == "hidden" else (1, 1)
        heads = queries + (0 if self.kv_projection == "none" else keys)
        return heads * self.head_dim * (2 if self.qk_norm_kind == "layernorm" else 1)
