"""Searches the placement of every encoder on the GPUs of one LLM pipeline.

A placement is a layout, a microbatch size and layers per stage; every candidate is scheduled by `fill`.
Budgets are counts of evaluations and of the ops in them, so that the same job gives the same plan on every
machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, permutations
from math import inf
from typing import TypeVar

import numpy as np

from optimus.cost.priced_layer import PricedLayer
from optimus.job.layout import Layout
from optimus.planner.context import PlanningContext
from optimus.planner.filled_plan import RejectedLayout, ScheduledLayout
from optimus.planner.forked import compute_by_key
from optimus.planner.layouts import common_encoder_layouts, valid_encoder_layouts
from optimus.planner.systems.colocated_plan import split_layers_evenly
from optimus.planner.systems.colocation_candidate import ColocationCandidate, EncoderPlacement
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.schedule.fill import FillResult
from optimus.schedule.llm_timeline import LlmTimeline
from optimus.schedule.pipeline_orders import peak_microbatches_in_flight

MAX_LAYOUTS = 6  # encoder layouts that are scheduled around one LLM pipeline, the most promising first
MAX_SHIFTED_LAYOUTS = 2  # of them that are also scheduled with a later start of the LLM
SHIFT_HALVINGS = 3  # steps of the binary search for the LLM's shift
MAX_LAYER_MOVES = 6  # of one layer from one encoder stage to another
MAX_GROWTH = 0.5  # of a step with the LLM's shift, above which larger shifts are not tried
SEARCH_SHIFT_WITHIN = (
    1.01  # times the best step, with the same shift of the LLM: slower placements are dropped
)
PIECES_PER_BLOCK = (2, 3, 4, 5, 6, 8)  # of an LLM microbatch, for every encoder block of a TP group
MAX_SLOWER_COUNTS = 2  # of pieces, in a row, before more are no longer tried
IGNORE_SLOWDOWN_SHARE = 2e-4  # of a step: it may get this much longer if less memory is needed
MAX_SIMULATED_OPS = 3_000_000  # around one LLM pipeline, and as many again to refine a candidate
MAX_ROOM_DOUBLINGS = 4  # times that an LLM pipeline is asked to leave encoders twice the memory
IGNORE_DELAY_SHARE = 2e-3  # of a step: shorter delays are not worth a search

Placements = Mapping[str, EncoderPlacement]  # by encoder
Start = TypeVar("Start")


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduledCandidate:
    """Encoder placements around one LLM pipeline, with the shift of the LLM that is best so far."""

    candidate: ColocationCandidate
    shift_s: float
    step_s: float  # by which candidates are compared
    late_s: float  # largest delay of an LLM op
    lines: int

    @staticmethod
    def of(candidate: ColocationCandidate, shift_s: float = 0.0) -> ScheduledCandidate:
        """Schedules a candidate around an LLM that starts so much later."""
        arranged = candidate.fill.schedule_encoders(shift_s)
        step_s = candidate.step_s(arranged)
        scheduled = ScheduledCandidate(
            candidate=candidate,
            shift_s=shift_s,
            step_s=step_s,
            late_s=arranged.late_s,
            lines=len(candidate.fill.schedule),
        )
        scheduled.__dict__["arranged"] = arranged  # of the cached property
        return scheduled

    @property
    def placements(self) -> Placements:
        return self.candidate.placements

    @cached_property
    def arranged(self) -> FillResult:
        """The schedule, recomputed here if another process computed its figures."""
        return self.candidate.fill.schedule_encoders(self.shift_s)


class ColocationSearch:
    """Search over the encoder placements around one LLM pipeline."""

    def __init__(self, context: PlanningContext, llm: PipelineCandidate) -> None:
        self.context, self.llm = context, llm
        self.rejected: list[RejectedLayout] = []
        self.considered = 0
        self._base: LlmTimeline | None = None
        self._scheduled: dict[ColocationCandidate, ScheduledCandidate] = {}  # common layouts
        self._ops_left = context.effort * MAX_SIMULATED_OPS
        self._known: set[object] = set()  # placements that were scheduled
        # Peak bytes of a rank over all layouts so far: without recomputation, and with the least memory.
        self._bytes_without_recompute = self._least_bytes = inf

    @property
    def has_layouts(self) -> bool:
        """True if any layout fits."""
        return bool(self._common_layouts)

    def schedule_common_layouts(self, below_s: float = inf) -> list[ScheduledCandidate]:
        """Schedules the most promising layouts, each for all encoders alike; returns the fastest first."""
        scheduled = sorted(self.schedule_layouts(MAX_LAYOUTS, below_s), key=_step_s)
        best = [(self, each) for each in scheduled[:MAX_SHIFTED_LAYOUTS]]
        shifted = schedule_on_all_cores(best, ColocationSearch._search_shift)
        self._ops_left -= sum(ops for _, ops in shifted)
        return sorted([*(each for each, _ in shifted), *scheduled[MAX_SHIFTED_LAYOUTS:]], key=_step_s)

    def schedule_layouts(self, most: int, below_s: float = inf) -> list[ScheduledCandidate]:
        """Schedules the `most` most promising layouts, each once, without a shift of the LLM.

        Layouts whose compute alone takes `below_s` or longer are left out.
        """
        promising = [candidate for candidate in self._common_layouts if candidate.work_s < below_s][:most]
        new = [candidate for candidate in promising if candidate not in self._scheduled]
        if new:
            self._shared_base(new[0])  # before processes part
        pairs = [(self, candidate) for candidate in new]
        results = schedule_on_all_cores(pairs, ColocationSearch._schedule)
        for candidate, (scheduled, ops) in zip(new, results, strict=True):
            if not self._scheduled or self._ops_left > 0:
                self._scheduled[candidate] = scheduled
                self._known.add(self._identity(scheduled.placements))
            self._ops_left -= ops
        return [self._scheduled[candidate] for candidate in promising if candidate in self._scheduled]

    def adds_no_recompute(self, scheduled: ScheduledCandidate) -> bool:
        """Returns whether encoders recompute no more than the job states."""
        least = dict(next(self.context.recompute_policies(self.context.job.model.encoders)))
        return all(chosen.recompute == least[name] for name, chosen in scheduled.placements.items())

    @property
    def added_bytes(self) -> list[float]:
        """Bytes that encoders add to the LLM's fullest rank: the least, its doubles, the most."""
        least = self._least_bytes - self.llm.peak_bytes
        most = self._bytes_without_recompute - self.llm.peak_bytes
        doubled = [least * 2**times for times in range(MAX_ROOM_DOUBLINGS)]
        return [size for size in doubled if size < most] + [most]

    def to_scheduled_layout(self, scheduled: ScheduledCandidate) -> ScheduledLayout:
        """Summarizes a candidate for reports."""
        return ScheduledLayout(
            layout=next(iter(scheduled.placements.values())).layout,
            module=self.context.encoder_names,
            step_s=scheduled.step_s,
            peak_bytes=scheduled.candidate.peak_bytes_bound,
            replayed=False,
        )

    # ------------------------------------------------------------------------ layouts

    @cached_property
    def _common_layouts(self) -> list[ColocationCandidate]:
        """Returns the most promising layouts that fit, each for all encoders alike."""
        layouts: list[Layout] = []
        for layout in common_encoder_layouts(self.context, self.llm.layout):
            self.considered += 1
            if isinstance(layout, RejectedLayout):
                self.rejected.append(layout)
            else:
                layouts.append(layout)
        names = [encoder.name for encoder in self.context.job.model.encoders]
        return self._fitting([dict.fromkeys(names, layout) for layout in layouts], MAX_LAYOUTS)

    def _fitting(self, choices: Iterable[Mapping[str, Layout]], most: int) -> list[ColocationCandidate]:
        """Returns the `most` most promising layouts that fit, each with the least recomputation that fits."""
        fitting: list[ColocationCandidate] = []
        for first, others in _most_promising_first(map(self.memory_ladder, choices)):
            ladder = [first, *others]
            self._bytes_without_recompute = min(self._bytes_without_recompute, ladder[0].peak_bytes_bound)
            fits = next((candidate for candidate in ladder if candidate.fits), None)
            smallest = fits or min(ladder, key=lambda candidate: candidate.peak_bytes_bound)
            self._least_bytes = min(self._least_bytes, smallest.peak_bytes_bound)
            if fits is not None:
                fitting.append(fits)
            else:
                self.rejected.append(smallest.reject_for_memory(smallest.peak_bytes_bound))
            if len(fitting) == most:
                break
        return fitting

    def memory_ladder(self, layouts: Mapping[str, Layout]) -> Iterator[ColocationCandidate]:
        """Yields candidates that need less and less memory, up to the first that fits.

        For every recomputation policy: all encoder microbatches resident, then a window of as many as fit.
        """
        for policy in self.context.recompute_policies(self.context.job.model.encoders):
            placements = {
                name: EncoderPlacement(
                    layout=layouts[name],
                    recompute=recompute,
                    pieces=self._pieces(name, layouts[name]),
                    split_backward=recompute != "full",
                )
                for name, recompute in policy
            }
            unbounded = self._candidate(placements)
            yield unbounded
            if unbounded.fits:
                return
            for window in self._windows[-1:]:
                bounded = max(unbounded.widest_window, window)
                yield self._candidate(
                    {name: replace(each, window=bounded) for name, each in placements.items()}
                )

    def _pieces(self, name: str, layout: Layout) -> int:
        """Returns one piece for each block of a TP group; two if there is one block, and images for both."""
        across = self.llm.layout.tp // layout.tp
        images = self.context.count_images(self.context.job.model.encoder(name), self.llm.sequences)
        return 2 if across == 1 and images >= 2 else across

    @cached_property
    def _windows(self) -> list[int]:
        """LLM microbatches whose encoder activations may be resident at a time, the larger window first.

        Twice as many as are in flight in the LLM cost no time, one more for every stage costs little.
        """
        least = peak_microbatches_in_flight(self.llm.order)
        return [n for n in (2 * least + 2, least + self.llm.layout.pp) if n < self.llm.microbatches]

    # ------------------------------------------------------------------------ evaluations

    def _candidate(self, placements: Placements) -> ColocationCandidate:
        return ColocationCandidate(self.context, self.llm, placements, self._shared_base)

    def _shared_base(self, candidate: ColocationCandidate) -> LlmTimeline:
        """Returns the LLM's own step, which is simulated once."""
        if self._base is None:
            self._base = LlmTimeline(candidate.header, self.llm.order)
        return self._base

    def _schedule(self, candidate: ColocationCandidate, shift_s: float = 0.0) -> ScheduledCandidate:
        self._ops_left -= len(candidate.fill.schedule)
        self._known.add(self._identity(candidate.placements))
        return ScheduledCandidate.of(candidate, shift_s)

    def _identity(self, placements: Placements) -> object:
        """Returns what tells placements apart, with layers per stage spelled out."""
        return tuple(
            replace(chosen, layers_per_stage=self._layers_per_stage(name, chosen))
            for name, chosen in placements.items()
        )

    def _layers_per_stage(self, name: str, chosen: EncoderPlacement) -> tuple[int, ...]:
        layers = self.context.job.model.encoder(name).stack.layers
        return chosen.layers_per_stage or split_layers_evenly(layers, chosen.layout.pp)

    def _is_new(self, placements: Placements) -> bool:
        """Returns whether placements were not scheduled yet, and may be."""
        return self._ops_left > 0 and self._identity(placements) not in self._known

    def _search_shift(self, unshifted: ScheduledCandidate) -> ScheduledCandidate:
        """Searches the shift of the LLM with the shortest step: the least that keeps encoders ahead.

        Where a step grows with the shift, it grows further with a larger one.
        """
        best, low_s = unshifted, 0.0
        high_s = min(unshifted.late_s, unshifted.candidate.forwards_ahead_s)
        for _ in range(SHIFT_HALVINGS if high_s > IGNORE_DELAY_SHARE * unshifted.step_s else 0):
            if self._ops_left <= 0:
                break
            middle = self._schedule(unshifted.candidate, (low_s + high_s) / 2)
            best = min(best, middle, key=_step_s)
            shift_s = middle.shift_s
            ahead = middle.late_s - shift_s < (high_s - low_s) / 2
            if not ahead and middle.step_s - unshifted.step_s > MAX_GROWTH * shift_s:
                break
            low_s, high_s = (low_s, shift_s) if ahead else (shift_s, high_s)
        return best

    # ------------------------------------------------------------------------ refinement

    def refine(self, scheduled: ScheduledCandidate) -> ScheduledCandidate:
        """Changes one property of the placements after another while the step gets shorter.

        In turn: separate layouts, split backwards, the assignment of microbatches, smaller microbatches, and
        layers per stage; then the window shrinks. For a copy of the search: the budget is for one candidate.
        """
        self._ops_left = self.context.effort * MAX_SIMULATED_OPS
        for change in (self._separate_layouts, self._toggle_split_backward, self._reassign_microbatches):
            scheduled = self._select_faster(scheduled, change(scheduled))
        scheduled = self._split_microbatches(scheduled)
        starts = scheduled, self._select_faster(scheduled, self._layers_by_traffic(scheduled))
        even = scheduled.step_s <= (1 + IGNORE_DELAY_SHARE) * starts[1].step_s
        levelled = min(map(self._level_stages, starts if even else starts[1:]), key=_step_s)
        return self._shrink_window(levelled)

    def _shrink_window(self, scheduled: ScheduledCandidate) -> ScheduledCandidate:
        """Takes the smallest window that costs at most IGNORE_SLOWDOWN_SHARE of the step."""
        for window in reversed(self._windows):
            fewer = {
                name: replace(chosen, window=window if not chosen.window else min(window, chosen.window))
                for name, chosen in scheduled.placements.items()
            }
            if not self._is_new(fewer):
                continue
            bounded = self._schedule(self._candidate(fewer), scheduled.shift_s)
            if bounded.step_s <= (1 + IGNORE_SLOWDOWN_SHARE) * scheduled.step_s:
                return bounded
        return scheduled

    def _select_faster(
        self,
        scheduled: ScheduledCandidate,
        changes: Iterable[Placements],
        within: float = SEARCH_SHIFT_WITHIN,
    ) -> ScheduledCandidate:
        """Returns the fastest of the changed placements that fit, or `scheduled` if none is faster.

        A change is scheduled with the same shift of the LLM first, and dropped if its step with it is more
        than `within` times the best.
        """
        for placements in changes:
            candidate = self._candidate(placements)
            if not self._is_new(placements) or not candidate.fits:
                continue
            same_shift = self._schedule(candidate, scheduled.shift_s)
            if same_shift.step_s < within * scheduled.step_s:
                shifted = self._search_shift(self._schedule(candidate))
                scheduled = min(scheduled, same_shift, shifted, key=_step_s)
        return scheduled

    def _separate_layouts(self, scheduled: ScheduledCandidate) -> Iterator[Placements]:
        """Yields placements in which one of several encoders has another layout."""
        layouts = {name: chosen.layout for name, chosen in scheduled.placements.items()}
        if len(layouts) > 1:
            for encoder in self.context.job.model.encoders:
                changed = [
                    {**layouts, encoder.name: layout}
                    for layout in valid_encoder_layouts(self.context, encoder, self.llm.layout)
                    if layout != layouts[encoder.name]
                ]
                yield from (candidate.placements for candidate in self._fitting(changed, 1))

    def _toggle_split_backward(self, scheduled: ScheduledCandidate) -> Iterator[Placements]:
        """Yields placements that split backwards into input and weight gradients, or no longer do."""
        yield {
            name: replace(chosen, split_backward=not chosen.split_backward)
            for name, chosen in scheduled.placements.items()
        }

    def _reassign_microbatches(self, scheduled: ScheduledCandidate) -> Iterator[Placements]:
        """Yields placements with other assignments of microbatches to pipelines, where they may help."""
        for change in scheduled.candidate.assignment_changes:
            yield {name: replace(chosen, **change) for name, chosen in scheduled.placements.items()}

    def _split_microbatches(self, scheduled: ScheduledCandidate) -> ScheduledCandidate:
        """Takes more and more pieces per microbatch, until MAX_SLOWER_COUNTS in a row are no faster.

        Smaller microbatches are ready earlier, so that the same shift of the LLM suffices for them.
        """
        slower = 0
        for placements in scheduled.candidate.placements_in_more_pieces(PIECES_PER_BLOCK):
            faster = self._select_faster(scheduled, [placements], within=1.0)
            slower = slower + 1 if faster is scheduled else 0
            scheduled = faster
            if slower == MAX_SLOWER_COUNTS:
                break
        return scheduled

    def _level_stages(self, scheduled: ScheduledCandidate) -> ScheduledCandidate:
        """Moves single layers from the stage that ends last to one that ends early, while that helps."""
        for _ in range(MAX_LAYER_MOVES):
            moves = (move for name in scheduled.placements for move in self._move_one_layer(scheduled, name))
            faster = next((move for move in moves if move.step_s < scheduled.step_s), None)
            if faster is None:
                break
            scheduled = faster
        return scheduled

    def _move_one_layer(self, scheduled: ScheduledCandidate, name: str) -> Iterator[ScheduledCandidate]:
        """Yields schedules with one layer moved from the last stage to end to each of the first two."""
        header, chosen = scheduled.candidate.header, scheduled.placements[name]
        stage_of = np.array(
            [header.ranks.stage_of(name, device) for device in range(header.ranks.num_classes)]
        )
        stages = header.modules[name].layout.pp
        ends_s = [scheduled.arranged.ends_s[stage_of == stage].max() for stage in range(stages)]
        counts = self._layers_per_stage(name, chosen)
        *earlier, last = np.argsort(ends_s).tolist()
        for taker in earlier[:2] if counts[last] > 1 else ():
            moved = replace(chosen, layers_per_stage=move_layer(counts, last, taker))
            placements = {**scheduled.placements, name: moved}
            candidate = self._candidate(placements)
            if self._is_new(placements) and candidate.fits:
                yield self._schedule(candidate, scheduled.shift_s)

    def _layers_by_traffic(self, scheduled: ScheduledCandidate) -> Iterator[Placements]:
        """Yields placements whose layers per stage minimize the delay by the encoders' parameter traffic."""
        placements = {}
        for name, chosen in scheduled.placements.items():
            encoder = self.context.job.model.encoder(name)
            layers = self.context.encoder_layers(encoder, chosen.layout, self.llm.sequences, chosen.recompute)
            counts = _split_layers_by_traffic(
                self.context, layers, scheduled.candidate.base, chosen.layout.pp
            )
            placements[name] = replace(chosen, layers_per_stage=counts)
        yield placements


Ladder = tuple[ColocationCandidate, Iterator[ColocationCandidate]]  # first candidate, those that need less


def _most_promising_first(ladders: Iterable[Iterator[ColocationCandidate]]) -> list[Ladder]:
    """Orders ladders by the busiest stage's seconds, but the best of every tp before the second of any.

    A small tp has less to do, a large one can hide more of it: only a schedule tells. No memory is counted.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    turns: list[tuple[int, int, Ladder]] = []
    starts = [(next(ladder), ladder) for ladder in ladders]
    for ladder in sorted(starts, key=lambda start: start[0].encoder_s):
        tp = tuple(chosen.layout.tp for chosen in ladder[0].placements.values())
        turns.append((seen[tp], len(turns), ladder))
        seen[tp] += 1
    return [ladder for _, _, ladder in sorted(turns, key=lambda turn: turn[:2])]


def _step_s(scheduled: ScheduledCandidate) -> float:
    return scheduled.step_s


def schedule_on_all_cores(
    starts: Sequence[tuple[ColocationSearch, Start]],
    method: Callable[[ColocationSearch, Start], ScheduledCandidate],
) -> list[tuple[ScheduledCandidate, float]]:
    """Returns what a method of a search returns for each start, and the ops that were simulated for it.

    Each is computed by a copy of its search, so that none knows what others find, on one core or two.
    """
    here: dict[int, ScheduledCandidate] = {}

    def schedule(place: int) -> tuple[Placements, dict[str, float], float]:
        search, start = starts[place]
        own = copy(search)
        own._known = set(search._known)
        found = here[place] = method(own, start)
        figures = {name: getattr(found, name) for name in ("shift_s", "step_s", "late_s", "lines")}
        return found.placements, figures, search._ops_left - own._ops_left

    cores = starts[0][0].context.cores if starts else 1
    results = compute_by_key(schedule, dict.fromkeys(range(len(starts)), 1.0), cores=cores)
    scheduled = []
    for place, (placements, figures, ops) in results.items():
        candidate = starts[place][0]._candidate(placements)
        known = here.get(place) or ScheduledCandidate(candidate=candidate, **figures)  # type: ignore[arg-type]
        scheduled.append((known, ops))
    return scheduled


# ---------------------------------------------------------------------------- layers per stage


def _split_layers_by_traffic(
    context: PlanningContext, layers: Sequence[PricedLayer], base: LlmTimeline, stages: int
) -> tuple[int, ...]:
    """Splits an encoder's inner layers over stages so that its parameter traffic delays the step least.

    Gathers of a stage run before the LLM's first forward there, reduces after its last backward; both share
    the NIC with the LLM's. Later stages begin later and end earlier: they have room for more layers. Starting
    from an even split, single layers move while the delay falls.
    """
    traffic = [context.parameter_traffic([layer]) for layer in layers]
    gathers_s = [0.0, *accumulate(part.gather_s for part in traffic)]  # of the first n layers
    reduces_s = [0.0, *accumulate(part.reduce_s for part in traffic)]
    edges = [base.compute_span_s(stage, stages) for stage in range(stages)]

    def delay_s(counts: tuple[int, ...]) -> tuple[float, float]:
        """Returns how far gathers delay the begin and reduces the end; then how uneven the ends are."""
        cuts = [0, *(1 + total for total in accumulate(counts[:-1])), len(layers)]
        begins_s, ends_s = [], []
        for (first, end), (free_s, over_s) in zip(pairwise(cuts), edges, strict=True):
            begins_s.append(gathers_s[end] - gathers_s[first] - free_s)
            ends_s.append(reduces_s[end] - reduces_s[first] + over_s)
        return max(begins_s) + max(ends_s), sum(end_s * end_s for end_s in ends_s)

    counts = split_layers_evenly(len(layers) - 2, stages)
    best = delay_s(counts)
    while True:
        neighbours = [move_layer(counts, a, b) for a, b in permutations(range(stages), 2) if counts[a] > 1]
        delay, neighbour = min(((delay_s(each), each) for each in neighbours), default=(best, counts))
        if delay >= best:
            return counts
        best, counts = delay, neighbour


def move_layer(counts: tuple[int, ...], giver: int, taker: int) -> tuple[int, ...]:
    """Returns the layers of every stage after one layer has moved from stage `giver` to stage `taker`."""
    return tuple(count - (at == giver) + (at == taker) for at, count in enumerate(counts))
