"""Counts the perturbed cost models in which a system stays about the fastest, and explains the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from optimus.cost.assumptions import Assumptions
from optimus.ir.op import Floats
from optimus.planner.compare import Comparison
from optimus.planner.forked import compute_by_key
from optimus.planner.planning import MIN_SPEEDUP_WORTH_FILLING
from optimus.planner.systems.base import SimulatedSystem
from optimus.sensitivity.batch_steps import BatchStepTimes
from optimus.sensitivity.perturb import (
    DRAWS,
    SEED,
    PerturbableSchedule,
    PerturbedCostModel,
    UncertainParameter,
    draw_cost_models,
    uncertain_parameters,
)

MIN_RULE_SCORE = 0.5  # share of wins minus share of losses under a rule, at least
MIN_WINS_FOR_RULE = 5  # fewer wins are explained by anything

Progress = Callable[[str, int, int], None]


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
class BetterSystem:
    """A system that is better in some of the cost models, and the rule that these have in common, if any."""

    system: str
    wins: int
    rule: WinRule | None

    def __str__(self) -> str:
        """E.g. `three-phase would be better in 12, 10 of them among the 40 where image tokens are -10 %`."""
        words = f"{self.system} would be better in {self.wins}"
        if self.rule is None:
            return words if self.wins < MIN_WINS_FOR_RULE else f"{words}, which no one assumption explains"
        share = "all" if self.rule.explains == self.wins else f"{self.rule.explains} of them"
        return f"{words}, {share} among the {self.rule.holds} where {self.rule}"


@dataclass(frozen=True, kw_only=True, eq=False)
class WinRate:
    """The perturbed cost models in which a system stays about the fastest, counted."""

    system: str
    holds: int  # cost models in which no system is faster by more than the margin
    better: tuple[BetterSystem, ...]  # in the other cost models, most wins first
    perturbed: PerturbedSteps

    @property
    def of(self) -> int:
        return len(self.perturbed.models)

    @property
    def sentence(self) -> str:
        if len(self.perturbed.steps_s) == 1:
            return "no other system comes close: no perturbed cost models were simulated"
        within = f"fastest or within {self.perturbed.margin - 1:.0%} of it"
        words = f"{within} in {self.holds} of {self.of} perturbed cost models"
        words += f", {self.perturbed.mean_excess(self.system):.1%} over it in their mean"
        return "; ".join([words, *map(str, self.better)])


@dataclass(frozen=True, kw_only=True, eq=False)
class PerturbedSteps:
    """Steps of systems under the same perturbed cost models."""

    margin: float
    parameters: tuple[UncertainParameter, ...]
    models: tuple[PerturbedCostModel, ...]
    steps_s: Mapping[str, Floats]  # of every simulated system, by cost model
    same_as: Mapping[str, str]  # systems that are not simulated, and the simulated one that each equals

    def holds(self, system: str) -> NDArray[np.bool_]:
        """Returns by cost model whether no system is faster than this one by more than the margin."""
        held: NDArray[np.bool_] = self._steps_of(system) <= self.margin * self._all_steps.min(axis=0)
        return held

    def select(self, names: Mapping[str, str]) -> PerturbedSteps:
        """Returns the steps of some systems under new names: `names[new]` is the present one."""
        steps_s: dict[str, Floats] = {}
        same_as: dict[str, str] = {}
        for new, present in names.items():
            steps = self._steps_of(present)
            twin = next((name for name, known in steps_s.items() if known is steps), None)
            if twin is None:
                steps_s[new] = steps
            else:
                same_as[new] = twin
        return replace(self, steps_s=steps_s, same_as=same_as)

    def find_loss_rule(self, system: str, other: str) -> WinRule | None:
        """Returns the assumption where another system is faster by more than the margin, if one tells."""
        losses = self.margin * self._steps_of(other) < self._steps_of(system)
        return find_win_rule(self.models, self.parameters, losses)

    def mean_excess(self, system: str) -> float:
        """Returns the share by which a system's step is over the fastest's, in the mean over cost models."""
        return float((self._steps_of(system) / self._all_steps.min(axis=0)).mean()) - 1

    def win_rate(self, system: str) -> WinRate:
        """Counts the cost models in which a system holds, and explains the others."""
        names, holds = list(self.steps_s), self.holds(system)
        fastest = np.array(names)[self._all_steps.argmin(axis=0)]
        wins = Counter(fastest[~holds].tolist())
        return WinRate(
            system=system,
            holds=int(holds.sum()),
            better=tuple(
                BetterSystem(
                    system=name,
                    wins=count,
                    rule=find_win_rule(self.models, self.parameters, (fastest == name) & ~holds),
                )
                for name, count in wins.most_common()
            ),
            perturbed=self,
        )

    def _steps_of(self, system: str) -> Floats:
        return self.steps_s[self.same_as.get(system, system)]

    @cached_property
    def _all_steps(self) -> Floats:
        return np.stack(list(self.steps_s.values()))


def unperturbed_cost_model(assumptions: Assumptions) -> PerturbedCostModel:
    """Returns the unperturbed cost model of a set of assumptions."""
    return PerturbedCostModel(
        slowdown=assumptions.residence_slowdown,
        launch_s=assumptions.launch_s,
        tp_overlapped=assumptions.tp_overlapped_share,
    )


def find_fully_sharded(system: SimulatedSystem) -> list[str]:
    """Returns the names of the modules that a system shards in every microbatch."""
    result = system.search_result
    return [] if result is None else result.filled.header.fully_sharded


def simulate_cost_models(
    comparison: Comparison,
    drawn: Mapping[str, BatchStepTimes],
    *,
    margin: float = MIN_SPEEDUP_WORTH_FILLING,
    draws: int = DRAWS,
    seed: int = SEED,
    cores: int = 1,
    progress: Progress = lambda name, done, total: None,
) -> PerturbedSteps:
    """Simulates the drawn systems' schedules, unchanged, under cost models with all parameters perturbed.

    Steps at the mean batch are multiplied by what drawn batches add to them.
    """
    base = unperturbed_cost_model(comparison.assumptions)
    encoders = [encoder.name for encoder in comparison.job.model.encoders]
    chosen, same_as = choose_systems_to_simulate(comparison, drawn)
    parameters = uncertain_parameters(base, comparison.assumptions.time_scale)
    models = draw_cost_models(base, parameters, draws=draws, seed=seed) if len(chosen) > 1 else []

    def time_system(place: int) -> Floats:
        other = chosen[place]
        sharded = find_fully_sharded(other)
        steps_s = PerturbableSchedule(other.schedule, encoders, base, fully_sharded=sharded).steps_s(models)
        return steps_s * (drawn[other.name].mean_s / other.step_s)

    by_place = compute_by_key(
        time_system,
        {place: float(len(other.schedule)) for place, other in enumerate(chosen)},
        cores=cores,
        report=lambda place: progress(f"perturbed {chosen[place].name}", place, len(chosen)),
    )
    return PerturbedSteps(
        margin=margin,
        parameters=tuple(parameters),
        models=tuple(models),
        steps_s={other.name: by_place[place] for place, other in enumerate(chosen)},
        same_as=same_as,
    )


def choose_systems_to_simulate(
    comparison: Comparison, drawn: Mapping[str, BatchStepTimes]
) -> tuple[list[SimulatedSystem], dict[str, str]]:
    """Returns the systems to simulate, fastest first, and by others the simulated one that each equals."""
    chosen: list[SimulatedSystem] = []
    same_as: dict[str, str] = {}
    for name in sorted(drawn, key=lambda name: drawn[name].mean_s):
        other = comparison.systems[name]
        twin = next((known.name for known in chosen if _is_same(known, other)), None)
        if twin is None:
            chosen.append(other)
        else:
            same_as[name] = twin
    return chosen, same_as


def _is_same(one: SimulatedSystem, other: SimulatedSystem) -> bool:
    same = len(one.schedule) == len(other.schedule) and one.step_s == other.step_s
    return same and np.array_equal(one.schedule.duration_s, other.schedule.duration_s)


def find_win_rule(
    models: Sequence[PerturbedCostModel], parameters: Collection[UncertainParameter], wins: NDArray[np.bool_]
) -> WinRule | None:
    """Returns the assumption and threshold that separate wins from losses best, or None if none does well."""
    if not MIN_WINS_FOR_RULE <= wins.sum() < len(wins):
        return None
    best: WinRule | None = None
    best_score = MIN_RULE_SCORE
    for parameter in parameters:
        values = np.array([getattr(model, parameter.field) for model in models])
        for value in parameter.choices or np.arange(parameter.low, parameter.high, 0.01).tolist():
            for above in (False, True):
                holds = values >= value if above else values <= value
                score = float(holds[wins].mean() - holds[~wins].mean())
                if score > best_score + 1e-9:
                    explains = int((holds & wins).sum())
                    best_score = score
                    best = WinRule(
                        parameter=parameter,
                        above=above,
                        value=value,
                        explains=explains,
                        holds=int(holds.sum()),
                    )
    return best
