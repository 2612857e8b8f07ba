"""Searches layouts, pieces and layers of every encoder beside one LLM pipeline, scheduled by `fill`.

Budgets are counts of evaluations and of the ops in them, so that the same job gives the same plan on every
machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, permutations
from math import inf

import numpy as np

from optimus.cost.priced_layer import PricedLayer
from optimus.job.layout import Layout
from optimus.planner.context import PlanningContext
from optimus.planner.filled_plan import RejectedLayout, ScheduledLayout
from optimus.planner.layouts import common_encoder_layouts, valid_encoder_layouts
from optimus.planner.systems.colocated_plan import split_layers_evenly
from optimus.planner.systems.colocation_candidate import ColocationCandidate, EncoderPlacement
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.schedule.fill import FillResult
from optimus.schedule.llm_timeline import LlmTimeline
from optimus.schedule.pipeline_orders import peak_microbatches_in_flight
from optimus.schedule.pipeline_schedule import price_parameter_traffic

MOST_LAYOUTS = 6  # scheduled beside one LLM pipeline, the most promising first
MOST_SHIFTED = 2  # of them with other shifts of the LLM
HALVINGS = 3  # of the shift of the LLM
MOST_MOVES = 6  # of a layer from one stage to another
FAR = 1.01  # behind, with the same shift of the LLM: not looked at further
NOTHING = 2e-4  # share of a step by which it may become longer if less memory is held
MOST_OPS = 3_000_000  # played beside one LLM pipeline, and as many again to refine what was found
MOST_DOUBLED = 4  # times that an LLM pipeline is asked to leave encoders twice the room
LITTLE = 2e-3  # share of a step: delays below it are not worth a search


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduledCandidate:
    """A way to lay encoders beside the LLM, and the best arrangement that was found for it."""

    trial: ColocationCandidate
    arranged: FillResult

    @property
    def beside(self) -> Mapping[str, EncoderPlacement]:
        return self.trial.beside

    @cached_property
    def step_s(self) -> float:
        return self.trial.step_s(self.arranged)


class ColocationSearch:
    """Everything that is tried beside one LLM pipeline."""

    def __init__(self, context: PlanningContext, llm: PipelineCandidate) -> None:
        self.context, self.llm = context, llm
        self.rejected: list[RejectedLayout] = []
        self.considered = 0
        self._base: LlmTimeline | None = None
        self._ops_left = MOST_OPS
        self._kept_bytes = self._least_bytes = inf  # of a rank: if nothing is made again, and at least

    def tried(self) -> list[ScheduledCandidate]:
        """The most promising ways that fit by their bytes, one layout for all encoders, the fastest first."""
        found: list[ScheduledCandidate] = []
        for trial in self._layouts():
            if not found or self._ops_left > 0:
                found.append(self._arranged(trial))
        found.sort(key=_step_s)
        shifted = [self._shifted(each) for each in found[:MOST_SHIFTED]]
        return sorted([*shifted, *found[MOST_SHIFTED:]], key=_step_s)

    def keeps_all(self, tried: ScheduledCandidate) -> bool:
        """Whether encoders make no more again than they are told to."""
        least = dict(next(self.context.policies(self.context.job.model.encoders)))
        return all(chosen.recompute == least[name] for name, chosen in tried.beside.items())

    @property
    def added_bytes(self) -> list[float]:
        """What encoders add to the LLM's fullest rank: at least, and more up to all they may keep."""
        least, kept = (each - self.llm.peak_bytes for each in (self._least_bytes, self._kept_bytes))
        return [least * 2**doubled for doubled in range(MOST_DOUBLED) if least * 2**doubled < kept] + [kept]

    def as_layout(self, tried: ScheduledCandidate) -> ScheduledLayout:
        """For those who look at what was tried."""
        return ScheduledLayout(
            layout=next(iter(tried.beside.values())).layout,
            module=self.context.encoder_names,
            step_s=tried.step_s,
            peak_bytes=tried.trial.most_bytes,
            replayed=False,
        )

    # ------------------------------------------------------------------------ layouts

    def _layouts(self) -> list[ColocationCandidate]:
        """Layouts common to all encoders, each with what costs least time and fits."""
        found: list[Layout] = []
        for layout in common_encoder_layouts(self.context, self.llm.layout):
            self.considered += 1
            if isinstance(layout, RejectedLayout):
                self.rejected.append(layout)
            else:
                found.append(layout)
        names = [encoder.name for encoder in self.context.job.model.encoders]
        return self._fitting({str(layout): dict.fromkeys(names, layout) for layout in found}, MOST_LAYOUTS)

    def _fitting(self, ways: Mapping[str, Mapping[str, Layout]], most: int) -> list[ColocationCandidate]:
        """The most promising of these ways that fit, each with what costs least time."""
        ladders = [list(self.ladder(layouts)) for layouts in ways.values()]
        fitting: list[ColocationCandidate] = []
        for ladder in _promising(ladders):
            self._kept_bytes = min(self._kept_bytes, ladder[0].most_bytes)
            found = next((trial for trial in ladder if trial.fits), None)
            frugal = found or min(ladder, key=lambda trial: trial.most_bytes)
            self._least_bytes = min(self._least_bytes, frugal.most_bytes)
            if found is not None:
                fitting.append(found)
            else:
                self.rejected.append(frugal.too_large(frugal.most_bytes))
            if len(fitting) == most:
                break
        return fitting

    def ladder(self, layouts: Mapping[str, Layout]) -> Iterator[ColocationCandidate]:
        """With all kept, then as many microbatches at a time as fit, then more and more made again."""
        for policy in self.context.policies(self.context.job.model.encoders):
            chosen = {
                name: EncoderPlacement(
                    layout=layouts[name],
                    recompute=recompute,
                    pieces=self._pieces(name, layouts[name]),
                    split=recompute != "full",
                )
                for name, recompute in policy
            }
            whole = self._trial(chosen)
            yield whole
            if whole.fits:
                return
            for window in self._windows[-1:]:
                bounded = max(whole.widest_window, window)
                yield self._trial({name: replace(each, window=bounded) for name, each in chosen.items()})

    def _pieces(self, name: str, layout: Layout) -> int:
        """One for each block of a TP group; two if there is only one, and images for both."""
        across = self.llm.layout.tp // layout.tp
        images = self.context.images(self.context.job.model.encoder(name), self.llm.sequences)
        return 2 if across == 1 and images >= 2 else across

    @cached_property
    def _windows(self) -> list[int]:
        """LLM microbatches of which an encoder may keep something at a time.

        Twice as many as are in flight in the LLM cost no time, one more for every stage costs little.
        """
        least = peak_microbatches_in_flight(self.llm.order)
        return [n for n in (2 * least + 2, least + self.llm.layout.pp) if n < self.llm.microbatches]

    # ------------------------------------------------------------------------ evaluations

    def _trial(self, beside: Mapping[str, EncoderPlacement]) -> ColocationCandidate:
        return ColocationCandidate(self.context, self.llm, beside, self._shared_base)

    def _shared_base(self, trial: ColocationCandidate) -> LlmTimeline:
        """The LLM's own step, played once."""
        if self._base is None:
            self._base = LlmTimeline(trial.header, self.llm.order)
        return self._base

    def _arranged(self, trial: ColocationCandidate, shift_s: float = 0.0) -> ScheduledCandidate:
        self._ops_left -= len(trial.fill.schedule)
        return ScheduledCandidate(trial=trial, arranged=trial.fill.arrange(shift_s))

    def _shifted(self, unshifted: ScheduledCandidate) -> ScheduledCandidate:
        """Arranged with the best shift of the LLM: the least that keeps encoders ahead."""
        best, low_s, high_s = unshifted, 0.0, unshifted.arranged.late_s
        for _ in range(HALVINGS if high_s > LITTLE * unshifted.arranged.step_s else 0):
            if self._ops_left <= 0:
                break
            middle = self._arranged(unshifted.trial, (low_s + high_s) / 2)
            best = min(best, middle, key=_step_s)
            shift_s = middle.arranged.shift_s
            ahead = middle.arranged.late_s - shift_s < (high_s - low_s) / 2
            low_s, high_s = (low_s, shift_s) if ahead else (shift_s, high_s)
        return best

    # ------------------------------------------------------------------------ refinement

    def refined(self, tried: ScheduledCandidate) -> ScheduledCandidate:
        """With layouts apart, other numbers of layers on stages, and smaller pieces, while that helps."""
        self._ops_left = MOST_OPS
        for change in (self._apart, self._split, self._dealt, self._cut_again, self._cut_again):
            tried = self._faster(tried, change(tried))
        starts = tried, self._faster(tried, self._counted(tried))
        even = tried.step_s <= (1 + LITTLE) * starts[1].step_s
        return self._frugal(min(map(self._levelled, starts if even else starts[1:]), key=_step_s))

    def _frugal(self, tried: ScheduledCandidate) -> ScheduledCandidate:
        """With the smallest window that costs nearly nothing, where more is kept."""
        for window in reversed(self._windows):
            fewer = {
                name: replace(chosen, window=window if not chosen.window else min(window, chosen.window))
                for name, chosen in tried.beside.items()
            }
            if self._ops_left <= 0:
                break
            bounded = self._arranged(self._trial(fewer), tried.arranged.shift_s)
            if bounded.step_s <= (1 + NOTHING) * tried.step_s:
                return bounded
        return tried

    def _faster(
        self, tried: ScheduledCandidate, ways: Iterable[Mapping[str, EncoderPlacement]]
    ) -> ScheduledCandidate:
        """The best of these ways, if it fits and is faster than what is there.

        With the same shift of the LLM first: who is far behind with it is not looked at further.
        """
        for beside in ways:
            trial = self._trial(beside)
            if not trial.fits or self._ops_left <= 0:
                continue
            same = self._arranged(trial, tried.arranged.shift_s)
            if same.step_s < FAR * tried.step_s:
                tried = min(tried, same, self._shifted(self._arranged(trial)), key=_step_s)
        return tried

    def _apart(self, tried: ScheduledCandidate) -> Iterator[Mapping[str, EncoderPlacement]]:
        """One of several encoders in another layout."""
        layouts = {name: chosen.layout for name, chosen in tried.beside.items()}
        if len(layouts) > 1:
            for encoder in self.context.job.model.encoders:
                own = {
                    str(layout): {**layouts, encoder.name: layout}
                    for layout in valid_encoder_layouts(self.context, encoder, self.llm.layout)
                    if layout != layouts[encoder.name]
                }
                yield from (trial.beside for trial in self._fitting(own, 1))

    def _split(self, tried: ScheduledCandidate) -> Iterator[Mapping[str, EncoderPlacement]]:
        """Backwards in one, or apart where they are not."""
        yield {name: replace(chosen, split=not chosen.split) for name, chosen in tried.beside.items()}

    def _dealt(self, tried: ScheduledCandidate) -> Iterator[Mapping[str, EncoderPlacement]]:
        """Microbatches dealt to pipelines in other ways, where that may help."""
        for change in tried.trial.other_deals:
            yield {name: replace(chosen, **change) for name, chosen in tried.beside.items()}

    def _cut_again(self, tried: ScheduledCandidate) -> Iterator[Mapping[str, EncoderPlacement]]:
        """In pieces of half the size, where there are images for them."""
        finer = {name: replace(chosen, pieces=2 * chosen.pieces) for name, chosen in tried.beside.items()}
        if tried.trial.may_cut:
            yield finer

    def _levelled(self, tried: ScheduledCandidate) -> ScheduledCandidate:
        """Layers moved one by one from the stage that ends last to one that ends early, while that helps."""
        for _ in range(MOST_MOVES):
            moves = (found for name in tried.beside for found in self._moved(tried, name))
            better = next((found for found in moves if found.step_s < tried.step_s), None)
            if better is None:
                break
            tried = better
        return tried

    def _moved(self, tried: ScheduledCandidate, name: str) -> Iterator[ScheduledCandidate]:
        """One layer of an encoder from its last stage to end to each of the two that end first."""
        header, chosen = tried.trial.header, tried.beside[name]
        stage_of = np.array(
            [header.ranks.stage_of(name, device) for device in range(header.ranks.num_classes)]
        )
        stages = header.modules[name].layout.pp
        ends = [tried.arranged.ends_s[stage_of == stage].max() for stage in range(stages)]
        inner = self.context.job.model.encoder(name).stack.layers
        counts = chosen.counts or split_layers_evenly(inner, stages)
        *others, last = np.argsort(ends).tolist()
        for taker in others[:2] if counts[last] > 1 else ():
            beside = {**tried.beside, name: replace(chosen, counts=move_layer(counts, last, taker))}
            trial = self._trial(beside)
            if self._ops_left > 0 and trial.fits:
                yield self._arranged(trial, tried.arranged.shift_s)

    def _counted(self, tried: ScheduledCandidate) -> Iterator[Mapping[str, EncoderPlacement]]:
        """Layers on stages by what their traffic leaves open."""
        found = {}
        for name, chosen in tried.beside.items():
            encoder = self.context.job.model.encoder(name)
            layers = self.context.encoder_layers(encoder, chosen.layout, self.llm.sequences, chosen.recompute)
            counts = _split_layers_by_traffic(self.context, layers, tried.trial.base, chosen.layout.pp)
            found[name] = replace(chosen, counts=counts)
        yield found


def _promising(ladders: Sequence[Sequence[ColocationCandidate]]) -> list[Sequence[ColocationCandidate]]:
    """By the busiest stage's seconds, but the best of every tp before the second of any.

    A small tp has less to do, a large one can hide more of it: only a schedule tells.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    turns: list[tuple[int, int, Sequence[ColocationCandidate]]] = []
    for ladder in sorted(ladders, key=lambda ladder: ladder[0].encoder_s):
        tp = tuple(chosen.layout.tp for chosen in ladder[0].beside.values())
        turns.append((seen[tp], len(turns), ladder))
        seen[tp] += 1
    return [ladder for _, _, ladder in sorted(turns, key=lambda turn: turn[:2])]


def _step_s(made: ScheduledCandidate) -> float:
    return made.step_s


def _split_layers_by_traffic(
    context: PlanningContext, layers: Sequence[PricedLayer], base: LlmTimeline, stages: int
) -> tuple[int, ...]:
    """Inner layers of every stage: single layers are moved while the delay falls."""
    precision = context.job.model.precision
    traffic = [price_parameter_traffic([layer], context.cost_model, precision) for layer in layers]
    gathers = [0.0, *accumulate(part.gather_s for part in traffic)]
    reduces = [0.0, *accumulate(part.reduce_s for part in traffic)]
    edges = [base.edges_s(stage, stages) for stage in range(stages)]

    def delay(counts: tuple[int, ...]) -> tuple[float, float]:
        """By how much gathers delay the beginning and reduces the end; then how uneven the ends are."""
        cuts = [0, *(1 + total for total in accumulate(counts[:-1])), len(layers)]
        lates = [
            gathers[b] - gathers[a] - free for (a, b), (free, _) in zip(pairwise(cuts), edges, strict=True)
        ]
        ends = [
            reduces[b] - reduces[a] + over for (a, b), (_, over) in zip(pairwise(cuts), edges, strict=True)
        ]
        return max(lates) + max(ends), sum(end * end for end in ends)

    counts = split_layers_evenly(len(layers) - 2, stages)
    best = delay(counts)
    while True:
        nearby = [move_layer(counts, a, b) for a, b in permutations(range(stages), 2) if counts[a] > 1]
        found = min(((delay(each), each) for each in nearby), default=(best, counts))
        if found[0] >= best:
            return counts
        best, counts = found


def move_layer(counts: tuple[int, ...], giver: int, taker: int) -> tuple[int, ...]:
    """With one layer taken from one stage and given to another."""
    return tuple(count - (at == giver) + (at == taker) for at, count in enumerate(counts))
