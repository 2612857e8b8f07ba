"""The paper's bubble scheduler (arXiv 2408.03505, section 4), step by step.

For each split of the microbatches over encoder pipelines:
  coarse    all encoder forwards before the LLM's compute, all backwards after it; what does not fit there
            delays the step
  fine      forward, then backward: take the pipeline on the critical path, move one of its microbatches,
            kernel by kernel, into the bubbles between LLM computations; check the dependencies; stop at the
            first failure
The split with the least latency is kept.

Backward is forward in a mirror: with time running from the end of the step to its beginning, encoder
backwards come first, kernels and stages stand in reverse, and "not before B_i" becomes "not after F_i". So
one function serves both directions, and only `Side` knows which of them it looks at.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

TimedKernel = tuple[str, float]  # what a phase is ("compute", "launch" or "wait"), and its seconds
COMPUTE, LAUNCH, WAIT = "compute", "launch", "wait"
ROUNDING_S = 1e-12


@dataclass(frozen=True, kw_only=True)
class Bubble:
    """An interval in which a device's compute lane is idle; `tp`: because LLM communication runs."""

    begin_s: float
    end_s: float
    tp: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceBubbles:
    """One end of the step on one device: time counts from that end towards the middle.

    `free_s`: until then the LLM does not compute. `bubbles` lie between its computations; `carriers` are
    intervals in which it computes and leaves its TP links alone.
    """

    free_s: float
    bubbles: Sequence[Bubble]
    carriers: Sequence[tuple[float, float]]

    _roomy: dict[float, _Room] = field(default_factory=dict)
    _carrying: dict[float, _Room] = field(default_factory=dict)

    def fit(self, seconds: float, now: float) -> float | None:
        """The first moment from `now` on at which a bubble has room for a kernel."""
        if seconds not in self._roomy:
            spans = [(bubble.begin_s, bubble.end_s) for bubble in self.bubbles]
            self._roomy[seconds] = _Room.of(spans, seconds)
        return self._roomy[seconds].first(seconds, now)

    def carry(self, seconds: float, now: float) -> float | None:
        """The first moment at which communication may run: in a bubble that is not TP's, or under compute."""
        if seconds not in self._carrying:
            bubbles = [(bubble.begin_s, bubble.end_s) for bubble in self.bubbles if not bubble.tp]
            self._carrying[seconds] = _Room.of(sorted([*self.carriers, *bubbles]), seconds)
        return self._carrying[seconds].first(seconds, now)


@dataclass(frozen=True, kw_only=True)
class _Room:
    """The intervals that are long enough for one size."""

    begins_s: list[float]
    ends_s: list[float]

    @classmethod
    def of(cls, spans: Sequence[tuple[float, float]], seconds: float) -> _Room:
        long = [span for span in spans if span[0] + seconds <= span[1]]
        return cls(begins_s=[begin for begin, _ in long], ends_s=[end for _, end in long])

    def first(self, seconds: float, now: float) -> float | None:
        """In the interval that `now` lies in if enough of it is left, else at the begin of the next."""
        at = bisect_right(self.ends_s, now)
        if at < len(self.ends_s) and max(self.begins_s[at], now) + seconds <= self.ends_s[at]:
            return max(self.begins_s[at], now)
        return self.begins_s[at + 1] if at + 1 < len(self.ends_s) else None


@dataclass(frozen=True, kw_only=True)
class _MovedMicrobatch:
    """One microbatch inside bubbles: begin of every kernel, by stage, and when the last stage ends."""

    begins_s: tuple[tuple[float, ...], ...]
    end_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderPipeline:
    """One encoder pipeline seen from one end of the step, by stage in the order in which data flows there.

    Its own stages hold nothing of another pipeline's: where its r-th moved microbatch goes does not depend on
    the others, so it is packed once, and a split costs only a comparison of sorted times.
    """

    sides: Sequence[DeviceBubbles]
    kernels: Sequence[Sequence[TimedKernel]]  # of one microbatch
    seconds: Sequence[float]  # of one microbatch's op, played alone
    _moves: list[_MovedMicrobatch | None] = field(default_factory=list)
    _cursors_s: list[float] = field(default_factory=list)
    _coarse: dict[int, _CoarseSchedule] = field(default_factory=dict)

    def move(self, number: int) -> _MovedMicrobatch | None:
        """Where the number-th microbatch goes that is moved into bubbles; None if it finds no room."""
        while len(self._moves) <= number and None not in self._moves[-1:]:
            self._moves.append(self._pack_one())
        return self._moves[number] if number < len(self._moves) else None

    def _pack_one(self) -> _MovedMicrobatch | None:
        """The next microbatch, behind those that were moved before: upstream stages first."""
        cursors = list(self._cursors_s) or [side.free_s for side in self.sides]
        begins, arrived = [], 0.0
        for stage, side in enumerate(self.sides):
            packed = pack_kernels_into_bubbles(side, self.kernels[stage], max(cursors[stage], arrived))
            if packed is None:
                return None
            begins.append(packed[0])
            arrived = cursors[stage] = packed[1]
        self._cursors_s[:] = cursors
        return _MovedMicrobatch(begins_s=tuple(begins), end_s=arrived)

    def coarse(self, count: int) -> _CoarseSchedule:
        """`count` microbatches before the LLM's compute, one after another."""
        if count not in self._coarse:
            busy = [0.0] * len(self.sides)
            ends, inside = [], 0.0
            for _ in range(count):
                arrived = 0.0
                for stage, (spent, side) in enumerate(zip(self.seconds, self.sides, strict=True)):
                    begin = max(busy[stage], arrived)
                    arrived = busy[stage] = begin + spent
                    inside += max(0.0, min(arrived, side.free_s) - begin)
                ends.append(arrived)
            over = [end - side.free_s for end, side in zip(busy, self.sides, strict=True)]
            overflow = max(over) if count else -float("inf")
            self._coarse[count] = _CoarseSchedule(ends_s=tuple(ends), overflow_s=overflow, inside_s=inside)
        return self._coarse[count]


@dataclass(frozen=True, kw_only=True)
class _CoarseSchedule:
    """Microbatches that run before the LLM: when each ends, what does not fit there, and what does."""

    ends_s: tuple[float, ...]
    overflow_s: float
    inside_s: float  # seconds in the LLM's bubbles, summed over stages


def pack_kernels_into_bubbles(
    side: DeviceBubbles, kernels: Sequence[TimedKernel], now: float
) -> tuple[tuple[float, ...], float] | None:
    """Begins of consecutive kernels in a device's bubbles, and when the last one ends; None: no room.

    Compute goes where it fits whole. Communication never goes into a TP bubble: it runs under LLM compute
    that is long enough, or inside another bubble.
    """
    begins: list[float] = []
    communicated = now  # collectives share the links: one after another
    for what, seconds in kernels:
        if what == WAIT:
            now = max(now, communicated)
        elif what == LAUNCH:
            begin = side.carry(seconds, max(now, communicated))
            if begin is None:
                return None
            communicated, now = begin + seconds, begin
        else:
            place = side.fit(seconds, now)
            if place is None:
                return None
            now = place
        begins.append(now)
        now += seconds if what == COMPUTE else 0.0
    return tuple(begins), max(now, communicated)


@dataclass(frozen=True, kw_only=True)
class BubbleFilling:
    """One direction of one split: how many microbatches of each pipeline moved, and what is left."""

    pipelines: Sequence[EncoderPipeline]
    split: Sequence[int]
    moved: tuple[int, ...]
    delay_s: float  # of the LLM, by what did not fit
    coarse_delay_s: float  # before anything was moved
    ends_s: tuple[tuple[float, ...], ...]  # of every pipeline's microbatches, in the LLM's time

    def begins_s(self, pipeline: int, number: int, stage: int) -> tuple[float, ...]:
        """Begin of every kernel of a pipeline's number-th moved microbatch on one of its stages."""
        move = self.pipelines[pipeline].move(number)
        assert move is not None
        return move.begins_s[stage]

    def inside_s(self, *, coarse: bool) -> float:
        """Seconds of encoder work in the LLM's bubbles, before or after the fine part."""
        total = 0.0
        for pipeline, count, moved in zip(self.pipelines, self.split, self.moved, strict=True):
            fine = 0 if coarse else moved
            total += pipeline.coarse(count - fine).inside_s + fine * sum(pipeline.seconds)
        return total

    @property
    def work_s(self) -> float:
        """Seconds of encoder work in all."""
        pairs = zip(self.pipelines, self.split, strict=True)
        return sum(count * sum(pipeline.seconds) for pipeline, count in pairs)


def fill_bubbles(pipelines: Sequence[EncoderPipeline], points: Points, split: Sequence[int]) -> BubbleFilling:
    """Coarse, then fine, for one split; `points` are the F_i, or in the mirror the B_i."""
    numbers = range(len(split))
    moved = [0] * len(split)
    before = [pipelines[j].coarse(split[j]) for j in numbers]  # what stands before the LLM
    inside: list[list[float]] = [[] for _ in numbers]  # ends of what was moved into bubbles
    late = points.late_s([each.ends_s for each in before])
    delay = coarse_delay = max(0.0, late, *(each.overflow_s for each in before))
    while delay > 0.0:
        critical = max(numbers, key=lambda j: before[j].overflow_s)
        move = pipelines[critical].move(moved[critical]) if moved[critical] < split[critical] else None
        if move is None:
            break
        left = pipelines[critical].coarse(split[critical] - moved[critical] - 1)
        others = (before[j].overflow_s for j in numbers if j != critical)
        shorter = max(0.0, left.overflow_s, *others)
        tried = [left if j == critical else before[j] for j in numbers]
        moves = [[*inside[j], move.end_s] if j == critical else inside[j] for j in numbers]
        shorter += max(0.0, points.late_s(_in_llm_time(tried, moves, shorter)))
        if shorter > delay or points.late_s(_in_llm_time(tried, moves, shorter)) > ROUNDING_S:
            break
        before, delay = tried, shorter
        inside[critical].append(move.end_s)
        moved[critical] += 1
    return BubbleFilling(
        pipelines=pipelines,
        split=split,
        moved=tuple(moved),
        delay_s=delay,
        coarse_delay_s=coarse_delay,
        ends_s=_in_llm_time(before, inside, delay),
    )


def _in_llm_time(
    before: Sequence[_CoarseSchedule], inside: Sequence[Sequence[float]], delay: float
) -> tuple[tuple[float, ...], ...]:
    """Ends by pipeline: what stands before the LLM is `delay` further away, what was moved is where it is."""
    pairs = zip(before, inside, strict=True)
    return tuple((*(end - delay for end in coarse.ends_s), *moved) for coarse, moved in pairs)


def subtract_kernels(
    side: DeviceBubbles, kernels: Sequence[TimedKernel], begins: Sequence[float]
) -> DeviceBubbles:
    """A side without the time that placed kernels take."""
    if not kernels:
        return side
    spans = [(begin, begin + seconds) for (_, seconds), begin in zip(kernels, begins, strict=True)]
    compute = [span for span, (what, _) in zip(spans, kernels, strict=True) if what == COMPUTE]
    launches = [span for span, (what, _) in zip(spans, kernels, strict=True) if what == LAUNCH]
    left = subtract_intervals([(bubble.begin_s, bubble.end_s) for bubble in side.bubbles], compute)
    return DeviceBubbles(
        free_s=side.free_s,
        bubbles=[Bubble(begin_s=begin, end_s=end, tp=side.bubbles[at].tp) for begin, end, at in left],
        carriers=[(begin, end) for begin, end, _ in subtract_intervals(side.carriers, launches)],
    )


def subtract_intervals(
    intervals: Sequence[tuple[float, float]], taken: Sequence[tuple[float, float]]
) -> list[tuple[float, float, int]]:
    """What is left of intervals when others, both in order, are taken out, and of which of them it is."""
    found, place = [], 0
    for number, (begin, end) in enumerate(intervals):
        while place < len(taken) and taken[place][1] <= begin:
            place += 1
        at = place
        while at < len(taken) and taken[at][0] < end:
            if taken[at][0] > begin:
                found.append((begin, taken[at][0], number))
            begin = max(begin, taken[at][1])
            at += 1
        if begin < end:
            found.append((begin, end, number))
    return found


Ends = Sequence[Sequence[float]]  # by pipeline, each in the order in which it runs its microbatches


class Points(Protocol):
    """The LLM's dependency points."""

    def late_s(self, ends_s: Ends) -> float:
        """By how much the latest of all ends is behind its point; at most 0 if all come in time."""
        ...


class Interchangeable:
    """F_1 <= F_2 <= ...: the i-th encoder microbatch to end, of any pipeline, becomes LLM microbatch i."""

    def __init__(self, points_s: Sequence[float]) -> None:
        self._points = list(points_s)

    def late_s(self, ends_s: Ends) -> float:
        return _late([end for own in ends_s for end in own], self._points)


class Assigned:
    """Points of every pipeline's own microbatches: a backward is of what its forward became.

    (In the mirror an end is a begin: no backward begins before B_i.)
    """

    def __init__(self, points_s: Sequence[Sequence[float]]) -> None:
        self._points = points_s

    def late_s(self, ends_s: Ends) -> float:
        return max(_late(own, points) for own, points in zip(ends_s, self._points, strict=True))


def _late(ends_s: Sequence[float], points_s: Sequence[float]) -> float:
    late = [end - point for end, point in zip(sorted(ends_s), points_s, strict=True)]
    return max(late, default=-float("inf"))


def assign_microbatches_by_end_time(ends_s: Ends) -> tuple[int, ...]:
    """The pipeline that feeds each LLM microbatch: the i-th to end becomes microbatch i."""
    events = [
        (end, pipeline, number) for pipeline, ends in enumerate(ends_s) for number, end in enumerate(ends)
    ]
    return tuple(pipeline for _, pipeline, _ in sorted(events))
