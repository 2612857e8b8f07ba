"""Makes an op order by list scheduling: a stage that is free takes the best op that is ready."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

from optimus.ir.op import OpKind
from optimus.schedule.pipelines import Pipeline, PipelineOp

UNLIMITED = 1 << 30
# rounds   backwards first, the oldest microbatch; forwards in rounds of as many as stages, as Megatron's
# breadth  the same, but forwards of all microbatches through a chunk before those of the next
# turns    one forward, one backward, of the deepest chunk
Priority = Literal["rounds", "breadth", "turns"]
PRIORITIES: tuple[Priority, ...] = ("rounds", "breadth", "turns")
Event = tuple[float, bool, int, PipelineOp]  # when; an end, else an op gets ready; stage; op


@dataclass(frozen=True, kw_only=True)
class OpTimes:
    """Seconds of the ops of every virtual stage, and of what it sends to the next (and gets back)."""

    stages: int
    seconds: Mapping[OpKind, Sequence[float]]  # of F, I, W; or of F, B
    send_s: Sequence[float]

    @property
    def backward(self) -> OpKind:
        """The kind of op that the virtual stage before waits for."""
        return OpKind.INPUT_GRAD if OpKind.INPUT_GRAD in self.seconds else OpKind.BACKWARD

    def followers(self, stage: int, op: PipelineOp) -> Iterator[tuple[float, int, PipelineOp]]:
        """What may run once `op` has ended: after how many seconds, on which stage, which op."""
        _, chunk, microbatch = op
        virtual = chunk * self.stages + stage
        if op.kind is OpKind.FORWARD and virtual + 1 < len(self.send_s):
            chunk, stage = divmod(virtual + 1, self.stages)
            yield self.send_s[virtual], stage, PipelineOp(OpKind.FORWARD, chunk, microbatch)
        elif op.kind is OpKind.FORWARD:
            yield 0.0, stage, PipelineOp(self.backward, chunk, microbatch)
        elif op.kind is not OpKind.WEIGHT_GRAD:
            if op.kind is OpKind.INPUT_GRAD:
                yield 0.0, stage, PipelineOp(OpKind.WEIGHT_GRAD, chunk, microbatch)
            if virtual:
                chunk, stage = divmod(virtual - 1, self.stages)
                yield self.send_s[virtual - 1], stage, PipelineOp(op.kind, chunk, microbatch)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """An op order with the start of every op, as a search compares them: without data-parallel traffic."""

    times: OpTimes
    starts: Mapping[tuple[int, PipelineOp], float]  # by stage and op
    step_s: float

    @property
    def order(self) -> Pipeline:
        """Ops by start; of those that start together, what takes no time first, as it was started."""
        stages = self.times.stages
        rows: list[list[tuple[float, float, int, PipelineOp]]] = [[] for _ in range(stages)]
        for place, ((stage, op), start) in enumerate(self.starts.items()):
            finish = start + self.times.seconds[op.kind][op.chunk * stages + stage]
            rows[stage].append((start, finish, place, op))
        return tuple(tuple(row[-1] for row in sorted(ops)) for ops in rows)


def greedy(
    times: OpTimes, microbatches: int, *, cap: int = UNLIMITED, priority: Priority = "rounds"
) -> Draft:
    """A stage takes weight gradients last, and of backwards and forwards what has priority.

    No microbatch enters a stage on which the activations of `cap` chunks are alive: the knob between
    ZB-H2 (arXiv 2401.10241) and what memory allows. What has entered is never held up, so that no
    cap can deadlock.
    """
    stages = [_Stage(cap=cap, priority=priority, stages=times.stages) for _ in range(times.stages)]
    events: list[Event] = [(0.0, False, 0, PipelineOp(OpKind.FORWARD, 0, nth)) for nth in range(microbatches)]
    starts: dict[tuple[int, PipelineOp], float] = {}
    now = 0.0
    while events:
        now, touched = events[0][0], set()
        while events and events[0][0] == now:
            _, ended, here, op = heappop(events)
            touched.add(here)
            if ended:
                stages[here].end(op, split=times.backward is OpKind.INPUT_GRAD)
                for after_s, there, follower in times.followers(here, op):
                    heappush(events, (now + after_s, False, there, follower))
            else:
                stages[here].add(op)
        for here in sorted(touched):
            taken = stages[here].take()
            if taken is not None:
                starts[here, taken] = now
                took_s = times.seconds[taken.kind][taken.chunk * times.stages + here]
                heappush(events, (now + took_s, True, here, taken))
    return Draft(times=times, starts=starts, step_s=now)


Queue = list[tuple[int, int, PipelineOp]]


@dataclass(kw_only=True)
class _Stage:
    """Ops that are ready on one stage, best first."""

    cap: int
    priority: Priority
    stages: int
    busy: bool = False
    alive: int = 0  # chunks whose activations are kept
    owes_forward: bool = False  # a backward was the last to run
    backwards: Queue = field(default_factory=list)
    entering: Queue = field(default_factory=list)  # forwards of the first chunk
    forwards: Queue = field(default_factory=list)  # of later chunks
    weights: Queue = field(default_factory=list)

    def add(self, op: PipelineOp) -> None:
        kind, chunk, microbatch = op
        if kind is OpKind.FORWARD:
            queue, rank = self.forwards if chunk else self.entering, (microbatch // self.stages, chunk)
        else:
            queue, rank = self.weights if kind is OpKind.WEIGHT_GRAD else self.backwards, (microbatch, -chunk)
        if self.priority == "turns" and kind is not OpKind.WEIGHT_GRAD:
            rank = -chunk, microbatch
        elif self.priority == "breadth" and kind is OpKind.FORWARD:
            rank = chunk, microbatch
        heappush(queue, (*rank, op))

    def end(self, op: PipelineOp, *, split: bool) -> None:
        self.busy = False
        if op.kind is (OpKind.WEIGHT_GRAD if split else OpKind.BACKWARD):
            self.alive -= 1

    def take(self) -> PipelineOp | None:
        """The op to start now, if the stage is free and has one."""
        entering = self.entering if self.alive < self.cap else []
        forwards = min((queue for queue in (self.forwards, entering) if queue), default=[])
        first = forwards if self.owes_forward else self.backwards
        queue = first or self.backwards or forwards or self.weights
        if self.busy or not queue:
            return None
        op = heappop(queue)[-1]
        self.busy = True
        self.alive += op.kind is OpKind.FORWARD
        if op.kind is not OpKind.WEIGHT_GRAD:
            self.owes_forward = self.priority == "turns" and op.kind is not OpKind.FORWARD
        return op
