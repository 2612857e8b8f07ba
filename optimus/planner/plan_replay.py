"""Replays a plan, with its encoders or without, and finds where its time goes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from optimus.errors import UserError
from optimus.ir.op import Schedule
from optimus.ir.plan import Plan, Program
from optimus.ir.ranks import LLM
from optimus.schedule.bubbles import BubbleSeconds, average_bubbles, sum_bubbles_by_cause
from optimus.schedule.lower import simulate_plan
from optimus.schedule.plan_schedule import build_plan_schedule
from optimus.schedule.simulator import ScheduleDeadlock, Timeline


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayedPlan:
    """A plan with its schedule, simulated timeline and bubbles."""

    plan: Plan
    schedule: Schedule
    timeline: Timeline
    bubbles: BubbleSeconds  # of the mean device class; all classes represent equally many GPUs

    @property
    def floor_s(self) -> float | None:
        """The LLM's own step, from the plan's notes."""
        floor_s = self.plan.notes.get("floor_s")
        return floor_s if isinstance(floor_s, float) else None


def replay_plan(plan: Plan) -> ReplayedPlan:
    """Simulates the programs of a plan; raises UserError if they cannot run to the end."""
    try:
        schedule = build_plan_schedule(plan, plan.programs)
        timeline = simulate_plan(plan, schedule)
    except (AssertionError, ScheduleDeadlock, IndexError) as error:
        raise UserError(
            field="PLAN",
            value=plan.name,
            problem=f"cannot be played: {str(error) or 'an op is missing'}",
            hint="optimus check says which rule it breaks; plan again",
        ) from error
    bubbles = average_bubbles(sum_bubbles_by_cause(schedule, timeline))
    return ReplayedPlan(plan=plan, schedule=schedule, timeline=timeline, bubbles=bubbles)


def replay_llm_alone(plan: Plan) -> ReplayedPlan:
    """Replays a plan without its encoders: the LLM's ops in the same order, with nothing between them."""
    kept = plan.names.index(LLM), len(plan.names) - 1  # and the optimizer, an op of no single module
    programs = tuple(Program.of(each.rows[np.isin(each.module, kept)]) for each in plan.programs)
    return replay_plan(replace(plan, programs=programs))
