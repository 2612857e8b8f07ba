"""Times a pipeline op by op and counts its activations, without building a schedule: fast, for searching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimus.compiled import njit_cached
from optimus.cost.assumptions import Assumptions
from optimus.ir.op import Floats, Ints, Lane, OpKind
from optimus.schedule.pipeline_orders import PipelineOrder
from optimus.schedule.pipeline_schedule import ParameterTraffic, TrafficOverlap, exposed_lane
from optimus.schedule.simulator import ScheduleDeadlock

_FORWARD, _BACKWARD = int(OpKind.FORWARD), int(OpKind.BACKWARD)
_INPUT_GRAD, _WEIGHT_GRAD = int(OpKind.INPUT_GRAD), int(OpKind.WEIGHT_GRAD)


@dataclass(frozen=True, kw_only=True, eq=False)
class OrderColumns:
    """An op order as columns: all ops of stage 0, then of stage 1, and so on."""

    stages: int
    chunks: int
    microbatches: int
    offset: Ints  # of every stage's first op, and the number of all ops
    kind: Ints
    chunk: Ints
    microbatch: Ints

    @staticmethod
    def of(order: PipelineOrder) -> OrderColumns:
        ops = chain.from_iterable(order)
        kind, chunk, microbatch = np.fromiter(chain.from_iterable(ops), np.int64).reshape(-1, 3).T.copy()
        return OrderColumns(
            stages=len(order),
            chunks=1 + int(chunk.max()),
            microbatches=1 + int(microbatch.max()),
            offset=np.concatenate([[0], np.cumsum([len(ops) for ops in order])]),
            kind=kind,
            chunk=chunk,
            microbatch=microbatch,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class StageSeconds:
    """Seconds of ops, sends and traffic of every virtual stage."""

    ops: dict[OpKind, Floats]
    sends: Floats
    traffic: Sequence[ParameterTraffic]


@dataclass(frozen=True, kw_only=True, eq=False)
class OpTimeline:
    """Start and end of every op of an order, and the end of the step."""

    start_s: Floats
    finish_s: Floats
    step_s: float


def time_ops(order: OrderColumns, seconds: StageSeconds, assumptions: Assumptions) -> OpTimeline:
    """Times a training step with one entry per op: as `simulate_schedule` does its schedule, to rounding.

    Gathers run from the start, a chunk's reduce after its last op; both slow down compute that they overlap.
    Every op waits for the one before it and for its input, which is sent right after it is produced.
    """
    stages = order.stages
    ops = np.zeros((len(OpKind), len(seconds.sends)))
    for kind, by_virtual in seconds.ops.items():
        ops[kind] = by_virtual
    overlaps = [
        TrafficOverlap(chunks=seconds.traffic[stage::stages], assumptions=assumptions)
        for stage in range(stages)
    ]
    chunks, mode = range(order.chunks), assumptions.dp_exposure
    exposed = np.array([[each.exposed(name) for each in overlaps] for name in ("gather_s", "reduce_s")])
    hidden = np.array(
        [
            [[each.hidden(name, chunk) for chunk in chunks] for each in overlaps]
            for name in ("gather_s", "reduce_s")
        ]
    )
    updates = np.array([sum(part.update_s for part in each.chunks) for each in overlaps])
    start, finish = np.zeros(len(order.kind)), np.zeros(len(order.kind))
    step_s = _time_ops(
        order.offset,
        order.kind,
        order.chunk,
        order.microbatch,
        order.microbatches,
        ops,
        seconds.sends,
        exposed,
        hidden,
        updates if assumptions.optimizer_time else np.zeros(0),
        mode != "chunks",
        mode != "all",
        exposed_lane(mode) == Lane.DP,
        assumptions.residence_slowdown,
        start,
        finish,
    )
    if step_s < 0:
        raise ScheduleDeadlock("ops of the order wait for each other")
    return OpTimeline(start_s=start, finish_s=finish, step_s=step_s)


def find_peak_activations(
    order: OrderColumns, saved: Floats, recomputed: Floats | None = None, logits: Floats | None = None
) -> Floats:
    """Returns for every stage the activation bytes at its peak, by component; logits are the last one.

    Inputs are bytes by [chunk, stage, component], and logits by [chunk, stage]. A chunk saves bytes from its
    forward to its backward, or to its W where that is split off; then what its I has recomputed (and
    gradients of logits) is kept until W. Logits are kept until its B or I.
    """
    held = np.zeros_like(saved) if recomputed is None else recomputed
    logits = np.zeros(saved.shape[:2]) if logits is None else logits
    peaks = np.zeros((saved.shape[1], saved.shape[2] + 1))
    _find_peaks(order.offset, order.kind, order.chunk, saved, held, logits, peaks)
    return peaks


@njit_cached
def _find_peaks(
    offset: NDArray[Any],
    kind: NDArray[Any],
    chunk: NDArray[Any],
    saved: Floats,
    recomputed: Floats,
    logits: Floats,
    peaks: Floats,
) -> None:
    for stage in range(len(offset) - 1):
        split = False
        for op in range(offset[stage], offset[stage + 1]):
            split = split or kind[op] == _WEIGHT_GRAD
        alive, most = np.zeros(peaks.shape[1]), -np.inf
        for op in range(offset[stage], offset[stage + 1]):
            saves, recomputes = 0.0, 0.0
            if kind[op] == _FORWARD:
                saves = 1.0
            elif kind[op] == _WEIGHT_GRAD:
                saves, recomputes = -1.0, -1.0
            elif split:
                recomputes = 1.0 if kind[op] == _INPUT_GRAD else 0.0
            else:
                saves = -1.0 if kind[op] == _BACKWARD else 0.0
            for part in range(saved.shape[2]):
                here = chunk[op], stage, part
                alive[part] += saves * saved[here] + recomputes * recomputed[here]
            if kind[op] == _FORWARD:
                alive[-1] += logits[chunk[op], stage]
            if alive.sum() > most:
                most = alive.sum()
                peaks[stage] = alive
            if kind[op] == _BACKWARD or kind[op] == _INPUT_GRAD:  # which still read logits
                alive[-1] -= logits[chunk[op], stage]


@njit_cached
def _time_ops(  # noqa: PLR0915
    offset: NDArray[Any],
    kind: NDArray[Any],
    chunk: NDArray[Any],
    microbatch: NDArray[Any],
    microbatches: int,
    seconds: Floats,
    sends: Floats,
    exposed: Floats,
    hidden: Floats,
    updates: Floats,
    has_exposed: bool,
    has_hidden: bool,
    exposed_on_dp: bool,
    slowdown: float,
    start: Floats,
    finish: Floats,
) -> float:
    """Fills `start` and `finish`; returns the end of the step, or -1 if ops wait for each other.

    Stages take turns, each running the ops whose inputs are there. Nothing but compute and what follows it on
    the same stage is shared, so all traffic that an op can overlap is known when it is timed.
    """
    stages, virtual_stages = len(offset) - 1, len(sends)
    chunks = virtual_stages // stages
    arrived = np.full((2, virtual_stages, microbatches), -1.0)  # of outputs forward, of gradients backward
    begun, left = np.zeros((stages, chunks), np.bool_), np.zeros((stages, chunks), np.int64)
    gathered = np.zeros((stages, chunks))
    computed, sent = np.zeros(stages), np.zeros(stages)  # ends of the last op and of the last send
    traffic = np.zeros((stages, 2, 2 + 2 * chunks))  # starts and ends of gathers and reduces on the DP lane
    moves = np.zeros(stages, np.int64)
    passed = np.zeros(stages, np.int64)  # of these, how many ended before the last op began
    at = offset[:stages].copy()
    reduced = 0.0
    for stage in range(stages):
        for op in range(offset[stage], offset[stage + 1]):
            left[stage, chunk[op]] += 1
        first = exposed[0, stage] if has_exposed else 0.0
        busy = first if exposed_on_dp else 0.0
        if has_exposed and exposed_on_dp:
            traffic[stage, 1, 0], moves[stage] = first, 1
        for part in range(chunks):
            gathered[stage, part] = first
            if has_hidden:
                traffic[stage, 0, moves[stage]] = busy
                busy += hidden[0, stage, part]
                traffic[stage, 1, moves[stage]] = busy
                moves[stage] += 1
                if not has_exposed or part > 0:
                    gathered[stage, part] = max(first, busy)
    running = True
    while running:
        running = False
        for stage in range(stages):
            while at[stage] < offset[stage + 1]:
                op = at[stage]
                part, nth = chunk[op], microbatch[op]
                virtual = part * stages + stage
                forward, weights = kind[op] == _FORWARD, kind[op] == _WEIGHT_GRAD
                direction, before = (0, virtual - 1) if forward else (1, virtual + 1)
                now = computed[stage]
                if not weights and 0 <= before < virtual_stages:
                    if arrived[direction, before, nth] < 0.0:
                        break
                    now = max(now, arrived[direction, before, nth])
                if not begun[stage, part]:
                    begun[stage, part] = True
                    now = max(now, gathered[stage, part])
                work = seconds[kind[op], virtual]
                end, place = now + work, passed[stage]
                while place < moves[stage] and traffic[stage, 1, place] <= now:
                    place += 1
                passed[stage] = place
                if slowdown > 0.0:
                    while place < moves[stage] and traffic[stage, 0, place] < end:
                        begins, ends = max(traffic[stage, 0, place], now), traffic[stage, 1, place]
                        end = begins + (end - begins) * (1.0 + slowdown)
                        if ends < end:
                            end = ends + (end - ends) / (1.0 + slowdown)
                        place += 1
                start[op], finish[op], computed[stage] = now, end, end
                if not weights:
                    goes_on = virtual + 1 < virtual_stages if forward else virtual > 0
                    if goes_on and stages > 1:
                        sent[stage] = max(sent[stage], end) + sends[virtual if forward else virtual - 1]
                        arrived[direction, virtual, nth] = sent[stage]
                    else:
                        arrived[direction, virtual, nth] = end
                left[stage, part] -= 1
                if left[stage, part] == 0 and has_hidden:
                    last = moves[stage]
                    begins = max(end, traffic[stage, 1, last - 1])
                    traffic[stage, 0, last], traffic[stage, 1, last] = begins, begins + hidden[1, stage, part]
                    moves[stage] = last + 1
                    reduced = max(reduced, traffic[stage, 1, last])
                at[stage] += 1
                running = True
    step = reduced
    for stage in range(stages):
        if at[stage] < offset[stage + 1]:
            return -1.0
        if has_exposed:
            begins = computed[stage]
            if exposed_on_dp:
                begins = max(begins, traffic[stage, 1, moves[stage] - 1])
            else:
                begins = max(begins, exposed[0, stage])
            reduced = max(reduced, begins + exposed[1, stage])
        step = max(step, computed[stage], sent[stage])
    step = max(step, reduced)
    for stage in range(len(updates)):
        step = max(step, max(computed[stage], reduced) + updates[stage])
    return float(step)
