"""Says how sure a winner is: in how many other cost models it still wins, and what decides it elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optimus.cost.assumptions import Assumptions
from optimus.ir.op import Floats
from optimus.planner.compare import Comparison
from optimus.planner.systems.base import SimulatedSystem
from optimus.sensitivity.perturb import (
    DRAWS,
    SEED,
    CostModel,
    Perturbable,
    UncertainParameter,
    doubts,
    draw_models,
)
from optimus.sensitivity.threads import in_threads

CANNOT_WIN = 1.3  # of the best step: systems beyond are left out
MOST_ROWS = 160_000_000  # that are played: of more systems the slowest are left out, never draws
EXPLAINS = 0.5  # of the wins, more than of the rest: below this one assumption says too little
FEW_WINS = 5  # below this anything explains them

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One assumption beyond one value: as good a reason as one assumption gives."""

    doubt: UncertainParameter
    above: bool
    value: float
    explains: int  # cost models where the rule holds and the system wins,
    holds: int  # and all where it holds

    def __str__(self) -> str:
        return self.doubt.say(self.value, above=self.above)


@dataclass(frozen=True, kw_only=True)
class Otherwise:
    """Who wins in some of the cost models, and what they have in common; no rule if hardly anything."""

    system: str
    wins: int
    rule: Rule | None


@dataclass(frozen=True, kw_only=True, eq=False)
class WinRate:
    """Which system is the fastest in how many cost models."""

    winner: str  # with nothing perturbed
    same: int
    of: int
    otherwise: tuple[Otherwise, ...]  # most wins first
    steps_s: Mapping[str, Floats]  # of every system that was played, by cost model
    models: tuple[CostModel, ...]
    left_out: Mapping[str, str]  # systems that were not played, with the reason


def base_model(assumptions: Assumptions) -> CostModel:
    """Ours."""
    return CostModel(
        slowdown=assumptions.residence_slowdown,
        launch_s=assumptions.launch_s,
        tp_overlapped=assumptions.tp_overlapped_share,
    )


def find_sure(
    comparison: Comparison,
    *,
    draws: int = DRAWS,
    seed: int = SEED,
    progress: Progress = lambda name, done, total: None,
) -> WinRate:
    """Plays the systems' schedules, as they are, under cost models that are wrong in everything at once."""
    base = base_model(comparison.assumptions)
    encoders = [encoder.name for encoder in comparison.job.model.encoders]
    chosen, left_out = choose_systems(comparison, draws)
    asked = doubts(base, comparison.assumptions.time_scale)
    models = draw_models(base, asked, draws=draws, seed=seed)
    steps: dict[str, Floats] = {}
    for place, system in enumerate(chosen):
        schedule = Perturbable(system.schedule, encoders, base)
        found = np.empty(draws)
        for draw, step_s in enumerate(in_threads(schedule.step_s, models)):
            progress(f"perturbed {system.name}", place * draws + draw, len(chosen) * draws)
            found[draw] = step_s
        steps[system.name] = found
    names = list(steps)
    winners = [names[int(place)] for place in np.argmin(np.stack(list(steps.values())), axis=0)]
    counts = Counter(winners)
    return WinRate(
        winner=names[0],
        same=counts[names[0]],
        of=draws,
        otherwise=tuple(
            Otherwise(system=name, wins=wins, rule=find_rule(models, asked, [w == name for w in winners]))
            for name, wins in counts.most_common()
            if name != names[0]
        ),
        steps_s=steps,
        models=tuple(models),
        left_out=left_out,
    )


def choose_systems(comparison: Comparison, draws: int) -> tuple[list[SimulatedSystem], dict[str, str]]:
    """The fastest first, and why others are left out: the rows of all that are played stay in the budget."""
    ranked = sorted(
        (system for name, system in comparison.systems.items() if system.fits and name != "llm-only"),
        key=lambda system: system.step_s,
    )
    chosen: list[SimulatedSystem] = []
    left_out: dict[str, str] = {}
    rows = 0
    for system in ranked:
        over = system.step_s / ranked[0].step_s
        twin = next((each.name for each in chosen if _same(each, system)), None)
        rows += draws * len(system.schedule)
        if twin is not None:
            left_out[system.name] = f"the same as {twin}"
        elif over > CANNOT_WIN:
            left_out[system.name] = f"{over:.2f} times the best step"
        elif len(chosen) > 1 and rows > MOST_ROWS:
            left_out[system.name] = "too many ops"
        else:
            chosen.append(system)
            continue
        rows -= draws * len(system.schedule)
    return chosen, left_out


def _same(one: SimulatedSystem, other: SimulatedSystem) -> bool:
    same = len(one.schedule) == len(other.schedule) and one.step_s == other.step_s
    return same and np.array_equal(one.schedule.duration_s, other.schedule.duration_s)


def find_rule(
    models: Sequence[CostModel], asked: Collection[UncertainParameter], wins: Sequence[bool]
) -> Rule | None:
    """The one assumption, and side of a value, that tells best where a system wins and where not."""
    won = np.array(wins)
    if not FEW_WINS <= won.sum() < len(won):
        return None
    best: Rule | None = None
    best_score = EXPLAINS
    for doubt in asked:
        values = np.array([getattr(model, doubt.field) for model in models])
        for value in doubt.choices or np.arange(doubt.low, doubt.high, 0.01).tolist():
            for above in (False, True):
                holds = values >= value if above else values <= value
                score = float(holds[won].mean() - holds[~won].mean())
                if score > best_score + 1e-9:
                    explains = int((holds & won).sum())
                    best_score = score
                    best = Rule(
                        doubt=doubt, above=above, value=value, explains=explains, holds=int(holds.sum())
                    )
    return best
