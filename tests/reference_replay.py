"""Replays a pipeline with plain numbers and free communication: the slow, obvious oracle of the fast one."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from optimus.ir.op import OpKind
from optimus.schedule.pipeline_orders import PipelineOp, PipelineOrder

BACKWARD = (OpKind.BACKWARD, OpKind.INPUT_GRAD)


class Deadlock(Exception):
    """No stage can run its next op."""


class Interval(NamedTuple):
    start: int
    finish: int


Replay = dict[tuple[int, PipelineOp], Interval]  # by stage and op


def replay(pipeline: PipelineOrder, duration: Mapping[OpKind, int]) -> Replay:
    """Start and finish of every op when each starts as early as stage order and dependencies allow."""
    stages = len(pipeline)
    chunks = 1 + max(op.chunk for order in pipeline for op in order)
    done: Replay = {}
    position = [0] * stages
    clock = [0] * stages
    while any(position[stage] < len(pipeline[stage]) for stage in range(stages)):
        progress = False
        for stage, order in enumerate(pipeline):
            while position[stage] < len(order):
                op = order[position[stage]]
                needs = dependency(stage, op, stages, chunks)
                if needs is not None and needs not in done:
                    break
                start = clock[stage] if needs is None else max(clock[stage], done[needs].finish)
                clock[stage] = start + duration[op.kind]
                done[stage, op] = Interval(start, clock[stage])
                position[stage] += 1
                progress = True
        if not progress:
            raise Deadlock([order[at : at + 1] for order, at in zip(pipeline, position, strict=True)])
    return done


def dependency(stage: int, op: PipelineOp, stages: int, chunks: int) -> tuple[int, PipelineOp] | None:
    """The one op that must finish first (a backward's own forward follows from the chain)."""
    virtual, last = op.chunk * stages + stage, stages * chunks - 1
    if op.kind is OpKind.WEIGHT_GRAD:
        return stage, op._replace(kind=OpKind.INPUT_GRAD)
    if op.kind in BACKWARD and virtual == last:
        return stage, op._replace(kind=OpKind.FORWARD)
    before = virtual + 1 if op.kind in BACKWARD else virtual - 1
    return None if before < 0 else (before % stages, op._replace(chunk=before // stages))


def makespan(done: Replay) -> int:
    return max(interval.finish for interval in done.values())


def idle_per_busy(done: Replay) -> Fraction:
    """Idle over busy time, summed over all stages until the last one finishes."""
    stages = 1 + max(stage for stage, _ in done)
    busy = sum(interval.finish - interval.start for interval in done.values())
    return Fraction(makespan(done) * stages - busy, busy)
