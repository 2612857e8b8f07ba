"""Attention over rows: consecutive runs of rows attend to themselves, their lengths known on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

# Queries (n, heads, dim), keys and values (n, kv_heads, dim), spans, causal: the output (n, heads, dim).
AttentionKernel = Callable[[Tensor, Tensor, Tensor, Sequence[int], bool], Tensor]


def attend_by_spans(
    queries: Tensor, keys: Tensor, values: Tensor, spans: Sequence[int], causal: bool
) -> Tensor:
    """One call for all spans of one length."""
    if len(spans) == 1 and spans[0]:
        assert spans[0] == queries.shape[0], f"a span of {spans[0]} rows for {queries.shape[0]}"
        alone = (rows.unsqueeze(0) for rows in (queries, keys, values))
        return _attend(*alone, causal=causal).squeeze(0)
    spans = [length for length in spans if length]
    assert sum(spans) == queries.shape[0], f"spans of {sum(spans)} rows for {queries.shape[0]}"
    lengths = sorted(set(spans))
    if not lengths:
        return queries
    if len(lengths) == 1:
        whole = (rows.unflatten(0, (len(spans), spans[0])) for rows in (queries, keys, values))
        return _attend(*whole, causal=causal).flatten(0, 1)
    parts = [rows.split(spans) for rows in (queries, keys, values)]
    found: list[Tensor] = [queries] * len(spans)
    for length in lengths:
        places = [place for place, span in enumerate(spans) if span == length]
        stacked = (torch.stack([part[place] for place in places]) for part in parts)
        for place, rows in zip(places, _attend(*stacked, causal=causal).unbind(), strict=True):
            found[place] = rows
    return torch.cat(found)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> Tensor:
    """(spans, length, heads, dim), by torch's best kernel."""
    found: Tensor = functional.scaled_dot_product_attention(
        queries.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        is_causal=causal,
        enable_gqa=queries.shape[2] != keys.shape[2],
    )
    return found.transpose(1, 2)
