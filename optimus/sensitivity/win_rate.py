"""Counts the perturbed cost models in which the fastest system stays the fastest, and explains the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from optimus.cost.assumptions import Assumptions
from optimus.environment import usable_cores
from optimus.ir.op import Floats
from optimus.planner.compare import Comparison
from optimus.planner.systems.base import SimulatedSystem
from optimus.sensitivity.perturb import (
    DRAWS,
    SEED,
    PerturbableSchedule,
    PerturbedCostModel,
    UncertainParameter,
    draw_cost_models,
    uncertain_parameters,
)

SKIP_ABOVE_BEST = 1.3  # times the best step: slower systems are not simulated
MAX_SIMULATED_OPS = 160_000_000  # over all draws: beyond it the slowest systems are left out, never draws
MIN_RULE_SCORE = 0.5  # share of wins minus share of losses under a rule, at least
MIN_WINS_FOR_RULE = 5  # fewer wins are explained by anything
MAX_THREADS = 8  # each holds the arrays of one schedule, up to 100 MB for the largest jobs

Progress = Callable[[str, int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class WinRule:
    """The one assumption, above or below a value, that separates a system's wins from its losses best."""

    parameter: UncertainParameter
    above: bool
    value: float
    explains: int  # cost models where the rule holds and the system wins,
    holds: int  # and all where it holds

    def __str__(self) -> str:
        return self.parameter.describe(self.value, above=self.above)


@dataclass(frozen=True, kw_only=True)
class OtherWinner:
    """Another system that wins in some of the cost models, and the rule that these have in common, if any."""

    system: str
    wins: int
    rule: WinRule | None


@dataclass(frozen=True, kw_only=True, eq=False)
class WinRate:
    """The fastest system of every perturbed cost model, counted."""

    winner: str  # with nothing perturbed
    same: int
    of: int
    otherwise: tuple[OtherWinner, ...]  # most wins first
    steps_s: Mapping[str, Floats]  # of every simulated system, by cost model
    models: tuple[PerturbedCostModel, ...]
    left_out: Mapping[str, str]  # systems that were not simulated, with the reason


def unperturbed_cost_model(assumptions: Assumptions) -> PerturbedCostModel:
    """Returns the unperturbed cost model of a set of assumptions."""
    return PerturbedCostModel(
        slowdown=assumptions.residence_slowdown,
        launch_s=assumptions.launch_s,
        tp_overlapped=assumptions.tp_overlapped_share,
    )


def compute_win_rate(
    comparison: Comparison,
    *,
    draws: int = DRAWS,
    seed: int = SEED,
    progress: Progress = lambda name, done, total: None,
) -> WinRate:
    """Simulates the systems' schedules, unchanged, under cost models that perturb all parameters at once."""
    base = unperturbed_cost_model(comparison.assumptions)
    encoders = [encoder.name for encoder in comparison.job.model.encoders]
    chosen, left_out = choose_systems_to_simulate(comparison, draws)
    parameters = uncertain_parameters(base, comparison.assumptions.time_scale)
    models = draw_cost_models(base, parameters, draws=draws, seed=seed)
    steps: dict[str, Floats] = {}
    for place, system in enumerate(chosen):
        schedule = PerturbableSchedule(system.schedule, encoders, base)
        system_steps_s = np.empty(draws)
        for draw, step_s in enumerate(map_in_threads(schedule.step_s, models)):
            progress(f"perturbed {system.name}", place * draws + draw, len(chosen) * draws)
            system_steps_s[draw] = step_s
        steps[system.name] = system_steps_s
    names = list(steps)
    winners = [names[int(place)] for place in np.argmin(np.stack(list(steps.values())), axis=0)]
    counts = Counter(winners)
    return WinRate(
        winner=names[0],
        same=counts[names[0]],
        of=draws,
        otherwise=tuple(
            OtherWinner(
                system=name, wins=wins, rule=find_win_rule(models, parameters, [w == name for w in winners])
            )
            for name, wins in counts.most_common()
            if name != names[0]
        ),
        steps_s=steps,
        models=tuple(models),
        left_out=left_out,
    )


def map_in_threads(
    function: Callable[[Item], Result], items: Iterable[Item]
) -> Generator[Result, None, None]:
    """Yields the results in the order of the items; compiled loops release the GIL."""
    with ThreadPoolExecutor(min(usable_cores(), MAX_THREADS)) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            for future in futures:
                yield future.result()
        finally:  # a caller that stops early waits for running items only
            for future in futures:
                future.cancel()


def choose_systems_to_simulate(
    comparison: Comparison, draws: int
) -> tuple[list[SimulatedSystem], dict[str, str]]:
    """Returns the systems to simulate, fastest first, and why others are left out."""
    ranked = sorted(
        (system for name, system in comparison.systems.items() if system.fits and name != "llm-only"),
        key=lambda system: system.step_s,
    )
    chosen: list[SimulatedSystem] = []
    left_out: dict[str, str] = {}
    rows = 0
    for system in ranked:
        over = system.step_s / ranked[0].step_s
        twin = next((other.name for other in chosen if _is_same(other, system)), None)
        rows += draws * len(system.schedule)
        if twin is not None:
            left_out[system.name] = f"the same as {twin}"
        elif over > SKIP_ABOVE_BEST:
            left_out[system.name] = f"{over:.2f} times the best step"
        elif len(chosen) > 1 and rows > MAX_SIMULATED_OPS:
            left_out[system.name] = "too many ops"
        else:
            chosen.append(system)
            continue
        rows -= draws * len(system.schedule)
    return chosen, left_out


def _is_same(one: SimulatedSystem, other: SimulatedSystem) -> bool:
    same = len(one.schedule) == len(other.schedule) and one.step_s == other.step_s
    return same and np.array_equal(one.schedule.duration_s, other.schedule.duration_s)


def find_win_rule(
    models: Sequence[PerturbedCostModel], parameters: Collection[UncertainParameter], wins: Sequence[bool]
) -> WinRule | None:
    """Returns the assumption and threshold that separate wins from losses best, or None if none does well."""
    won = np.array(wins)
    if not MIN_WINS_FOR_RULE <= won.sum() < len(won):
        return None
    best: WinRule | None = None
    best_score = MIN_RULE_SCORE
    for parameter in parameters:
        values = np.array([getattr(model, parameter.field) for model in models])
        for value in parameter.choices or np.arange(parameter.low, parameter.high, 0.01).tolist():
            for above in (False, True):
                holds = values >= value if above else values <= value
                score = float(holds[won].mean() - holds[~won].mean())
                if score > best_score + 1e-9:
                    explains = int((holds & won).sum())
                    best_score = score
                    best = WinRule(
                        parameter=parameter,
                        above=above,
                        value=value,
                        explains=explains,
                        holds=int(holds.sum()),
                    )
    return best
