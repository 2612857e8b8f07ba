"""Routes encoder rows to LLM sequence positions inside a tensor-parallel group, on the host before the step.

Rows of an encoder microbatch arrive at LLM stage 0 on as many ranks as the encoder has tensor-parallel ranks,
a contiguous part on each. From there each row goes to the rank whose shard of the LLM's sequence holds its
position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.models.collectives import TpGroup
from optimus.models.microbatch_inputs import SeamRoute


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedRows:
    """Rows of one encoder microbatch: the ranks that hold them, and their positions in the LLM's sequence."""

    holders: range  # ranks in the LLM's tensor-parallel group
    targets: Tensor  # the sequence length for padding, which goes nowhere


def holder_tp_ranks(plan: Plan, module: str, microbatch: int) -> range:
    """Returns the LLM's tensor-parallel ranks at which rows of an encoder microbatch arrive."""
    tp = plan.modules[module].layout.tp
    block = plan.modules[module].pipelines[microbatch] % (plan.ranks.llm.tp // tp)
    return range(block * tp, (block + 1) * tp)


def receives_rows(plan: Plan, rank: int, module: str, microbatch: int) -> bool:
    """Returns whether rows of an encoder microbatch arrive at a rank of stage 0."""
    return plan.ranks.place(LLM, rank).tp in holder_tp_ranks(plan, module, microbatch)


def route_rows(microbatches: Sequence[RoutedRows], tp_group: TpGroup, length: int) -> SeamRoute:
    """Returns the rows that one rank sends and receives; `length` is that of the sequence."""
    shard = length // tp_group.size
    targets_by_rank = [_concatenated_targets(microbatches, rank) for rank in range(tp_group.size)]
    targets = targets_by_rank[tp_group.rank]
    receivers = torch.div(targets, shard, rounding_mode="floor")  # of padding: behind the last rank
    order = torch.argsort(receivers, stable=True)
    sent = [int((receivers == rank).sum()) for rank in range(tp_group.size)]
    received = [of_rank[(of_rank // shard) == tp_group.rank] for of_rank in targets_by_rank]
    return SeamRoute(
        pieces=tuple(len(part) for part in _targets_on(microbatches, tp_group.rank)),
        leaving=order[: sum(sent)],
        sent=tuple(sent),
        received=tuple(len(of_rank) for of_rank in received),
        targets=torch.cat(received) - tp_group.rank * shard,
    )


def _targets_on(microbatches: Sequence[RoutedRows], rank: int) -> list[Tensor]:
    """Returns the targets of the rows that a rank holds, by microbatch."""
    targets = []
    for rows in microbatches:
        if rank in rows.holders:
            count = len(rows.targets) // len(rows.holders)
            begin = (rank - rows.holders[0]) * count
            targets.append(rows.targets[begin : begin + count])
    return targets


def _concatenated_targets(microbatches: Sequence[RoutedRows], rank: int) -> Tensor:
    targets = _targets_on(microbatches, rank)
    return torch.cat(targets) if targets else torch.empty(0, dtype=torch.int64)
