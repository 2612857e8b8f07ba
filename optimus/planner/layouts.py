"""Enumerates layouts of LLM and encoders, rejects those that do not fit, and ranks the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from math import inf, prod

from optimus.cost.assumptions import Assumptions
from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.measured_profile import Profile
from optimus.cost.memory import model_state_memory
from optimus.errors import DoesNotFit, UserError, one_of
from optimus.ir.op import OpKind
from optimus.job.job import Job
from optimus.job.layout import Layout, divisors
from optimus.job.model import Encoder, Llm
from optimus.planner.context import PlanningCache, PlanningContext
from optimus.planner.filled_plan import RejectedLayout
from optimus.planner.forked import compute_by_key
from optimus.planner.systems.colocated_plan import encoder_layout_on_llm_gpus
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.planner.systems.pipeline_search import (
    even_chunk_counts,
    first_fitting_pipeline,
    search_pipelines,
)

MAX_TP = 8  # never across nodes
MAX_PP = 16
MAX_EP = 64
MIN_CP_TOKENS = 4096  # of a sequence on each rank: context parallelism is for long ones
ESTIMATE_AT_MOST = 10  # layouts whose pipelines are built and estimated,
AT_A_TIME = 4  # without knowing of each other
COMPARE_AT_MOST = 3  # layouts by each estimate in which all systems are compared,
COMPARE_WITHIN = 1.15  # if their estimates are at most this times the best


def _make_cost_model(job: Job, assumptions: Assumptions, profile: Profile | None) -> ClusterCostModel:
    return ClusterCostModel(
        cluster=job.cluster,
        assumptions=assumptions,
        profile=profile or Profile(),
        gradient_bytes=job.model.precision.gradient_bytes,
    )


def choose_smallest_context(
    job: Job, assumptions: Assumptions, profile: Profile | None = None
) -> tuple[PlanningContext, tuple[RejectedLayout, ...]]:
    """Returns the context at the smallest layout that fits, and the smaller layouts that do not.

    Open axes grow in this order until all layers fit in one pipeline: tp up to 8 at pp 1, then
    pp, then ep beyond a node; first without recomputing whole layers, then with.
    """
    cost_model = _make_cost_model(job, assumptions, profile)
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
    """Returns whether the job leaves no choice of the LLM's layout."""
    return {"pp", "tp"} <= set(job.layout.of("llm").stated())


def _context_at_stated_layout(job: Job, cost_model: ClusterCostModel) -> PlanningContext:
    """Returns the context at the layout that the job states."""
    for layout in _layouts(job):
        context = _context_at(job, cost_model, layout)
        if isinstance(context, str):
            raise _batch_error(job, layout)
        return context
    raise _no_layout_fits(job, [])


def _no_layout_fits(job: Job, rejected: Sequence[RejectedLayout]) -> DoesNotFit:
    """Returns the error for a job that fits in no layout."""
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
    """Yields all layouts of the LLM that agree with what the job states, smallest replica first."""
    stated, stack = job.layout.of("llm").stated(), job.model.llm.stack
    gpus, limit = job.cluster.gpus, job.layout.limits.max_pp or MAX_PP
    tokens = job.workload.sequence_tokens
    most_cp = max(1, tokens // MIN_CP_TOKENS)
    axes = {
        "cp": [1] + [cp for cp in (2, 4, 8) if cp <= most_cp and tokens % (2 * cp) == 0],
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
    """Yields layouts that agree with what the job states: tp grows first, then pp, then ep."""
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
    """Returns why an encoder's stated layout does not divide this layout of the LLM, or None."""
    for encoder in job.model.encoders:
        for axis, size in job.layout.of(encoder.name).stated().items():
            if axis in ("pp", "tp") and getattr(layout, axis) % size:
                llm_axis = f"{axis}{getattr(layout, axis)}"
                return f"stated: {encoder.name} {axis}{size} does not divide the LLM's {llm_axis}"
    return None


def _expert_spreads(job: Job) -> list[int]:
    """Returns the ep to try: inside a node first, then wider."""
    experts = job.model.llm.stack.experts
    assert experts is not None
    first = job.cluster.gpus_per_node
    return [ep for ep in (first, 2 * first, 4 * first, MAX_EP) if ep <= MAX_EP and experts.count % ep == 0]


def _context_at(
    job: Job, cost_model: ClusterCostModel, layout: Layout, cache: PlanningCache | None = None
) -> PlanningContext | str:
    """Returns the context at a layout, or the reason why the batch does not divide."""
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
    """Returns the error for a stated layout that the batch does not divide into."""
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
    """Returns why all layers do not fit in one pipeline at this layout, or None if they do."""
    pipeline = _find_fitting_pipeline(context)
    if isinstance(pipeline, str):
        return pipeline
    policies = list(context.recompute_policies(context.job.model.modules))
    if not full_recompute and any(step == "full" for _, step in pipeline.policy) and len(policies) > 1:
        return "memory: fits only with whole layers recomputed"
    return None


def _find_fitting_pipeline(context: PlanningContext) -> PipelineCandidate | str:
    """Returns one pipeline of all layers with the least recomputation that fits, or why there is none."""
    job, capacity = context.job, context.capacity_bytes
    modules = job.model.modules
    policies = list(context.recompute_policies(modules))
    layers = context.layers(modules, context.microbatch_sequences, policies[-1])
    states = model_state_memory(layers, job.model.precision).states / context.layout.pp
    if states > capacity:
        return f"memory: model states alone {states / 1e9:.1f} of {capacity / 1e9:.0f} GB"
    pipeline = first_fitting_pipeline(context, modules)
    if pipeline.mean_bytes > capacity:
        return f"memory: at least {pipeline.mean_bytes / 1e9:.1f} of {capacity / 1e9:.0f} GB"
    return pipeline


# ---------------------------------------------------------------------------- encoders


def common_encoder_layouts(context: PlanningContext, llm: Layout) -> Iterator[Layout | RejectedLayout]:
    """Yields layouts for all encoders alike: PP_enc divides PP_llm, TP_enc divides TP_llm, over all GPUs."""
    encoders = context.job.model.encoders
    for layout in _all_layouts(llm):
        reasons = [encoder_layout_error(context, encoder, layout) for encoder in encoders]
        error = next((reason for reason in reasons if reason), None)
        yield RejectedLayout(layout=layout, reason=error, module=context.encoder_names) if error else layout


def valid_encoder_layouts(context: PlanningContext, encoder: Encoder, llm: Layout) -> Iterator[Layout]:
    """Yields the layouts that one encoder may have on the LLM's GPUs."""
    return (layout for layout in _all_layouts(llm) if encoder_layout_error(context, encoder, layout) is None)


def _all_layouts(llm: Layout) -> Iterator[Layout]:
    for pp in divisors(llm.pp):
        for tp in divisors(llm.tp):
            yield encoder_layout_on_llm_gpus(llm, pp=pp, tp=tp)


def encoder_layout_error(context: PlanningContext, encoder: Encoder, layout: Layout) -> str | None:
    """Returns why an encoder cannot have a layout, or None if it can.

    Heads need not be a multiple of tp: they are padded, and priced so, for every system.
    """
    stack, stated = encoder.stack, context.job.layout.of(encoder.name).stated()
    if stack.attention.heads < layout.tp:
        return f"divisibility: {encoder.name} has {stack.attention.heads} heads, tp is {layout.tp}"
    if stack.layers < layout.pp:
        return f"divisibility: {encoder.name} has {stack.layers} layers, pp is {layout.pp}"
    for axis, size in stated.items():
        if axis in ("dp", "pp", "tp") and getattr(layout, axis) != size:
            return f"stated: the job asks for {encoder.name} {axis}{size}"
    return None


# ---------------------------------------------------------------------------- ranking


@dataclass(frozen=True, kw_only=True, eq=False)
class RankedLayouts:
    """Contexts at the LLM layouts in which all systems are compared, best first; and rejected layouts."""

    contexts: tuple[PlanningContext, ...]
    rejected: tuple[RejectedLayout, ...]
    considered: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _EstimatedLayout:
    """A context with step estimates; before it is estimated, `step_s` is a lower bound."""

    context: PlanningContext
    step_s: float  # of a balanced pipeline of all modules
    llm_alone_s: float = 0.0  # of a pipeline of the LLM


def rank_llm_layouts(
    job: Job,
    assumptions: Assumptions,
    profile: Profile | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    *,
    effort: float = 1.0,
    cores: int = 1,
) -> RankedLayouts:
    """Ranks the contexts of a job; only one if its layout is stated. Raises DoesNotFit if there is none.

    A layout is rejected by a rule, by memory, or because its work alone takes longer than another layout's
    step is estimated to. Two estimates count: that of a quickly balanced pipeline of all layers, since other
    systems need the same recomputation to fit, and that of the LLM alone, since it may hide encoders. Counts,
    not seconds, limit how many layouts are tried.
    """
    cost_model = _make_cost_model(job, assumptions, profile)
    if is_llm_layout_stated(job):
        return RankedLayouts(
            contexts=(_context_at_stated_layout(job, cost_model),), rejected=(), considered=1
        )
    rejected: list[RejectedLayout] = []
    contexts: dict[Layout, PlanningContext] = {}
    layouts, cache = list(enumerate_llm_layouts(job)), PlanningCache()
    for layout in layouts:
        context = encoder_layout_conflict(job, layout) or _context_at(job, cost_model, layout, cache)
        if isinstance(context, str):
            rejected.append(RejectedLayout(layout=layout, reason=context))
        else:
            contexts[layout] = context

    def report(layout: Layout) -> None:
        progress("layouts", layouts.index(layout), len(layouts) + ESTIMATE_AT_MOST)

    def work_or_refusal(layout: Layout) -> float | str:
        fitting = _find_fitting_pipeline(contexts[layout])
        return fitting if isinstance(fitting, str) else _work_s(fitting)

    works = compute_by_key(work_or_refusal, dict.fromkeys(contexts, 1.0), cores=cores, report=report)
    rejected += [
        RejectedLayout(layout=layout, reason=work) for layout, work in works.items() if isinstance(work, str)
    ]
    bounded = [
        _EstimatedLayout(context=contexts[layout], step_s=work)
        for layout, work in works.items()
        if not isinstance(work, str)
    ]
    if not bounded:
        raise _no_layout_fits(job, sorted(rejected, key=lambda each: layouts.index(each.layout)))
    estimated = _estimate(sorted(bounded, key=_step_s), rejected, progress, len(layouts), cores)
    most = max(1, round(effort * COMPARE_AT_MOST))
    close = (_close_to_best(estimated, key, most) for key in (_step_s, _llm_alone_s))
    kept = dict.fromkeys(chain.from_iterable(close))
    rejected += [
        RejectedLayout(layout=each.context.layout, reason=_why_slower(each, estimated[0]))
        for each in estimated
        if each not in kept
    ]
    return RankedLayouts(
        contexts=tuple(each.context for each in kept), rejected=tuple(rejected), considered=len(layouts)
    )


def _close_to_best(
    estimated: list[_EstimatedLayout], key: Callable[[_EstimatedLayout], float], most: int
) -> list[_EstimatedLayout]:
    ranked = sorted(estimated, key=key)
    return [each for each in ranked[:most] if key(each) <= COMPARE_WITHIN * key(ranked[0])]


def _why_slower(layout: _EstimatedLayout, best: _EstimatedLayout) -> str:
    over = layout.step_s / best.step_s
    return (
        f"slower: a balanced pipeline takes about {layout.step_s:.3g} s, {over:.2f} times that at "
        f"{best.context.layout}, the LLM alone {layout.llm_alone_s:.3g} s"
    )


def _estimate(
    bounded: list[_EstimatedLayout],
    rejected: list[RejectedLayout],
    progress: Callable[[str, int, int], None],
    done: int,
    cores: int,
) -> list[_EstimatedLayout]:
    """Estimates the steps of layouts whose bound is close to the best; returns the shortest first."""
    estimated: list[_EstimatedLayout] = []

    def estimate(place: int) -> tuple[float | None, float | None]:
        context = bounded[place].context
        model = context.job.model
        return _quick_estimate_s(context, model.modules), _quick_estimate_s(context, (model.llm,))

    for first in range(0, len(bounded), AT_A_TIME):
        best_s = min(map(_step_s, estimated), default=inf)
        places: list[int] = []
        for place in range(first, min(first + AT_A_TIME, len(bounded))):
            each = bounded[place]
            if len(estimated) + len(places) >= ESTIMATE_AT_MOST or each.step_s >= COMPARE_WITHIN * best_s:
                reason = f"work alone takes {each.step_s:.3g} s on each GPU, a step elsewhere {best_s:.3g} s"
                rejected.append(RejectedLayout(layout=each.context.layout, reason=f"slower: {reason}"))
            else:
                places.append(place)
        progress("layouts", done + len(estimated), done + ESTIMATE_AT_MOST)
        for place, (balanced_s, alone_s) in compute_by_key(
            estimate, dict.fromkeys(places, 1.0), cores=cores
        ).items():
            each = bounded[place]
            if balanced_s is not None and alone_s is not None:
                estimated.append(replace(each, step_s=balanced_s, llm_alone_s=alone_s))
            else:
                reason = f"memory: balanced pipelines exceed {each.context.capacity_bytes / 1e9:.0f} GB"
                rejected.append(RejectedLayout(layout=each.context.layout, reason=reason))
    return sorted(estimated, key=_step_s)


def _quick_estimate_s(context: PlanningContext, modules: tuple[Encoder | Llm, ...]) -> float | None:
    """Returns the step of the best pipeline before its cut is improved, at V that split the LLM evenly."""
    stated = context.job.layout.of("llm").chunks
    counts = {stated} if stated else even_chunk_counts(context)
    pipelines = search_pipelines(context, modules, chunk_counts=counts, starts=1, evaluations=0)
    return pipelines[0].estimate_s if pipelines else None


def _work_s(pipeline: PipelineCandidate) -> float:
    """Returns the seconds of forwards and backwards of all its modules on the mean GPU."""
    seconds = sum(
        float(pipeline.sums.layer_seconds(kind).sum()) for kind in (OpKind.FORWARD, OpKind.BACKWARD)
    )
    return seconds * pipeline.microbatches / pipeline.layout.pp


def _step_s(layout: _EstimatedLayout) -> float:
    return layout.step_s


def _llm_alone_s(layout: _EstimatedLayout) -> float:
    return layout.llm_alone_s
