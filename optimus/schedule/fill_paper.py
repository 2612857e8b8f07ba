"""The paper's bubble scheduler (arXiv 2408.03505, section 4), step by step.

For each split of the microbatches over encoder pipelines:
  coarse    all encoder forwards before the LLM's compute, all backwards after it; what does not fit there
            delays the step
  fine      forward, then backward: take the pipeline on the critical path, move one of its microbatches,
            kernel by kernel, into the bubbles between LLM computations; check the dependencies; stop at the
            first failure
The split with the least latency is kept.

Backward is forward in a mirror: with time running from the end of the step to its beginning, encoder
backwards come first, kernels and stages are reversed, and "not before B_i" becomes "not after F_i". So one
function serves both directions, and only `DeviceBubbles` depends on the direction.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Ends = Sequence[Sequence[float]]  # by pipeline, each in the order in which it runs its microbatches
LatestDelay = Callable[[Ends], float]  # seconds by which the latest end exceeds its dependency point
TimedKernel = tuple[str, float]  # what a phase is ("compute", "launch" or "wait"), and its seconds
COMPUTE, LAUNCH, WAIT = "compute", "launch", "wait"
ROUNDING_S = 1e-12
_Room = tuple[list[float], list[float]]  # starts and ends of intervals


@dataclass(frozen=True, kw_only=True)
class Bubble:
    """Interval in which a device's compute lane is idle; `tp`: because LLM communication runs."""

    begin_s: float
    end_s: float
    tp: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceBubbles:
    """Idle time of one device, seen from one end of the step: time counts from that end to the middle.

    The LLM does not compute before `free_s`. `bubbles` are between its computations; `carriers` are intervals
    in which it computes and does not use its TP links.
    """

    free_s: float
    bubbles: Sequence[Bubble]
    carriers: Sequence[tuple[float, float]]

    _roomy: dict[float, _Room] = field(default_factory=dict)
    _carrying: dict[float, _Room] = field(default_factory=dict)

    def fit(self, seconds: float, now: float) -> float | None:
        """Returns the first time from `now` on at which a bubble has room for a kernel, if any."""
        if seconds not in self._roomy:
            spans = [(bubble.begin_s, bubble.end_s) for bubble in self.bubbles]
            self._roomy[seconds] = _long_enough(spans, seconds)
        return _first_fit(self._roomy[seconds], seconds, now)

    def carry(self, seconds: float, now: float) -> float | None:
        """Returns the first time at which communication can run: in a bubble not of TP, or under compute."""
        if seconds not in self._carrying:
            bubbles = [(bubble.begin_s, bubble.end_s) for bubble in self.bubbles if not bubble.tp]
            self._carrying[seconds] = _long_enough(sorted([*self.carriers, *bubbles]), seconds)
        return _first_fit(self._carrying[seconds], seconds, now)


def _long_enough(spans: Sequence[tuple[float, float]], seconds: float) -> _Room:
    """Returns starts and ends of the intervals in which `seconds` fit."""
    long = [span for span in spans if span[0] + seconds <= span[1]]
    return [begin for begin, _ in long], [end for _, end in long]


def _first_fit(room: _Room, seconds: float, now: float) -> float | None:
    """Returns `now` if enough of its interval is left, else the start of the next interval."""
    begins_s, ends_s = room
    at = bisect_right(ends_s, now)
    if at < len(ends_s) and max(begins_s[at], now) + seconds <= ends_s[at]:
        return max(begins_s[at], now)
    return begins_s[at + 1] if at + 1 < len(ends_s) else None


@dataclass(frozen=True, kw_only=True)
class _MovedMicrobatch:
    """Microbatch inside bubbles: start of every kernel by stage, and the end on the last stage."""

    begins_s: tuple[tuple[float, ...], ...]
    end_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderPipeline:
    """Encoder pipeline seen from one end of the step; stages in the order of the data flow there.

    Its stages run nothing of other pipelines: the place of its r-th moved microbatch does not depend on them,
    so it is packed once, and a split costs only a comparison of sorted times.
    """

    devices: Sequence[DeviceBubbles]
    kernels: Sequence[Sequence[TimedKernel]]  # of one microbatch
    seconds: Sequence[float]  # of one microbatch's op, simulated alone
    _moves: list[_MovedMicrobatch | None] = field(default_factory=list)
    _cursors_s: list[float] = field(default_factory=list)
    _coarse: dict[int, _CoarseSchedule] = field(default_factory=dict)

    def move(self, number: int) -> _MovedMicrobatch | None:
        """Returns the number-th microbatch that is moved into bubbles; None if there is no room."""
        while len(self._moves) <= number and None not in self._moves[-1:]:
            self._moves.append(self._pack_one())
        return self._moves[number] if number < len(self._moves) else None

    def _pack_one(self) -> _MovedMicrobatch | None:
        """Places the next microbatch after those that were moved before, upstream stages first."""
        cursors = list(self._cursors_s) or [device.free_s for device in self.devices]
        begins, arrived = [], 0.0
        for stage, device in enumerate(self.devices):
            packed = pack_kernels_into_bubbles(device, self.kernels[stage], max(cursors[stage], arrived))
            if packed is None:
                return None
            begins.append(packed[0])
            arrived = cursors[stage] = packed[1]
        self._cursors_s[:] = cursors
        return _MovedMicrobatch(begins_s=tuple(begins), end_s=arrived)

    def coarse(self, count: int) -> _CoarseSchedule:
        """Schedules `count` microbatches one after another before the LLM's compute."""
        if count not in self._coarse:
            busy = [0.0] * len(self.devices)
            ends, inside = [], 0.0
            for _ in range(count):
                arrived = 0.0
                for stage, (spent, device) in enumerate(zip(self.seconds, self.devices, strict=True)):
                    begin = max(busy[stage], arrived)
                    arrived = busy[stage] = begin + spent
                    inside += max(0.0, min(arrived, device.free_s) - begin)
                ends.append(arrived)
            over = [end - device.free_s for end, device in zip(busy, self.devices, strict=True)]
            overflow = max(over) if count else -float("inf")
            self._coarse[count] = _CoarseSchedule(ends_s=tuple(ends), overflow_s=overflow, inside_s=inside)
        return self._coarse[count]


@dataclass(frozen=True, kw_only=True)
class _CoarseSchedule:
    """Microbatches that run before the LLM: their ends, what does not fit there, and what does."""

    ends_s: tuple[float, ...]
    overflow_s: float
    inside_s: float  # seconds in the LLM's bubbles, summed over stages


def pack_kernels_into_bubbles(
    device: DeviceBubbles, kernels: Sequence[TimedKernel], now: float
) -> tuple[tuple[float, ...], float] | None:
    """Returns the starts of consecutive kernels in a device's bubbles and the end of the last; None: no room.

    Compute goes where it fits whole. Communication never goes into a TP bubble: it runs under LLM compute
    that is long enough, or inside another bubble.
    """
    begins: list[float] = []
    communicated = now  # collectives share the links: one after another
    for what, seconds in kernels:
        if what == WAIT:
            now = max(now, communicated)
        elif what == LAUNCH:
            begin = device.carry(seconds, max(now, communicated))
            if begin is None:
                return None
            communicated, now = begin + seconds, begin
        else:
            place = device.fit(seconds, now)
            if place is None:
                return None
            now = place
        begins.append(now)
        now += seconds if what == COMPUTE else 0.0
    return tuple(begins), max(now, communicated)


@dataclass(frozen=True, kw_only=True)
class BubbleFilling:
    """One direction of one split: how many microbatches of each pipeline moved, and the remaining delay."""

    pipelines: Sequence[EncoderPipeline]
    split: Sequence[int]
    moved: tuple[int, ...]
    delay_s: float  # of the LLM, by what did not fit
    coarse_delay_s: float  # before anything was moved
    ends_s: tuple[tuple[float, ...], ...]  # of every pipeline's microbatches, in the LLM's time

    def begins_s(self, pipeline: int, number: int, stage: int) -> tuple[float, ...]:
        """Returns the starts of the kernels of a pipeline's number-th moved microbatch on a stage."""
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
        """Seconds of all encoder work."""
        pairs = zip(self.pipelines, self.split, strict=True)
        return sum(count * sum(pipeline.seconds) for pipeline, count in pairs)


def fill_bubbles(
    pipelines: Sequence[EncoderPipeline], latest_delay_s: LatestDelay, split: Sequence[int]
) -> BubbleFilling:
    """Fills bubbles coarsely, then finely, for one split."""
    numbers = range(len(split))
    moved = [0] * len(split)
    before = [pipelines[j].coarse(split[j]) for j in numbers]  # microbatches before the LLM
    inside: list[list[float]] = [[] for _ in numbers]  # ends of microbatches moved into bubbles
    late = latest_delay_s([coarse.ends_s for coarse in before])
    delay = coarse_delay = max(0.0, late, *(coarse.overflow_s for coarse in before))
    while delay > 0.0:
        critical = max(numbers, key=lambda j: before[j].overflow_s)
        move = pipelines[critical].move(moved[critical]) if moved[critical] < split[critical] else None
        if move is None:
            break
        left = pipelines[critical].coarse(split[critical] - moved[critical] - 1)
        other_overflows_s = (before[j].overflow_s for j in numbers if j != critical)
        shorter = max(0.0, left.overflow_s, *other_overflows_s)
        candidate = [left if j == critical else before[j] for j in numbers]
        moves = [[*inside[j], move.end_s] if j == critical else inside[j] for j in numbers]
        shorter += max(0.0, latest_delay_s(_in_llm_time(candidate, moves, shorter)))
        if shorter > delay or latest_delay_s(_in_llm_time(candidate, moves, shorter)) > ROUNDING_S:
            break
        before, delay = candidate, shorter
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
    """Returns ends by pipeline: those before the LLM are `delay` earlier, those in bubbles stay."""
    pairs = zip(before, inside, strict=True)
    return tuple((*(end - delay for end in coarse.ends_s), *moved) for coarse, moved in pairs)


def subtract_kernels_from_bubbles(
    device: DeviceBubbles, kernels: Sequence[TimedKernel], begins: Sequence[float]
) -> DeviceBubbles:
    """Returns the bubbles of a device without the time that placed kernels take."""
    if not kernels:
        return device
    spans = [(begin, begin + seconds) for (_, seconds), begin in zip(kernels, begins, strict=True)]
    compute = [span for span, (what, _) in zip(spans, kernels, strict=True) if what == COMPUTE]
    launches = [span for span, (what, _) in zip(spans, kernels, strict=True) if what == LAUNCH]
    left = subtract_intervals([(bubble.begin_s, bubble.end_s) for bubble in device.bubbles], compute)
    return DeviceBubbles(
        free_s=device.free_s,
        bubbles=[Bubble(begin_s=begin, end_s=end, tp=device.bubbles[at].tp) for begin, end, at in left],
        carriers=[(begin, end) for begin, end, _ in subtract_intervals(device.carriers, launches)],
    )


def subtract_intervals(
    intervals: Sequence[tuple[float, float]], taken: Sequence[tuple[float, float]]
) -> list[tuple[float, float, int]]:
    """Returns what is left of intervals, with their indices, when others are cut out; both are sorted."""
    left, place = [], 0
    for number, (begin, end) in enumerate(intervals):
        while place < len(taken) and taken[place][1] <= begin:
            place += 1
        at = place
        while at < len(taken) and taken[at][0] < end:
            if taken[at][0] > begin:
                left.append((begin, taken[at][0], number))
            begin = max(begin, taken[at][1])
            at += 1
        if begin < end:
            left.append((begin, end, number))
    return left


# ---------------------------------------------------------------------------- global ordering


def latest_delay_in_any_order(points_s: Sequence[float], ends_s: Ends) -> float:
    """Returns by how much the latest end exceeds its F_i if any pipeline may feed any LLM microbatch.

    F_1 <= F_2 <= ...: the i-th encoder microbatch to end, of any pipeline, becomes LLM microbatch i. At most
    0 if all come in time.
    """
    return _late([end for pipeline in ends_s for end in pipeline], points_s)


def latest_delay_as_assigned(points_s: Sequence[Sequence[float]], ends_s: Ends) -> float:
    """Returns by how much the latest end exceeds its point if every pipeline has points of its own.

    A backward belongs to the LLM microbatch that its forward became. (Mirrored, an end is a start: no
    backward starts before B_i.)
    """
    return max(_late(ends, points) for ends, points in zip(ends_s, points_s, strict=True))


def _late(ends_s: Sequence[float], points_s: Sequence[float]) -> float:
    late = [end - point for end, point in zip(sorted(ends_s), points_s, strict=True)]
    return max(late, default=-float("inf"))


def assign_microbatches_by_end_time(ends_s: Ends) -> tuple[int, ...]:
    """Returns the pipeline that feeds each LLM microbatch: the i-th to end becomes microbatch i."""
    events = [
        (end, pipeline, number) for pipeline, ends in enumerate(ends_s) for number, end in enumerate(ends)
    ]
    return tuple(pipeline for _, pipeline, _ in sorted(events))
