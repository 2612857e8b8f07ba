"""Proves that no device can wait for ever, under three models of how devices run their lines.

Each model is a graph of what must happen before what; a plan that is free of deadlock has no circle in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optimus.ir.op import RECVS, Ints, Lane, OpKind
from optimus.verify.time_replay import followers
from optimus.verify.waits import Waits, chained


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """Lines that wait for each other: each for the next, the last for the first."""

    model: str
    lines: tuple[int, ...]


HOSTS = "a send blocks its host until the receive is posted"
STREAMS = "every communicator is a queue behind the compute enqueued before"
ONE_QUEUE = "all communication of a device goes through one queue"


def check_hosts(waits: Waits) -> Cycle | None:
    """Model (a): hosts run their lines in order; only sends, waits, gated forwards and finish block."""
    lines, count = waits.lines, len(waits.lines)
    rows = np.arange(count)
    not_first = rows != lines.first[lines.device]
    send_of = np.full(count, -1)
    send_of[waits.recv] = waits.send
    # What consumes received data needs its send to have been reached: the line before that to have ended.
    consumes = send_of[waits.before] >= 0
    sends, consumers = send_of[waits.before[consumes]], waits.after[consumes]
    reached = not_first[sends]
    # A meeting is an extra node: complete once all its lines are posted.
    finish = np.flatnonzero(lines.kind == OpKind.OPTIMIZER)
    meets = (waits.meeting >= 0) & (lines.kind != OpKind.OPTIMIZER)
    posts = np.flatnonzero(meets)
    blocks = ~np.isin(waits.phase_kind[waits.after], (-1, OpKind.LAUNCH)) | (
        lines.kind[waits.after] == OpKind.OPTIMIZER
    )
    needs = meets[waits.before] & blocks
    meetings = len(waits.meeting_size)
    there = np.bincount(waits.meeting[posts], minlength=meetings)
    never = count + np.flatnonzero((there > 0) & (there < waits.meeting_size))
    edges = [
        (rows[not_first] - 1, rows[not_first]),
        (waits.recv, waits.send),
        (sends[reached] - 1, consumers[reached]),
        (posts, count + waits.meeting[posts]),
        (count + waits.meeting[waits.before[needs]], waits.after[needs]),
        (never, never),
        (finish[not_first[finish]] - 1, np.full(int(not_first[finish].sum()), count + meetings)),
        (np.full(len(finish), count + meetings), finish),
    ]
    return _cycle(HOSTS, count + meetings + 1, edges, count)


def check_streams(waits: Waits, *, one_queue: bool) -> Cycle | None:
    """Model (b): compute in order, a queue per communicator. Model (c): one queue for all of them."""
    lines, count = waits.lines, len(waits.lines)
    node = np.arange(count)
    _, first, number = np.unique(waits.meeting, return_index=True, return_inverse=True)
    meets = waits.meeting >= 0
    node[meets] = first[number[meets]]
    node[waits.recv] = node[waits.send]
    compute = waits.lane == Lane.COMPUTE
    talks = ~compute
    latest = np.maximum.accumulate(np.where(compute, np.arange(count), -1))
    behind = talks & (latest >= lines.first[lines.device])
    data = ~np.isin(lines.kind[waits.after], RECVS)  # a receive and its send are one node
    there = np.bincount(waits.meeting[meets], minlength=len(waits.meeting_size))
    never = np.flatnonzero(meets)[(there < waits.meeting_size)[waits.meeting[meets]]]
    edges = [
        (waits.before[data], waits.after[data]),
        chained(lines.device, compute),
        (latest[behind], np.flatnonzero(behind)),
        chained(lines.device, talks) if one_queue else chained(_communicators(waits), talks),
        (never, never),
    ]
    joined = [(node[before], node[after]) for before, after in edges]
    return _cycle(ONE_QUEUE if one_queue else STREAMS, count, joined, count)


def _communicators(waits: Waits) -> Ints:
    """The queue of every line of communication: per class, and per group or directed edge of a module."""
    lines, count = waits.lines, len(waits.lines)
    peer = np.full(count, -1)
    peer[waits.send], peer[waits.recv] = lines.device[waits.recv], lines.device[waits.send]
    size = len(lines.plan.programs)
    edge = ((lines.module * len(OpKind) + lines.kind) * size + peer) + len(waits.group_members)
    queues: Ints = np.where(waits.group >= 0, waits.group, edge) * size + lines.device
    return queues


def _cycle(model: str, count: int, edges: list[tuple[Ints, Ints]], lines: int) -> Cycle | None:
    """Takes away what waits for nothing, again and again; what is left holds a circle."""
    before = np.concatenate([first for first, _ in edges])
    after = np.concatenate([second for _, second in edges])
    offset, following, pending = followers(count, before, after)
    free = [node for node, waiting in enumerate(pending) if not waiting]
    for node in free:  # grows
        for other in following[offset[node] : offset[node + 1]]:
            pending[other] -= 1
            if not pending[other]:
                free.append(other)
    if len(free) == count:
        return None
    stuck = np.array(pending) > 0
    inside = stuck[before] & stuck[after]
    waits_for = dict(zip(after[inside].tolist(), before[inside].tolist(), strict=True))
    seen: dict[int, int] = {}
    node = next(iter(waits_for))
    while node not in seen:
        seen[node] = len(seen)
        node = waits_for[node]
    circle = list(seen)[seen[node] :]
    return Cycle(model=model, lines=tuple(node for node in circle if node < lines))
