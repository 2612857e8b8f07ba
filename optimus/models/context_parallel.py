"""Splits sequences over context-parallel ranks, and gathers keys and values of all ranks before attention.

Every sequence is cut into 2 x cp chunks of equal length, of which rank i holds chunk i and chunk
2 x cp - 1 - i: under a causal mask all ranks then have the same work, as in Megatron and torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from optimus.errors import UserError
from optimus.ir.op import KernelName
from optimus.models.attention import AttentionBlock
from optimus.models.collectives import AsyncCollective, TpGroup
from optimus.models.segment import Gradients, State
from optimus.models.tensor_parallel import TpCollective, present, replaced


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextShare:
    """Rows of a microbatch that one rank holds, and what its queries attend to."""

    rows: Tensor  # int64: index in the microbatch of each row of this rank
    by_rank: Tensor  # int64: index in the microbatch of each gathered row, rank after rank
    in_order: Tensor  # int64: index among gathered rows of each row of the microbatch
    blocks: tuple[AttentionBlock, ...]

    def map(self, function: Any) -> ContextShare:
        """Returns the share with a function applied to its tensors, such as a copy to a device."""
        rows, by_rank, in_order = map(function, (self.rows, self.by_rank, self.in_order))
        return replace(self, rows=rows, by_rank=by_rank, in_order=in_order)


def split_sequences(lengths: Sequence[int], spans: Sequence[int], rank: int, size: int) -> ContextShare:
    """Returns a rank's share of sequences of these lengths; rows attend inside their span, a document."""
    runs = [list(_list_runs(lengths, other, size)) for other in range(size)]
    by_rank = torch.cat([torch.arange(*run) for of_rank in runs for run in of_rank])
    return ContextShare(
        rows=by_rank.chunk(size)[rank],
        by_rank=by_rank,
        in_order=torch.argsort(by_rank),
        blocks=tuple(_list_blocks(runs[rank], spans)),
    )


def check_sequence_length(length: int, cp: int) -> None:
    """Raises if a sequence cannot be cut into equal chunks, two for every rank."""
    if length % (2 * cp):
        raise UserError(
            field="layout.llm.cp",
            value=cp,
            problem=f"does not divide {length} tokens of a sequence into {2 * cp} equal chunks",
            hint=f"use sequences of {-(-length // (2 * cp)) * 2 * cp} tokens, or another cp",
        )


def _list_runs(lengths: Sequence[int], rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields begin and end of the two chunks of every sequence that a rank holds."""
    for begin, end in pairwise(accumulate(lengths, initial=0)):
        check_sequence_length(end - begin, size)
        chunk = (end - begin) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            yield begin + number * chunk, begin + (number + 1) * chunk


def _list_blocks(runs: Sequence[tuple[int, int]], spans: Sequence[int]) -> Iterator[AttentionBlock]:
    """Yields the parts of runs of rows that lie in one document each, with the keys that they see."""
    documents = list(pairwise(accumulate(spans, initial=0)))
    for first, last in runs:
        for begin, end in documents:
            low, high = max(first, begin), min(last, end)
            if low < high:
                yield AttentionBlock(queries=high - low, first_key=begin, keys=high - begin)


class ContextGather(TpCollective):
    """Gathers keys and values of all ranks in the order of the sequences; reduce-scatters their gradients.

    What was gathered is freed after the attention, and gathered again for its backward.
    """

    axis = "cp"
    forward_name = regather_name = KernelName.CONTEXT
    backward_name = KernelName.CONTEXT.scatter

    def __init__(self, cp_group: TpGroup, state_index: int) -> None:
        super().__init__(cp_group, state_index)
        self.cp_group = cp_group

    def launch(self, state: State, context: Any) -> AsyncCollective:
        gather = self.cp_group.all_gather(state[self.state_index])
        order = context.share.in_order
        return gather.then(lambda rows: replaced(state, self.state_index, rows.index_select(0, order)))

    def launch_backward(self, gradients: Gradients, context: Any) -> AsyncCollective:
        by_rank = present(gradients[self.state_index]).index_select(0, context.share.by_rank)
        scatter = self.cp_group.reduce_scatter(by_rank)
        return scatter.then(lambda rows: replaced(gradients, self.state_index, rows))

    def launch_regather(self, rows: Tensor, output: Tensor, context: Any) -> AsyncCollective:
        order = context.share.in_order
        return self.cp_group.all_gather(rows).then(
            lambda gathered: torch.index_select(gathered, 0, order, out=output)
        )
