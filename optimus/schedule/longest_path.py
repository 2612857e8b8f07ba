"""Times one schedule under many sets of durations at once, as longest paths in its order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimus.compiled import njit_cached
from optimus.environment import usable_cores
from optimus.ir.op import NUM_LANES, Floats, Ints, Lane, OpKind, Schedule
from optimus.schedule.schedule_builder import edges_to_csr
from optimus.schedule.simulator import ScheduleDeadlock, count_launches_before, simulate_schedule

WIDTH = 8  # columns that are timed together: the ends of an op fill one cache line
MAX_THREADS = 8  # each holds the ends of all ops, up to 100 MB for the largest jobs
DEFAULT_SLOWDOWN = 0.1  # under which the shares of work under collectives are found where there is none


class LongestPath:
    """A schedule as a graph of ops in topological order: of their dependencies, lanes and meetings.

    The share of an op's work that runs under a collective, and is slowed down, is simulated once, with the
    schedule's own durations; other durations leave it as it is. With these the step is the simulated one, to
    rounding; others take a fraction of the time that simulating them would.
    """

    def __init__(self, schedule: Schedule, *, slowdown: float = 0.0, launch_s: float = 0.0) -> None:
        self._schedule = schedule
        received = np.flatnonzero(schedule.is_recv)
        sent = schedule.deps[schedule.dep_offset[received]]
        launches = schedule.kind != OpKind.WAIT
        self._launches = count_launches_before(schedule.device, launches, schedule.num_devices)
        np.maximum.at(self._launches, sent, self._launches[received])  # a SEND is issued when its RECV is
        nodes, edges = _list_edges(schedule, received, sent)
        total = max(len(schedule), int(nodes.max(initial=0)) + 1)
        self._nodes = _sort_topologically(
            nodes, np.bincount(edges[:, 0], minlength=total), *edges_to_csr(edges[:, ::-1], total)
        )
        if len(self._nodes) < len(nodes):
            raise ScheduleDeadlock(f"{len(nodes) - len(self._nodes)} ops wait for each other")
        place = np.zeros(total, np.int64)
        place[self._nodes] = np.arange(len(self._nodes))
        self._waits_offset, self._waits = edges_to_csr(place[edges], len(self._nodes))
        self.slowed_share = self._simulate_slowed_share(slowdown or DEFAULT_SLOWDOWN, launch_s)

    def with_durations(self, duration_s: Floats, *, slowdown: float, launch_s: float) -> LongestPath:
        """Returns the same graph of a schedule with other durations."""
        other = copy(self)
        other._schedule = replace(self._schedule, duration_s=duration_s)
        other.slowed_share = other._simulate_slowed_share(slowdown or DEFAULT_SLOWDOWN, launch_s)
        return other

    def _simulate_slowed_share(self, slowdown: float, launch_s: float) -> Floats:
        """Returns the share of every compute op's work that runs under a collective."""
        timeline = simulate_schedule(self._schedule, slowdown=slowdown, launch_s=launch_s)
        taken_s, duration_s = timeline.finish_s - timeline.start_s, self._schedule.duration_s
        computes = (self._schedule.lane == Lane.COMPUTE) & (duration_s > 0)
        share = (taken_s / np.where(computes, duration_s, 1.0) - 1.0) / slowdown
        return np.where(computes, share.clip(0.0, 1.0), 0.0)

    def steps_s(
        self,
        group: Ints,
        factors: Floats,
        *,
        slowdown: Floats | float,
        launch_s: Floats | float,
        added_s: Floats | None = None,
    ) -> Floats:
        """Returns a step for every column of `factors`, by which durations are multiplied.

        Row `group[op]` has the factors of an op. `added_s` are seconds that ops take longer in every column.
        """
        columns = factors.shape[1]
        by_column = [factors, *(np.full((1, columns), each) for each in (slowdown, launch_s))]
        padded = [np.pad(each, ((0, 0), (0, -columns % WIDTH)), mode="edge") for each in by_column]
        added, group = np.zeros(0) if added_s is None else added_s, group.astype(np.int64)

        def time_block(first: int) -> Floats:
            return _time_nodes(
                self._nodes,
                self._waits_offset,
                self._waits,
                self._schedule.duration_s,
                added,
                group,
                self.slowed_share,
                self._launches,
                *(np.ascontiguousarray(each[:, first : first + WIDTH]) for each in padded),
            )

        with ThreadPoolExecutor(min(usable_cores(), MAX_THREADS)) as pool:  # compiled loops release the GIL
            blocks = pool.map(time_block, range(0, columns, WIDTH))
            return np.concatenate([np.zeros(0), *blocks])[:columns]


def _list_edges(schedule: Schedule, received: Ints, sent: Ints) -> tuple[Ints, Ints]:
    """Returns the nodes, and edges (node, node that it waits for).

    A node is an op, or a meeting (a number from the count of ops on), which begins all its members: it waits
    for what they wait for, and they wait for it. An op waits for its dependencies and for the op before it on
    its lane. A RECV is no node: what waits for it waits for its SEND.
    """
    count = len(schedule)
    source = np.arange(count)
    source[received] = sent
    is_node = np.ones(count, bool)
    is_node[received] = False
    ops = np.flatnonzero(is_node)
    begins = np.arange(count)  # the node that waits for what an op waits for
    meets = np.zeros(0, np.int64)
    if schedule.meeting is not None:
        meets = np.flatnonzero(schedule.meeting >= 0)
        begins[meets] = count + schedule.meeting[meets]
    waiting = np.repeat(np.arange(count), np.diff(schedule.dep_offset))
    kept = is_node[waiting]
    lane = schedule.device[ops].astype(np.int64) * NUM_LANES + schedule.lane[ops]
    by_lane = np.argsort(lane, kind="stable")
    same = np.diff(lane[by_lane]) == 0
    before, after = ops[by_lane[:-1][same]], ops[by_lane[1:][same]]
    edges = [
        (begins[waiting[kept]], source[schedule.deps[kept]]),
        (begins[after], before),
        (meets, begins[meets]),
    ]
    nodes = np.concatenate([ops, np.unique(begins[meets])])
    return nodes, np.concatenate([np.stack(each, axis=1) for each in edges])


@njit_cached
def _sort_topologically(
    nodes: NDArray[Any], waits: NDArray[Any], follower_offset: NDArray[Any], followers: NDArray[Any]
) -> NDArray[Any]:
    """Returns nodes so that each follows all that it waits for; `waits` counts these. Cycles are left out."""
    order = np.empty(len(nodes), np.int64)
    size = 0
    for node in nodes:
        if waits[node] == 0:
            order[size] = node
            size += 1
    done = 0
    while done < size:
        node = order[done]
        done += 1
        for position in range(follower_offset[node], follower_offset[node + 1]):
            follower = followers[position]
            waits[follower] -= 1
            if waits[follower] == 0:
                order[size] = follower
                size += 1
    return order[:size]


@njit_cached
def _time_nodes(
    nodes: NDArray[Any],
    waits_offset: NDArray[Any],
    waits: NDArray[Any],
    duration: Floats,
    added: Floats,
    group: NDArray[Any],
    slowed_share: Floats,
    launches: Floats,
    factors: Floats,
    slowdown: Floats,
    launch: Floats,
) -> Floats:
    """Returns the end of the last node for WIDTH columns of factors."""
    count = len(duration)
    ends = np.empty((len(nodes), WIDTH))
    end, step = np.empty(WIDTH), np.zeros(WIDTH)
    for at in range(len(nodes)):
        node = nodes[at]
        for n in range(WIDTH):
            end[n] = launches[node] * launch[0, n] if node < count else 0.0
        for position in range(waits_offset[at], waits_offset[at + 1]):
            source = waits[position]
            for n in range(WIDTH):
                waited = ends[source, n]
                end[n] = waited if waited > end[n] else end[n]  # compiled to vectors, which max is not
        if node < count:
            number, share = group[node], slowed_share[node]
            seconds, more = duration[node], added[node] if len(added) > 0 else 0.0
            for n in range(WIDTH):
                end[n] += (seconds * factors[number, n] + more) * (1.0 + slowdown[0, n] * share)
        for n in range(WIDTH):
            ends[at, n] = end[n]
            step[n] = end[n] if end[n] > step[n] else step[n]
    return step
