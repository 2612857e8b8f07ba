"""Perturbs each assumption alone, low and high: how far the step moves, and whether another system wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from optimus.ir.op import Schedule
from optimus.ir.plan import Plan
from optimus.planner.compare import Comparison
from optimus.sensitivity.perturb import (
    PerturbableSchedule,
    PerturbedCostModel,
    UncertainParameter,
    uncertain_parameters,
)
from optimus.sensitivity.win_rate import find_fully_sharded


@dataclass(frozen=True, kw_only=True)
class TornadoBar:
    """Steps with one assumption at the ends of its range; winners only where systems were compared."""

    name: str
    low_label: str
    high_label: str
    low_s: float
    high_s: float
    winner_low: str | None = None
    winner_high: str | None = None


@dataclass(frozen=True, kw_only=True)
class Tornado:
    """Steps with each assumption at the ends of its range, and of a narrower range inside it."""

    step_s: float
    wide: tuple[TornadoBar, ...]
    narrow: tuple[TornadoBar, ...] = ()
    winner: str | None = None  # with nothing perturbed
    how: str = ""  # what was simulated, in one sentence


def compute_tornado(plan: Plan, schedule: Schedule, comparison: Comparison | None = None) -> Tornado:
    """Perturbs a plan, and all systems that fit where a comparison is given."""
    schedules = {plan.strategy: (schedule, plan.fully_sharded)}
    if comparison is not None:
        schedules |= {
            name: (system.schedule, find_fully_sharded(system))
            for name, system in comparison.systems.items()
            if system.fits and name not in ("llm-only", plan.strategy)
        }
    several = len(schedules) > 1
    base = _base_of(plan)
    parameters = uncertain_parameters(base, _noted(plan, "time_scale", 1.0))
    perturbables = {
        name: PerturbableSchedule(ops, list(plan.encoders), base, fully_sharded=sharded)
        for name, (ops, sharded) in schedules.items()
    }
    what = "all systems that fit were simulated again" if several else "only this plan was simulated again"
    kept = "with their schedules as they are" if several else "with its schedule as it is"
    more = "" if several else ": whether another system would win is not known"
    return Tornado(
        step_s=plan.claims.step_s,
        wide=tuple(_perturbed(plan.strategy, perturbables, base, parameter) for parameter in parameters),
        winner=_winner({name: system.step_s(base) for name, system in perturbables.items()}),
        how=f"{what}, {kept}{more}",
    )


def _base_of(plan: Plan) -> PerturbedCostModel:
    """Returns the cost model that the plan was made with."""
    hidden = _noted(plan, "tp_overlapped_share", 0.0)
    return PerturbedCostModel(slowdown=plan.slowdown, launch_s=plan.launch_s, tp_overlapped=hidden)


def _noted(plan: Plan, name: str, default: float) -> float:
    """Returns an assumption from the plan's notes, which are free text: any value may be there, or none."""
    preset = plan.notes.get("preset")
    value = preset.get(name) if isinstance(preset, Mapping) else None
    return float(value) if isinstance(value, int | float) else default


def _perturbed(
    strategy: str,
    perturbables: Mapping[str, PerturbableSchedule],
    base: PerturbedCostModel,
    parameter: UncertainParameter,
) -> TornadoBar:
    low, high = (
        {
            name: system.step_s(replace(base, **{parameter.field: value}))
            for name, system in perturbables.items()
        }
        for value in parameter.ends
    )
    return TornadoBar(
        name=parameter.name,
        low_label=parameter.show(parameter.ends[0]),
        high_label=parameter.show(parameter.ends[1]),
        low_s=low[strategy],
        high_s=high[strategy],
        winner_low=_winner(low),
        winner_high=_winner(high),
    )


def _winner(steps: Mapping[str, float]) -> str | None:
    return min(steps, key=lambda name: steps[name]) if len(steps) > 1 else None
