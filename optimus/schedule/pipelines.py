"""Writes the order in which every pipeline stage runs its forwards and backwards, as data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from optimus.errors import UserError, one_of
from optimus.ir.op import OpKind


class PipelineOp(NamedTuple):
    """One forward or backward of one chunk; its virtual stage is `chunk * stages + stage`."""

    kind: OpKind
    chunk: int
    microbatch: int


Pipeline = tuple[tuple[PipelineOp, ...], ...]  # one op order per stage


def megatron_warmup(stages: int, chunks: int) -> tuple[int, ...]:
    """Forwards of each stage before its first F, B pair in Megatron: room to overlap sends."""
    return tuple(2 * (stages - 1 - stage) + (chunks - 1) * stages for stage in range(stages))


def least_warmup(stages: int, chunks: int) -> tuple[int, ...]:
    """The fewest forwards that keep the makespan with free communication: the paper's adjusted warm-up."""
    return tuple((stages - 1 - stage) + (chunks - 1) * stages for stage in range(stages))


def one_f_one_b(*, stages: int, microbatches: int) -> Pipeline:
    """1F1B (PipeDream-flush): one chunk per stage, with the least warm-up."""
    return interleaved(stages=stages, chunks=1, microbatches=microbatches, warmup=least_warmup(stages, 1))


def interleaved(
    *, stages: int, chunks: int, microbatches: int, warmup: Sequence[int] | None = None
) -> Pipeline:
    """Interleaved 1F1B (arXiv 2104.04473): warm-up forwards, then pairs F, B, then the backwards left.

    `warmup[r]`, Megatron's by default, counts the forwards of stage r before its first pair.
    """
    _check_counts(stages=stages, chunks=chunks, microbatches=microbatches)
    forwards = _forwards(stages, chunks, microbatches)
    backwards = _backwards(OpKind.BACKWARD, stages, chunks, microbatches)
    wanted = megatron_warmup(stages, chunks) if warmup is None else warmup
    counts = [min(count, len(forwards)) for count in wanted]
    _check_warmup(counts, stages=stages, chunks=chunks)

    def order(count: int) -> tuple[PipelineOp, ...]:
        pairs = list(zip(forwards[count:], backwards, strict=False))
        return (*forwards[:count], *chain.from_iterable(pairs), *backwards[len(pairs) :])

    return tuple(order(count) for count in counts)


def zero_bubble(*, stages: int, chunks: int, microbatches: int) -> Pipeline:
    """ZB-H1 (arXiv 2401.10241), interleaved: stage r runs every W r backwards late, to fill its drain."""
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

    return tuple(order(stage, count) for stage, count in enumerate(least_warmup(stages, chunks)))


def _forwards(stages: int, chunks: int, microbatches: int) -> list[PipelineOp]:
    """Depth first: `stages` microbatches through one chunk, then the same ones through the next."""
    return [
        PipelineOp(OpKind.FORWARD, chunk, microbatch)
        for first in range(0, microbatches, stages)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + stages, microbatches))
    ]


def _backwards(kind: OpKind, stages: int, chunks: int, microbatches: int) -> list[PipelineOp]:
    """The order of the forwards, last chunk first."""
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
    """Refuse counts that can deadlock.

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


def most_in_flight(order: Pipeline) -> int:
    """Microbatches between their first forward and their last backward on the first stage."""
    count = most = 0
    for op in order[0]:
        count += op.chunk == 0 and op.kind == OpKind.FORWARD
        count -= op.chunk == 0 and op.kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD)
        most = max(most, count)
    return most
