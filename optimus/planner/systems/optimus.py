"""Our system: encoders colocated with the LLM's best pipelines, their work scheduled by `fill`.

Candidates are ranked by the loop's own time; the best are lowered and replayed, and the replay decides.
Budgets are counts of evaluations and of the ops in them, so that the same job gives the same plan on every
machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from optimus.errors import DoesNotFit
from optimus.planner.context import PlanningContext, describe_recompute
from optimus.planner.filled_plan import FilledPlan, RejectedLayout, SearchResult, summarize_rejections
from optimus.planner.systems.base import BaseSystem
from optimus.planner.systems.colocation_search import ColocationSearch, ScheduledCandidate
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.schedule.simulator import ScheduleDeadlock

REFINE_AT_MOST = 3  # candidates, over all LLM pipelines,
REFINE_WITHIN = 1.01  # if their steps are at most this times the best


class OptimusSystem(BaseSystem):
    """Our scheduler: list scheduling over all lanes, around the best LLM pipelines."""

    name = "optimus"
    allowed_as = "fill"
    makes_plan = True

    def candidates(self, pipelines: LlmPipelines) -> list[SearchResult]:
        """Returns the best plan."""
        if not pipelines.context.job.model.encoders:
            raise DoesNotFit("there is no encoder to place", "use llm-only")
        return [search_optimus_plan(pipelines.context, pipelines.beside, pipelines.roomier)]


Roomier = Callable[[PipelineCandidate, Sequence[float]], Iterable[PipelineCandidate]]


def _none(llm: PipelineCandidate, added_bytes: Sequence[float]) -> Iterable[PipelineCandidate]:
    return ()


def search_optimus_plan(
    context: PlanningContext, llms: Sequence[PipelineCandidate], roomier: Roomier = _none
) -> SearchResult:
    """The best beside any LLM pipeline, or where nothing fits beside it one that is `roomier`, by replay."""
    searches: list[ColocationSearch] = []
    pool: list[tuple[ColocationSearch, ScheduledCandidate]] = []

    def look_beside(llm: PipelineCandidate) -> list[ScheduledCandidate]:
        searches.append(ColocationSearch(context, llm))
        found = searches[-1].tried()
        pool.extend((searches[-1], each) for each in found)
        return found

    def is_behind(llm: PipelineCandidate) -> bool:
        """Alone it takes longer than what is found."""
        return bool(pool) and llm.estimate_s > min(each.step_s for _, each in pool)

    for llm in llms:
        if is_behind(llm):
            continue
        found = look_beside(llm)
        if not any(map(searches[-1].keeps_all, found)):
            for other in roomier(llm, searches[-1].added_bytes):
                if not is_behind(other):
                    look_beside(other)
    considered = sum(search.considered for search in searches)
    rejected = [each for search in searches for each in search.rejected]
    pool.sort(key=lambda pair: pair[1].step_s)
    close = [pair for pair in pool[:REFINE_AT_MOST] if pair[1].step_s <= REFINE_WITHIN * pool[0][1].step_s]
    refined = [search.refined(tried) for search, tried in close]
    ranked = sorted([*refined, *(tried for _, tried in pool[len(close) :])], key=lambda tried: tried.step_s)
    best = _first_that_fits(ranked, rejected)
    if best is None:
        words = "; ".join(summarize_rejections(rejected))
        raise DoesNotFit(
            f"encoders fit beside the LLM at {context.layout} in none of {considered} layouts: {words}",
            "use recompute: full, more GPUs, more tp or pp, or another system",
        )
    filled, tried = best
    return SearchResult(
        filled=filled,
        llm=tried.trial.llm,
        how=_describe(tried),
        considered=considered,
        hidden_share=filled.hidden_share,
        notes={"shift_s": tried.arranged.shift_s},
        rejected=rejected,
        tried=[search.as_layout(each) for search, each in pool],
    )


def _first_that_fits(
    ranked: Sequence[ScheduledCandidate], rejected: list[RejectedLayout]
) -> tuple[FilledPlan, ScheduledCandidate] | None:
    """As replayed; those that turn out not to fit, or to have no order that all classes can play, are not."""
    for tried in ranked:
        try:
            filled = tried.trial.plan(tried.arranged)
        except ScheduleDeadlock as stuck:
            rejected.append(tried.trial.refused(f"order: {stuck}"))
            continue
        if filled.fits:
            return filled, tried
        rejected.append(tried.trial.too_large(max(held.peak for held in filled.plan.memory)))
    return None


def _describe(tried: ScheduledCandidate) -> str:
    llm = tried.trial.llm
    parts = []
    for name, chosen in tried.beside.items():
        counts = "" if not chosen.counts else f" layers {'+'.join(map(str, chosen.counts))}"
        pieces = "" if chosen.pieces == 1 else f" in {chosen.pieces} pieces"
        window = "" if not chosen.window else f" at most {chosen.window} microbatches at a time"
        parts.append(f"{name} {chosen.layout}{pieces}{counts}{window}")
    again = describe_recompute((*((n, c.recompute) for n, c in tried.beside.items()), *llm.policy))
    size = f"microbatch {llm.sequences:.3g}"
    return f"{'; '.join(parts)}; llm {llm.layout}; {llm.order_name}; {size}; {again}"
