"""Assesses a plan: its step over drawn batches, and its win rate under perturbed cost models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from optimus.planner.planning import PlanningResult
from optimus.planner.systems.base import SimulatedSystem
from optimus.sensitivity.batch_steps import BatchStepTimes, simulate_batches
from optimus.sensitivity.drawn_batches import BATCHES, SEED
from optimus.sensitivity.perturb import DRAWS
from optimus.sensitivity.win_rate import WinRate, compute_win_rate


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanAssessment:
    """Figures of the two last lines of `optimus plan`."""

    steps: Mapping[str, BatchStepTimes]  # of the plan, of today's system and of the best other, in this order
    sure: WinRate


def assess_plan(
    planned: PlanningResult,
    *,
    batches: int = BATCHES,
    draws: int = DRAWS,
    seed: int = SEED,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> PlanAssessment:
    """Simulates drawn batches and perturbed cost models; takes up to two minutes for the largest jobs."""
    compared = [planned.plan.strategy, *(system.name for system in _reference_systems(planned))]
    return PlanAssessment(
        steps=simulate_batches(planned.comparison, compared, count=batches, seed=seed, progress=progress),
        sure=compute_win_rate(planned.comparison, draws=draws, seed=seed, progress=progress),
    )


def _reference_systems(planned: PlanningResult) -> list[SimulatedSystem]:
    """Returns the systems that a plan is compared with: today's, and the fastest that fills no bubbles."""
    today, simpler = planned.systems.get("today"), planned.simpler
    fitting = [system for system in (today, simpler) if system is not None and system.fits]
    return list({system.name: system for system in fitting}.values())
