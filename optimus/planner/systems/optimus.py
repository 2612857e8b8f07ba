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
from optimus.planner.systems.colocation_candidate import SMALL_LINES
from optimus.planner.systems.colocation_search import (
    ColocationSearch,
    ScheduledCandidate,
    schedule_on_all_cores,
)
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.schedule.simulator import ScheduleDeadlock

HOPELESS_ABOVE = 1.1  # times a known step: more than other pipelines gain;
HOPELESS_REFINED_ABOVE = 1.05  # than refinement gains;
HOPELESS_AGAIN_ABOVE = 1.03  # than they gain at a layout over another, where they were tried;
HOPELESS_FIRST_ABOVE = 1.05  # and than other encoder layouts gain there over the first
FIRST_LAYOUTS = 2  # encoder layouts around the first pipeline, which tell where to search first
REFINE_AT_MOST = 3  # candidates, over all LLM pipelines,
REFINE_WITHIN = 1.01  # if their steps are at most this times the best
LOWER_WITHIN = 1.005  # times a known step: a replay is about as long as the schedule that it replays


@dataclass(frozen=True)
class OptimusSystem(BaseSystem):
    """Encoders colocated with the LLM, their work list-scheduled over all lanes into the LLM's bubbles."""

    known_s: float = inf  # a step that a plan should be faster than
    again: bool = False  # the system was searched at another layout

    name = "optimus"
    allowed_as = "fill"
    makes_plan = True
    takes_sharded = True
    contains = "stage0", "balanced", "balanced-best", "three-phase", "fsdp"
    simulate_within = inf  # of plans that are lowered and replayed

    def candidates(self, pipelines: LlmPipelines) -> list[SearchResult]:
        """Returns the best plan with filled bubbles."""
        return [pipelines.once(OptimusSearch.around).find_plan(self.known_s, again=self.again)]

    def looking_below(self, step_s: float, *, again: bool = False) -> OptimusSystem:
        """Returns the system with a search that soon gives up what is not faster than a known step."""
        return replace(self, known_s=step_s, again=again)

    def first_step_s(self, pipelines: LlmPipelines) -> float:
        """Returns the shortest of the first schedules; inf if none fits."""
        try:
            return pipelines.once(OptimusSearch.around).first_step_s(self.known_s)
        except DoesNotFit:
            return inf


FindSmaller = Callable[[PipelineCandidate, Sequence[float]], Iterable[PipelineCandidate]]


def _find_none(llm: PipelineCandidate, added_bytes: Sequence[float]) -> Iterable[PipelineCandidate]:
    return ()


class OptimusSearch:
    """Searches the best plan around any of the LLM's pipelines at one layout; the replay decides.

    Where encoders fit only with added recomputation, `find_smaller` gives pipelines that leave more memory.
    """

    def __init__(
        self,
        context: PlanningContext,
        llms: Sequence[PipelineCandidate],
        find_smaller: FindSmaller = _find_none,
    ) -> None:
        self._context, self._llms, self._find_smaller = context, llms, find_smaller
        self._searches: dict[object, ColocationSearch] = {}  # by identity of the LLM's pipeline
        self._pool: list[tuple[ColocationSearch, ScheduledCandidate]] = []

    @classmethod
    def around(cls, pipelines: LlmPipelines) -> OptimusSearch:
        """Returns the search around pipelines that encoders are colocated with."""
        if not pipelines.context.job.model.encoders:
            raise DoesNotFit("there is no encoder to place", "use llm-only")
        return cls(pipelines.context, pipelines.for_colocation, pipelines.with_free_memory)

    def first_step_s(self, known_s: float = inf) -> float:
        """Returns the shortest of the first schedules around the first pipeline with room for encoders.

        Only those that may be shorter than a known step are counted.
        """
        for llm in self._llms:
            first = self._search_of(llm).schedule_layouts(FIRST_LAYOUTS, known_s)
            if first:
                return min(scheduled.step_s for scheduled in first)
        return inf

    def find_plan(self, known_s: float = inf, *, again: bool = False) -> SearchResult:
        """Returns the best plan.

        Pipelines are no longer searched, and schedules not refined, where they are far above a known step;
        small ones are, which takes little time and gains more. If a plan was searched at another layout,
        before, those above it are not lowered either, but refused.
        """
        limits = (HOPELESS_AGAIN_ABOVE if again else HOPELESS_ABOVE), HOPELESS_REFINED_ABOVE
        hopeless_s, unrefined_s = (inf if self._is_small else limit * known_s for limit in limits)
        slower = DoesNotFit(f"the step is longer at {self._context.layout} than a known one", "use that one")
        if again and inf > self.first_step_s(known_s) > HOPELESS_FIRST_ABOVE * known_s:
            raise slower
        self._schedule_all(hopeless_s, known_s)
        considered = sum(search.considered for search in self._searches.values())
        rejected = [rejection for search in self._searches.values() for rejection in search.rejected]
        ranked = self._rank_and_refine(min(hopeless_s, unrefined_s))
        if not ranked and any(search.has_layouts for search in self._searches.values()):
            raise slower
        if again and ranked:
            ranked = [pair for pair in ranked if _step_s(pair) <= LOWER_WITHIN * known_s]
            if not ranked:
                raise slower
        best = _first_that_fits([scheduled for _, scheduled in ranked], rejected)
        if best is None:
            reasons = "; ".join(summarize_rejections(rejected))
            raise DoesNotFit(
                f"encoders fit beside the LLM at {self._context.layout} in none of {considered} layouts: "
                f"{reasons}",
                "use recompute: full, more GPUs, more tp or pp, or another system",
            )
        filled, chosen = best
        return SearchResult(
            filled=filled,
            llm=chosen.candidate.llm,
            how=_describe(chosen),
            considered=considered,
            notes={"shift_s": chosen.shift_s},
            peak_bytes_at_p99=chosen.candidate.peak_bytes_at_p99(filled),
            rejected=rejected,
            tried=[search.to_scheduled_layout(each) for search, each in self._pool],
        )

    @property
    def _is_small(self) -> bool:
        """True if the first schedule has few lines."""
        first = next((each for llm in self._llms for each in self._search_of(llm).schedule_layouts(1)), None)
        return first is not None and first.lines <= SMALL_LINES

    def _search_of(self, llm: PipelineCandidate) -> ColocationSearch:
        """Returns the search around a pipeline, the same each time."""
        return self._searches.setdefault(llm.identity, ColocationSearch(llm.context, llm))

    def _schedule_all(self, hopeless_s: float, known_s: float) -> None:
        """Schedules encoders around all pipelines that can be fast enough, each once."""
        self._pool.clear()
        searched: set[object] = set()

        def is_hopeless() -> bool:
            return inf > self._best_s > hopeless_s

        def search_around(llm: PipelineCandidate) -> list[ScheduledCandidate] | None:
            if llm.identity in searched or llm.estimate_s > self._best_s or is_hopeless():
                return None
            searched.add(llm.identity)
            search = self._search_of(llm)
            scheduled = search.schedule_common_layouts(known_s)
            self._pool.extend((search, each) for each in scheduled)
            return scheduled

        for llm in self._llms:
            scheduled, search = search_around(llm), self._search_of(llm)
            if scheduled is None or is_hopeless() or any(map(search.adds_no_recompute, scheduled)):
                continue
            for smaller in self._find_smaller(llm, search.added_bytes):
                search_around(smaller)

    def _rank_and_refine(self, hopeless_s: float) -> list[tuple[ColocationSearch, ScheduledCandidate]]:
        """Returns all schedules, the fastest first, after the best are refined if they can be fast enough."""
        ranked = sorted(self._pool, key=_step_s)
        if self._best_s > hopeless_s:
            return ranked
        close = [pair for pair in ranked[:REFINE_AT_MOST] if _step_s(pair) <= REFINE_WITHIN * self._best_s]
        refined = [each for each, _ in schedule_on_all_cores(close, ColocationSearch.refine)]
        pairs = [(search, each) for (search, _), each in zip(close, refined, strict=True)]
        return sorted([*pairs, *ranked[len(close) :]], key=_step_s)

    @property
    def _best_s(self) -> float:
        return min(map(_step_s, self._pool), default=inf)


def _step_s(pair: tuple[ColocationSearch, ScheduledCandidate]) -> float:
    return pair[1].step_s


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
        mean_bytes = max(held.peak for held in filled.memory)
        if not filled.fits:
            rejected.append(candidate.reject_for_memory(mean_bytes))
        elif (heavy_bytes := candidate.peak_bytes_at_p99(filled)) > candidate.context.capacity_bytes:
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
    return f"{'; '.join(parts)}; llm {llm.layout}; {llm.order_label}; {size}; {recompute}"
