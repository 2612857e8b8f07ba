"""Bugs of tensor-parallel layers, each planted by one replacement, with a case that must notice it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from engine_bugs import Bugs, bug, wrapped
from torch import Tensor

from optimus.engine import rank_batch
from optimus.engine.buckets import RankBuckets
from optimus.models import end_layers, kernels
from optimus.models.chunk import SegmentedChunk
from optimus.models.collectives import AsyncCollective, ParamSplit, TpGroup
from optimus.models.layer_ops import ResidualAdd
from optimus.models.microbatch_inputs import LlmMicrobatchContext
from optimus.models.segment import Segment
from optimus.models.tensor_parallel import AllGather, SeamExchange
from optimus.models.transformer_layer import ResidualProjection

TP_BUGS: Bugs = {}
PLAIN, SHARDED = "tp: two stages", "sharded tp: two stages"


@bug("partial gradients are not summed", PLAIN, TP_BUGS)
def _() -> AbstractContextManager[Any]:
    return wrapped(RankBuckets, "reduce_partial_sums", lambda original, self: None)


@bug("only the first bucket's partial gradients are summed", PLAIN, TP_BUGS)
def _() -> AbstractContextManager[Any]:
    def partial_sums(original: Any, self: Any, bucket: Any) -> Tensor:
        found: Tensor = original(self, bucket)
        return found if bucket is next(iter(self)) else found[:0]

    return wrapped(RankBuckets, "partial_sums", partial_sums)


@bug("the norm counts what all ranks of a group hold on each of them", SHARDED, TP_BUGS)
def _() -> AbstractContextManager[Any]:
    return wrapped(RankBuckets, "grad_for_norm", lambda original, self, bucket: bucket.reduced_grad)


@bug("sums of another rank's rows are kept", PLAIN, TP_BUGS)
def _() -> AbstractContextManager[Any]:
    def total(original: Any, self: TpGroup, parts: Tensor) -> AsyncCollective:
        return original(self, parts.roll(parts.shape[0] // self.size, 0))  # type: ignore[no-any-return]

    return wrapped(TpGroup, "reduce_scatter", total)


@bug("gathered rows are in another order", PLAIN, TP_BUGS)
def _() -> AbstractContextManager[Any]:
    def gather(original: Any, self: TpGroup, part: Tensor) -> AsyncCollective:
        flight: AsyncCollective = original(self, part)
        return flight.then(lambda rows: rows.roll(part.shape[0], 0))

    return wrapped(TpGroup, "all_gather", gather)


@bug("what was freed is not gathered again", PLAIN, TP_BUGS)
def _() -> AbstractContextManager[Any]:
    def again(original: Any, self: AllGather, part: Tensor, whole: Tensor, context: Any) -> AsyncCollective:
        return AsyncCollective(None, whole.zero_)

    return wrapped(AllGather, "launch_regather", again)


@bug("what is gathered again comes from this rank alone", PLAIN, TP_BUGS)
def _() -> AbstractContextManager[Any]:
    def again(original: Any, self: AllGather, part: Tensor, whole: Tensor, context: Any) -> AsyncCollective:
        whole.copy_(part.repeat(self.tp_group.size, 1))
        return AsyncCollective(None, lambda: None)

    return wrapped(AllGather, "launch_regather", again)


@bug("gradients of a divided product's input are not summed", PLAIN, TP_BUGS)
def _() -> AbstractContextManager[Any]:
    def back(original: Any, self: AllGather, gradients: Any, context: Any) -> AsyncCollective:
        mine = gradients[self.state_index]
        own = mine[self.tp_group.rows(len(mine))].clone()
        return AsyncCollective(
            None, lambda: (*gradients[: self.state_index], own, *gradients[self.state_index + 1 :])
        )

    return wrapped(AllGather, "launch_backward", back)


@bug("every rank of a group begins with the same part of a matrix", PLAIN, TP_BUGS)
def _() -> AbstractContextManager[Any]:
    return wrapped(
        ParamSplit, "shard", lambda original, self, whole, rank, size: original(self, whole, 0, size)
    )


@bug("a part of a fused matrix is cut without looking at its blocks", PLAIN, TP_BUGS)
def _() -> AbstractContextManager[Any]:
    def shard(original: Any, self: ParamSplit, whole: Tensor, rank: int, size: int) -> Tensor:
        return whole.chunk(size, self.dim)[rank]

    return wrapped(ParamSplit, "shard", shard)


@bug("ids of another part of the vocabulary are looked up too", PLAIN, TP_BUGS)
def _() -> AbstractContextManager[Any]:
    def shard_index(original: Any, table: Tensor, ids: Tensor, first: int) -> tuple[Tensor, Tensor]:
        here, mine = original(table, ids, first)
        return torch.ones_like(here), mine

    return wrapped(kernels, "_shard_index", shard_index)


@bug("columns that stand for nothing take part in the loss", "tp: odd numbers", TP_BUGS)
def _() -> AbstractContextManager[Any]:
    def entropy(original: Any, logits: Tensor, *args: Any, first_id: int, count: int) -> Tensor:
        return original(logits, *args, first_id=first_id, count=logits.shape[1])

    return patch(
        "optimus.models.end_layers.vocab_parallel_cross_entropy", lambda *a, **k: entropy(_ENTROPY, *a, **k)
    )


_ENTROPY = end_layers.vocab_parallel_cross_entropy


@bug("a label of another rank counts on all", PLAIN, TP_BUGS)
def _() -> AbstractContextManager[Any]:
    def entropy(logits: Tensor, labels: Tensor, tp_group: TpGroup, *, first_id: int, count: int) -> Tensor:
        return _ENTROPY(logits, labels, tp_group, first_id=0, count=count)

    return patch("optimus.models.end_layers.vocab_parallel_cross_entropy", entropy)


@bug("dropout of a rank's rows is that of the first rows", "tp: full", TP_BUGS)
def _() -> AbstractContextManager[Any]:
    def shard(original: Any, self: LlmMicrobatchContext, rows: slice, seam: Any) -> LlmMicrobatchContext:
        found: LlmMicrobatchContext = original(self, rows, seam)
        keys = None if self.dropout_keys is None else self.dropout_keys[: rows.stop - rows.start]
        return replace(found, dropout_keys=keys)

    return wrapped(LlmMicrobatchContext, "shard", shard)


@bug("the gradient of a join forgets its dropout", "tp: full", TP_BUGS)
def _() -> AbstractContextManager[Any]:
    def back(original: Any, self: ResidualAdd, values: Any, *given: Any) -> Any:
        return original(self, None, *given)

    return wrapped(ResidualAdd, "backward", back)


@bug("encoder rows are placed where the other rank's belong", PLAIN, TP_BUGS)
def _() -> AbstractContextManager[Any]:
    def route_encoder_rows(original: Any, bins: Any, places: Any, *ranks: Any) -> Any:
        routes, targets = original(bins, places, *ranks)
        return routes, tuple((rows + 1) % int(places.index[-1]) for rows in targets)

    return wrapped(rank_batch, "route_encoder_rows", route_encoder_rows)


@bug("gradients of encoder rows stay where they are", PLAIN, TP_BUGS)
def _() -> AbstractContextManager[Any]:
    def back(original: Any, self: SeamExchange, gradients: Any, context: Any) -> AsyncCollective:
        flight: AsyncCollective = original(self, gradients, context)
        return flight.then(lambda found: (found[0], *(part.zero_() for part in found[1:])))

    return wrapped(SeamExchange, "launch_backward", back)


@bug("an embedding whose gradient comes late gets none", "tp: zero-bubble", TP_BUGS)
def _() -> AbstractContextManager[Any]:
    def later(original: Any, self: SegmentedChunk, frame: Any, place: int) -> bool:
        found: bool = original(self, frame, place)
        if found:
            frame.deferred_gradients[place] = tuple(
                g if g is None else torch.zeros_like(g) for g in frame.deferred_gradients[place]
            )
        return found

    return wrapped(SegmentedChunk, "_defer_to_wgrad", later)


@bug("a bias of the rows is added on every rank before the sum", "tp: zero-bubble", TP_BUGS)
def _() -> AbstractContextManager[Any]:
    def parallel_segments(original: Any, self: ResidualProjection) -> list[Segment]:
        product, scatter, join = original(self)
        product.bias = self.bias
        return [product, scatter, join]

    return wrapped(ResidualProjection, "parallel_segments", parallel_segments)
