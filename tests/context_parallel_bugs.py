"""Bugs of context parallelism, each planted by one replacement, with a case that must notice it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from engine_bugs import Bugs, bug, wrapped
from torch import Tensor

from optimus.engine import rank_batch
from optimus.engine.rank_batch import RowPlaces
from optimus.ir.op import Communicator
from optimus.ir.ranks import LLM, RankGrid
from optimus.models.collectives import AsyncCollective
from optimus.models.context_parallel import ContextGather, ContextShare
from optimus.models.microbatch_inputs import LlmMicrobatchContext
from optimus.models.tensor_parallel import SeamExchange

CP_BUGS: Bugs = {}
TWO, DOCUMENTS = "cp: two", "cp: cp 2 x pp 2 zero-bubble, documents"
DROPPED, PLAIN = "cp: cp 2 x dp 2, rare images", "cp: cp 2 x tp 2, selective, plain"


def _other_share(**changes: Any) -> AbstractContextManager[Any]:
    """Changes fields of every rank's share, each by a function of the share."""

    def split(original: Any, *args: Any) -> ContextShare:
        share: ContextShare = original(*args)
        return replace(share, **{name: change(share) for name, change in changes.items()})

    return wrapped(rank_batch, "split_sequences", split)


def _first_rows_of(name: str) -> AbstractContextManager[Any]:
    """Gives every rank what belongs to the first rows of the microbatch."""

    def split(original: Any, self: LlmMicrobatchContext, share: ContextShare) -> LlmMicrobatchContext:
        found: LlmMicrobatchContext = original(self, share)
        whole = getattr(self, name)
        rows = slice(0, len(share.rows))
        first: Any = tuple(table[rows] for table in whole) if isinstance(whole, tuple) else whole[rows]
        changes: dict[str, Any] = {name: first}
        return replace(found, **changes)

    return wrapped(LlmMicrobatchContext, "split_context", split)


# ---------------------------------------------------------------------------- masks and positions


@bug("rows see keys after them", TWO, CP_BUGS)
def _() -> AbstractContextManager[Any]:
    def blocks(share: ContextShare) -> Any:
        return tuple(replace(block, keys=block.keys + 1) for block in share.blocks[:-1]) + share.blocks[-1:]

    return _other_share(blocks=blocks)


@bug("rows see no key of the chunks before theirs", TWO, CP_BUGS)
def _() -> AbstractContextManager[Any]:
    def blocks(share: ContextShare) -> Any:
        return tuple(
            replace(block, first_key=block.first_key + block.keys - block.queries, keys=block.queries)
            for block in share.blocks
        )

    return _other_share(blocks=blocks)


@bug("documents attend to each other", DOCUMENTS, CP_BUGS)
def _() -> AbstractContextManager[Any]:
    def split(original: Any, lengths: Any, spans: Any, *rank: int) -> ContextShare:
        return original(lengths, lengths, *rank)  # type: ignore[no-any-return]

    return wrapped(rank_batch, "split_sequences", split)


@bug("rotary positions begin anew on every rank", TWO, CP_BUGS)
def _() -> AbstractContextManager[Any]:
    return _first_rows_of("rotary")


@bug("multimodal rotary positions begin anew on every rank", "cp: cp 4", CP_BUGS)
def _() -> AbstractContextManager[Any]:
    return _first_rows_of("rotary")


@bug("learned positions begin anew on every rank", PLAIN, CP_BUGS)
def _() -> AbstractContextManager[Any]:
    return _first_rows_of("positions")


@bug("labels are those of the first rows", TWO, CP_BUGS)
def _() -> AbstractContextManager[Any]:
    return _first_rows_of("labels")


@bug("dropout is that of the first rows", DROPPED, CP_BUGS)
def _() -> AbstractContextManager[Any]:
    return _first_rows_of("dropout_keys")


# ---------------------------------------------------------------------------- keys, values, gradients


@bug("keys stay in the order of ranks", TWO, CP_BUGS)
def _() -> AbstractContextManager[Any]:
    return _other_share(in_order=lambda share: torch.arange(len(share.in_order)))


@bug("gradients of keys stay in the order of the sequence", TWO, CP_BUGS)
def _() -> AbstractContextManager[Any]:
    return _other_share(by_rank=lambda share: torch.arange(len(share.by_rank)))


@bug("keys are those of this rank alone", TWO, CP_BUGS)
def _() -> AbstractContextManager[Any]:
    def launch(original: Any, self: ContextGather, state: Any, context: Any) -> AsyncCollective:
        flight: AsyncCollective = original(self, state, context)
        repeated = state[2].repeat(self.cp_group.size, 1, 1)
        return flight.then(lambda found: (*found[:2], repeated))

    return wrapped(ContextGather, "launch", launch)


@bug("gradients of keys are not summed", TWO, CP_BUGS)
def _() -> AbstractContextManager[Any]:
    def back(original: Any, self: ContextGather, gradients: Any, context: Any) -> AsyncCollective:
        flight: AsyncCollective = original(self, gradients, context)
        return flight.then(lambda found: (*found[:2], gradients[2][context.share.rows]))

    return wrapped(ContextGather, "launch_backward", back)


@bug("keys that were freed are not gathered again", TWO, CP_BUGS)
def _() -> AbstractContextManager[Any]:
    def again(
        original: Any, self: ContextGather, rows: Tensor, output: Tensor, context: Any
    ) -> AsyncCollective:
        return original(self, rows, output, context).then(lambda found: found.zero_())  # type: ignore[no-any-return]

    return wrapped(ContextGather, "launch_regather", again)


@bug("the LLM is reduced over replicas, not over context ranks", TWO, CP_BUGS)
def _() -> AbstractContextManager[Any]:
    def group(original: Any, self: RankGrid, module: str, communicator: Any, rank: int) -> tuple[int, ...]:
        found: tuple[int, ...] = original(self, module, communicator, rank)
        if (module, communicator) != (LLM, Communicator.DP):
            return found
        return tuple(other for other in found if self.place(LLM, other).cp == self.place(LLM, rank).cp)

    return wrapped(RankGrid, "group_of", group)


@bug("the loss is scaled by the labels of one rank", TWO, CP_BUGS)
def _() -> AbstractContextManager[Any]:
    def split(original: Any, self: LlmMicrobatchContext, share: ContextShare) -> LlmMicrobatchContext:
        found: LlmMicrobatchContext = original(self, share)
        return replace(found, scale=found.scale * len(share.by_rank) / len(share.rows))

    return wrapped(LlmMicrobatchContext, "split_context", split)


# ---------------------------------------------------------------------------- encoder rows


@bug("encoder rows go to ranks of contiguous runs", TWO, CP_BUGS)
def _() -> AbstractContextManager[Any]:
    def split(original: Any, share: ContextShare, tp: int, cp: int) -> RowPlaces:
        return original(replace(share, in_order=share.in_order.sort().values), tp, cp)  # type: ignore[no-any-return]

    return wrapped(RowPlaces, "split", split)


@bug("encoder rows arrive at the first context rank, whichever encoded them", TWO, CP_BUGS)
def _() -> AbstractContextManager[Any]:
    return wrapped(rank_batch, "find_receiving_cp_rank", lambda original, *args: 0)


@bug("gradients of encoder rows do not come back over context ranks", TWO, CP_BUGS)
def _() -> AbstractContextManager[Any]:
    def back(original: Any, self: SeamExchange, gradients: Any, context: Any) -> AsyncCollective:
        flight: AsyncCollective = original(self, gradients, context)
        if self.axis != "cp":
            return flight
        return flight.then(lambda found: (found[0], *(part.zero_() for part in found[1:])))

    return wrapped(SeamExchange, "launch_backward", back)
