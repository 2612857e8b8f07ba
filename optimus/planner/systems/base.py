"""Plays ways to run a job, and takes the fastest of several."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from optimus.cost.memory import Memory
from optimus.errors import DoesNotFit
from optimus.ir.op import Schedule
from optimus.planner.context import PlanningContext
from optimus.schedule.simulate import Timeline, evaluate

MOST_PLAYED = 4  # choices of a system that are played kernel by kernel,
CLOSE = 1.02  # if their estimates are this close to the best


class Way(Protocol):
    """One way to run a job, before it is played."""

    @property
    def fits(self) -> bool: ...

    @property
    def memories(self) -> tuple[Memory, ...]: ...

    @property
    def estimate_s(self) -> float: ...

    def schedule(self) -> Schedule: ...


W = TypeVar("W", bound=Way)


def play(context: PlanningContext, schedule: Schedule) -> Timeline:
    """Kernel by kernel, under the assumptions of the setting."""
    assumptions = context.prices.assumptions
    return evaluate(schedule, slowdown=assumptions.residence_slowdown, launch_s=assumptions.launch_s)


def step_s(context: PlanningContext, way: Way) -> float:
    """Step time of one way, kernel by kernel."""
    return play(context, way.schedule()).step_s


def fastest(context: PlanningContext, name: str, choices: Iterable[W]) -> W:
    """The fastest of the choices that fit: ranked by estimate, the first few played."""
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        raise DoesNotFit(
            f"{name} fits in {context.capacity_bytes / 1e9:.0f} GB in no way that was tried",
            "use another system, more GPUs, or recompute: full",
        )
    ranked = sorted(fitting, key=lambda choice: choice.estimate_s)
    close = [choice for choice in ranked if choice.estimate_s <= CLOSE * ranked[0].estimate_s]
    if len(close) == 1:
        return close[0]
    return min(close[:MOST_PLAYED], key=lambda choice: step_s(context, choice))
