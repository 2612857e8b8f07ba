"""Assesses a plan: its step over drawn batches, and its win rate under perturbed cost models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from optimus.planner.planning import PlanningResult
from optimus.planner.systems.base import SimulatedSystem
from optimus.sensitivity.batch_steps import BEST, BatchStepTimes, simulate_batches
from optimus.sensitivity.drawn_batches import BATCHES, SEED
from optimus.sensitivity.perturb import DRAWS
from optimus.sensitivity.win_rate import WinRate, compute_win_rate

MAX_OVER_PLAN = 1.1  # mean step of a system over the plan's, up to which batches may make it the faster
MAX_RIVALS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanAssessment:
    """Figures of the two last lines of `optimus plan`."""

    steps: Mapping[str, BatchStepTimes]  # of the plan, of today's system and of close others, in this order
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
    compared = [planned.plan.strategy, *(system.name for system in _close_systems(planned))]
    return PlanAssessment(
        steps=simulate_batches(
            planned.comparison, compared, dealing=BEST, count=batches, seed=seed, progress=progress
        ),
        sure=compute_win_rate(planned.comparison, draws=draws, seed=seed, progress=progress),
    )


def _close_systems(planned: PlanningResult) -> list[SimulatedSystem]:
    """Returns the systems that a plan is compared with: today's, and those that may beat it, fastest first.

    Batches are at most so much slower than the mean; of systems that fill no bubbles, the best is always in.
    """
    today, simpler, others = planned.systems.get("today"), planned.simpler, planned.rivals
    limit = MAX_OVER_PLAN * planned.step_s
    close = [today, simpler, *(system for system in others if system.step_s <= limit)]
    return list({s.name: s for s in close if s is not None and s.fits}.values())[:MAX_RIVALS]
