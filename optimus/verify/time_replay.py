"""Plays the lines of a plan in time, exactly as docs/plan-file.md says time passes."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from optimus.ir.op import COMPUTE_PHASES, Floats, Ints
from optimus.verify.waits import Waits


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """Start and end of every line; negative where the plan stops before."""

    start_s: Floats
    end_s: Floats

    @property
    def complete(self) -> bool:
        return bool((self.end_s >= 0).all())

    @property
    def step_s(self) -> float:
        return float(self.end_s.max(initial=0.0))


def followers(count: int, before: Ints, after: Ints) -> tuple[list[int], list[int], list[int]]:
    """What follows every node, as offsets and nodes, and how many each node waits for."""
    order = np.argsort(before, kind="stable")
    offset = np.concatenate([[0], np.cumsum(np.bincount(before, minlength=count))])
    return offset.tolist(), after[order].tolist(), np.bincount(after, minlength=count).tolist()


def replay(waits: Waits) -> Replay:
    """An event loop: a line is ready when its lane and all it waits for have ended, and it is issued."""
    return _Player(waits).play()


class _Player:
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
        # Per device: how many collectives are there, the compute phase that runs, and when it ends.
        classes = len(plan.programs)
        self.here = [0] * classes
        self.running = [-1] * classes
        self.due = [0.0] * classes

    def play(self) -> Replay:
        """Ends lines in the order of time, and starts what that lets start."""
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
                    for other in followers[offset[line] : offset[line + 1]]:
                        pending[other] -= 1
                        if not pending[other]:
                            ready.append(other)
                    continue
                line = ready.pop()
                if issue[line] > now:
                    heappush(heap, (issue[line], line))
                    continue
                if resident[line]:
                    self._change(device[line], 1, now)
                for other in (line,) if meeting[line] < 0 else self._met(line):
                    start[other] = now
                    left = duration[other]
                    if left and compute[other]:
                        here = device[other]
                        left *= self.slowed if self.here[here] else 1.0
                        running[here], due[here] = other, now + left
                    if left:
                        heappush(heap, (now + left, other))
                    else:
                        ended.append(other)
            if not heap:
                return Replay(start_s=np.array(start), end_s=np.array(end))
            moment, line = heappop(heap)
            if start[line] < 0:  # it waited for the host
                ready.append(line)
            elif compute[line]:
                here = device[line]
                if running[here] != line or due[here] != moment:
                    continue  # it ends at another time by now
                running[here] = -1
                ended.append(line)
            else:
                ended.append(line)
            now = moment

    def _met(self, line: int) -> list[int]:
        """All lines of a meeting once the last of them is ready; none before."""
        meeting = self.meeting[line]
        self.members[meeting].append(line)
        return self.members[meeting] if len(self.members[meeting]) == self.missing[meeting] else []

    def _change(self, device: int, by: int, now: float) -> None:
        """Collectives come and go: what is left of the running phase takes another time from now on."""
        before = self.here[device]
        self.here[device] = before + by
        if (before == 0) != (before + by == 0) and self.running[device] >= 0:
            left = self.due[device] - now
            self.due[device] = now + (left * self.slowed if by > 0 else left / self.slowed)
            heappush(self.heap, (self.due[device], self.running[device]))
