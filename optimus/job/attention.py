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
        return weights + biases + self._qk_norm_parameters

    @property
    def _qk_norm_parameters(self) -> int:
        if not self.qk_norm or self.qk_norm_kind == "l2":
            return 0
        heads = (self.heads, self.kv_heads) if self.qk_norm_over == "hidden" else (1, 1)
        return sum(heads) * self.head_dim * (2 if self.qk_norm_kind == "layernorm" else 1)
