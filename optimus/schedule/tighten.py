"""Shortens a small schedule: lines shift back and forth between its two ends, from slightly disturbed starts.

Each pass lets lines start, one by one, as early as all they wait for and a gap on their lanes allow; one over
reversed time pushes them to the end first. Neither lengthens the step (justification: Valls et al., EJOR 165,
2005; `shake` does the same to the ops of a pipeline). Unlike the event loop this looks ahead: a line may make
others wait that are ready, if the step is shorter for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimus.ir.op import NUM_LANES, Floats, Ints, Schedule
from optimus.schedule._numba import compiled
from optimus.schedule.build import group_by_first

REACH = 64
DISTURBANCES = 0.05, 0.1, 0.2  # of a start, in parts of the step: taken in turn


def tighten(schedule: Schedule, chains: Ints, turn: Ints, *, rounds: int) -> Ints:
    """Every line's new turn. `chains`: pairs (line, the line it comes after) besides the schedule's waits."""
    nodes = _nodes(schedule)
    lines = np.arange(len(schedule))
    waits = np.repeat(lines, np.diff(schedule.dep_offset))
    edges = nodes[np.concatenate([np.stack([waits, schedule.deps], axis=1), chains])]
    count = int(nodes.max()) + 1
    seconds = np.zeros(count)
    np.maximum.at(seconds, nodes, schedule.duration_s)
    lane = schedule.device.astype(np.int64) * NUM_LANES + schedule.lane
    lane_offset, lanes = group_by_first(np.stack([nodes, lane], axis=1), count)
    last = np.zeros(count, np.int64)  # who meets comes when all are there
    np.maximum.at(last, nodes, turn)
    sequence = _shaken(
        np.argsort(last),
        seconds,
        *group_by_first(edges, count),
        *group_by_first(edges[:, ::-1], count),
        lane_offset,
        lanes,
        schedule.num_devices * NUM_LANES,
        np.array(DISTURBANCES),
        rounds,
    )
    place = np.empty(count, np.int64)
    place[sequence] = np.arange(count)
    found = np.empty(len(schedule), np.int64)
    found[np.argsort(place[nodes], kind="stable")] = lines
    return found


def in_turn(schedule: Schedule, turn: Ints) -> Schedule:
    """What a replay needs of the schedule, its lines in the order of their turns."""
    order = np.argsort(turn)
    waits = np.repeat(turn, np.diff(schedule.dep_offset))
    dep_offset, deps = group_by_first(np.stack([waits, turn[schedule.deps]], axis=1), len(turn))
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
    """Of every line its number; lines that meet have the same."""
    lines = np.arange(len(schedule))
    if schedule.meeting is None:
        return lines
    met = schedule.meeting.astype(np.int64)
    _, found = np.unique(np.where(met >= 0, met, lines + len(lines)), return_inverse=True)
    return np.asarray(found, np.int64)


@compiled
def _shaken(
    sequence: NDArray[Any],
    seconds: Floats,
    before_offset: NDArray[Any],
    before: NDArray[Any],
    after_offset: NDArray[Any],
    after: NDArray[Any],
    lane_offset: NDArray[Any],
    lanes: NDArray[Any],
    num_lanes: int,
    disturbances: Floats,
    rounds: int,
) -> NDArray[Any]:
    """The best sequence found, each node behind what it waits for."""
    count = len(sequence)
    best_s = np.inf
    start, end = np.zeros(count), np.zeros(count)
    best_start = np.zeros(count)
    key = np.empty(count)
    drawn = np.uint64(1)
    for nth in range(rounds):
        tried = sequence
        if nth > 0:  # each node earlier or later, but behind what it waits for
            by_s = disturbances[nth % len(disturbances)] * best_s
            for node in sequence:
                drawn = drawn * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
                share = np.float64(drawn >> np.uint64(11)) / 2.0**52 - 1.0
                key[node] = best_start[node] + by_s * share
                for position in range(before_offset[node], before_offset[node + 1]):
                    key[node] = max(key[node], key[before[position]])
            tried = sequence[np.argsort(key[sequence], kind="mergesort")]
        _pack(tried, seconds, before_offset, before, lane_offset, lanes, num_lanes, start, end)
        step_s = np.inf
        while end.max() < step_s:
            step_s = end.max()
            tried = _by_time(tried, start, end)
            if step_s <= best_s:
                best_s, sequence = step_s, tried
                best_start[:] = start
            latest = tried[::-1]
            latest = latest[np.argsort(-end[latest], kind="mergesort")]
            _pack(latest, seconds, after_offset, after, lane_offset, lanes, num_lanes, start, end)
            earliest = latest[::-1]
            tried = earliest[np.argsort(-end[earliest], kind="mergesort")]
            _pack(tried, seconds, before_offset, before, lane_offset, lanes, num_lanes, start, end)
    return sequence


@compiled
def _by_time(sequence: NDArray[Any], start: Floats, end: Floats) -> NDArray[Any]:
    """By start, then by end: what takes no time comes before what begins at the same moment."""
    found = sequence[np.argsort(end[sequence], kind="mergesort")]
    return found[np.argsort(start[found], kind="mergesort")]


@compiled
def _pack(
    sequence: NDArray[Any],
    seconds: Floats,
    wait_offset: NDArray[Any],
    waits: NDArray[Any],
    lane_offset: NDArray[Any],
    lanes: NDArray[Any],
    num_lanes: int,
    start: Floats,
    end: Floats,
) -> None:
    """Every node as early as possible, in gaps too, without moving those packed before it.

    Nobody looks for gaps further back than `REACH` others on a lane: large schedules would take too long.
    """
    tail = np.full(num_lanes, -1, np.int64)  # on each lane, by start: places in `lanes`, ...
    following = np.full(len(lanes), -1, np.int64)  # ... and who stands on both sides of each
    preceding = np.full(len(lanes), -1, np.int64)
    owner = np.empty(len(lanes), np.int64)
    for node in sequence:
        begin = 0.0
        for position in range(wait_offset[node], wait_offset[node + 1]):
            begin = max(begin, end[waits[position]])
        moved = True
        while moved:  # until there is a gap at the same time on all its lanes
            moved = False
            for place in range(lane_offset[node], lane_offset[node + 1]):
                last, other, looked_at = tail[lanes[place]], -1, 0
                while last >= 0 and end[owner[last]] > begin:
                    if looked_at == REACH:
                        begin = end[owner[last]]
                        moved = True
                        break
                    last, other, looked_at = preceding[last], last, looked_at + 1
                while other >= 0 and begin + seconds[node] > start[owner[other]] * (1 + 1e-12):
                    begin = max(begin, end[owner[other]])
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
