"""What `python -m benchmarks shaped` compares: ways to play one plan over a slow link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.waiting import Waiting
from optimus.engine.distributed_optimizer import ShardedBucket
from optimus.engine.process_groups import ProcessGroups
from optimus.ir.plan import Plan
from optimus.job.layout import LayoutChoice
from optimus.models.tensor_parallel import TpGroup
from optimus.profiler.at_home import LocalTpGroup

RANKS = 2
Axis = Literal["dp", "tp"]  # which of the two goes over the slow link


class Silent(ShardedBucket):
    """Replicas that do not know of each other."""

    def gather(self) -> None:
        """Every replica goes on with what it has."""

    def reduce(self) -> None:
        """Every replica learns from its own part of the batch."""


class Mute(ProcessGroups):
    """A tensor-parallel group in which nobody hears the other: numbers mean nothing, and take as long."""

    def tp_group(self, plan: Plan, module: str) -> TpGroup:
        found = super().tp_group(plan, module)
        return LocalTpGroup(rank=found.rank, size=found.size)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a variant plays the plan."""

    buckets: type[ShardedBucket] = ShardedBucket
    slots: bool = True
    groups: type[ProcessGroups] = ProcessGroups


@dataclass(frozen=True, kw_only=True)
class Contest:
    """What is compared over the link: ours, the same unfilled, and what neither can beat."""

    ways: dict[str, Way]
    layout: LayoutChoice  # of the LLM
    dtype: torch.dtype
    mbit_per_s: float
    sequences: int  # of a step
    images: int  # of a sequence, which share its image tokens
    words: str  # what the two ranks are, and what goes over the link
    traffic: str

    @property
    def ours(self) -> str:
        return next(iter(self.ways))

    @property
    def unfilled(self) -> str:
        return list(self.ways)[1]

    @property
    def silent(self) -> str:
        return list(self.ways)[-1]

    @property
    def widths(self) -> tuple[int, ...]:
        """Of layers, to measure."""
        return tuple(sorted({1, self.layout.tp or 1}))


CONTESTS: dict[Axis, Contest] = {
    "dp": Contest(
        ways={
            "DP bubbles filled": Way(),
            "DP bubbles not filled": Way(buckets=Waiting),
            "no DP traffic": Way(buckets=Silent),
        },
        layout=LayoutChoice(dp=RANKS, pp=1, tp=1),
        dtype=torch.bfloat16,
        mbit_per_s=400.0,
        sequences=8,
        images=1,
        words="two replicas",
        traffic="data-parallel",
    ),
    "tp": Contest(
        ways={
            "TP slots filled": Way(),
            "TP slots not filled": Way(slots=False),
            "no TP traffic": Way(groups=Mute),
        },
        layout=LayoutChoice(dp=1, pp=1, tp=RANKS),
        dtype=torch.float32,  # here faster than bf16, as GPUs are in bf16: traffic counts as it does there
        mbit_per_s=600.0,
        sequences=8,
        images=2,  # one for each rank, whose kernels then fit into gaps
        words="two ranks that divide the LLM's layers",
        traffic="tensor-parallel",
    ),
}
