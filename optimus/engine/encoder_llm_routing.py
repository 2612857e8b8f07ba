"""Which encoder rows go where inside a tensor-parallel group: known on the host before the step.

Rows of a piece arrive at stage 0 on the ranks that stand where the encoder's stood: as many as divide the
encoder, each with a run of the rows. From there they go to whoever holds their places in the LLM's sequence.
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
    """Encoder rows of an LLM microbatch: who holds them, and the row of the sequence that each replaces."""

    holders: range  # in the LLM's tensor-parallel group
    targets: Tensor  # the length of the sequence for nowhere


def holder_tp_ranks(plan: Plan, module: str, microbatch: int) -> range:
    """Places in the LLM's tensor-parallel group at which rows of an encoder microbatch arrive."""
    tp = plan.modules[module].layout.tp
    block = plan.modules[module].pipelines[microbatch] % (plan.ranks.llm.tp // tp)
    return range(block * tp, (block + 1) * tp)


def receives_rows(plan: Plan, rank: int, module: str, microbatch: int) -> bool:
    """Whether a rank of stage 0 gets rows of an encoder microbatch."""
    return plan.ranks.place(LLM, rank).tp in holder_tp_ranks(plan, module, microbatch)


def route_rows(pieces: Sequence[RoutedRows], tp_group: TpGroup, length: int) -> SeamRoute:
    """What one rank sends and gets; `length` is that of the sequence."""
    own = length // tp_group.size
    held = [_held(pieces, rank) for rank in range(tp_group.size)]
    mine = held[tp_group.rank]
    going = torch.div(mine, own, rounding_mode="floor")  # nowhere is behind the last rank
    order = torch.argsort(going, stable=True)
    sent = [int((going == rank).sum()) for rank in range(tp_group.size)]
    coming = [targets[(targets // own) == tp_group.rank] for targets in held]
    return SeamRoute(
        pieces=tuple(len(part) for part in _parts(pieces, tp_group.rank)),
        leaving=order[: sum(sent)],
        sent=tuple(sent),
        received=tuple(len(targets) for targets in coming),
        targets=torch.cat(coming) - tp_group.rank * own,
    )


def _parts(pieces: Sequence[RoutedRows], rank: int) -> list[Tensor]:
    """Targets of what a rank holds, piece by piece."""
    found = []
    for piece in pieces:
        if rank in piece.holders:
            own = len(piece.targets) // len(piece.holders)
            begin = (rank - piece.holders[0]) * own
            found.append(piece.targets[begin : begin + own])
    return found


def _held(pieces: Sequence[RoutedRows], rank: int) -> Tensor:
    found = _parts(pieces, rank)
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
