"""Simulates a schedule and returns when every op starts and ends, by one compiled event loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimus.compiled import njit_cached
from optimus.ir.op import NUM_LANES, Floats, Ints, Lane, OpKind, Schedule

_COMPUTE, _TP, _DP = int(Lane.COMPUTE), int(Lane.TP), int(Lane.DP)


class ScheduleDeadlock(RuntimeError):
    """Schedule that cannot end: an op waits for one that is queued behind it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """Start and end of every op; `step_s` is the end of the last one."""

    start_s: Floats
    finish_s: Floats
    step_s: float


def simulate_schedule(schedule: Schedule, *, slowdown: float = 0.0, launch_s: float = 0.0) -> Timeline:
    """Simulates `schedule` and returns its timeline.

    A compute op runs slower by `slowdown` while a collective (lanes tp and dp) is resident on its
    device: from when it could start (it may have to wait for others it meets) until it ends.
    The host of a device issues its ops in program order, one per `launch_s`, and never waits; a WAIT
    costs it nothing. An op starts no earlier than it was issued, and a SEND no earlier than its RECV.
    """
    issued = launch_s * count_launches_before(
        schedule.device, schedule.kind != OpKind.WAIT, schedule.num_devices
    )
    none = np.zeros(0)
    return _run_event_loop(schedule, slowdown, issued, rank=none, due_s=none, patience_s=0.0)[0]


def list_schedule(
    schedule: Schedule,
    *,
    rank: Floats,
    due_s: Floats,
    held_s: Floats,
    patience_s: float,
    slowdown: float = 0.0,
) -> tuple[Timeline, Ints]:
    """Simulates `schedule` with some ops in no fixed order; returns the timeline and every op's turn.

    An op of rank 0 or more is free. Whenever a lane has no ready op in order, it starts the ready free op of
    least rank that ends before the lane's next op in order is due. Due times are delayed by as much as the
    lane's last op in order was late; an overdue op is expected after the same delay again, or after
    `patience_s`. No op starts before `held_s`.
    """
    return _run_event_loop(schedule, slowdown, held_s.copy(), rank=rank, due_s=due_s, patience_s=patience_s)


def _run_event_loop(
    schedule: Schedule,
    slowdown: float,
    issued: Floats,
    *,
    rank: Floats,
    due_s: Floats,
    patience_s: float,
) -> tuple[Timeline, Ints]:
    """Runs the event loop; changes `issued`, the time at which the host has issued every op."""
    lane = schedule.device.astype(np.int64) * NUM_LANES + schedule.lane
    deps, dep_offset = schedule.deps.astype(np.int32), schedule.dep_offset.astype(np.int64)
    received = np.flatnonzero(schedule.is_recv)
    sent = deps[dep_offset[received]]
    if len(received):  # a wait for a RECV is one for its SEND; a SEND is issued when both are
        lane[received] = -1
        source = np.arange(len(schedule), dtype=np.int32)
        source[received] = sent
        deps = source[deps]
        np.maximum.at(issued, sent, issued[received])
    start, finish = np.full(len(schedule), -1.0), np.full(len(schedule), -1.0)
    turn = np.full(len(schedule) if len(rank) else 0, -1, np.int64)
    meeting, missing, member_offset, members = _meetings(schedule)
    _event_loop(
        lane,
        schedule.num_devices * NUM_LANES,
        schedule.duration_s,
        dep_offset,
        deps,
        np.diff(dep_offset).astype(np.int64),
        meeting,
        missing,
        member_offset,
        members,
        issued,
        slowdown,
        rank,
        due_s,
        patience_s,
        start,
        finish,
        turn,
    )
    start[received], finish[received] = start[sent], finish[sent]
    stuck = np.flatnonzero(finish < 0)
    if len(stuck):
        raise ScheduleDeadlock(f"{len(stuck)} ops never start; the first is {schedule[int(stuck[0])]}")
    return Timeline(start_s=start, finish_s=finish, step_s=float(finish.max(initial=0.0))), turn


def _meetings(schedule: Schedule) -> tuple[Ints, Ints, Ints, Ints]:
    """Returns the meeting of every op (-1: none), and per meeting its size and its ops in CSR form."""
    if schedule.meeting is None:
        none = np.zeros(0, np.int64)
        return np.full(len(schedule), -1, np.int64), none, np.zeros(1, np.int64), none
    meeting = schedule.meeting.astype(np.int64)
    meets = np.flatnonzero(meeting >= 0)
    sizes = np.bincount(meeting[meets])
    members = meets[np.argsort(meeting[meets], kind="stable")]
    return meeting, sizes, np.concatenate([[0], np.cumsum(sizes)]), members


@njit_cached
def _event_loop(  # noqa: PLR0915
    lane: NDArray[Any],
    num_lanes: int,
    duration: Floats,
    dep_offset: NDArray[Any],
    deps: NDArray[Any],
    pending: NDArray[Any],
    meeting: NDArray[Any],
    missing: NDArray[Any],
    member_offset: NDArray[Any],
    members: NDArray[Any],
    issued: Floats,
    slowdown: float,
    rank: Floats,
    due: Floats,
    patience: float,
    start: Floats,
    finish: Floats,
    turn: NDArray[Any],
) -> None:
    """Runs an event loop over lanes. Fills `start` and `finish` (-1: never), and `turn` if some ops are free.

    `pending` counts the unfinished dependencies of every op, `missing` the members of every meeting that
    have not arrived: initially all.

    One long function on purpose: passing arrays to another function costs reference counts per event, four
    times the time. Indices have one type, so that helpers are compiled once.
    """
    follower_offset, followers = _reverse(len(lane), dep_offset, deps)
    listing, turns = len(rank) > 0, 0
    queue_offset, queue = _queues(lane, rank, num_lanes)
    head = queue_offset[:num_lanes].copy()  # next op of the lane
    late = np.zeros(num_lanes, np.float64)  # how much after it was due the lane's last op in order began
    offered = np.full(num_lanes, -1, np.int64)  # free ops that are ready: the first by rank, ...
    behind = np.full(len(rank), -1, np.int64)  # ... and the next after each
    if listing:
        for op in range(len(lane)):
            if rank[op] >= 0.0 and pending[op] == 0:
                _offer(op, lane[op], rank, offered, behind)
    running = np.empty(num_lanes, np.int64)  # op on the lane, -1 when free
    resident = np.zeros(num_lanes // NUM_LANES, np.int64)  # collectives running, per device
    key = np.empty(num_lanes, np.float64)  # next event of the lane: an end, or an issue it waits for
    heap = np.empty(num_lanes, np.int64)  # lanes by key
    place = np.empty(num_lanes, np.int64)  # position of the lane in the heap, -1: none
    size = int(np.int64(0))  # numba would compile a function once more for a literal 0
    free = np.empty(num_lanes, np.int64)  # lanes to look at: they may start an op now
    num_free = num_lanes
    looked_at = np.empty(num_lanes, np.bool_)  # is in `free`
    for here in range(num_lanes):
        running[here], place[here], free[here], looked_at[here] = -1, -1, here, True
    now = 0.0
    while True:
        while num_free > 0:
            num_free -= 1
            here = free[num_free]
            looked_at[here] = False
            if running[here] >= 0:
                continue
            op, room = -1, np.inf  # seconds until the lane's next op in order
            if head[here] < queue_offset[here + 1]:
                op = queue[head[here]]
                if pending[op] > 0:
                    if listing:  # an overdue op is expected after the same delay again
                        room = max(abs(due[op] + late[here] - now), patience)
                    op = -1
                elif issued[op] > now:
                    room = issued[op] - now
                    op = -1
                else:
                    head[here] += 1
                    if listing:
                        late[here] = max(now - due[op], 0.0)
            if op < 0 and listing and offered[here] >= 0:
                op = _take(here, room / (1.0 + slowdown), duration, offered, behind)
            if op < 0:
                if room < np.inf and (not listing or offered[here] >= 0 or pending[queue[head[here]]] == 0):
                    key[here] = now + room  # look again then
                    size = _insert(here, key, heap, place, size)
                continue
            if listing:
                turn[op] = turns
                turns += 1
            running[here] = op
            device, role = here // NUM_LANES, here % NUM_LANES
            if role == _TP or role == _DP:  # noqa: SIM109  `in` is slower here
                resident[device] += 1
                if resident[device] == 1 and slowdown > 0.0:
                    _rescale(device, now, 1.0 + slowdown, running, key, heap, place, size)
            met = meeting[op]
            if met >= 0:
                missing[met] -= 1
                if missing[met] > 0:  # it waits on its lane for the other members
                    continue
                first, end = member_offset[met], member_offset[met + 1]
            else:
                first, end = 0, 1
            for position in range(first, end):
                starts = members[position] if met >= 0 else op
                there = lane[starts]
                start[starts] = now
                slowed = there % NUM_LANES == _COMPUTE and resident[there // NUM_LANES] > 0
                key[there] = now + duration[starts] * (1.0 + slowdown if slowed else 1.0)
                size = _insert(there, key, heap, place, size)
        if size == 0:
            return
        here = heap[0]
        now = key[here]
        size = _remove_first(key, heap, place, size)
        free[0], num_free, looked_at[here] = here, 1, True
        op = running[here]
        if op < 0 or start[op] < 0.0:  # nothing ends: the lane is only looked at, or its op waits
            continue
        finish[op] = now
        running[here] = -1
        device, role = here // NUM_LANES, here % NUM_LANES
        if role == _TP or role == _DP:  # noqa: SIM109
            resident[device] -= 1
            if resident[device] == 0 and slowdown > 0.0:
                _rescale(device, now, 1.0 / (1.0 + slowdown), running, key, heap, place, size)
        for position in range(follower_offset[op], follower_offset[op + 1]):
            follower = followers[position]
            pending[follower] -= 1
            there = lane[follower]
            if there < 0 or pending[follower] > 0:
                continue
            if listing and rank[follower] >= 0.0:
                _offer(follower, there, rank, offered, behind)
            if running[there] < 0 and not looked_at[there]:
                free[num_free] = there
                looked_at[there] = True
                num_free += 1


@njit_cached
def _rescale(
    device: int,
    now: float,
    factor: float,
    running: NDArray[Any],
    key: Floats,
    heap: NDArray[Any],
    place: NDArray[Any],
    size: int,
) -> None:
    """Multiplies the remaining time of the device's compute op by `factor`."""
    compute = device * NUM_LANES + _COMPUTE
    if running[compute] >= 0 and place[compute] >= 0:  # not one that waits for a meeting
        key[compute] = now + (key[compute] - now) * factor
        _sift_up(place[compute], key, heap, place)
        _sift_down(place[compute], key, heap, place, size)


@njit_cached
def count_launches_before(device: NDArray[Any], launches: NDArray[Any], num_devices: int) -> Floats:
    """Returns how many ops the host of each op's device has launched before the op."""
    issued = np.empty(len(device), np.float64)
    count = np.zeros(num_devices, np.int64)
    for op in range(len(device)):
        issued[op] = count[device[op]]
        count[device[op]] += launches[op]
    return issued


@njit_cached
def _reverse(count: int, dep_offset: NDArray[Any], deps: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns followers of every op, from the dependencies of every op."""
    offset = np.zeros(count + 1, np.int64)
    for dep in deps:
        offset[dep + 1] += 1
    for op in range(count):
        offset[op + 1] += offset[op]
    place = offset[:count].copy()
    followers = np.empty(len(deps), np.int64)
    for op in range(count):
        for position in range(dep_offset[op], dep_offset[op + 1]):
            dep = deps[position]
            followers[place[dep]] = op
            place[dep] += 1
    return offset, followers


@njit_cached
def _queues(lane: NDArray[Any], rank: Floats, num_lanes: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns the ops of every lane in program order, except free ones."""
    listing = len(rank) > 0
    offset = np.zeros(num_lanes + 1, np.int64)
    for op in range(len(lane)):
        if lane[op] >= 0 and not (listing and rank[op] >= 0.0):
            offset[lane[op] + 1] += 1
    for here in range(num_lanes):
        offset[here + 1] += offset[here]
    place = offset[:num_lanes].copy()
    queue = np.empty(len(lane), np.int32)
    for op in range(len(lane)):
        if lane[op] >= 0 and not (listing and rank[op] >= 0.0):
            queue[place[lane[op]]] = op
            place[lane[op]] += 1
    return offset, queue


@njit_cached
def _offer(op: int, here: int, rank: Floats, offered: NDArray[Any], behind: NDArray[Any]) -> None:
    """Puts a free op that is ready among those of its lane, by rank."""
    before, after = -1, offered[here]
    while after >= 0 and (rank[after] < rank[op] or (rank[after] == rank[op] and after < op)):
        before, after = after, behind[after]
    behind[op] = after
    if before < 0:
        offered[here] = op
    else:
        behind[before] = op


@njit_cached
def _take(here: int, room: float, duration: Floats, offered: NDArray[Any], behind: NDArray[Any]) -> int:
    """Removes and returns the first free op of the lane that is no longer than `room` (-1: none)."""
    before, op = -1, offered[here]
    while op >= 0 and duration[op] > room:
        before, op = op, behind[op]
    if op >= 0:
        if before < 0:
            offered[here] = behind[op]
        else:
            behind[before] = behind[op]
    return int(op)


# A binary heap of lanes by their next event; ties go to the lower lane, so that runs repeat.


@njit_cached
def _before(a: int, b: int, key: Floats) -> bool:
    return bool(key[a] < key[b] or (key[a] == key[b] and a < b))


@njit_cached
def _insert(here: int, key: Floats, heap: NDArray[Any], place: NDArray[Any], size: int) -> int:
    """Puts a lane into the heap, or restores its position; returns the size of the heap."""
    if place[here] < 0:
        heap[size] = here
        place[here] = size
        size += 1
    _sift_up(place[here], key, heap, place)
    _sift_down(place[here], key, heap, place, size)
    return size


@njit_cached
def _remove_first(key: Floats, heap: NDArray[Any], place: NDArray[Any], size: int) -> int:
    place[heap[0]] = -1
    size -= 1
    if size > 0:
        heap[0] = heap[size]
        place[heap[0]] = 0
        _sift_down(place[heap[0]], key, heap, place, size)
    return size


@njit_cached
def _sift_up(index: int, key: Floats, heap: NDArray[Any], place: NDArray[Any]) -> None:
    here = heap[index]
    while index > 0:
        parent = (index - 1) >> 1
        if not _before(here, heap[parent], key):
            break
        heap[index] = heap[parent]
        place[heap[index]] = index
        index = parent
    heap[index] = here
    place[here] = index


@njit_cached
def _sift_down(index: int, key: Floats, heap: NDArray[Any], place: NDArray[Any], size: int) -> None:
    here = heap[index]
    while True:
        child = 2 * index + 1
        if child >= size:
            break
        if child + 1 < size and _before(heap[child + 1], heap[child], key):
            child += 1
        if not _before(heap[child], here, key):
            break
        heap[index] = heap[child]
        place[heap[index]] = index
        index = child
    heap[index] = here
    place[here] = index
