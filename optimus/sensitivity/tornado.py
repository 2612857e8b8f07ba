"""Each assumption alone, taken low and high: how far it moves a step, and whether another system wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from optimus.ir.op import Schedule
from optimus.ir.plan import Plan
from optimus.planner.compare import Comparison
from optimus.sensitivity.perturb import CostModel, Perturbable, UncertainParameter, doubts


@dataclass(frozen=True, kw_only=True)
class Perturbed:
    """The step under one assumption, taken lower and higher; winners only where systems were compared."""

    name: str
    low_label: str
    high_label: str
    low_s: float
    high_s: float
    winner_low: str | None = None
    winner_high: str | None = None


@dataclass(frozen=True, kw_only=True)
class Tornado:
    """How the step answers to wrong assumptions: the widest change of each, and a narrower one inside it."""

    step_s: float
    wide: tuple[Perturbed, ...]
    narrow: tuple[Perturbed, ...] = ()
    winner: str | None = None  # with nothing perturbed
    how: str = ""  # what was played again, in one sentence


def find_tornado(plan: Plan, schedule: Schedule, comparison: Comparison | None = None) -> Tornado:
    """Of a plan with its schedule; all systems that fit are played too where they are known."""
    schedules = {plan.strategy: schedule}
    if comparison is not None:
        schedules |= {
            name: system.schedule
            for name, system in comparison.systems.items()
            if system.fits and name not in ("llm-only", plan.strategy)
        }
    several = len(schedules) > 1
    base = _base_of(plan)
    asked = doubts(base, _noted(plan, "time_scale", 1.0))
    played = {name: Perturbable(each, list(plan.encoders), base) for name, each in schedules.items()}
    what = "all systems that fit were played again" if several else "only this plan was played again"
    kept = "with their schedules as they are" if several else "with its schedule as it is"
    more = "" if several else ": whether another system would win is not known"
    return Tornado(
        step_s=plan.claims.step_s,
        wide=tuple(_perturbed(plan.strategy, played, base, doubt) for doubt in asked),
        winner=_winner({name: each.step_s(base) for name, each in played.items()}),
        how=f"{what}, {kept}{more}",
    )


def _base_of(plan: Plan) -> CostModel:
    """What the plan was made with, of what it says."""
    hidden = _noted(plan, "tp_overlapped_share", 0.0)
    return CostModel(slowdown=plan.slowdown, launch_s=plan.launch_s, tp_overlapped=hidden)


def _noted(plan: Plan, name: str, otherwise: float) -> float:
    """An assumption as the plan's notes have it, which are free: anything may stand there, or nothing."""
    preset = plan.notes.get("preset")
    found = preset.get(name) if isinstance(preset, Mapping) else None
    return float(found) if isinstance(found, int | float) else otherwise


def _perturbed(
    own: str, played: Mapping[str, Perturbable], base: CostModel, doubt: UncertainParameter
) -> Perturbed:
    low, high = (
        {name: each.step_s(replace(base, **{doubt.field: value})) for name, each in played.items()}
        for value in doubt.ends
    )
    return Perturbed(
        name=doubt.name,
        low_label=doubt.show(doubt.ends[0]),
        high_label=doubt.show(doubt.ends[1]),
        low_s=low[own],
        high_s=high[own],
        winner_low=_winner(low),
        winner_high=_winner(high),
    )


def _winner(steps: Mapping[str, float]) -> str | None:
    return min(steps, key=lambda name: steps[name]) if len(steps) > 1 else None
