"""Replays the lines of a plan in time, by the semantics of docs/plan-file.md."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from optimus.ir.op import COMPUTE_PHASES, Floats, Ints
from optimus.verify.waits import Waits


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """Start and end of every line; negative for lines that never run."""

    start_s: Floats
    end_s: Floats

    @property
    def complete(self) -> bool:
        return bool((self.end_s >= 0).all())

    @property
    def step_s(self) -> float:
        return float(self.end_s.max(initial=0.0))


def followers(count: int, before: Ints, after: Ints) -> tuple[list[int], list[int], list[int]]:
    """Returns the successors of every node as offsets and nodes, and the number of its predecessors."""
    order = np.argsort(before, kind="stable")
    offset = np.concatenate([[0], np.cumsum(np.bincount(before, minlength=count))])
    return offset.tolist(), after[order].tolist(), np.bincount(after, minlength=count).tolist()


def replay(waits: Waits) -> Replay:
    """Runs an event loop: a line is ready once issued, its lane is free and all it waits for has ended."""
    return _EventLoop(waits).run()


class _EventLoop:
    """State of a replay; compute under resident collectives runs slower."""

    def __init__(self, waits: Waits) -> None:
        plan, count = waits.lines.plan, len(waits.lines)
        earlier, later = waits.lane_order
        self.offset, self.followers, self.pending = followers(
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

    def run(self) -> Replay:
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
                return Replay(start_s=np.array(start), end_s=np.array(end))
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
