"""Orders the ops of every pipeline stage: 1F1B, interleaved 1F1B, zero-bubble, and list scheduling.

An order has one op per virtual stage and microbatch; `expand_order_to_phases` makes a program of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, pairwise
from typing import Literal, NamedTuple

import numpy as np

from optimus.errors import UserError, one_of
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan, Program
from optimus.ir.ranks import LLM


class PipelineOp(NamedTuple):
    """Forward or backward of one chunk; its virtual stage is `chunk * stages + stage`."""

    kind: OpKind
    chunk: int
    microbatch: int


PipelineOrder = tuple[tuple[PipelineOp, ...], ...]  # one op order per stage


def megatron_warmup_counts(stages: int, chunks: int) -> tuple[int, ...]:
    """Returns Megatron's warm-up forwards of each stage before its first F, B pair: room to overlap sends."""
    return tuple(2 * (stages - 1 - stage) + (chunks - 1) * stages for stage in range(stages))


def minimal_warmup_counts(stages: int, chunks: int) -> tuple[int, ...]:
    """Returns the fewest warm-up forwards that keep the makespan with free sends (the paper's adjusted)."""
    return tuple((stages - 1 - stage) + (chunks - 1) * stages for stage in range(stages))


def build_1f1b_order(*, stages: int, microbatches: int) -> PipelineOrder:
    """Builds 1F1B (PipeDream-flush): one chunk per stage, with the least warm-up."""
    return build_interleaved_1f1b_order(
        stages=stages, chunks=1, microbatches=microbatches, warmup=minimal_warmup_counts(stages, 1)
    )


def build_interleaved_1f1b_order(
    *, stages: int, chunks: int, microbatches: int, warmup: Sequence[int] | None = None
) -> PipelineOrder:
    """Builds interleaved 1F1B (arXiv 2104.04473): warm-up forwards, pairs F, B, then the remaining backwards.

    `warmup[r]`, Megatron's by default, counts the forwards of stage r before its first pair.
    """
    _check_counts(stages=stages, chunks=chunks, microbatches=microbatches)
    forwards = _forwards(stages, chunks, microbatches)
    backwards = _backwards(OpKind.BACKWARD, stages, chunks, microbatches)
    warmup = megatron_warmup_counts(stages, chunks) if warmup is None else warmup
    counts = [min(count, len(forwards)) for count in warmup]
    _check_warmup(counts, stages=stages, chunks=chunks)

    def order(count: int) -> tuple[PipelineOp, ...]:
        pairs = list(zip(forwards[count:], backwards, strict=False))
        return (*forwards[:count], *chain.from_iterable(pairs), *backwards[len(pairs) :])

    return tuple(order(count) for count in counts)


def build_zero_bubble_order(*, stages: int, chunks: int, microbatches: int) -> PipelineOrder:
    """Builds interleaved ZB-H1 (arXiv 2401.10241): stage r delays every W by r backwards."""
    _check_counts(stages=stages, chunks=chunks, microbatches=microbatches)
    forwards = _forwards(stages, chunks, microbatches)
    inputs = _backwards(OpKind.INPUT_GRAD, stages, chunks, microbatches)
    weights = _backwards(OpKind.WEIGHT_GRAD, stages, chunks, microbatches)

    def order(delay: int, count: int) -> tuple[PipelineOp, ...]:
        ops = forwards[:count]
        for step, backward in enumerate(inputs):
            ops += forwards[count + step : count + step + 1]  # none left in the drain
            ops.append(backward)
            if step >= delay:
                ops.append(weights[step - delay])
        return (*ops, *weights[max(0, len(inputs) - delay) :])

    return tuple(order(stage, count) for stage, count in enumerate(minimal_warmup_counts(stages, chunks)))


def _forwards(stages: int, chunks: int, microbatches: int) -> list[PipelineOp]:
    """Orders forwards depth first: `stages` microbatches through one chunk, then through the next."""
    return [
        PipelineOp(OpKind.FORWARD, chunk, microbatch)
        for first in range(0, microbatches, stages)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + stages, microbatches))
    ]


def _backwards(kind: OpKind, stages: int, chunks: int, microbatches: int) -> list[PipelineOp]:
    """Orders backwards as the forwards, last chunk first."""
    return [
        PipelineOp(kind, chunks - 1 - chunk, microbatch)
        for _, chunk, microbatch in _forwards(stages, chunks, microbatches)
    ]


def _check_counts(*, stages: int, chunks: int, microbatches: int) -> None:
    assert min(stages, chunks, microbatches) >= 1, f"{stages=} {chunks=} {microbatches=}"
    if chunks > 1 and microbatches % stages:
        below = microbatches // stages * stages
        choices = one_of(choice for choice in (below, below + stages) if choice)
        raise UserError(
            field="workload.microbatches",
            value=microbatches,
            problem=f"must be a multiple of the {stages} pipeline stages with {chunks} chunks",
            hint=f"use {choices} microbatches, or chunks 1",
        )


def _check_warmup(counts: Sequence[int], *, stages: int, chunks: int) -> None:
    """Refuses counts that can deadlock.

    Every backward must find its forward done, by the last chunk (a floor) and by the stages before
    (counts never rise); and through the ring from last to first stage, forwards may run at most two
    groups of `stages` microbatches ahead of the backwards they wait for.
    """
    if len(counts) != stages:
        raise ValueError(f"warmup has {len(counts)} counts for {stages} stages")
    if counts[-1] < (chunks - 1) * stages:
        raise ValueError(f"warmup {counts} must be at least {(chunks - 1) * stages} on the last stage")
    if any(later > earlier for earlier, later in pairwise(counts)):
        raise ValueError(f"warmup {counts} must not rise from stage to stage")
    if chunks > 1 and counts[0] - counts[-1] > 2 * stages:
        raise ValueError(f"warmup {counts} may fall by at most {2 * stages} from first to last stage")


def peak_microbatches_in_flight(order: PipelineOrder) -> int:
    """Returns the most microbatches between first forward and last backward on the first stage."""
    count = most = 0
    for op in order[0]:
        count += op.chunk == 0 and op.kind == OpKind.FORWARD
        count -= op.chunk == 0 and op.kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD)
        most = max(most, count)
    return most


# ---------------------------------------------------------------------------- list scheduling

UNLIMITED_CHUNKS = 1 << 30
# rounds   backwards first, the oldest microbatch; forwards in rounds of as many as stages, as Megatron's
# breadth  the same, but forwards of all microbatches through a chunk before those of the next
# turns    one forward, one backward, of the deepest chunk
Priority = Literal["rounds", "breadth", "turns"]
PRIORITIES: tuple[Priority, ...] = ("rounds", "breadth", "turns")
Event = tuple[float, bool, int, PipelineOp]  # time; whether the op ends, else it becomes ready; stage; op


@dataclass(frozen=True, kw_only=True)
class OpTimes:
    """Seconds of the ops of every virtual stage, and of its sends to the next one and back."""

    stages: int
    seconds: Mapping[OpKind, Sequence[float]]  # of F, I, W; or of F, B
    send_s: Sequence[float]

    @property
    def backward(self) -> OpKind:
        """Kind of op that the previous virtual stage waits for."""
        return OpKind.INPUT_GRAD if OpKind.INPUT_GRAD in self.seconds else OpKind.BACKWARD

    def followers(self, stage: int, op: PipelineOp) -> Iterator[tuple[float, int, PipelineOp]]:
        """Yields the ops that can run once `op` has ended: delay in seconds, stage, op."""
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
class TimedOrder:
    """Op order with the start of every op, without data-parallel traffic."""

    times: OpTimes
    starts: Mapping[tuple[int, PipelineOp], float]  # by stage and op
    step_s: float

    @property
    def order(self) -> PipelineOrder:
        """Ops by start; of those that start together, ops of no duration come first."""
        stages = self.times.stages
        rows: list[list[tuple[float, float, int, PipelineOp]]] = [[] for _ in range(stages)]
        for place, ((stage, op), start) in enumerate(self.starts.items()):
            finish = start + self.times.seconds[op.kind][op.chunk * stages + stage]
            rows[stage].append((start, finish, place, op))
        return tuple(tuple(row[-1] for row in sorted(ops)) for ops in rows)


def list_schedule_pipeline(
    times: OpTimes, microbatches: int, *, cap: int = UNLIMITED_CHUNKS, priority: Priority = "rounds"
) -> TimedOrder:
    """Builds an order greedily: a free stage starts the ready op of highest priority, weight gradients last.

    No microbatch enters a stage that holds the activations of `cap` chunks: the knob between ZB-H2
    (arXiv 2401.10241) and what memory allows. A microbatch that has entered is never held back, so that
    no cap can deadlock.
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
                for after_s, follower_stage, follower in times.followers(here, op):
                    heappush(events, (now + after_s, False, follower_stage, follower))
            else:
                stages[here].add(op)
        for here in sorted(touched):
            taken = stages[here].take()
            if taken is not None:
                starts[here, taken] = now
                took_s = times.seconds[taken.kind][taken.chunk * times.stages + here]
                heappush(events, (now + took_s, True, here, taken))
    return TimedOrder(times=times, starts=starts, step_s=now)


Queue = list[tuple[int, int, PipelineOp]]


@dataclass(kw_only=True)
class _Stage:
    """Ready ops of one stage, by priority."""

    cap: int
    priority: Priority
    stages: int
    busy: bool = False
    alive: int = 0  # chunks whose activations are saved
    forward_next: bool = False  # a backward was the last op to run
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
        """Returns the op to start now, if the stage is free and has one."""
        entering = self.entering if self.alive < self.cap else []
        forwards = min((queue for queue in (self.forwards, entering) if queue), default=[])
        first = forwards if self.forward_next else self.backwards
        queue = first or self.backwards or forwards or self.weights
        if self.busy or not queue:
            return None
        op = heappop(queue)[-1]
        self.busy = True
        self.alive += op.kind is OpKind.FORWARD
        if op.kind is not OpKind.WEIGHT_GRAD:
            self.forward_next = self.priority == "turns" and op.kind is not OpKind.FORWARD
        return op


# ---------------------------------------------------------------------------- programs


def expand_order_to_phases(
    plan: Plan, order: PipelineOrder, device: int, modules: Sequence[str] | None = None
) -> Program:
    """Returns all phases of a device class, in the order of its stage's ops.

    `modules` (all by default) are parts of the pipeline: in a virtual stage, layers of encoders run before
    the LLM's, and their backwards after it. A backward that the order splits is whole where the encoder does
    not split it.
    """
    stage = plan.ranks.coordinates(device)[0]
    numbers = [(at, name) for at, name in enumerate(plan.modules) if modules is None or name in modules]
    ops: list[tuple[int, int, int, int]] = []
    sizes: list[int] = []
    for op in order[stage]:
        for number, name in numbers if op.kind == OpKind.FORWARD else reversed(numbers):
            kind, template = op.kind, plan.template_of(name, op.kind, stage, op.chunk)
            if not template and kind == OpKind.INPUT_GRAD:
                kind, template = OpKind.BACKWARD, plan.template_of(name, OpKind.BACKWARD, stage, op.chunk)
            if template:
                mine = _microbatches_on(plan, name, device, op.microbatch)
                ops += [(number, kind, op.chunk, microbatch) for microbatch in mine]
                sizes += [len(template)] * len(mine)
    counts = np.array(sizes, np.int64)
    place = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.repeat(np.array(ops, np.int32).reshape(-1, 4), counts, axis=0)
    return Program.of(np.column_stack([rows, place]))


def _microbatches_on(plan: Plan, name: str, device: int, llm_microbatch: int) -> list[int]:
    """Returns a module's microbatches that belong to one of the LLM's and run on a device class."""
    if name == LLM:
        return [llm_microbatch]
    module, pipeline = plan.modules[name], plan.ranks.pipeline_of(name, device)
    numbers = module.microbatches_of(llm_microbatch)
    return [number for number in numbers if module.pipelines[number] == pipeline]
