"""Which layouts of the LLM deserve a full look: every open one, bounded, estimated, and the best few kept.

A layout is refused by a rule, by memory, or because work alone takes longer there than another layout's whole
step is estimated to. Two estimates count: that of a quickly balanced pipeline of all layers, since what it
must make again to fit the other systems must as well, and that of the LLM alone, since encoders may hide
behind it. Counts, not seconds, limit what is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from optimus.cost.assumptions import Assumptions
from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.measured_profile import Profile
from optimus.ir.op import OpKind
from optimus.job.job import Job
from optimus.job.model import Encoder, Llm
from optimus.planner.context import PlanningCache, PlanningContext
from optimus.planner.layouts import (
    _context_at,
    _context_at_stated_layout,
    _find_fitting_pipeline,
    _no_layout_fits,
    encoder_layout_conflict,
    enumerate_llm_layouts,
    is_llm_layout_stated,
)
from optimus.planner.rejected import RejectedLayout
from optimus.planner.systems.layer_partition import even_chunk_counts, search_pipelines
from optimus.planner.systems.pipeline import PipelineCandidate

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
