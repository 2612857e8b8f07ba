"""Searches what the hosts or streams of a small plan can do for a state from which none of them can go on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

from slow_plan_replay import COLLECTIVES, Id, SlowPlan

from optimus.ir.op import RECVS, SENDS, Lane, OpKind

State = tuple[int, ...]  # per class: the line that it has reached
Guard = list[tuple[int, int]]  # classes and the line that each must have reached


def guard_of(slow: SlowPlan, line: Id) -> Guard:
    """When a host gets past a line: what the hosts of other classes must have reached."""

    def reached(other: Id) -> tuple[int, int]:
        return other.device, slow.at[other]

    if line.kind in SENDS:
        return [reached(slow.recv_of[line])]
    phase = slow.phase(line)
    if line.kind != OpKind.OPTIMIZER and (phase is None or phase.kind == OpKind.LAUNCH):
        needed = [] if phase is None else [need for need in slow.needs[line] if need.kind in RECVS]
        return [reached(slow.send_of(need)) for need in needed]  # only posts
    guard = [reached(slow.send_of(need)) for need in slow.needs[line] if need.kind in RECVS]
    for need in slow.needs[line]:
        own = need._replace(place=line.place) == line  # a launch of the same op
        wanted = slow.phase(need)
        if need.kind in COLLECTIVES or (own and wanted is not None and wanted.kind == OpKind.LAUNCH):
            guard += [reached(other) for other in slow.meetings.get(need, ())]
    if line.kind == OpKind.OPTIMIZER:
        guard += [reached(other) for other in slow.meetings[line]]
    return guard


def can_stop(slow: SlowPlan) -> bool:
    """Visits every state that any interleaving reaches; whether one before the end has no move."""
    guards = [[guard_of(slow, line) for line in program] for program in slow.programs]
    sizes = tuple(len(program) for program in slow.programs)
    seen: set[State] = set()
    todo: list[State] = [(0,) * len(sizes)]
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        moves = [
            (*state[:device], at + 1, *state[device + 1 :])
            for device, at in enumerate(state)
            if at < sizes[device] and all(state[other] >= line for other, line in guards[device][at])
        ]
        if not moves and state != sizes:
            return True
        todo += moves
    return False


def streams_stop(slow: SlowPlan, *, one_queue: bool) -> bool:
    """Runs whatever can run until nothing can. What can run once can run later: one order is enough."""
    queues: dict[Hashable, list[Id]] = defaultdict(list)
    queue_of: dict[Id, Hashable] = {}
    behind: dict[Id, Id | None] = {}  # the compute enqueued before
    for program in slow.programs:
        compute = None
        for line in program:
            talks = slow.lane(line) != Lane.COMPUTE
            behind[line] = compute if talks else None
            if not talks:
                compute = line
            queue = _communicator(slow, line) if talks and not one_queue else None
            queue_of[line] = line.device, talks, queue
            queues[queue_of[line]].append(line)
    waiting = {frozenset(_together(slow, line)) for line in slow.at}
    done: set[Id] = set()

    def free(line: Id) -> bool:
        needs = [] if line.kind in RECVS else slow.needs[line]
        enqueued = behind[line]
        first = queues[queue_of[line]][0] == line
        return first and done.issuperset(needs) and (enqueued is None or enqueued in done)

    while waiting:
        now = [event for event in waiting if all(free(line) for line in event)]
        if not now:
            return True
        for line in now[0]:
            done.add(line)
            queues[queue_of[line]].pop(0)
        waiting.remove(now[0])
    return False


def _together(slow: SlowPlan, line: Id) -> list[Id]:
    """Lines that happen at once: the ends of a transfer, a meeting, or the line alone."""
    if line.kind in RECVS:
        return [line, slow.send_of(line)]
    if line.kind in SENDS:
        return [line, slow.recv_of[line]]
    return slow.meetings.get(line, [line])


def _communicator(slow: SlowPlan, line: Id) -> Hashable:
    if line.kind in SENDS:
        return line.module, line.kind, line.device, slow.recv_of[line].device
    if line.kind in RECVS:
        return line.module, line.kind - 1, slow.send_of(line).device, line.device
    return slow.group(line)
