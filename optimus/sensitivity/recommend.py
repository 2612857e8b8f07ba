"""Recommends one system for a job, from drawn batches, perturbed cost models and simplicity, and plans it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from optimus.cost.assumptions import Assumptions
from optimus.cost.measured_profile import Profile
from optimus.errors import DoesNotFit
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.planner.compare import Comparison
from optimus.planner.planning import (
    MIN_SPEEDUP_WORTH_FILLING,
    PlanningResult,
    build_plan,
    compare_for_plan,
)
from optimus.planner.systems.base import OVERLAPPED_TP_SHARE, SimulatedSystem
from optimus.planner.systems.registry import (
    SYSTEMS,
    default_baselines,
    fills_bubbles,
    is_allowed,
    load_system,
)
from optimus.sensitivity.batch_steps import BEST, BatchStepTimes, simulate_batches
from optimus.sensitivity.drawn_batches import BATCHES, SEED
from optimus.sensitivity.perturb import DRAWS
from optimus.sensitivity.win_rate import WinRate, compute_win_rate

MAX_OVER_FASTEST = 1.1  # step of a system at the mean, up to which batches may make it the fastest
NEARLY_FULL = 0.95  # of a GPU's memory: a recommendation that needs more says so
FILLED = "optimus"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Recommendation:
    """The system to run: the simplest of those that are about as fast as the fastest over drawn batches."""

    name: str
    systems: Mapping[str, SimulatedSystem]  # those that may be the fastest
    capacity_bytes: float
    drawn: Mapping[str, BatchStepTimes]  # systems that may be the fastest, and today's; fastest first
    planned: tuple[str, ...]  # those of them that can be planned, in the same order
    sure: WinRate | None  # None: not computed

    @property
    def system(self) -> SimulatedSystem:
        return self.systems[self.name]

    @property
    def steps(self) -> BatchStepTimes:
        """Steps of the recommended system over the batches."""
        return self.drawn[self.name]

    @property
    def fastest(self) -> str:
        """The fastest system over the batches, of those that can be planned."""
        return self.planned[0]

    @property
    def next_best(self) -> str | None:
        """The fastest other system that can be planned and is not the same."""
        steps_s = self.steps.steps_s
        others = (name for name in self.planned if name != self.name)
        return next((n for n in others if (self.drawn[n].steps_s != steps_s).any()), None)

    @property
    def memory_share(self) -> float:
        return self.system.peak_bytes / self.capacity_bytes

    @property
    def filling_speedup(self) -> float | None:
        """Mean step of the best system that fills no bubbles over that of `optimus`; None: not compared."""
        simpler = [name for name in self.planned if not fills_bubbles(name)]
        if FILLED not in self.drawn or not simpler:
            return None
        return self.drawn[simpler[0]].mean_s / self.drawn[FILLED].mean_s

    @property
    def _with_tp_overlapped(self) -> str:
        """What filling gains if TP traffic is overlapped already; empty where it is not worth it."""
        filled = self.systems.get(FILLED)
        simpler = [s.overlapped_step_s for n, s in self.systems.items() if not fills_bubbles(n)]
        gain = self.filling_speedup
        if filled is None or gain is None or gain < MIN_SPEEDUP_WORTH_FILLING:
            return ""
        less = max(0.0, 1 - filled.overlapped_step_s / min(simpler))
        return f", {less:.1%} with {OVERLAPPED_TP_SHARE:.0%} of the TP traffic overlapped already"

    @property
    def _layouts(self) -> str:
        """The layout of the LLM, and of encoders that have another."""
        result = self.system.search_result
        assert result is not None, "what is recommended has a plan"
        modules = result.filled.header.modules
        llm = f"llm {modules[LLM].layout}{', fully sharded' * (self.name == FILLED and result.llm.locked)}"
        others = [f"{n} {m.layout}" for n, m in modules.items() if m.layout != modules[LLM].layout]
        return f"{llm} ({', '.join(others)})" if others else llm

    @property
    def reasons(self) -> list[str]:
        """Why this system: what the fastest and the next best take, what filling gains, and the memory."""
        reasons, margin = [], f"{MIN_SPEEDUP_WORTH_FILLING - 1:.0%}"
        less = 1 - self.drawn[self.fastest].mean_s / self.steps.mean_s
        if less > 0:
            allowed = f"within the {margin} in which the simpler system is recommended"
            reasons.append(f"{self.fastest} takes {less:.1%} less time, {allowed}")
        elif self.next_best is not None:
            longer = self.drawn[self.next_best].mean_s / self.steps.mean_s - 1
            reasons.append(f"the next best, {self.next_best}, takes {longer:.1%} longer")
        gain = self.filling_speedup
        if gain is not None:
            gained = f"takes {1 - 1 / gain:.1%} less time" if gain >= 1.0005 else "gains nothing here"
            worth = "worth it" if gain >= MIN_SPEEDUP_WORTH_FILLING else f"worth it from {margin} on"
            reasons.append(f"filling bubbles {gained} ({worth}{self._with_tp_overlapped})")
        if self.memory_share > NEARLY_FULL:
            reasons.append(f"it needs {self.memory_share:.0%} of the memory, which leaves little room")
        return reasons

    @property
    def sentence(self) -> str:
        """The recommendation in one sentence, the same in the terminal, JSON, plan file and report."""
        steps = self.steps
        words = f"run {self.name} on {self._layouts}: {steps.mean_s:.4g} s a step"
        if steps.simulations > 1:
            words += f" over {len(steps.steps_s)} drawn batches (p95 {steps.p95_s:.4g})"
        words += f", {self.system.peak_bytes / 1e9:.1f} of {self.capacity_bytes / 1e9:.0f} GB at p99 of steps"
        return "; ".join([words, *self.reasons, *([] if self.sure is None else [self.sure.sentence])])

    @property
    def notes(self) -> dict[str, Any]:
        """Entries of the plan file for its readers."""
        drawn = {n: {"mean_s": each.mean_s, "p95_s": each.p95_s} for n, each in self.drawn.items()}
        return {"recommended": self.name, "recommendation": self.sentence, "drawn": drawn}


@dataclass(frozen=True, kw_only=True, eq=False)
class RecommendedPlan(PlanningResult):
    """A plan of the recommended system, or of another that was asked for, and the recommendation."""

    recommendation: Recommendation


def plan_job(
    job: Job,
    *,
    strategy: str | None = None,
    assumptions: Assumptions | str = "default",
    profile: Profile | None = None,
    systems: Iterable[str] | None = None,
    batches: int = BATCHES,
    draws: int = DRAWS,
    effort: float = 1.0,
    cores: int = 1,
    progress: Progress = lambda name, done, total: None,
) -> RecommendedPlan:
    """Plans the recommended system of a job, or the one called `strategy`, and checks the plan by all rules.

    `systems` are those to choose from: all that apply, by default. With `draws=0` no perturbed cost models
    are simulated. `effort` multiplies the budgets of searches. DoesNotFit proposes changes under which a job
    fits. With more than one of `cores`, processes share the work; the answer is the same.
    """
    comparison = compare_to_recommend(
        job,
        strategy=strategy,
        assumptions=assumptions,
        profile=profile,
        systems=systems,
        effort=effort,
        cores=cores,
        progress=progress,
    )
    recommendation = recommend(comparison, batches=batches, draws=draws, cores=cores, progress=progress)
    return plan_recommended(comparison, recommendation, strategy=strategy)


def compare_to_recommend(
    job: Job,
    *,
    strategy: str | None = None,
    assumptions: Assumptions | str = "default",
    profile: Profile | None = None,
    systems: Iterable[str] | None = None,
    effort: float = 1.0,
    cores: int = 1,
    progress: Progress = lambda name, done, total: None,
) -> Comparison:
    """Simulates all systems that may be recommended."""
    chosen = default_baselines(job) if systems is None else list(systems)
    filled = [FILLED] if is_allowed(FILLED, job) else []
    planned = [name for name in chosen if name in SYSTEMS and _can_be_planned(name, job)]
    strategies = [strategy] if strategy is not None else dict.fromkeys([*filled, *planned])
    return compare_for_plan(
        job,
        list(strategies),
        assumptions=assumptions,
        profile=profile,
        systems=[*chosen, *filled],
        effort=effort,
        cores=cores,
        progress=progress,
    )


def recommend(
    comparison: Comparison,
    *,
    batches: int = BATCHES,
    draws: int = DRAWS,
    seed: int = SEED,
    cores: int = 1,
    progress: Progress = lambda name, done, total: None,
) -> Recommendation:
    """Recommends the simplest system whose mean step over drawn batches is close to the fastest's."""
    names = _list_contenders(comparison)
    steps = simulate_batches(
        comparison, names, dealing=BEST, count=batches, seed=seed, cores=cores, progress=progress
    )
    drawn = dict(sorted(steps.items(), key=lambda item: item[1].mean_s))
    planned = [name for name in drawn if _can_be_planned(name, comparison.job)]
    close = [n for n in planned if drawn[n].mean_s <= MIN_SPEEDUP_WORTH_FILLING * drawn[planned[0]].mean_s]
    chosen = min(close, key=list(SYSTEMS).index)
    return Recommendation(
        name=chosen,
        systems={name: comparison.systems[name] for name in planned},
        capacity_bytes=comparison.context.capacity_bytes,
        drawn=drawn,
        planned=tuple(planned),
        sure=compute_win_rate(
            comparison,
            chosen,
            {name: drawn[name] for name in planned},
            draws=draws,
            seed=seed,
            cores=cores,
            progress=progress,
        )
        if draws
        else None,
    )


def plan_recommended(
    comparison: Comparison, recommendation: Recommendation, *, strategy: str | None = None
) -> RecommendedPlan:
    """Builds and checks the plan of the recommended system, or of the one called `strategy`."""
    planned = build_plan(comparison, strategy or recommendation.name, recommendation.notes)
    known = {field.name: getattr(planned, field.name) for field in fields(planned)}
    return RecommendedPlan(**known, recommendation=recommendation)


def _can_be_planned(name: str, job: Job) -> bool:
    """Returns whether a system has a plan that keeps to the job's limits and stated layout."""
    return load_system(name).makes_plan and is_allowed(name, job)


def _list_contenders(comparison: Comparison) -> list[str]:
    """Returns systems that fit and may be the fastest over drawn batches, and today's, fastest first."""
    fitting = {n: s.step_s for n, s in comparison.systems.items() if s.fits and n != "llm-only"}
    planned = [name for name in fitting if _can_be_planned(name, comparison.job)]
    if not planned:
        raise DoesNotFit(
            f"no system that was compared fits in {comparison.context.capacity_bytes / 1e9:.0f} GB",
            "compare all systems, use more GPUs, or recompute: full",
        )
    limit = MAX_OVER_FASTEST * min(fitting[name] for name in planned)
    close = [name for name in fitting if fitting[name] <= limit or name == "today"]
    return sorted(close, key=fitting.__getitem__)
