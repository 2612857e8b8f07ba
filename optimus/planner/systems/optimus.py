"""Plans encoders colocated with the LLM's best pipelines, their work scheduled by `fill`.

Candidates are ranked by the step time of `fill`; the best are lowered and replayed, and the replay decides.
Budgets are counts of evaluations and of the ops in them, so that the same job gives the same plan on every
machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from optimus.errors import DoesNotFit
from optimus.planner.context import PlanningContext, describe_recompute
from optimus.planner.filled_plan import FilledPlan, RejectedLayout, SearchResult, summarize_rejections
from optimus.planner.systems.base import BaseSystem
from optimus.planner.systems.colocation_search import ColocationSearch, ScheduledCandidate
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.schedule.simulator import ScheduleDeadlock

HOPELESS_ABOVE = 1.1  # times a known step: more than other pipelines and refinement gain,
HOPELESS_AGAIN_ABOVE = 1.03  # and than they gain at a layout over another, where they were tried
REFINE_AT_MOST = 3  # candidates, over all LLM pipelines,
REFINE_WITHIN = 1.01  # if their steps are at most this times the best


@dataclass(frozen=True)
class OptimusSystem(BaseSystem):
    """Encoders colocated with the LLM, their work list-scheduled over all lanes into the LLM's bubbles."""

    hopeless_s: float = inf  # above this, the first schedules are not refined,
    again: bool = False  # and not lowered where the system was searched at another layout

    name = "optimus"
    allowed_as = "fill"
    makes_plan = True
    contains = "stage0", "balanced", "balanced-best", "three-phase", "fsdp"
    simulate_within = inf  # of plans that are lowered and replayed

    def candidates(self, pipelines: LlmPipelines) -> list[SearchResult]:
        """Returns the best plan with filled bubbles."""
        context = pipelines.context
        if not context.job.model.encoders:
            raise DoesNotFit("there is no encoder to place", "use llm-only")
        llms, find_smaller = pipelines.for_colocation, pipelines.with_free_memory
        return [
            search_optimus_plan(context, llms, find_smaller, hopeless_s=self.hopeless_s, again=self.again)
        ]

    def looking_below(self, step_s: float, *, again: bool = False) -> OptimusSystem:
        """Returns the system with a search that soon gives up what is not faster than a known step."""
        above = HOPELESS_AGAIN_ABOVE if again else HOPELESS_ABOVE
        return replace(self, hopeless_s=above * step_s, again=again)


FindSmaller = Callable[[PipelineCandidate, Sequence[float]], Iterable[PipelineCandidate]]


def _find_none(llm: PipelineCandidate, added_bytes: Sequence[float]) -> Iterable[PipelineCandidate]:
    return ()


def search_optimus_plan(
    context: PlanningContext,
    llms: Sequence[PipelineCandidate],
    find_smaller: FindSmaller = _find_none,
    *,
    hopeless_s: float = inf,
    again: bool = False,
) -> SearchResult:
    """Returns the best plan around any of the LLM pipelines; the replay decides.

    Where encoders fit only with added recomputation, `find_smaller` gives pipelines that leave more memory.
    Where the first schedules are above `hopeless_s`, neither they nor other pipelines are refined; DoesNotFit
    is raised if the plan is searched `again`, at another layout.
    """
    searches: list[ColocationSearch] = []
    pool: list[tuple[ColocationSearch, ScheduledCandidate]] = []

    def search_around(llm: PipelineCandidate) -> list[ScheduledCandidate]:
        searches.append(ColocationSearch(context, llm))
        scheduled = searches[-1].schedule_common_layouts()
        pool.extend((searches[-1], each) for each in scheduled)
        return scheduled

    def best_s() -> float:
        return min((scheduled.step_s for _, scheduled in pool), default=inf)

    def is_hopeless() -> bool:
        return inf > best_s() > hopeless_s

    def is_too_slow(llm: PipelineCandidate) -> bool:
        """Returns whether the LLM alone takes longer than the best candidate, or none can be fast enough."""
        return llm.estimate_s > best_s() or is_hopeless()

    for llm in llms:
        if is_too_slow(llm):
            continue
        scheduled = search_around(llm)
        if not is_hopeless() and not any(map(searches[-1].adds_no_recompute, scheduled)):
            for smaller in find_smaller(llm, searches[-1].added_bytes):
                if not is_too_slow(smaller):
                    search_around(smaller)
    considered = sum(search.considered for search in searches)
    rejected = [rejection for search in searches for rejection in search.rejected]
    if is_hopeless() and again:
        raise DoesNotFit(f"the step is longer at {context.layout} than at another layout", "use that layout")
    pool.sort(key=lambda pair: pair[1].step_s)
    close = [pair for pair in pool[:REFINE_AT_MOST] if pair[1].step_s <= REFINE_WITHIN * pool[0][1].step_s]
    if is_hopeless():
        close = []
    refined = [search.refine(each) for search, each in close]
    ranked = sorted([*refined, *(each for _, each in pool[len(close) :])], key=lambda each: each.step_s)
    best = _first_that_fits(ranked, rejected)
    if best is None:
        reasons = "; ".join(summarize_rejections(rejected))
        raise DoesNotFit(
            f"encoders fit beside the LLM at {context.layout} in none of {considered} layouts: {reasons}",
            "use recompute: full, more GPUs, more tp or pp, or another system",
        )
    filled, chosen = best
    return SearchResult(
        filled=filled,
        llm=chosen.candidate.llm,
        how=_describe(chosen),
        considered=considered,
        hidden_share=filled.hidden_share,
        notes={"shift_s": chosen.arranged.shift_s},
        peak_bytes_at_p99=chosen.candidate.peak_bytes_at_p99(filled.plan),
        rejected=rejected,
        tried=[search.to_scheduled_layout(each) for search, each in pool],
    )


def _first_that_fits(
    ranked: Sequence[ScheduledCandidate], rejected: list[RejectedLayout]
) -> tuple[FilledPlan, ScheduledCandidate] | None:
    """Lowers and replays candidates until one fits; those that deadlock or exceed the memory are rejected."""
    for scheduled in ranked:
        candidate = scheduled.candidate
        try:
            filled = candidate.plan(scheduled.arranged)
        except ScheduleDeadlock as deadlock:
            rejected.append(candidate.reject(f"order: {deadlock}"))
            continue
        mean_bytes = max(held.peak for held in filled.plan.memory)
        if not filled.fits:
            rejected.append(candidate.reject_for_memory(mean_bytes))
        elif (heavy_bytes := candidate.peak_bytes_at_p99(filled.plan)) > filled.plan.capacity_bytes:
            rejected.append(candidate.reject_for_memory(heavy_bytes, mean_bytes))
        else:
            return filled, scheduled
    return None


def _describe(scheduled: ScheduledCandidate) -> str:
    llm, placements = scheduled.candidate.llm, scheduled.placements
    parts = []
    for name, chosen in placements.items():
        counts = chosen.layers_per_stage
        layers = "" if not counts else f" layers {'+'.join(map(str, counts))}"
        pieces = "" if chosen.pieces == 1 else f" in {chosen.pieces} pieces"
        window = "" if not chosen.window else f" at most {chosen.window} microbatches at a time"
        parts.append(f"{name} {chosen.layout}{pieces}{layers}{window}")
    recompute = describe_recompute((*((n, c.recompute) for n, c in placements.items()), *llm.policy))
    size = f"microbatch {llm.sequences:.3g}"
    return f"{'; '.join(parts)}; llm {llm.layout}; {llm.order_name}; {size}; {recompute}"
