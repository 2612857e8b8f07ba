"""Computes attention over spans of rows whose lengths the host knows, and rotary positions of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.attention.varlen import varlen_attn

# Queries (n, heads, dim), keys and values (n, kv_heads, dim), spans, causal: the output (n, heads, dim).
AttentionKernel = Callable[[Tensor, Tensor, Tensor, Sequence[int], bool], Tensor]
Rotary = tuple[Tensor, Tensor]  # cosines and sines, (n, 1, head_dim / 2) each


HAS_VARLEN = {"window_size", "enable_gqa"} <= set(signature(varlen_attn).parameters)  # earlier ones lack both


class Spans(tuple[int, ...]):
    """Lengths of runs of rows that attend to one another; kernels of GPUs read `offsets` on the device."""

    offsets: Tensor  # int32: the first row of every run that is not empty, and the end of the last

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Spans:
        spans = cls(lengths)
        spans.offsets = torch.tensor([0, *accumulate(filter(None, spans))], dtype=torch.int32)
        return spans

    def map(self, function: Callable[[Tensor], Tensor]) -> Spans:
        """Returns the spans with a function applied to the offsets, such as a copy to a device."""
        mapped = Spans(self)
        mapped.offsets = function(self.offsets)
        return mapped


def attend_by_spans(
    queries: Tensor, keys: Tensor, values: Tensor, spans: Sequence[int], causal: bool
) -> Tensor:
    """Lets the rows of each span attend to one another, with one call per distinct span length."""
    if len(spans) == 1 and spans[0]:
        assert spans[0] == queries.shape[0], f"a span of {spans[0]} rows for {queries.shape[0]}"
        batch_of_one = (rows.unsqueeze(0) for rows in (queries, keys, values))
        return _attend(*batch_of_one, causal=causal).squeeze(0)
    spans = [length for length in spans if length]
    assert sum(spans) == queries.shape[0], f"spans of {sum(spans)} rows for {queries.shape[0]}"
    lengths = sorted(set(spans))
    if not lengths:
        return queries
    if len(lengths) == 1:
        batch = (rows.unflatten(0, (len(spans), spans[0])) for rows in (queries, keys, values))
        return _attend(*batch, causal=causal).flatten(0, 1)
    split = [rows.split(spans) for rows in (queries, keys, values)]
    outputs: list[Tensor] = [queries] * len(spans)
    for length in lengths:
        same_length = [index for index, span in enumerate(spans) if span == length]
        stacked = (torch.stack([rows[index] for index in same_length]) for rows in split)
        for index, rows in zip(same_length, _attend(*stacked, causal=causal).unbind(), strict=True):
            outputs[index] = rows
    return torch.cat(outputs)


def can_attend_varlen(head_dim: int) -> bool:
    """Returns whether FlashAttention has heads of this size, which nothing pads."""
    return head_dim % 8 == 0 and head_dim <= 256


def attend_varlen(
    queries: Tensor, keys: Tensor, values: Tensor, spans: Sequence[int], causal: bool
) -> Tensor:
    """Computes the same with one kernel of a GPU, which reads spans of unequal lengths where they are."""
    if len(set(filter(None, spans))) < 2 or not can_attend_varlen(queries.shape[2]):
        return attend_by_spans(queries, keys, values, spans, causal)
    assert isinstance(spans, Spans) and sum(spans) == queries.shape[0]
    attended = varlen_attn(
        queries,
        keys,
        values,
        spans.offsets,
        spans.offsets,
        max(spans),
        max(spans),
        window_size=(-1, 0) if causal else (-1, -1),
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    assert isinstance(attended, Tensor)
    return attended


def _attend(queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> Tensor:
    """Runs torch's best kernel over (spans, length, heads, dim)."""
    attended: Tensor = functional.scaled_dot_product_attention(
        queries.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        is_causal=causal,
        enable_gqa=queries.shape[2] != keys.shape[2],
    )
    return attended.transpose(1, 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionBlock:
    """A run of queries of one document, and the keys from the document's first to the last query's."""

    queries: int
    first_key: int
    keys: int
    mask: CausalBias = field(init=False)  # made once: no dispatch mode may be active

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", causal_lower_right(self.queries, self.keys))


def attend_by_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, blocks: Sequence[AttentionBlock]
) -> Tensor:
    """Lets runs of queries (n, heads, dim) attend to keys of the same document that are not after them.

    Keys and values are those of whole sequences, in order.
    """
    outputs = []
    for block, rows in zip(blocks, queries.split([block.queries for block in blocks]), strict=True):
        seen = slice(block.first_key, block.first_key + block.keys)
        attended: Tensor = functional.scaled_dot_product_attention(
            rows.transpose(0, 1)[None],
            keys[seen].transpose(0, 1)[None],
            values[seen].transpose(0, 1)[None],
            attn_mask=block.mask,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


# ---------------------------------------------------------------------------------------- rotary positions


def build_sequence_rotary_table(
    positions: Tensor,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    sections: Sequence[int] = (),
    *,
    interleaved: bool = False,
) -> Rotary:
    """Returns the table of positions (n,), or of positions (axes, n) where section i rotates by axis i.

    With `interleaved`, axes take turns until their section is used up; the first axis gets the rest.
    """
    frequencies = _frequencies(head_dim // 2, theta)
    if not sections:
        return _table(positions.double()[:, None] * frequencies, dtype)
    assert sum(sections) == head_dim // 2, f"sections {sections} for {head_dim // 2} frequencies"
    axes = torch.arange(len(sections)).repeat_interleave(torch.tensor(sections))
    if interleaved:
        axes = torch.zeros(head_dim // 2, dtype=torch.int64)
        for axis, count in enumerate(sections[1:], 1):
            axes[axis : count * len(sections) : len(sections)] = axis
    return _table(positions.double()[axes].T * frequencies, dtype)


def build_grid_rotary_table(coordinates: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Returns the table of coordinates (n, 2): half of the angles rotate by height, half by width."""
    frequencies = _frequencies(head_dim // 4, theta)
    angles = coordinates.double()[:, :, None] * frequencies
    return _table(angles.flatten(1), dtype)


def _frequencies(count: int, theta: float) -> Tensor:
    return theta ** (-torch.arange(count, dtype=torch.float64) / count)


def _table(angles: Tensor, dtype: torch.dtype) -> Rotary:
    return angles.cos()[:, None].to(dtype), angles.sin()[:, None].to(dtype)


def apply_rotary(heads: Tensor, rotary: Rotary) -> Tensor:
    """Rotates every pair (i, i + dim / 2) of heads (n, heads, dim) by its angle."""
    cosines, sines = rotary
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


def apply_rotary_backward(gradient: Tensor, rotary: Rotary) -> Tensor:
    """Rotates by the opposite angles, which is the gradient of `apply_rotary`."""
    cosines, sines = rotary
    return apply_rotary(gradient, (cosines, -sines))
