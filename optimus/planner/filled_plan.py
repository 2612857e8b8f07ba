"""A plan with programs and claims, made from an arrangement of phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from optimus.cost.memory import Memory
from optimus.ir.op import Schedule
from optimus.ir.plan import Claims, Plan, Program
from optimus.planner.systems.colocated import as_memory
from optimus.schedule.lower import Lowered, lower
from optimus.schedule.phases import DIGITS
from optimus.schedule.plan_memory import claim_encoder_s, claim_memory


@dataclass(frozen=True, kw_only=True, eq=False)
class FilledPlan:
    """What is written to a plan file, with its schedule and timeline for those who look at it."""

    plan: Plan
    lowered: Lowered

    @property
    def step_s(self) -> float:
        return self.plan.claims.step_s

    @property
    def estimate_s(self) -> float:
        return self.plan.claims.estimate_s

    def schedule(self) -> Schedule:
        return self.lowered.schedule

    @property
    def memories(self) -> tuple[Memory, ...]:
        """Of one rank of every device class."""
        return tuple(
            as_memory(held.fixed, held.llm_activations, held.encoder_activations, held.seam)
            for held in self.plan.memory
        )

    @property
    def fits(self) -> bool:
        return max(held.peak for held in self.plan.memory) <= self.plan.capacity_bytes

    @property
    def hidden_share(self) -> float:
        """Share of encoder compute that lies in slots of, or between, the LLM's phases."""
        seconds = self.plan.claims.encoder_s
        total = sum(seconds.values())
        return (seconds["slots"] + seconds["between"]) / total if total else 1.0


def finish_plan(
    header: Plan, orders: Sequence[Program], fixed: Sequence[Mapping[str, int]], *, estimate_s: float
) -> FilledPlan:
    """Lowers `orders` and states what the result costs: the replay's makespan, memory, where work lies."""
    lowered = lower(header, orders)
    claims = Claims(
        step_s=round(lowered.timeline.step_s, DIGITS),
        estimate_s=round(estimate_s, DIGITS),
        encoder_s={
            region: round(seconds, DIGITS) for region, seconds in claim_encoder_s(header, lowered).items()
        },
    )
    memory = claim_memory(header, lowered.programs, fixed)
    plan = replace(header, programs=lowered.programs, claims=claims, memory=memory)
    return FilledPlan(plan=plan, lowered=lowered)
