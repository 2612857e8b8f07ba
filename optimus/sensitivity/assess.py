"""How sure an answer is: steps over drawn batches, and the winner under perturbed cost models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from optimus.planner.planning import Planned
from optimus.planner.systems.base import SimulatedSystem
from optimus.sensitivity.batch_steps import Steps, play_batches
from optimus.sensitivity.drawn_batches import BATCHES, SEED
from optimus.sensitivity.perturb import DRAWS
from optimus.sensitivity.win_rate import WinRate, find_sure


@dataclass(frozen=True, kw_only=True, eq=False)
class Assessed:
    """What stands behind the two last lines of `optimus plan`."""

    steps: Mapping[str, Steps]  # of the plan, of today's system and of the best other, in this order
    sure: WinRate


def assess_plan(
    planned: Planned,
    *,
    batches: int = BATCHES,
    draws: int = DRAWS,
    seed: int = SEED,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Assessed:
    """Takes up to a minute or two for the largest jobs; the same answer every time."""
    compared = [planned.plan.strategy, *(system.name for system in others(planned))]
    return Assessed(
        steps=play_batches(planned.comparison, compared, count=batches, seed=seed, progress=progress),
        sure=find_sure(planned.comparison, draws=draws, seed=seed, progress=progress),
    )


def others(planned: Planned) -> list[SimulatedSystem]:
    """What a plan is held against: what runs today, and the best that fills no bubbles."""
    today, simpler = planned.systems.get("today"), planned.simpler
    found = [system for system in (today, simpler) if system is not None and system.fits]
    return list({system.name: system for system in found}.values())
