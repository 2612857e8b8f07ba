"""Runs tensor-parallel plans of the engine's own layers on paced ranks, and torch's schedules with DTensor.

The plans of ours fill more and more of the LLM's idle time. Every step is compared with its own replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from benchmarks.paced import (
    MEANING,
    SEED,
    TIMEOUT_S,
    PacedComparison,
    PacedTask,
    RankResult,
    faults_of,
    run_task,
    step_progress,
)
from benchmarks.paced_backend import PacedNetwork, run_paced_ranks
from benchmarks.paced_clock import Draws
from benchmarks.paced_plan import PlanReplay
from benchmarks.paced_torch import PacedPipeline, PacedTorchVariant
from benchmarks.paced_tp_job import P2P_LINK, TP, TpJob, replicas_on
from benchmarks.paced_tp_model import PacedModel, replay_blocking, replay_model
from benchmarks.paced_tp_plans import DP_BUBBLES, FLOOR, OURS, TP_SLOTS, VARIANTS, PlanVariant, variants_of
from benchmarks.paced_tp_torch import make_pipelines, torch_variants
from benchmarks.ranks import Progress
from benchmarks.report import EVENLY, BenchResult
from optimus.errors import UserError, one_of
from optimus.ir.plan import Plan

MAX_RANKS_IN_TIME = 8  # that two cores wake in time; more ranks run in slow motion
MAX_GAIN_ERROR = 0.01  # of the measured gain of slots over the predicted one


def bench_paced_tp(
    *,
    ranks: int = 16,
    dp: int | None = None,
    rounds: int = 3,
    seed: int = SEED,
    against: Sequence[str] = (),
    progress: Progress = lambda name, done, total: None,
) -> BenchResult:
    """Plans from means, runs drawn durations, and compares with replays of the same draws."""
    fits = replicas_on(ranks)
    job = TpJob(ranks=ranks, dp=dp or next((count for count in fits if count > 1), fits[0]))
    progress("planning", 0, 1)
    searches = torch_variants(job)
    names = choose_variants([*VARIANTS, *searches], against)
    plans, draws = variants_of(job, names), Draws(seed=seed)
    pipelines = {name: search.best(job.pp) for name, search in searches.items() if name in names}
    counts = dict.fromkeys((*plans, *pipelines), rounds)
    task = PacedTask(
        plans=partial(make_models, plans, draws),
        pipelines=partial(_make_pipelines, job, plans[OURS].plan, pipelines, draws),
        rounds=counts,
    )
    time_scale = max(1.0, ranks / MAX_RANKS_IN_TIME)
    results = run_paced_ranks(
        run_task,
        ranks,
        P2P_LINK,
        task,
        time_scale=time_scale,
        timeout_s=time_scale * 4 * TIMEOUT_S,
        on_report=step_progress(progress, counts),
    )
    replays = {name: replay_variant(variant, draws, name, results) for name, variant in plans.items()}
    predicted_s = {name: replay.step_s for name, replay in replays.items()}
    predicted_s |= {name: variant.replayed_s(draws) for name, variant in pipelines.items()}
    comparison = PacedComparison(results, predicted_s, find_plan_faults(plans, replays, results))
    return _result(job, comparison, plans[OURS].plan, time_scale)


def choose_variants(names: Sequence[str], against: Sequence[str], ours: str = OURS) -> set[str]:
    """Returns ours and the variants to compare with: all, if none is named."""
    for name in against:
        if name not in names:
            raise UserError(
                field="--against",
                value=name,
                problem="is not a variant of this bench",
                hint=f"use {one_of(repr(known) for known in names if known != ours)}",
            )
    return {ours, *against} if against else set(names)


# ---------------------------------------------------------------------------- on every rank


def make_models(
    variants: Mapping[str, PlanVariant], draws: Draws, network: PacedNetwork
) -> dict[str, PacedModel]:
    """Returns this rank of every plan."""
    return {
        name: PacedModel(
            variant.job, variant.plan, draws, network, timeout_s=TIMEOUT_S, blocking=variant.blocking
        )
        for name, variant in variants.items()
    }


def _make_pipelines(
    job: TpJob, plan: Plan, variants: Mapping[str, PacedTorchVariant], draws: Draws, network: PacedNetwork
) -> Mapping[str, PacedPipeline]:
    if not variants:
        return {}
    return make_pipelines(
        job,
        variants,
        lambda variant, kind, stage, microbatch: variant.drawn_s(draws, kind, stage, microbatch),
        network,
        plan,
        timeout_s=TIMEOUT_S,
    )


# ---------------------------------------------------------------------------- results


def replay_variant(
    variant: PlanVariant, draws: Draws, name: str, results: Sequence[RankResult]
) -> PlanReplay:
    """Replays a plan with the seconds of its ranks' transfers."""
    replay = replay_blocking if variant.blocking else replay_model
    return replay(variant.plan, draws, [result.traffic[name] for result in results])


def find_plan_faults(
    plans: Mapping[str, PlanVariant], replays: Mapping[str, PlanReplay], results: Sequence[RankResult]
) -> list[str]:
    """Describes faults of all plans with overlap; of blocking ones, only the end of the step is replayed."""
    return [
        f"{name}: {fault}"
        for name, variant in plans.items()
        if not variant.blocking
        for fault in faults_of(variant.plan, replays[name], results, name)
    ]


def _result(job: TpJob, comparison: PacedComparison, plan: Plan, time_scale: float) -> BenchResult:
    measured_s, predicted_s = comparison.measured_s, comparison.predicted_s
    layout = f"dp{job.dp} pp{job.pp} tp{TP}, the encoder replicated on every rank"
    notes = [
        f"{job.ranks} ranks: {layout}; {job.microbatches} microbatches; encoder and LLM have equal work",
        *_ratios(measured_s, predicted_s),
        *([f"in slow motion, a second takes {time_scale:g}"] if time_scale > 1 else []),
        "torch's schedules shard the LLM by DTensor; their replicas send each other nothing",
        *comparison.notes(plan),
        MEANING,
    ]
    bound, bound_s = bound_of(measured_s, predicted_s, job.bound_s)
    return BenchResult(
        bench="paced",
        variants=comparison.variants,
        ours=OURS,
        bound=bound,
        bound_s=bound_s,
        ours_over_bound=comparison.ours_s / bound_s,
        notes=tuple(notes),
        problems=(*comparison.problems(), *_gain_problem(measured_s, predicted_s)),
    )


def bound_of(
    measured_s: Mapping[str, float], predicted_s: Mapping[str, float], evenly_s: float
) -> tuple[str, float]:
    """Returns name and seconds of the bound: the LLM alone, measured or replayed, or all work evenly."""
    if FLOOR in measured_s:
        return FLOOR, measured_s[FLOOR]
    return (f"{FLOOR}, replayed", predicted_s[FLOOR]) if FLOOR in predicted_s else (EVENLY, evenly_s)


def _ratios(measured_s: Mapping[str, float], predicted_s: Mapping[str, float]) -> list[str]:
    """Describes the gain of slots and the distance of ours from the floor, measured and replayed."""
    notes = []
    for text, over, under in (
        ("slots make a step shorter by", DP_BUBBLES, TP_SLOTS),
        ("ours over the LLM alone:", OURS, FLOOR),
    ):
        if over in measured_s and under in measured_s:
            ratios = (seconds[over] / seconds[under] for seconds in (measured_s, predicted_s))
            notes.append("{} {:.4f} measured, {:.4f} replayed".format(text, *ratios))
    return notes


def _gain_problem(measured_s: Mapping[str, float], predicted_s: Mapping[str, float]) -> list[str]:
    if not {DP_BUBBLES, TP_SLOTS} <= set(measured_s):
        return []
    gain, predicted = (seconds[DP_BUBBLES] / seconds[TP_SLOTS] for seconds in (measured_s, predicted_s))
    is_near = abs(gain / predicted - 1) <= MAX_GAIN_ERROR
    return [] if is_near else [f"slots gain {gain:.4f}, not {predicted:.4f}"]
