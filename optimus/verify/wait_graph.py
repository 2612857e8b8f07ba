"""Walks the graph of what lines wait for: replayed times, deadlocks, and a grid of dependent ops.

A plan is free of deadlock if the graph has no cycle under any of three models of how devices run lines.
Times follow the semantics of docs/plan-file.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from optimus.ir.op import COMPUTE_PHASES, RECVS, Floats, Ints, Lane, OpKind, ShortOpName
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.verify.expected_program import ExpectedProgram, PlanLines, check_line_coverage
from optimus.verify.waits import LineWaits, WaitDerivation, pair_consecutive_lines


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayedTimes:
    """Start and end of every line; negative for lines that never run."""

    start_s: Floats
    end_s: Floats

    @property
    def complete(self) -> bool:
        return bool((self.end_s >= 0).all())

    @property
    def step_s(self) -> float:
        return float(self.end_s.max(initial=0.0))


def build_successors_csr(count: int, before: Ints, after: Ints) -> tuple[list[int], list[int], list[int]]:
    """Returns the successors of every node as offsets and nodes, and the number of its predecessors."""
    order = np.argsort(before, kind="stable")
    offset = np.concatenate([[0], np.cumsum(np.bincount(before, minlength=count))])
    return offset.tolist(), after[order].tolist(), np.bincount(after, minlength=count).tolist()


def replay_times(waits: LineWaits) -> ReplayedTimes:
    """Runs an event loop: a line is ready once issued, its lane is free and all it waits for has ended."""
    return _EventLoop(waits).run()


class _EventLoop:
    """State of a replay; compute under resident collectives runs slower."""

    def __init__(self, waits: LineWaits) -> None:
        plan, count = waits.lines.plan, len(waits.lines)
        earlier, later = waits.lane_order
        self.offset, self.followers, self.pending = build_successors_csr(
            count, np.concatenate([waits.before, earlier]), np.concatenate([waits.after, later])
        )
        self.issue: list[float] = waits.issue_s.tolist()
        self.duration: list[float] = waits.duration_s.tolist()
        self.device: list[int] = waits.lines.device.tolist()
        self.meeting: list[int] = waits.meeting.tolist()
        self.missing: list[int] = waits.meeting_size.tolist()
        self.members: list[list[int]] = [[] for _ in self.missing]
        self.slowed = 1.0 + plan.slowdown
        slows, nothing = plan.slowdown > 0, [False] * count
        self.resident: list[bool] = waits.resident.tolist() if slows else nothing
        self.compute: list[bool] = np.isin(waits.phase_kind, COMPUTE_PHASES).tolist() if slows else nothing
        self.start = [-1.0] * count
        self.end = [-1.0] * count
        self.heap: list[tuple[float, int]] = []
        # Per device: resident collectives, the running compute phase, and when it ends.
        classes = len(plan.programs)
        self.residents = [0] * classes
        self.running = [-1] * classes
        self.due = [0.0] * classes

    def run(self) -> ReplayedTimes:
        """Ends lines in order of time and starts those that become ready."""
        offset, followers, pending = self.offset, self.followers, self.pending
        start, end = self.start, self.end
        issue, duration, meeting, heap = self.issue, self.duration, self.meeting, self.heap
        resident, compute, device = self.resident, self.compute, self.device
        running, due = self.running, self.due
        ready = [line for line, count in enumerate(pending) if not count]
        ended: list[int] = []  # at this moment
        now = 0.0
        while True:
            while ready or ended:
                if ended:
                    line = ended.pop()
                    end[line] = now
                    if resident[line]:
                        self._change(device[line], -1, now)
                    for follower in followers[offset[line] : offset[line + 1]]:
                        pending[follower] -= 1
                        if not pending[follower]:
                            ready.append(follower)
                    continue
                line = ready.pop()
                if issue[line] > now:
                    heappush(heap, (issue[line], line))
                    continue
                if resident[line]:
                    self._change(device[line], 1, now)
                for member in (line,) if meeting[line] < 0 else self._met(line):
                    start[member] = now
                    left = duration[member]
                    if left and compute[member]:
                        here = device[member]
                        left *= self.slowed if self.residents[here] else 1.0
                        running[here], due[here] = member, now + left
                    if left:
                        heappush(heap, (now + left, member))
                    else:
                        ended.append(member)
            if not heap:
                return ReplayedTimes(start_s=np.array(start), end_s=np.array(end))
            moment, line = heappop(heap)
            if start[line] < 0:  # the host had not issued it
                ready.append(line)
            elif compute[line]:
                here = device[line]
                if running[here] != line or due[here] != moment:
                    continue  # superseded: its end has moved
                running[here] = -1
                ended.append(line)
            else:
                ended.append(line)
            now = moment

    def _met(self, line: int) -> list[int]:
        """Returns all lines of a meeting once the last of them is ready; none before."""
        meeting = self.meeting[line]
        self.members[meeting].append(line)
        return self.members[meeting] if len(self.members[meeting]) == self.missing[meeting] else []

    def _change(self, device: int, by: int, now: float) -> None:
        """Counts a collective in or out and rescales the rest of the running compute phase."""
        before = self.residents[device]
        self.residents[device] = before + by
        if (before == 0) != (before + by == 0) and self.running[device] >= 0:
            left = self.due[device] - now
            self.due[device] = now + (left * self.slowed if by > 0 else left / self.slowed)
            heappush(self.heap, (self.due[device], self.running[device]))


# ---------------------------------------------------------------------------- deadlock


@dataclass(frozen=True, kw_only=True)
class WaitCycle:
    """Cycle of lines that wait for each other: each for the next, the last for the first."""

    model: str
    lines: tuple[int, ...]


HOSTS = "a send blocks its host until the receive is posted"
STREAMS = "every communicator is a queue behind the compute enqueued before"
ONE_QUEUE = "all communication of a device goes through one queue"


def find_host_deadlock(waits: LineWaits) -> WaitCycle | None:
    """Finds a cycle under model (a): hosts run lines in order; sends, waits and the optimizer block."""
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


def find_stream_deadlock(waits: LineWaits, *, one_queue: bool) -> WaitCycle | None:
    """Finds a cycle under model (b), compute in order and a queue per communicator, or (c), one for all."""
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
        pair_consecutive_lines(lines.device, compute),
        (latest[behind], np.flatnonzero(behind)),
        pair_consecutive_lines(lines.device if one_queue else _communicators(waits), communicates),
        (never, never),
    ]
    joined = [(node[before], node[after]) for before, after in edges]
    return _cycle(ONE_QUEUE if one_queue else STREAMS, count, joined, count)


def _communicators(waits: LineWaits) -> Ints:
    """Returns the queue of every line: per class, and per group or directed edge of a module."""
    lines, count = waits.lines, len(waits.lines)
    peer = np.full(count, -1)
    peer[waits.send], peer[waits.recv] = lines.device[waits.recv], lines.device[waits.send]
    size = len(lines.plan.programs)
    edge = ((lines.module * len(OpKind) + lines.kind) * size + peer) + len(waits.group_members)
    queues: Ints = np.where(waits.group >= 0, waits.group, edge) * size + lines.device
    return queues


def _cycle(model: str, count: int, edges: list[tuple[Ints, Ints]], lines: int) -> WaitCycle | None:
    """Removes nodes that wait for nothing until none is left; any remainder holds a cycle."""
    before = np.concatenate([first for first, _ in edges])
    after = np.concatenate([second for _, second in edges])
    offset, following, pending = build_successors_csr(count, before, after)
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
    return WaitCycle(model=model, lines=tuple(node for node in cycle if node < lines))


# ---------------------------------------------------------------------------- grid of ops

OpGrid = list[list[ShortOpName | None]]


def build_op_grid(plan: Plan, *, aligned: bool = True) -> OpGrid:
    """Returns the rows of a grid in which every F, B, I and W takes one row, below all it waits for.

    An op of several phases is placed by its first. Rows align the classes only if the plan holds the rules
    of coverage and deadlock; without `aligned`, the op in row n is the n-th of its class.
    """
    lines = PlanLines(plan)
    phases = lines.kind <= OpKind.WEIGHT_GRAD
    first = phases & (lines.place == 0)
    before, after = pair_consecutive_lines(lines.device, phases)
    if aligned:
        expected = ExpectedProgram(plan)
        broken = next(iter(check_line_coverage(lines, expected)), None)
        assert broken is None, broken
        waits = WaitDerivation(lines, expected).derive()
        before, after = np.concatenate([before, waits.before]), np.concatenate([after, waits.after])
    step = _longest_path(first, before, after)
    grid: OpGrid = [[None] * len(plan.programs) for _ in range(int(step.max(initial=0)))]
    for line in np.flatnonzero(first).tolist():
        module = plan.names[lines.module[line]]
        chunk, microbatch = int(lines.chunk[line]), int(lines.microbatch[line])
        name = ShortOpName(OpKind(lines.kind[line]), chunk, microbatch, "" if module == LLM else module)
        grid[step[line] - 1][lines.device[line]] = name
    return grid


def _longest_path(counted: Ints, before: Ints, after: Ints) -> Ints:
    """Returns how many counted lines the longest chain up to each line has."""
    count = len(counted)
    offset, following, pending = build_successors_csr(count, before, after)
    length = counted.astype(np.int64).tolist()
    weight = list(length)
    free = [line for line, waiting in enumerate(pending) if not waiting]
    for line in free:  # grows
        for follower in following[offset[line] : offset[line + 1]]:
            length[follower] = max(length[follower], length[line] + weight[follower])
            pending[follower] -= 1
            if not pending[follower]:
                free.append(follower)
    assert len(free) == count, "lines wait in a cycle"
    return np.array(length, np.int64)
