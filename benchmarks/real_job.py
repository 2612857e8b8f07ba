"""What `bench real` decides before any rank is timed: a profile, our plan, cuts for torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from typing import Any

import numpy as np

from benchmarks.real_ranks import run_pinned_ranks
from benchmarks.torch_stages import Cut, Prepared, Variant, layers_in_order
from optimus.cost.assumptions import preset
from optimus.cost.measured import Profile
from optimus.errors import UserError, nearest
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan
from optimus.job.job import Job
from optimus.job.read import find_job
from optimus.models.build import layer_count
from optimus.planner.context import PlanningContext
from optimus.planner.layouts import decide_context
from optimus.planner.listed import Beside, list_plan, llm_pipeline
from optimus.planner.systems.layer_partition import smallest_maximum_cut
from optimus.profiler.links import measure_links
from optimus.profiler.machine import describe_machine
from optimus.profiler.segments import profile_job

JOB = "cpu/bench-vl"
Progress = Callable[[str, int, int], None]


def prepare(names: Sequence[str], progress: Progress) -> Prepared:
    """Profiles this machine, plans with it, and cuts the same layers for those of torch's schedules."""
    job = find_job(JOB)
    progress("profile", 0, 1)
    (profile,) = run_pinned_ranks(_profile, 1, job)
    links = measure_links()
    profile = replace(profile, name="of this machine", links=links)
    job = replace(job, cluster=describe_machine(links, ranks=2))
    context, _ = decide_context(job, preset("default"), profile)
    plan, how = best_plan(context)
    weights = layer_seconds(context)
    encoder = sum(layer_count(module) for module in job.model.encoders)
    variants = [
        Variant(name=name, schedule=schedule, cut=cut(weights, encoder))
        for name, (schedule, cut) in VARIANTS.items()
        if name in names
    ]
    total = sum(weights)
    return Prepared(
        job=job,
        plan=plan,
        variants=tuple(variants),
        bound_s=total * plan.microbatches / 2,
        encoder_share=sum(weights[:encoder]) / sum(weights[encoder:]),
        how=how,
    )


def _profile(rank: int, job: Job, tell: Any) -> Profile:
    """On a core of its own, under the conditions of the ranks that will be timed."""
    return profile_job(job)


def best_plan(context: PlanningContext) -> tuple[Plan, str]:
    """The best of a few LLM orders, by replay."""
    found: list[tuple[float, int, Plan, str]] = []
    for chunks, order in ((1, "1f1b"), (2, "interleaved"), (1, "zero-bubble"), (2, "zero-bubble")):
        llm = llm_pipeline(context, chunks=chunks, order_name=order)
        beside = {encoder.name: Beside() for encoder in context.job.model.encoders}
        filled = list_plan(context, llm, beside)
        found.append((filled.step_s, len(found), filled.plan, f"{order}, {chunks} chunks a rank"))
    _, _, plan, how = min(found)
    return plan, how


def layer_seconds(context: PlanningContext) -> list[float]:
    """Forward and backward (whole or split, whichever is shorter), of every layer in model order."""
    model, policy = context.job.model, tuple((m.name, "none") for m in context.job.model.modules)
    layers = context.layers(model.modules, context.microbatch_sequences, policy)
    sums = context.sums(layers)
    split = sums.layer_seconds(OpKind.INPUT_GRAD) + sums.layer_seconds(OpKind.WEIGHT_GRAD)
    seconds = sums.layer_seconds(OpKind.FORWARD) + np.minimum(sums.layer_seconds(OpKind.BACKWARD), split)
    assert len(seconds) == len(layers_in_order(model))
    return [float(each) for each in seconds]


def even_cut(weights: Sequence[float], ranks: tuple[tuple[int, ...], ...]) -> Cut:
    """Of all cuts into parts that `ranks` hold: the least for the busiest rank, then the shortest parts."""
    parts, sums = sum(map(len, ranks)), [0.0, *accumulate(weights)]

    def cost(inner: tuple[int, ...]) -> tuple[float, float]:
        seconds = [sums[b] - sums[a] for a, b in pairwise((0, *inner, len(weights)))]
        return max(sum(seconds[part] for part in mine) for mine in ranks), max(seconds)

    best = min(combinations(range(1, len(weights)), parts - 1), key=cost)
    return (0, *best, len(weights))


def stage0_cut(weights: Sequence[float], encoder: int, parts: int) -> Cut:
    """The LLM cut evenly, the whole encoder in front of its first part."""
    inner = smallest_maximum_cut(weights[encoder:], parts)
    return (0, *(encoder + at for at in inner[1:]))


def chosen_variants(names: Sequence[str]) -> tuple[str, ...]:
    """All, if none is named."""
    for name in names:
        if name not in VARIANTS:
            hint = nearest(name, VARIANTS)
            raise UserError(field="--against", value=name, problem="is not a variant", hint=hint)
    return tuple(name for name in VARIANTS if not names or name in names)


_ROUNDS, _THERE_AND_BACK = ((0, 2), (1, 3)), ((0, 3), (1, 2))  # quarters on each rank
VARIANTS: dict[str, tuple[str, Callable[[Sequence[float], int], Cut]]] = {
    "stage0 1F1B": ("1F1B", lambda weights, encoder: stage0_cut(weights, encoder, 2)),
    "stage0 Interleaved": ("Interleaved1F1B", lambda weights, encoder: stage0_cut(weights, encoder, 4)),
    "balanced 1F1B": ("1F1B", lambda weights, _: even_cut(weights, ((0,), (1,)))),
    "balanced Interleaved": ("Interleaved1F1B", lambda weights, _: even_cut(weights, _ROUNDS)),
    "balanced InterleavedZB": ("InterleavedZeroBubble", lambda weights, _: even_cut(weights, _ROUNDS)),
    "balanced ZBV": ("ZBVZeroBubble", lambda weights, _: even_cut(weights, _THERE_AND_BACK)),
}
