"""Layouts of the LLM: what the job states is kept, what it leaves out is open; and which of them fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from optimus.cost.assumptions import Assumptions
from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.measured_profile import Profile
from optimus.cost.memory import model_state_memory
from optimus.errors import DoesNotFit, UserError, one_of
from optimus.ir.op import OpKind
from optimus.job.job import Job
from optimus.job.layout import Layout
from optimus.job.model import Encoder, Llm
from optimus.planner.context import PlanningCache, PlanningContext
from optimus.planner.filled_plan import RejectedLayout
from optimus.planner.systems.colocated_plan import encoder_layout_on_llm_gpus
from optimus.planner.systems.layer_partition import (
    even_chunk_counts,
    first_fitting_pipeline,
    search_pipelines,
)
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
    policies = list(context.recompute_policies(context.job.model.modules))
    if not full_recompute and any(step == "full" for _, step in found.policy) and len(policies) > 1:
        return "memory: fits only with whole layers recomputed"
    return None


def _find_fitting_pipeline(context: PlanningContext) -> PipelineCandidate | str:
    """All layers in one pipeline with the least recomputation that fits, or why there is none."""
    job, capacity = context.job, context.capacity_bytes
    modules = job.model.modules
    policies = list(context.recompute_policies(modules))
    layers = context.layers(modules, context.microbatch_sequences, policies[-1])
    held = model_state_memory(layers, job.model.precision).states / context.layout.pp
    if held > capacity:
        return f"memory: model states alone {held / 1e9:.1f} of {capacity / 1e9:.0f} GB"
    found = first_fitting_pipeline(context, modules)
    if not found.fits:
        return f"memory: at least {found.peak_bytes / 1e9:.1f} of {capacity / 1e9:.0f} GB"
    return found


def common_encoder_layouts(context: PlanningContext, llm: Layout) -> Iterator[Layout | RejectedLayout]:
    """Layouts for all encoders alike: PP_enc divides PP_llm, TP_enc divides TP_llm, over all GPUs."""
    encoders = context.job.model.encoders
    for layout in _all_layouts(llm):
        reasons = [encoder_layout_error(context, encoder, layout) for encoder in encoders]
        found = next((reason for reason in reasons if reason), None)
        yield RejectedLayout(layout=layout, reason=found, module=context.encoder_names) if found else layout


def valid_encoder_layouts(context: PlanningContext, encoder: Encoder, llm: Layout) -> Iterator[Layout]:
    """Layouts that one encoder may have beside the LLM."""
    return (layout for layout in _all_layouts(llm) if encoder_layout_error(context, encoder, layout) is None)


def _all_layouts(llm: Layout) -> Iterator[Layout]:
    for pp in _divisors(llm.pp):
        for tp in _divisors(llm.tp):
            yield encoder_layout_on_llm_gpus(llm, pp=pp, tp=tp)


def encoder_layout_error(context: PlanningContext, encoder: Encoder, layout: Layout) -> str | None:
    """The reason why an encoder cannot be divided so, or is not to be.

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


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


MOST_ESTIMATED = 10  # layouts whose pipelines are made
MOST_KEPT = 3  # by each estimate: layouts in which all systems are made,
CLOSE = 1.15  # if their estimates are this close to the best


@dataclass(frozen=True, kw_only=True, eq=False)
class RankedLayouts:
    """Settings that deserve a full look, the most promising first, and what was passed over."""

    contexts: tuple[PlanningContext, ...]
    rejected: tuple[RejectedLayout, ...]
    considered: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Candidate:
    context: PlanningContext
    seconds: float  # of work that the mean GPU cannot avoid, or of a balanced step
    alone_s: float = 0.0  # of the LLM's own step


def rank_llm_layouts(
    job: Job,
    assumptions: Assumptions,
    profile: Profile | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> RankedLayouts:
    """The settings of a job; one if its layout is stated. DoesNotFit if there is none."""
    cost_model = ClusterCostModel(cluster=job.cluster, assumptions=assumptions, profile=profile or Profile())
    if is_llm_layout_stated(job):
        return RankedLayouts(
            contexts=(_context_at_stated_layout(job, cost_model),), rejected=(), considered=1
        )
    rejected: list[RejectedLayout] = []
    bounded: list[_Candidate] = []
    layouts, cache = list(enumerate_llm_layouts(job)), PlanningCache()
    for place, layout in enumerate(layouts):
        progress("layouts", place, len(layouts) + MOST_ESTIMATED)
        context = encoder_layout_conflict(job, layout) or _context_at(job, cost_model, layout, cache)
        fitting = context if isinstance(context, str) else _find_fitting_pipeline(context)
        if isinstance(fitting, str):
            rejected.append(RejectedLayout(layout=layout, reason=fitting))
        else:
            bounded.append(_Candidate(context=fitting.context, seconds=_work_s(fitting)))
    if not bounded:
        raise _no_layout_fits(job, rejected)
    estimated = _estimated(sorted(bounded, key=_seconds), rejected, progress, len(layouts))
    kept = dict.fromkeys((*_closest(estimated, _seconds), *_closest(estimated, _alone_s)))
    rejected += [
        RejectedLayout(layout=each.context.layout, reason=_why_slower(each, estimated[0]))
        for each in estimated
        if each not in kept
    ]
    return RankedLayouts(
        contexts=tuple(each.context for each in kept), rejected=tuple(rejected), considered=len(layouts)
    )


def _closest(estimated: list[_Candidate], key: Callable[[_Candidate], float]) -> list[_Candidate]:
    ranked = sorted(estimated, key=key)
    return [each for each in ranked[:MOST_KEPT] if key(each) <= CLOSE * key(ranked[0])]


def _why_slower(candidate: _Candidate, best: _Candidate) -> str:
    over = candidate.seconds / best.seconds
    return (
        f"slower: a balanced pipeline takes about {candidate.seconds:.3g} s, {over:.2f} of that at "
        f"{best.context.layout}, the LLM alone {candidate.alone_s:.3g} s"
    )


def _estimated(
    bounded: list[_Candidate],
    rejected: list[RejectedLayout],
    progress: Callable[[str, int, int], None],
    done: int,
) -> list[_Candidate]:
    """Estimated steps, shortest first, of those whose work leaves them a chance."""
    found: list[_Candidate] = []
    for place, each in enumerate(bounded):
        best_s = min(map(_seconds, found), default=float("inf"))
        if len(found) == MOST_ESTIMATED or each.seconds >= CLOSE * best_s:
            words = (
                f"slower: work alone takes {each.seconds:.3g} s on each GPU, a step elsewhere {best_s:.3g} s"
            )
            rejected.append(RejectedLayout(layout=each.context.layout, reason=words))
            continue
        progress("layouts", done + place, done + MOST_ESTIMATED)
        model = each.context.job.model
        balanced_s, alone_s = _quick_s(each.context, model.modules), _quick_s(each.context, (model.llm,))
        if balanced_s is not None and alone_s is not None:
            found.append(replace(each, seconds=balanced_s, alone_s=alone_s))
        else:
            reason = f"memory: balanced pipelines exceed {each.context.capacity_bytes / 1e9:.0f} GB"
            rejected.append(RejectedLayout(layout=each.context.layout, reason=reason))
    return sorted(found, key=_seconds)


def _quick_s(context: PlanningContext, modules: tuple[Encoder | Llm, ...]) -> float | None:
    """A step of the best pipeline before its cut is improved; V such that the LLM's layers are even."""
    stated = context.job.layout.of("llm").chunks
    counts = {stated} if stated else even_chunk_counts(context)
    made = search_pipelines(context, modules, chunk_counts=counts, starts=1, evaluations=0)
    return made[0].estimate_s if made else None


def _work_s(pipeline: PipelineCandidate) -> float:
    """Forwards and backwards of all its modules on the mean GPU."""
    seconds = sum(
        float(pipeline.sums.layer_seconds(kind).sum()) for kind in (OpKind.FORWARD, OpKind.BACKWARD)
    )
    return seconds * pipeline.microbatches / pipeline.layout.pp


def _seconds(candidate: _Candidate) -> float:
    return candidate.seconds


def _alone_s(candidate: _Candidate) -> float:
    return candidate.alone_s
