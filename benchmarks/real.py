"""Times our engine and torch's own schedules over the same layers, with two ranks on two cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import numpy as np

from benchmarks.ranks import Progress, Report, run_pinned_ranks
from benchmarks.report import BenchResult, VariantTime
from benchmarks.timing import Timings, alternate, check_losses, total_loss, variant_times
from benchmarks.variants import OURS, Cut, StepSetup, TorchVariant, Variants, layers_in_order
from optimus.cost.assumptions import get_preset
from optimus.cost.measured_profile import Profile
from optimus.errors import UserError, nearest
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan
from optimus.job.job import Job
from optimus.job.read import find_job
from optimus.models.build import count_layers
from optimus.planner.context import PlanningContext
from optimus.planner.layouts import choose_smallest_context
from optimus.planner.systems.colocated_plan import encoder_layout_on_llm_gpus
from optimus.planner.systems.colocation_candidate import ColocationCandidate, EncoderPlacement
from optimus.planner.systems.llm_only import build_llm_pipeline
from optimus.planner.systems.pipeline_search import minimize_largest_stage
from optimus.profiler.links import measure_links
from optimus.profiler.machine import describe_host_as_cluster
from optimus.profiler.segments import profile_job

JOB = "cpu/bench-vl"
WARM_UP_STEPS = 2  # of each variant
ROUNDS = 28


def bench_real(
    *,
    rounds: int = ROUNDS,
    against: Sequence[str] = (),
    progress: Progress = lambda name, done, total: None,
) -> BenchResult:
    """Profiles this machine, plans, times our plan and the variants named in `against`, and compares."""
    setup = prepare(chosen_variants(against), progress)
    progress("starting ranks", 0, rounds)
    timings = run_pinned_ranks(
        time_variants, 2, setup, rounds, on_report=lambda done: progress("timing", done, rounds)
    )[0]
    check_losses(timings.losses, OURS)
    return compare(setup, timings, rounds)


def time_variants(rank: int, setup: StepSetup, rounds: int, report: Report) -> Timings:
    """Times every variant once a round, on every rank."""
    variants = Variants(setup)
    losses: dict[str, tuple[float, float]] = {}
    for _ in range(WARM_UP_STEPS):
        losses = {
            name: (total_loss(step()), variants.grad_squares(name)) for name, step in variants.steps.items()
        }
    return alternate(variants.steps, rounds, report, losses)


def compare(setup: StepSetup, timings: Timings, rounds: int) -> BenchResult:
    """Returns medians, and ratios with their intervals."""
    variants, plan = variant_times(timings.seconds, OURS), setup.plan
    notes = (
        f"our plan: {setup.how}; predicted {plan.claims.step_s:.3f} s",
        f"encoder work is {setup.encoder_share:.2f} of the LLM's; {plan.microbatches} microbatches",
        *_best_balanced(variants),
        f"{rounds} rounds; {timings.describe()}",
    )
    return BenchResult(
        bench="real",
        variants=variants,
        ours=OURS,
        bound_s=setup.bound_s,
        ours_over_bound=variants[OURS].step_s / setup.bound_s,
        notes=notes,
    )


def _best_balanced(variants: Mapping[str, VariantTime]) -> list[str]:
    """Describes the fastest variant without filling, if one ran."""
    balanced = [name for name in variants if name.startswith("balanced")]
    if not balanced:
        return []
    best = min(balanced, key=lambda name: variants[name].step_s)
    time = variants[best]
    interval = f"95 % interval {time.over_ours_low:.3f} to {time.over_ours_high:.3f}"
    return [f"best balanced variant: {best}, {time.over_ours:.3f} of ours, {interval}"]


# ---------------------------------------------------------------------------- before any rank is timed


def chosen_variants(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the variants to time: all, if none is named."""
    for name in names:
        if name not in VARIANTS:
            hint = nearest(name, VARIANTS)
            raise UserError(field="--against", value=name, problem="is not a variant", hint=hint)
    return tuple(name for name in VARIANTS if not names or name in names)


def prepare(names: Sequence[str], progress: Progress) -> StepSetup:
    """Profiles this machine, plans with the profile, and cuts the same layers for torch's schedules."""
    job = find_job(JOB)
    progress("profile", 0, 1)
    (profile,) = run_pinned_ranks(_profile, 1, job)
    links = measure_links()
    profile = replace(profile, name="of this machine", links=links)
    job = replace(job, cluster=describe_host_as_cluster(links, ranks=2))
    context, _ = choose_smallest_context(job, get_preset("default"), profile)
    plan, how = best_plan(context)
    weights = layer_seconds(context)
    encoder_layers = sum(count_layers(module) for module in job.model.encoders)
    variants = [
        TorchVariant(name=name, schedule=schedule, cut=cut(weights, encoder_layers))
        for name, (schedule, cut) in VARIANTS.items()
        if name in names
    ]
    return StepSetup(
        job=job,
        plan=plan,
        variants=tuple(variants),
        bound_s=sum(weights) * plan.microbatches / 2,
        encoder_share=sum(weights[:encoder_layers]) / sum(weights[encoder_layers:]),
        how=how,
    )


def _profile(rank: int, job: Job, report: Report) -> Profile:
    """Profiles in a process that is pinned as the timed ranks are."""
    return profile_job(job)


def best_plan(context: PlanningContext) -> tuple[Plan, str]:
    """Returns the best of a few LLM orders, by replay, and its description."""
    plans: list[tuple[float, int, Plan, str]] = []
    for chunks, order in ((1, "1f1b"), (2, "interleaved"), (1, "zero-bubble"), (2, "zero-bubble")):
        llm = build_llm_pipeline(context, chunks=chunks, order_name=order)
        layout = encoder_layout_on_llm_gpus(llm.layout, pp=1, tp=1)
        whole = EncoderPlacement(layout=layout, recompute="none", split_backward=False)
        filled = ColocationCandidate(
            context, llm, {encoder.name: whole for encoder in context.job.model.encoders}
        ).best_shifted()
        plans.append((filled.step_s, len(plans), filled.plan, f"{order}, {chunks} chunks a rank"))
    _, _, plan, how = min(plans)
    return plan, how


def layer_seconds(context: PlanningContext) -> list[float]:
    """Returns forward and backward seconds of every layer in model order; a backward is whole or split."""
    model, policy = context.job.model, tuple((m.name, "none") for m in context.job.model.modules)
    layers = context.layers(model.modules, context.microbatch_sequences, policy)
    sums = context.sums(layers)
    split = sums.layer_seconds(OpKind.INPUT_GRAD) + sums.layer_seconds(OpKind.WEIGHT_GRAD)
    seconds = sums.layer_seconds(OpKind.FORWARD) + np.minimum(sums.layer_seconds(OpKind.BACKWARD), split)
    assert len(seconds) == len(layers_in_order(model))
    return [float(layer_s) for layer_s in seconds]


def even_cut(weights: Sequence[float], ranks: tuple[tuple[int, ...], ...]) -> Cut:
    """Returns the cut that minimizes the busiest rank, then the longest part; `ranks` holds parts by rank."""
    parts, sums = sum(map(len, ranks)), [0.0, *accumulate(weights)]

    def cost(inner: tuple[int, ...]) -> tuple[float, float]:
        seconds = [sums[b] - sums[a] for a, b in pairwise((0, *inner, len(weights)))]
        return max(sum(seconds[part] for part in rank_parts) for rank_parts in ranks), max(seconds)

    best = min(combinations(range(1, len(weights)), parts - 1), key=cost)
    return (0, *best, len(weights))


def stage0_cut(weights: Sequence[float], encoder_layers: int, parts: int) -> Cut:
    """Cuts the LLM evenly, and puts the whole encoder in front of its first part."""
    inner = minimize_largest_stage(weights[encoder_layers:], parts)
    return (0, *(encoder_layers + at for at in inner[1:]))


_ROUND_ROBIN, _V_SHAPE = ((0, 2), (1, 3)), ((0, 3), (1, 2))  # quarters of the model on each rank
VARIANTS: dict[str, tuple[str, Callable[[Sequence[float], int], Cut]]] = {
    "stage0 1F1B": ("1F1B", lambda weights, encoder: stage0_cut(weights, encoder, 2)),
    "stage0 Interleaved": ("Interleaved1F1B", lambda weights, encoder: stage0_cut(weights, encoder, 4)),
    "balanced 1F1B": ("1F1B", lambda weights, _: even_cut(weights, ((0,), (1,)))),
    "balanced Interleaved": ("Interleaved1F1B", lambda weights, _: even_cut(weights, _ROUND_ROBIN)),
    "balanced InterleavedZB": ("InterleavedZeroBubble", lambda weights, _: even_cut(weights, _ROUND_ROBIN)),
    "balanced ZBV": ("ZBVZeroBubble", lambda weights, _: even_cut(weights, _V_SHAPE)),
}
