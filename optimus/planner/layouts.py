"""Layouts of the LLM: what the job states is kept, what it leaves out is open; and which of them fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

from optimus.cost.assumptions import Assumptions
from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.measured_profile import Profile
from optimus.cost.memory import model_state_memory
from optimus.errors import DoesNotFit, UserError, one_of
from optimus.job.job import Job
from optimus.job.layout import Layout
from optimus.planner.context import PlanningCache, PlanningContext
from optimus.planner.rejected import RejectedLayout
from optimus.planner.systems.layer_partition import first_fitting_pipeline
from optimus.planner.systems.pipeline import PipelineCandidate

MAX_TP = 8  # never across nodes
MAX_PP = 16
MAX_EP = 64
MIN_CP_TOKENS = 4096  # of a sequence on each rank: context parallelism is for long ones


def choose_smallest_context(
    job: Job, assumptions: Assumptions, profile: Profile | None = None
) -> tuple[PlanningContext, tuple[RejectedLayout, ...]]:
    """One setting without a search, the smallest that fits, and the layouts passed over on the way.

    Open axes grow in this order until all layers fit in one pipeline: tp up to 8 at pp 1, then
    pp, then ep beyond a node; first without recomputing whole layers, then with.
    """
    cost_model = ClusterCostModel(cluster=job.cluster, assumptions=assumptions, profile=profile or Profile())
    if is_llm_layout_stated(job):
        return _context_at_stated_layout(job, cost_model), ()
    rejected: list[RejectedLayout] = []
    for full_recompute in (False, True):
        for layout in _layouts(job):
            context = _context_at(job, cost_model, layout)
            if isinstance(context, str):
                rejected.append(RejectedLayout(layout=layout, reason=context))
                continue
            reason = _why_too_large(context, full_recompute=full_recompute)
            if reason is None:
                return context, tuple(rejected)
            rejected.append(RejectedLayout(layout=layout, reason=reason))
    raise _no_layout_fits(job, rejected)


def is_llm_layout_stated(job: Job) -> bool:
    """Whether the job leaves no choice of the LLM's layout."""
    return {"pp", "tp"} <= set(job.layout.of("llm").stated())


def _context_at_stated_layout(job: Job, cost_model: ClusterCostModel) -> PlanningContext:
    """At the layout that the job states."""
    for layout in _layouts(job):
        context = _context_at(job, cost_model, layout)
        if isinstance(context, str):
            raise _batch_error(job, layout)
        return context
    raise _no_layout_fits(job, [])


def _no_layout_fits(job: Job, rejected: Sequence[RejectedLayout]) -> DoesNotFit:
    """What is said when nothing is left."""
    tried = {str(r.layout): r.reason for r in rejected}
    nearest = (
        f"the widest, {list(tried)[-1]}: {list(tried.values())[-1]}" if tried else "none divides the GPUs"
    )
    return DoesNotFit(
        f"{job.model.name} does not fit {job.cluster.gpus} x {job.cluster.gpu.name} "
        f"in any of {len(tried)} layouts; {nearest}",
        "use more GPUs, GPUs with more memory, or a smaller model; optimus catalog lists GPUs",
    )


def enumerate_llm_layouts(job: Job) -> Iterator[Layout]:
    """All layouts that agree with what is stated, by their size."""
    stated, stack = job.layout.of("llm").stated(), job.model.llm.stack
    gpus, limit = job.cluster.gpus, job.layout.limits.max_pp or MAX_PP
    most_cp = max(1, job.workload.sequence_tokens // MIN_CP_TOKENS)
    axes = {
        "cp": [cp for cp in (1, 2, 4, 8) if cp <= most_cp],
        "pp": range(1, min(limit, stack.layers) + 1),
        "tp": [tp for tp in (1, 2, 4, 8) if tp <= MAX_TP and stack.attention.heads % tp == 0],
        "ep": _expert_spreads(job) if stack.experts else [1],
    }
    choices = [[stated[axis]] if axis in stated else sizes for axis, sizes in axes.items()]
    for cp, pp, tp, ep in sorted(product(*choices), key=lambda sizes: (prod(sizes[:3]), sizes)):
        dp, rest = divmod(gpus, pp * cp * tp)
        if dp and not rest and (dp * cp * tp) % ep == 0 and stated.get("dp", dp) == dp:
            yield Layout(dp=dp, pp=pp, cp=cp, ep=ep, tp=tp, chunks=stated.get("chunks", 1))


def _layouts(job: Job) -> Iterator[Layout]:
    """Layouts that agree with what is stated, smallest first."""
    stated, experts = job.layout.of("llm").stated(), job.model.llm.stack.experts
    cp = stated.get("cp", 1)
    widths = [stated["tp"]] if "tp" in stated else [tp for tp in (1, 2, 4, 8) if tp <= MAX_TP]
    limit = job.layout.limits.max_pp or MAX_PP
    depths = (
        [stated["pp"]]
        if "pp" in stated
        else [2**n for n in range(6) if 2**n <= min(limit, job.model.llm.stack.layers)]
    )
    spreads = [stated["ep"]] if "ep" in stated else _expert_spreads(job) if experts else [1]
    for ep in spreads:
        for pp in depths:
            for tp in widths if pp == depths[0] else widths[-1:]:
                dp, rest = divmod(job.cluster.gpus, pp * cp * tp)
                if dp and not rest and (dp * cp * tp) % ep == 0 and stated.get("dp", dp) == dp:
                    chunks = stated.get("chunks", 1)
                    yield Layout(dp=dp, pp=pp, cp=cp, ep=ep, tp=tp, chunks=chunks)


def encoder_layout_conflict(job: Job, layout: Layout) -> str | None:
    """Why an encoder's stated layout cannot stand beside this one of the LLM."""
    for encoder in job.model.encoders:
        for axis, size in job.layout.of(encoder.name).stated().items():
            if axis in ("pp", "tp") and getattr(layout, axis) % size:
                own = f"{axis}{getattr(layout, axis)}"
                return f"stated: {encoder.name} {axis}{size} does not divide the LLM's {own}"
    return None


def _expert_spreads(job: Job) -> list[int]:
    """Inside a node first, then wider."""
    experts = job.model.llm.stack.experts
    assert experts is not None
    first = job.cluster.gpus_per_node
    return [ep for ep in (first, 2 * first, 4 * first, MAX_EP) if ep <= MAX_EP and experts.count % ep == 0]


def _context_at(
    job: Job, cost_model: ClusterCostModel, layout: Layout, cache: PlanningCache | None = None
) -> PlanningContext | str:
    """The setting at a layout, or why there is none."""
    sizes = job.layout.limits.microbatch_sequences
    for sequences in sizes:
        context = PlanningContext(
            job=job,
            cost_model=cost_model,
            layout=layout,
            microbatch_sequences=sequences,
            cache=cache or PlanningCache(),
        )
        if context.microbatches(sequences) is not None:
            return context
    batch = job.workload.sequences_per_step
    return f"batch: {batch} sequences do not divide into dp {layout.dp} x microbatch {one_of(sizes)}"


def _batch_error(job: Job, layout: Layout) -> UserError:
    """A stated layout that the batch does not divide into."""
    batch = job.workload.sequences_per_step
    unit = layout.dp * min(job.layout.limits.microbatch_sequences)
    nearest = sorted({max(1, batch // unit) * unit, (batch // unit + 1) * unit})
    return UserError(
        field="workload.sequences_per_step",
        value=batch,
        problem=f"is not a multiple of dp = {layout.dp} times "
        f"layout.limits.microbatch_sequences = {one_of(job.layout.limits.microbatch_sequences)}",
        hint=f"use {one_of(nearest)}, another dp or another microbatch",
    )


def _why_too_large(context: PlanningContext, *, full_recompute: bool) -> str | None:
    """None if all layers fit in one pipeline at this layout."""
    found = _find_fitting_pipeline(context)
    if isinstance(found, str):
        return found
    policies = list(context.policies(context.job.model.modules))
    if not full_recompute and any(step == "full" for _, step in found.policy) and len(policies) > 1:
        return "memory: fits only with whole layers recomputed"
    return None


def _find_fitting_pipeline(context: PlanningContext) -> PipelineCandidate | str:
    """All layers in one pipeline with the least recomputation that fits, or why there is none."""
    job, capacity = context.job, context.capacity_bytes
    modules = job.model.modules
    policies = list(context.policies(modules))
    layers = context.layers(modules, context.microbatch_sequences, policies[-1])
    held = model_state_memory(layers, job.model.precision).states / context.layout.pp
    if held > capacity:
        return f"memory: model states alone {held / 1e9:.1f} of {capacity / 1e9:.0f} GB"
    found = first_fitting_pipeline(context, modules)
    if not found.fits:
        return f"memory: at least {found.peak_bytes / 1e9:.1f} of {capacity / 1e9:.0f} GB"
    return found
