"""Recommends one system for a job, from drawn batches, perturbed cost models and simplicity, and plans it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from math import inf

from optimus.cost.assumptions import Assumptions
from optimus.cost.measured_profile import Profile
from optimus.errors import DoesNotFit
from optimus.job.job import Job
from optimus.planner.compare import Comparison
from optimus.planner.planning import PlanningResult, build_plan, compare_for_plan
from optimus.planner.systems.registry import SYSTEMS, default_baselines, is_allowed, load_system
from optimus.sensitivity.batch_steps import BEST, simulate_batches
from optimus.sensitivity.drawn_batches import BATCHES, SEED
from optimus.sensitivity.perturb import DRAWS, MOST_OF_FULL_SHARDING
from optimus.sensitivity.recommendation import FILLED, Recommendation, choose_simplest, compute_excess
from optimus.sensitivity.win_rate import find_fully_sharded, simulate_cost_models

MAX_OVER_FASTEST = 1.1  # step of a system at the mean, up to which batches may make it the fastest
ON_PIPELINE = " pipeline"  # ends the name of a system's other plan, while plans are listed and weighed

Progress = Callable[[str, int, int], None]


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
    report_known: Callable[[Comparison], None] = lambda comparison: None,
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
        also_on_pipelines=True,
        cores=cores,
        progress=progress,
        report_known=report_known,
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
    """Recommends a system from its mean step over drawn batches, its memory, and perturbed cost models.

    A system whose best plan is around a fully sharded LLM stands for the one around a pipeline, if that is
    faster in the mean over cost models.
    """
    every, job = add_plans_on_pipelines(comparison), comparison.job
    steps = simulate_batches(
        every, _list_contenders(every), dealing=BEST, count=batches, seed=seed, cores=cores, progress=progress
    )
    perturbed, plans = None, [name for name in steps if _can_be_planned(system_of(name), job)]
    if draws:
        perturbed = simulate_cost_models(
            every,
            {name: steps[name] for name in plans},
            draws=draws,
            seed=seed,
            cores=cores,
            progress=progress,
        )
    excess = compute_excess(plans, perturbed)
    chosen = _choose_plans(steps, excess)
    drawn = {name: replace(steps[plan], system=name) for name, plan in chosen.items()}
    drawn = dict(sorted(drawn.items(), key=lambda item: item[1].mean_s))
    planned = [name for name in drawn if _can_be_planned(name, job)]
    if perturbed is not None:
        perturbed = perturbed.select({name: chosen[name] for name in planned})
    systems = {name: replace(every.systems[chosen[name]], name=name) for name in planned}
    capacity_bytes = comparison.context.capacity_bytes
    shares = {name: system.peak_bytes / capacity_bytes for name, system in systems.items()}
    means_s = {name: drawn[name].mean_s for name in planned}
    name = choose_simplest(means_s, shares, compute_excess(planned, perturbed))
    return Recommendation(
        name=name,
        systems=systems,
        capacity_bytes=capacity_bytes,
        drawn=drawn,
        planned=tuple(planned),
        sure=None if perturbed is None else perturbed.win_rate(name),
        sharded={
            name: (comparison.systems[name], excess[name] - excess[chosen[name]])
            for name in planned
            if chosen[name] != name and name in excess
        },
    )


def add_plans_on_pipelines(comparison: Comparison) -> Comparison:
    """Returns the comparison with the other plans of systems, under names of their own."""
    others = {f"{name}{ON_PIPELINE}": system for name, system in comparison.on_pipelines.items()}
    named = {name: replace(system, name=name) for name, system in others.items()}
    return replace(comparison, systems={**comparison.systems, **named})


def system_of(plan: str) -> str:
    """Returns the name of the system that a plan is of."""
    return plan.removesuffix(ON_PIPELINE)


def _choose_plans(plans: Iterable[str], excess: Mapping[str, float]) -> dict[str, str]:
    """Returns by system its plan with the least excess; systems without cost models have one."""
    chosen: dict[str, str] = {}
    for plan in sorted(plans, key=lambda plan: (excess.get(plan, 0.0), plan)):
        chosen.setdefault(system_of(plan), plan)
    return chosen


def plan_recommended(
    comparison: Comparison, recommendation: Recommendation, *, strategy: str | None = None
) -> RecommendedPlan:
    """Builds and checks the plan of the recommended system, or of the one called `strategy`."""
    comparison = replace(comparison, systems={**comparison.systems, **recommendation.systems})
    planned = build_plan(comparison, strategy or recommendation.name, recommendation.notes)
    known = {field.name: getattr(planned, field.name) for field in fields(planned)}
    return RecommendedPlan(**known, recommendation=recommendation)


def _can_be_planned(name: str, job: Job) -> bool:
    """Returns whether a system has a plan that keeps to the job's limits and stated layout."""
    return load_system(name).makes_plan and is_allowed(name, job)


def _list_contenders(comparison: Comparison) -> list[str]:
    """Returns systems that fit and may be the fastest over drawn batches, and today's, fastest first.

    Where a fully sharded system is the fastest, others may be in cost models that let full sharding cost
    more.
    """
    fitting = {n: s.step_s for n, s in comparison.systems.items() if s.fits and n != "llm-only"}
    planned = [name for name in fitting if _can_be_planned(system_of(name), comparison.job)]
    if not planned:
        raise DoesNotFit(
            f"no system that was compared fits in {comparison.context.capacity_bytes / 1e9:.0f} GB",
            "compare all systems, use more GPUs, or recompute: full",
        )
    unsharded = [name for name in planned if not find_fully_sharded(comparison.systems[name])]
    fastest_s, unsharded_s = (min((fitting[n] for n in names), default=inf) for names in (planned, unsharded))
    limit_s = MAX_OVER_FASTEST * fastest_s
    unsharded_limit_s = max(limit_s, min(MAX_OVER_FASTEST * unsharded_s, MOST_OF_FULL_SHARDING * fastest_s))
    close = [
        name
        for name, step_s in fitting.items()
        if step_s <= (unsharded_limit_s if name in unsharded else limit_s) or name == "today"
    ]
    return sorted(close, key=fitting.__getitem__)
