"""Proves that no device waits forever, under three models of how devices run their lines.

Each model is a graph of events; a plan is free of deadlock if the graph has no cycle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optimus.ir.op import RECVS, Ints, Lane, OpKind
from optimus.verify.time_replay import followers
from optimus.verify.waits import Waits, chained


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """Cycle of lines that wait for each other: each for the next, the last for the first."""

    model: str
    lines: tuple[int, ...]


HOSTS = "a send blocks its host until the receive is posted"
STREAMS = "every communicator is a queue behind the compute enqueued before"
ONE_QUEUE = "all communication of a device goes through one queue"


def check_hosts(waits: Waits) -> Cycle | None:
    """Checks model (a): hosts run lines in order; sends, waits, gated forwards and the optimizer block."""
    lines, count = waits.lines, len(waits.lines)
    rows = np.arange(count)
    not_first = rows != lines.first[lines.device]
    send_of = np.full(count, -1)
    send_of[waits.recv] = waits.send
    # A consumer of received data needs the send to be reached: the line before the send to have ended.
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
    posted = np.bincount(waits.meeting[posts], minlength=meetings)
    never = count + np.flatnonzero((posted > 0) & (posted < waits.meeting_size))
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
    """Checks model (b), compute in order and a queue per communicator, or model (c), one queue for all."""
    lines, count = waits.lines, len(waits.lines)
    node = np.arange(count)
    _, first, number = np.unique(waits.meeting, return_index=True, return_inverse=True)
    meets = waits.meeting >= 0
    node[meets] = first[number[meets]]
    node[waits.recv] = node[waits.send]
    compute = waits.lane == Lane.COMPUTE
    communicates = ~compute
    latest = np.maximum.accumulate(np.where(compute, np.arange(count), -1))
    behind = communicates & (latest >= lines.first[lines.device])
    data = ~np.isin(lines.kind[waits.after], RECVS)  # a receive and its send are one node
    posted = np.bincount(waits.meeting[meets], minlength=len(waits.meeting_size))
    never = np.flatnonzero(meets)[(posted < waits.meeting_size)[waits.meeting[meets]]]
    edges = [
        (waits.before[data], waits.after[data]),
        chained(lines.device, compute),
        (latest[behind], np.flatnonzero(behind)),
        chained(lines.device if one_queue else _communicators(waits), communicates),
        (never, never),
    ]
    joined = [(node[before], node[after]) for before, after in edges]
    return _cycle(ONE_QUEUE if one_queue else STREAMS, count, joined, count)


def _communicators(waits: Waits) -> Ints:
    """Returns the queue of every line: per class, and per group or directed edge of a module."""
    lines, count = waits.lines, len(waits.lines)
    peer = np.full(count, -1)
    peer[waits.send], peer[waits.recv] = lines.device[waits.recv], lines.device[waits.send]
    size = len(lines.plan.programs)
    edge = ((lines.module * len(OpKind) + lines.kind) * size + peer) + len(waits.group_members)
    queues: Ints = np.where(waits.group >= 0, waits.group, edge) * size + lines.device
    return queues


def _cycle(model: str, count: int, edges: list[tuple[Ints, Ints]], lines: int) -> Cycle | None:
    """Removes nodes that wait for nothing until none is left; any remainder holds a cycle."""
    before = np.concatenate([first for first, _ in edges])
    after = np.concatenate([second for _, second in edges])
    offset, following, pending = followers(count, before, after)
    free = [node for node, waiting in enumerate(pending) if not waiting]
    for node in free:  # grows
        for follower in following[offset[node] : offset[node + 1]]:
            pending[follower] -= 1
            if not pending[follower]:
                free.append(follower)
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
    cycle = list(seen)[seen[node] :]
    return Cycle(model=model, lines=tuple(node for node in cycle if node < lines))
