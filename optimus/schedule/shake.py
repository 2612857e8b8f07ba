"""Shortens an op order: ops shift back and forth between its two ends, from slightly disturbed starts.

Each pass lets ops start, one by one, as early as data and a gap on their stage allow; one over reversed time
pushes them to the end first. Neither lengthens the step (justification: Valls et al., EJOR 165, 2005).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import inf
from random import Random

from optimus.ir.op import OpKind
from optimus.schedule.list_pipeline import Draft
from optimus.schedule.pipelines import PipelineOp

DISTURBANCES = (0.05, 0.1)  # of a start, in parts of the step
ROUNDING = 1 - 1e-12  # a gap may be as long as an op
Waits = Sequence[Sequence[tuple[int, float]]]  # for every op: what it follows, by how many seconds


def shake(
    draft: Draft, *, rounds: int, random: Random, enough_s: float, accept: Callable[[Draft], bool]
) -> Draft:
    """The shortest acceptable order found in so many rounds, or the first that takes `enough_s` or less."""
    net = _Net(draft)
    starts = [draft.starts[op] for op in net.ops]
    for nth in range(rounds):
        if draft.step_s <= enough_s:
            break
        by_s = random.choice(DISTURBANCES) * draft.step_s if nth else 0.0
        moved, step_s = net.justified(net.disturbed(starts, by_s, random))
        if step_s <= draft.step_s:
            found = net.draft(moved, step_s)
            if accept(found):
                draft, starts = found, moved
    return draft


class _Net:
    """Ops numbered so that each comes after the one op it waits for."""

    def __init__(self, draft: Draft) -> None:
        self._times = times = draft.times
        self.ops: list[tuple[int, PipelineOp]] = [
            (stage, op) for stage, op in draft.starts if (stage, op.kind, op.chunk) == (0, OpKind.FORWARD, 0)
        ]
        self._before: list[list[tuple[int, float]]] = [[] for _ in self.ops]
        self._after: list[list[tuple[int, float]]] = []
        for number, (stage, op) in enumerate(self.ops):  # grows as followers are found
            self._after.append([])
            for after_s, there, follower in times.followers(stage, op):
                self._after[number].append((len(self.ops), after_s))
                self._before.append([(number, after_s)])
                self.ops.append((there, follower))
        self._stage = [stage for stage, _ in self.ops]
        self._seconds = [times.seconds[op.kind][op.chunk * times.stages + stage] for stage, op in self.ops]

    def draft(self, starts: Sequence[float], step_s: float) -> Draft:
        return Draft(times=self._times, starts=dict(zip(self.ops, starts, strict=True)), step_s=step_s)

    def disturbed(self, starts: Sequence[float], by_s: float, random: Random) -> list[int]:
        """Ops by start, each earlier or later by at most `by_s`, but after what it waits for."""
        keys: list[float] = []
        for number, start in enumerate(starts):
            key = start + by_s * (2 * random.random() - 1)
            keys.append(max((key, *(keys[other] for other, _ in self._before[number]))))
        return sorted(range(len(keys)), key=lambda number: (keys[number], number))

    def justified(self, sequence: Sequence[int]) -> tuple[list[float], float]:
        """Starts of the ops, packed in this sequence and then shifted back and forth while that helps."""
        starts, ends = self._pack(sequence, self._before)
        last_s = inf
        while (step_s := max(ends)) < last_s:
            last_s = step_s
            latest = sorted(range(len(ends)), key=lambda number: (-ends[number], -number))
            _, left = self._pack(latest, self._after)  # from an op's start to the end of the step
            earliest = sorted(range(len(left)), key=lambda number: (-left[number], number))
            starts, ends = self._pack(earliest, self._before)
        return starts, step_s

    def _pack(self, sequence: Sequence[int], waits: Waits) -> tuple[list[float], list[float]]:
        """Every op as early as possible, in gaps too, without moving those packed before it."""
        starts, ends = [0.0] * len(sequence), [0.0] * len(sequence)
        busy: list[list[tuple[float, float]]] = [[] for _ in range(self._times.stages)]
        for number in sequence:
            seconds, start = self._seconds[number], 0.0
            for other, after_s in waits[number]:
                ready = ends[other] + after_s
                if ready > start:
                    start = ready
            taken = busy[self._stage[number]]
            place = bisect_right(taken, (start, inf))
            if place and taken[place - 1][1] > start:
                start = taken[place - 1][1]
            while place < len(taken) and (start + seconds) * ROUNDING > taken[place][0]:
                start = taken[place][1]
                place += 1
            starts[number], ends[number] = start, start + seconds
            taken.insert(place, (start, start + seconds))
        return starts, ends
