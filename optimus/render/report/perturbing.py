"""Plays schedules again with some of their durations scaled: what the step owes to each assumption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from optimus.program.op import Communicator, Kind, Schedule
from optimus.program.plan import Plan
from optimus.render.report.data import Perturbed, Sure
from optimus.schedule.timeline import evaluate
from optimus.search.compare import Comparison
from optimus.search.replaying import Replayed

WIDE, NARROW = 0.2, 0.1
COMPUTE = (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W)
EFFICIENCY = "compute efficiency"
TRAFFIC = {
    "time of TP traffic": Communicator.TP,
    "time of DP traffic": Communicator.DP,
    "time of messages between stages": Communicator.PP,
}


def perturb(plan: Plan, played: Replayed, comparison: Comparison | None = None) -> Sure:
    """Every assumption 10 and 20 % lower and higher; all systems that fit where they are known."""
    schedules = {plan.strategy: played.schedule}
    if comparison is not None:
        schedules |= {
            name: system.schedule
            for name, system in comparison.systems.items()
            if system.fits and name not in ("llm-only", plan.strategy)
        }
    several = len(schedules) > 1
    steps = {name: _step_s(plan, schedule, "", 0.0) for name, schedule in schedules.items()}
    what = "all systems that fit were played again" if several else "only this plan was played again"
    kept = "with their schedules as they are" if several else "with its schedule as it is"
    more = "" if several else ": whether another system would win is not known"
    return Sure(
        step_s=plan.claims.step_s,
        wide=tuple(_perturbed(plan, schedules, name, WIDE) for name in (EFFICIENCY, *TRAFFIC)),
        narrow=tuple(_perturbed(plan, schedules, name, NARROW) for name in (EFFICIENCY, *TRAFFIC)),
        winner=_winner(steps),
        how=f"{what}, {kept}{more}",
    )


def _winner(steps: Mapping[str, float]) -> str | None:
    return min(steps, key=lambda name: steps[name]) if len(steps) > 1 else None


def _perturbed(plan: Plan, schedules: Mapping[str, Schedule], name: str, share: float) -> Perturbed:
    low, high = (
        {system: _step_s(plan, schedule, name, change) for system, schedule in schedules.items()}
        for change in (-share, share)
    )
    return Perturbed(
        name=name,
        low_label=f"-{share:.0%}".replace("%", " %"),
        high_label=f"+{share:.0%}".replace("%", " %"),
        low_s=low[plan.strategy],
        high_s=high[plan.strategy],
        winner_low=_winner(low),
        winner_high=_winner(high),
    )


def _step_s(plan: Plan, schedule: Schedule, name: str, change: float) -> float:
    """The step if what `name` says were larger by the share `change`."""
    factor = np.ones(len(schedule))
    if name == EFFICIENCY:
        factor[np.isin(schedule.kind, COMPUTE)] = 1 / (1 + change)
    elif name:
        factor[schedule.communicator == TRAFFIC[name]] = 1 + change
    scaled = replace(schedule, duration_s=schedule.duration_s * factor)
    return evaluate(scaled, slowdown=plan.slowdown, launch_s=plan.launch_s).step_s
