"""Shortens a schedule by justification: ops shift back and forth between its two ends.

Each pass lets ops start, one by one, as early as their dependencies and a gap on their lanes allow; a pass
over reversed time pushes them to the end first. Neither lengthens the step (justification: Valls et al.,
EJOR 165, 2005). Further rounds begin with slightly disturbed starts. Unlike the simulator's event loop, this
looks ahead: an op may delay others that are ready if the step becomes shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimus.compiled import njit_cached
from optimus.ir.op import NUM_LANES, Floats, Ints, OpKind, Schedule
from optimus.schedule.op_times import OrderColumns
from optimus.schedule.pipeline_orders import PipelineOp, TimedOrder
from optimus.schedule.schedule_builder import edges_to_csr

ORDER_DISTURBANCE_SHARES = (0.05, 0.1)  # of a start, as shares of the step: drawn at random
DISTURBANCE_SHARES = (0.05, 0.1, 0.2)  # the same, used in turn
MAX_GAPS_SEARCHED = 64  # on one lane for one line: large schedules would take too long
UNLIMITED_GAPS = 1 << 30
CsrDelays = tuple[Ints, Ints, Floats]  # dependencies of every node: offsets, nodes, seconds after their end
CsrLanes = tuple[Ints, Ints, int]  # lanes of every node: offsets, lanes; and the number of lanes

# ---------------------------------------------------------------------------- ops of a pipeline


def shorten_pipeline_order(
    draft: TimedOrder,
    *,
    rounds: int,
    random: Random,
    enough_s: float,
    accept: Callable[[OrderColumns], bool],
) -> TimedOrder:
    """Returns the shortest acceptable order of all rounds, or the first that takes at most `enough_s`."""
    graph = _OrderGraph(draft)
    starts, step_s = np.array([draft.starts[op] for op in graph.ops]), draft.step_s
    accepted = False
    for number in range(rounds):
        if step_s <= enough_s:
            break
        by_s = random.choice(ORDER_DISTURBANCE_SHARES) * step_s if number else 0.0
        shifted, shifted_s = graph.justified(graph.disturbed(starts, by_s, random))
        if shifted_s <= step_s and accept(graph.columns(shifted)):
            accepted, starts, step_s = True, shifted, shifted_s
    return graph.draft(starts, step_s) if accepted else draft


class _OrderGraph:
    """Graph of ops, numbered so that each comes after the one op it waits for."""

    def __init__(self, draft: TimedOrder) -> None:
        self._times = times = draft.times
        self.ops: list[tuple[int, PipelineOp]] = [
            (stage, op) for stage, op in draft.starts if (stage, op.kind, op.chunk) == (0, OpKind.FORWARD, 0)
        ]
        before = [-1] * len(self.ops)  # the op that each waits for
        delays_s = [0.0] * len(self.ops)  # and for how long after its end
        for number, (stage, op) in enumerate(self.ops):  # grows as followers are found
            for after_s, follower_stage, follower in times.followers(stage, op):
                self.ops.append((follower_stage, follower))
                before.append(number)
                delays_s.append(after_s)
        count = len(self.ops)
        self._before, delay_s = np.array(before, np.int64), np.array(delays_s)
        waits = np.flatnonzero(self._before >= 0)
        edges = np.stack([waits, self._before[waits]], axis=1)
        self._waits: CsrDelays = (*edges_to_csr(edges, count), delay_s[waits])
        after_offset, after = edges_to_csr(edges[:, ::-1], count)
        self._reversed_waits: CsrDelays = (after_offset, after, delay_s[after])
        self._stage: Ints = np.array([stage for stage, _ in self.ops], np.int64)
        self._kind, self._chunk, self._microbatch = np.array([op for _, op in self.ops], np.int64).T.copy()
        self._seconds: Floats = np.array(
            [times.seconds[op.kind][op.chunk * times.stages + stage] for stage, op in self.ops], np.float64
        )
        stages = np.stack([np.arange(count), self._stage], axis=1)
        self._lanes: CsrLanes = (*edges_to_csr(stages, count), times.stages)
        self._offset = np.concatenate([[0], np.cumsum(np.bincount(self._stage, minlength=times.stages))])

    def draft(self, starts: Floats, step_s: float) -> TimedOrder:
        by_op = dict(zip(self.ops, starts.tolist(), strict=True))
        return TimedOrder(times=self._times, starts=by_op, step_s=step_s)

    def columns(self, starts: Floats) -> OrderColumns:
        """Returns the order that `draft` has with these starts."""
        order = np.lexsort((starts + self._seconds, starts, self._stage))
        return OrderColumns(
            stages=self._times.stages,
            chunks=len(self._times.send_s) // self._times.stages,
            microbatches=1 + int(self._microbatch.max()),
            offset=self._offset,
            kind=self._kind[order],
            chunk=self._chunk[order],
            microbatch=self._microbatch[order],
        )

    def disturbed(self, starts: Floats, by_s: float, random: Random) -> Ints:
        """Returns ops by start, each earlier or later by at most `by_s`, but after what it waits for."""
        drawn = np.array([random.random() for _ in range(len(starts))])
        return _order_after(starts + by_s * (2 * drawn - 1), self._before)

    def justified(self, sequence: Ints) -> tuple[Floats, float]:
        """Returns starts of the ops and the step, packed in this sequence, then shifted while that helps."""
        return _justify(sequence, self._seconds, self._waits, self._reversed_waits, self._lanes)


@njit_cached
def _order_after(keys: Floats, before: Ints) -> Ints:
    """Returns ops by key, none before the one it waits for."""
    for op in range(len(keys)):
        if before[op] >= 0:
            keys[op] = max(keys[op], keys[before[op]])
    return np.argsort(keys, kind="mergesort")


@njit_cached
def _justify(
    sequence: NDArray[Any], seconds: Floats, waits: CsrDelays, reversed_waits: CsrDelays, lanes: CsrLanes
) -> tuple[Floats, float]:
    start, end = np.zeros(len(sequence)), np.zeros(len(sequence))
    last_s = np.inf
    _pack(sequence, seconds, waits, lanes, UNLIMITED_GAPS, False, start, end)
    while end.max() < last_s:
        last_s = end.max()
        latest = len(end) - 1 - np.argsort(-end[::-1], kind="mergesort")
        # Back from the step's end: `end` is then the time left from an op's start.
        _pack(latest, seconds, reversed_waits, lanes, UNLIMITED_GAPS, False, start, end)
        _pack(np.argsort(-end, kind="mergesort"), seconds, waits, lanes, UNLIMITED_GAPS, False, start, end)
    return start, end.max()


# ---------------------------------------------------------------------------- lines of a schedule


def shorten_schedule(schedule: Schedule, chains: Ints, turn: Ints, *, rounds: int) -> Ints:
    """Shortens a schedule by local search; returns every line's new turn.

    `chains` holds pairs (line, the line it comes after) besides the schedule's dependencies.
    """
    nodes = _nodes(schedule)
    lines = np.arange(len(schedule))
    waits = np.repeat(lines, np.diff(schedule.dep_offset))
    edges = nodes[np.concatenate([np.stack([waits, schedule.deps], axis=1), chains])]
    count = int(nodes.max()) + 1
    seconds = np.zeros(count)
    np.maximum.at(seconds, nodes, schedule.duration_s)
    lane = schedule.device.astype(np.int64) * NUM_LANES + schedule.lane
    node_lanes = edges_to_csr(np.stack([nodes, lane], axis=1), count)
    no_delay = np.zeros(len(edges))
    last = np.zeros(count, np.int64)  # lines that meet start when the last of them is ready
    np.maximum.at(last, nodes, turn)
    sequence = _search_sequences(
        np.argsort(last),
        seconds,
        (*edges_to_csr(edges, count), no_delay),
        (*edges_to_csr(edges[:, ::-1], count), no_delay),
        (*node_lanes, schedule.num_devices * NUM_LANES),
        np.array(DISTURBANCE_SHARES),
        rounds,
    )
    place = np.empty(count, np.int64)
    place[sequence] = np.arange(count)
    turns = np.empty(len(schedule), np.int64)
    turns[np.argsort(place[nodes], kind="stable")] = lines
    return turns


def reorder_schedule(schedule: Schedule, turn: Ints) -> Schedule:
    """Returns the columns of the schedule that a replay needs, its lines in the order of their turns."""
    order = np.argsort(turn)
    waits = np.repeat(turn, np.diff(schedule.dep_offset))
    dep_offset, deps = edges_to_csr(np.stack([waits, turn[schedule.deps]], axis=1), len(turn))
    return replace(
        schedule,
        kind=schedule.kind[order],
        device=schedule.device[order],
        lane=schedule.lane[order],
        duration_s=schedule.duration_s[order],
        dep_offset=dep_offset,
        deps=deps,
        meeting=None if schedule.meeting is None else schedule.meeting[order],
    )


def _nodes(schedule: Schedule) -> Ints:
    """Returns the node of every line; lines that meet are one node."""
    lines = np.arange(len(schedule))
    if schedule.meeting is None:
        return lines
    meeting = schedule.meeting.astype(np.int64)
    _, nodes = np.unique(np.where(meeting >= 0, meeting, lines + len(lines)), return_inverse=True)
    return np.asarray(nodes, np.int64)


@njit_cached
def _search_sequences(
    sequence: NDArray[Any],
    seconds: Floats,
    waits: CsrDelays,
    reversed_waits: CsrDelays,
    lanes: CsrLanes,
    disturbances: Floats,
    rounds: int,
) -> NDArray[Any]:
    """Returns the best sequence of all rounds, each node after what it waits for."""
    count = len(sequence)
    best_s = np.inf
    start, end = np.zeros(count), np.zeros(count)
    best_start = np.zeros(count)
    random_state = np.uint64(1)
    for number in range(rounds):
        candidate = sequence
        if number > 0:
            by_s = disturbances[number % len(disturbances)] * best_s
            candidate, random_state = _disturb(sequence, best_start, by_s, waits, random_state)
        _pack(candidate, seconds, waits, lanes, MAX_GAPS_SEARCHED, True, start, end)
        step_s = np.inf
        while end.max() < step_s:
            step_s = end.max()
            candidate = _by_time(candidate, start, end)
            if step_s <= best_s:
                best_s, sequence = step_s, candidate
                best_start[:] = start
            latest = candidate[::-1]
            latest = latest[np.argsort(-end[latest], kind="mergesort")]
            _pack(latest, seconds, reversed_waits, lanes, MAX_GAPS_SEARCHED, True, start, end)
            earliest = latest[::-1]
            candidate = earliest[np.argsort(-end[earliest], kind="mergesort")]
            _pack(candidate, seconds, waits, lanes, MAX_GAPS_SEARCHED, True, start, end)
    return sequence


@njit_cached
def _disturb(
    sequence: NDArray[Any], start: Floats, by_s: float, waits: CsrDelays, random_state: Any
) -> tuple[NDArray[Any], Any]:
    """Returns nodes by start, each earlier or later by at most `by_s`, but after what it waits for.

    Also returns the next state of a linear congruential generator, the same on every machine.
    """
    wait_offset, wait_nodes, _ = waits
    key = np.empty(len(sequence))
    for node in sequence:
        random_state = random_state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        share = np.float64(random_state >> np.uint64(11)) / 2.0**52 - 1.0
        key[node] = start[node] + by_s * share
        for position in range(wait_offset[node], wait_offset[node + 1]):
            key[node] = max(key[node], key[wait_nodes[position]])
    return sequence[np.argsort(key[sequence], kind="mergesort")], random_state


@njit_cached
def _by_time(sequence: NDArray[Any], start: Floats, end: Floats) -> NDArray[Any]:
    """Sorts by start, then by end: a node of no duration comes before one that starts at the same moment."""
    by_end = sequence[np.argsort(end[sequence], kind="mergesort")]
    return by_end[np.argsort(start[by_end], kind="mergesort")]


@njit_cached
def _pack(
    sequence: NDArray[Any],
    seconds: Floats,
    waits: CsrDelays,
    node_lanes: CsrLanes,
    max_gaps: int,
    may_join: bool,
    start: Floats,
    end: Floats,
) -> None:
    """Starts every node as early as possible, in gaps too, without moving those packed before it.

    A node starts no earlier than `delays` after the end of what it waits for, and looks for gaps no further
    back than `max_gaps` others on a lane. With `may_join`, a node of no duration may start at the same moment
    as a longer one that was packed before it; otherwise it starts behind.
    """
    wait_offset, wait_nodes, delays = waits
    lane_offset, lanes, num_lanes = node_lanes
    tail = np.full(num_lanes, -1, np.int64)  # on each lane, by start: places in `lanes`, ...
    following = np.full(len(lanes), -1, np.int64)  # ... and its neighbours
    preceding = np.full(len(lanes), -1, np.int64)
    owner = np.empty(len(lanes), np.int64)
    for node in sequence:
        begin = 0.0
        for position in range(wait_offset[node], wait_offset[node + 1]):
            begin = max(begin, end[wait_nodes[position]] + delays[position])
        moved = True
        while moved:  # until there is a gap at the same time on all its lanes
            moved = False
            for place in range(lane_offset[node], lane_offset[node + 1]):
                last, other, looked_at = tail[lanes[place]], -1, 0
                while last >= 0 and end[owner[last]] > begin:
                    if looked_at == max_gaps:
                        begin = end[owner[last]]
                        moved = True
                        break
                    last, other, looked_at = preceding[last], last, looked_at + 1
                ready = begin
                while not may_join and other >= 0 and start[owner[other]] <= ready:
                    begin = end[owner[other]]
                    moved = True
                    last, other = other, following[other]
                while other >= 0 and begin + seconds[node] > start[owner[other]] * (1 + 1e-12):
                    begin = max(begin, end[owner[other]]) if may_join else end[owner[other]]
                    moved = True
                    last, other = other, following[other]
                preceding[place], following[place] = last, other
            moved &= lane_offset[node + 1] - lane_offset[node] > 1
        start[node], end[node] = begin, begin + seconds[node]
        for place in range(lane_offset[node], lane_offset[node + 1]):
            owner[place] = node
            if preceding[place] >= 0:
                following[preceding[place]] = place
            if following[place] >= 0:
                preceding[following[place]] = place
            else:
                tail[lanes[place]] = place
