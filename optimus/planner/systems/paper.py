"""Plans as the paper does: every encoder layout, pruned by memory, scheduled into bubbles and replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from optimus.errors import DoesNotFit, one_of
from optimus.job.layout import Layout
from optimus.planner.context import PlanningContext, describe_recompute
from optimus.planner.filled_plan import (
    FilledPlan,
    RejectedLayout,
    ScheduledLayout,
    SearchResult,
    summarize_rejections,
)
from optimus.planner.layouts import common_encoder_layouts
from optimus.planner.systems.base import BaseSystem
from optimus.planner.systems.llm_only import PLAIN_ORDERS, LlmPipelines
from optimus.planner.systems.paper_candidate import LlmTimelines, PaperCandidate, PaperSchedule
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.planner.systems.pipeline_search import search_pipelines
from optimus.schedule.pipeline_orders import build_interleaved_1f1b_order, minimal_warmup_counts

REPLAY_AT_MOST = 4  # encoder layouts that are lowered and replayed,
REPLAY_WITHIN = 1.05  # if their estimates are at most this times the best
SPLITS_LEFT_OUT = "too many splits of the microbatches: the uniform one and its neighbours were tried"
ADJUSTED_WARMUP = "interleaved, adjusted warm-up"


@dataclass(frozen=True, kw_only=True, eq=False)
class PaperSearchResult(SearchResult):
    """The best plan by the paper's algorithm, with the algorithm's own schedule."""

    choice: PaperSchedule


class PaperSystem(BaseSystem):
    """The paper's algorithm: encoders in layouts of their own, their work in the LLM's bubbles."""

    name = "paper"
    allowed_as = "fill"
    makes_plan = True
    simulate_within = inf  # of plans that are lowered and replayed

    def candidates(self, pipelines: LlmPipelines) -> list[PaperSearchResult]:
        """Returns the best plan at the LLM's best V, and at the V that the job states."""
        context = pipelines.context
        if not context.job.model.encoders:
            raise DoesNotFit("there is no encoder to place", "use llm-only")
        llms, stated = [pipelines.floor_1f1b], context.job.layout.of("llm").chunks
        if stated not in (None, pipelines.floor_1f1b.layout.chunks):
            llms += search_pipelines(
                context,
                (context.job.model.llm,),
                orders=PLAIN_ORDERS,
                chunk_counts={stated},
                starts=1,
                evaluations=0,
            )[:1]
        results, refusals = [], []
        for llm in llms:
            try:
                results.append(search_paper_plan(context, [llm, *pipelines.more_recomputed(llm)]))
            except DoesNotFit as no:
                refusals.append(no)
        if not results:
            raise refusals[0]
        return [min(results, key=lambda result: result.filled.step_s)]


def search_paper_plan(context: PlanningContext, llms: Sequence[PipelineCandidate]) -> PaperSearchResult:
    """Schedules every layout that fits beside each LLM pipeline; the first pipeline for which one fits wins.

    Splits are ranked by the algorithm's own estimate. It leaves out the encoders' parameter traffic, which
    decides between layouts: those are ranked with it, and the best few by replay.
    """
    for llm in llms:
        considered, rejected = 0, list[RejectedLayout]()
        choices: list[PaperSchedule] = []
        variants: list[PipelineCandidate] = list(warmup_variants(llm))
        timelines: LlmTimelines = {}
        for layout in common_encoder_layouts(context, llm.layout):
            considered += 1
            if isinstance(layout, RejectedLayout):
                rejected.append(layout)
                continue
            outcome = _schedule(context, variants, timelines, layout)
            if isinstance(outcome, RejectedLayout):
                rejected.append(outcome)
            else:
                choices.append(outcome)
        plans = _replay_best(choices, rejected)
        if plans:
            best, choice = min(plans, key=lambda pair: pair[0].step_s)
            return PaperSearchResult(
                filled=best,
                llm=choice.candidate.llm,
                choice=choice,
                how=_describe(choice),
                considered=considered,
                own_hidden_share=choice.hidden_share(),
                notes={
                    "hidden_share_coarse": choice.hidden_share(coarse=True),
                    "split": list(choice.split),
                },
                estimate_includes_traffic=False,
                remarks=() if choice.all_splits else (SPLITS_LEFT_OUT,),
                rejected=rejected,
                tried=_summarize_layouts(choices, plans, rejected),
            )
    reasons = "; ".join(summarize_rejections(rejected))
    raise DoesNotFit(
        f"encoders fit beside the LLM at {context.layout} in none of {considered} layouts: {reasons}",
        _hint(rejected),
    )


def _describe(choice: PaperSchedule) -> str:
    candidate, split = choice.candidate, choice.split
    same = len(set(split)) == 1
    counts = f"{len(split)} x {split[0]}" if same else "+".join(map(str, split))
    recompute = describe_recompute((*candidate.recompute.items(), *candidate.llm.policy))
    return (
        f"{candidate.context.encoder_names} {candidate.layout}; microbatches {counts}; "
        f"llm {candidate.llm.layout}; {candidate.llm.order_name}; "
        f"microbatch {candidate.llm.sequences:.3g}; {recompute}"
    )


def _hint(rejected: Sequence[RejectedLayout]) -> str:
    kinds = {each.reason.partition(":")[0] for each in rejected}
    hints = {
        "memory": "recompute: full, more GPUs, or more tp or pp",
        "microbatches": "more sequences per step, or smaller microbatches",
        "divisibility": "no more pp than the encoders have layers, no more tp than heads",
        "stated": "an encoder layout that divides the LLM's",
    }
    return f"use {one_of(hint for kind, hint in hints.items() if kind in kinds)}, or another system"


def _schedule(
    context: PlanningContext, llms: Sequence[PipelineCandidate], timelines: LlmTimelines, layout: Layout
) -> PaperSchedule | RejectedLayout:
    """Schedules one layout with the least recomputation that fits, its best split and best warm-up."""
    encoders, llm = context.job.model.encoders, llms[0]
    needs: list[str] = []
    for policy in context.recompute_policies(encoders):
        variants = [PaperCandidate(context, each, layout, dict(policy), timelines) for each in llms]
        candidate = variants[0]
        if candidate.num_pipelines > llm.microbatches:
            reason = f"microbatches: {llm.microbatches} for {candidate.num_pipelines} encoder pipelines"
            return RejectedLayout(layout=layout, reason=reason, module=context.encoder_names)
        even = -(-llm.microbatches // candidate.num_pipelines)
        most = min(each.max_microbatches(context.capacity_bytes) for each in variants)
        if most >= even:
            return min((each.search_splits(most) for each in variants), key=lambda choice: choice.estimate_s)
        needs.append(f"{candidate.peak_bytes_bound(even) / 1e9:.1f}")
    capacity = context.capacity_bytes / 1e9
    reason = f"memory: {needs[-1]} of {capacity:.1f} GB with the most recomputation"
    return RejectedLayout(
        layout=layout,
        reason=reason,
        module=context.encoder_names,
        peak_bytes=candidate.peak_bytes_bound(even),
    )


def warmup_variants(llm: PipelineCandidate) -> Iterator[PipelineCandidate]:
    """Yields the pipeline, and its variant with the paper's adjusted warm-up, which defers later forwards."""
    yield llm
    layout = llm.layout
    if layout.chunks > 1 and llm.order_name == "interleaved":
        order = build_interleaved_1f1b_order(
            stages=layout.pp,
            chunks=layout.chunks,
            microbatches=llm.microbatches,
            warmup=minimal_warmup_counts(layout.pp, layout.chunks),
        )
        yield replace(llm, explicit_order=order, order_name=ADJUSTED_WARMUP)


def _replay_best(
    choices: Sequence[PaperSchedule], rejected: list[RejectedLayout]
) -> list[tuple[FilledPlan, PaperSchedule]]:
    """Lowers and replays the most promising schedules; those that do not fit are rejected."""

    def rank(choice: PaperSchedule) -> float:
        return choice.estimate_s + choice.candidate.traffic_s

    ranked = sorted(choices, key=rank)
    plans: list[tuple[FilledPlan, PaperSchedule]] = []
    for choice in ranked:
        if len(plans) == REPLAY_AT_MOST or (plans and rank(choice) > REPLAY_WITHIN * rank(ranked[0])):
            break
        filled = choice.candidate.plan(choice)
        if filled.fits:
            plans.append((filled, choice))
            continue
        peak = max(held.peak for held in filled.memory) / 1e9
        reason = f"memory: {peak:.1f} of {filled.header.capacity_bytes / 1e9:.1f} GB"
        names = choice.candidate.context.encoder_names
        rejected.append(
            RejectedLayout(layout=choice.candidate.layout, reason=reason, module=names, peak_bytes=1e9 * peak)
        )
    return plans


def _summarize_layouts(
    choices: Sequence[PaperSchedule],
    plans: Sequence[tuple[FilledPlan, PaperSchedule]],
    rejected: Sequence[RejectedLayout],
) -> list[ScheduledLayout]:
    """Summarizes every layout that fits: as replayed, or as estimated where others were more promising."""
    replayed = {choice.candidate.layout: filled for filled, choice in plans}
    passed_over = {each.layout for each in rejected}
    layouts = []
    for choice in choices:
        candidate = choice.candidate
        if candidate.layout in passed_over:
            continue
        filled = replayed.get(candidate.layout)
        if filled is None:
            step_s, peak = (
                choice.estimate_s + candidate.traffic_s,
                candidate.peak_bytes_bound(max(choice.split)),
            )
        else:
            step_s, peak = filled.step_s, float(max(held.peak for held in filled.memory))
        layouts.append(
            ScheduledLayout(
                layout=candidate.layout,
                module=candidate.context.encoder_names,
                step_s=step_s,
                peak_bytes=peak,
                replayed=filled is not None,
            )
        )
    return layouts
