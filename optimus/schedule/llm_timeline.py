"""Simulates the LLM alone, finds its bubbles, and inserts encoder phases between its phases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from optimus.ir.op import Floats, Ints, Lane, OpKind
from optimus.ir.plan import Plan, Program, Template
from optimus.ir.ranks import LLM
from optimus.schedule.bubbles import CAUSES, find_idle_intervals
from optimus.schedule.fill_paper import (
    COMPUTE,
    LAUNCH,
    WAIT,
    Bubble,
    DeviceBubbles,
    TimedKernel,
    subtract_intervals,
)
from optimus.schedule.lower import lower_to_programs
from optimus.schedule.pipeline_orders import PipelineOrder, expand_order_to_phases

FIRST, LAST = -np.inf, np.inf  # before, and after, all phases of the LLM


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedEncoderOp:
    """Op of an encoder microbatch on one class, with the time of each of its phases in the LLM's step."""

    module: str
    kind: OpKind
    microbatch: int
    times_s: Sequence[float]


class LlmTimeline:
    """Step of the LLM alone, simulated phase by phase."""

    def __init__(self, plan: Plan, order: PipelineOrder) -> None:
        alone = replace(plan, modules={LLM: plan.modules[LLM]})
        devices = range(alone.ranks.num_classes)
        orders = [expand_order_to_phases(alone, order, device) for device in devices]
        lowered = lower_to_programs(alone, orders)
        self._plan, self._orders = alone, orders
        self._schedule, self._timeline, self._programs = lowered.schedule, lowered.timeline, lowered.programs
        self._op_kind = np.concatenate([program.kind for program in lowered.programs])
        self._idle = find_idle_intervals(self._schedule, self._timeline)
        self._cached_bubbles: dict[tuple[int, bool], DeviceBubbles] = {}
        self.step_s = self._timeline.step_s
        # Encoder work must be done when the optimizer begins.
        self.end_s = float(self._timeline.start_s[self._schedule.kind == OpKind.OPTIMIZER].min())

    @cached_property
    def forward_points(self) -> list[float]:
        """F_i: start of the forward of microbatch i in the LLM's first virtual stage."""
        start_s = self._timeline.start_s
        return sorted(float(start_s[rows].min()) for rows in self._entry_ops(OpKind.FORWARD))

    @cached_property
    def backward_points(self) -> list[float]:
        """B_i: end of the backward of microbatch i in the LLM's first virtual stage."""
        finish_s = self._timeline.finish_s
        return sorted(
            float(finish_s[rows].max()) for rows in self._entry_ops(OpKind.BACKWARD, OpKind.INPUT_GRAD)
        )

    def _entry_ops(self, *kinds: OpKind) -> Iterator[Ints]:
        """Yields the lines of every microbatch's op in the LLM's first virtual stage."""
        schedule, plan = self._schedule, self._plan
        here = (schedule.device == plan.ranks.entry_of(0)) & (schedule.chunk == plan.entry_chunk)
        rows = np.flatnonzero(here & np.isin(self._op_kind, kinds))
        for microbatch in range(self._plan.microbatches):
            yield rows[schedule.microbatch[rows] == microbatch]

    def device_bubbles(self, stage: int, *, mirrored: bool) -> DeviceBubbles:
        """Returns the bubbles of a stage from the start of the step or, mirrored, from its end."""
        key = stage, mirrored
        if key not in self._cached_bubbles:
            self._cached_bubbles[key] = self._bubbles_from(stage, mirrored=mirrored)
        return self._cached_bubbles[key]

    def _bubbles_from(self, stage: int, *, mirrored: bool) -> DeviceBubbles:
        bubbles, carriers, (first, last) = self._stage_bubbles[stage]
        if not mirrored:
            return DeviceBubbles(free_s=first, bubbles=bubbles, carriers=carriers)
        end = self.end_s
        return DeviceBubbles(
            free_s=end - last,
            bubbles=[
                Bubble(begin_s=end - b.end_s, end_s=end - b.begin_s, tp=b.tp) for b in reversed(bubbles)
            ],
            carriers=[(end - b, end - a) for a, b in reversed(carriers)],
        )

    @cached_property
    def _stage_bubbles(self) -> list[tuple[list[Bubble], list[tuple[float, float]], tuple[float, float]]]:
        return [self._bubbles_of(stage) for stage in range(self._plan.ranks.llm.pp)]

    def _bubbles_of(self, stage: int) -> tuple[list[Bubble], list[tuple[float, float]], tuple[float, float]]:
        """Returns bubbles, carriers, and the first and last time of compute of a stage."""
        schedule, timeline, idle = self._schedule, self._timeline, self._idle
        device = self._plan.ranks.class_at(stage, 0, 0)
        here = np.flatnonzero(schedule.device == device)
        works = here[(schedule.lane[here] == Lane.COMPUTE) & (schedule.kind[here] != OpKind.OPTIMIZER)]
        if not len(works):  # before the LLM's first virtual stage: forwards get one half, backwards the other
            return [], [], (self.end_s / 2, self.end_s / 2)
        takes = timeline.finish_s[works] > timeline.start_s[works]
        works = works[takes] if takes.any() else works  # a stage without layers only passes tensors on
        first, last = float(timeline.start_s[works[0]]), float(timeline.finish_s[works[-1]])
        mine = (idle.device == device) & (idle.begin_s >= first) & (idle.end_s <= last)
        tp = idle.cause[mine] == CAUSES.index("tp")
        begins, ends = idle.begin_s[mine].tolist(), idle.end_s[mine].tolist()
        bubbles = [
            Bubble(begin_s=b, end_s=e, tp=t) for b, e, t in zip(begins, ends, tp.tolist(), strict=True)
        ]
        links = here[(schedule.lane[here] == Lane.TP) & (schedule.duration_s[here] > 0)]
        busy = list(zip(timeline.start_s[links].tolist(), timeline.finish_s[links].tolist(), strict=True))
        compute = list(zip(timeline.start_s[works].tolist(), timeline.finish_s[works].tolist(), strict=True))
        carriers = [(begin, end) for begin, end, _ in subtract_intervals(_joined(compute), busy)]
        return bubbles, carriers, (first, last)

    def _alone(self, plan: Plan, device: int) -> int:
        """Returns the class of the LLM alone that corresponds to a class of `plan`."""
        stage, context, _ = plan.ranks.coordinates(device)
        return self._plan.ranks.class_at(stage, context, 0)

    def rows_of_llm(self, plan: Plan) -> list[Ints]:
        """Returns the LLM's phases on every class of `plan`, as rows of a program."""
        return [self.llm_rows(plan, device) for device in range(plan.ranks.num_classes)]

    def llm_rows(self, plan: Plan, device: int) -> Ints:
        """Returns the LLM's phases on a class of `plan`, as rows of a program."""
        rows: Ints = self._orders[self._alone(plan, device)].rows.copy()
        rows[:, 0] = plan.names.index(LLM)
        return rows

    def begins_s(self, plan: Plan) -> Floats:
        """Returns the starts of the LLM's phases, class after class of `plan`."""
        starts = []
        for device in range(plan.ranks.num_classes):
            here = (self._schedule.device == self._alone(plan, device)) & (
                self._op_kind <= OpKind.WEIGHT_GRAD
            )
            starts.append(self._timeline.start_s[here])
        return np.concatenate(starts)

    def compute_span_s(self, stage: int, every: int) -> tuple[float, float]:
        """Returns when the LLM starts to compute and when all ends, on every `every`th stage from `stage`.

        The earliest start, relative to the entry stage's, and the latest end.
        """
        begins, ends = [], []
        first = self._stage_bubbles[self._plan.ranks.entry_stage][2][0]
        for number in range(stage, self._plan.ranks.llm.pp, every):
            begins.append(self._stage_bubbles[number][2][0] - first)
            here = self._schedule.device == self._plan.ranks.class_at(number, 0, 0)
            works = here & (self._schedule.kind != OpKind.OPTIMIZER)
            ends.append(float(self._timeline.finish_s[works].max(initial=0.0)))
        return min(begins), max(ends)

    def traffic_order(self) -> dict[tuple[OpKind, int, int], int]:
        """Returns the line of each gather and reduce in its program, by kind, stage and bucket."""
        order = {}
        for stage in range(self._plan.ranks.llm.pp):
            program = self._programs[self._plan.ranks.class_at(stage, 0, 0)]
            for line in np.flatnonzero(
                (program.kind == OpKind.UNSHARD) | (program.kind == OpKind.REDUCE_GRAD)
            ).tolist():
                order[OpKind(program.kind[line]), stage, int(program.place[line])] = line
        return order

    def insert_encoder_ops(self, plan: Plan, fillers: Sequence[Sequence[PlacedEncoderOp]]) -> list[Program]:
        """Returns the phases of every class of `plan`: the LLM's and, at their times, those of `fillers`."""
        return [self._insert_into_class(plan, device, placed) for device, placed in enumerate(fillers)]

    def _insert_into_class(self, plan: Plan, device: int, placed: Sequence[PlacedEncoderOp]) -> Program:
        llm, names = self.llm_rows(plan, device), plan.names
        if not placed:
            return Program.of(llm)
        alone = self._alone(plan, device)
        keys = self._keys[alone]
        lines = [
            (names.index(op.module), op.kind, 0, op.microbatch, phase)
            for op in placed
            for phase in range(len(op.times_s))
        ]
        times = np.concatenate([self._times(plan, device, alone, op) for op in placed])
        order = np.argsort(times, kind="stable")  # forwards and backwards may alternate in the same bubbles
        times, rows = times[order], np.array(lines, llm.dtype)[order]
        before = self._behind_launches[alone][np.searchsorted(keys, times, side="left")]
        return Program.of(np.insert(llm, before, rows, axis=0))

    def _times(self, plan: Plan, device: int, alone: int, op: PlacedEncoderOp) -> Floats:
        """Returns the times of an op's phases, never decreasing.

        A launch during LLM compute is enqueued before that compute: after it, the LLM's own launches are.
        """
        times: Floats = np.array(op.times_s, np.float64)
        template = plan.template_of(op.module, op.kind, plan.ranks.stage_of(op.module, device), 0)
        launches = np.array([phase.kind == OpKind.LAUNCH for phase in template])
        starts, ends = self._computes[alone]
        under = np.searchsorted(starts, times, side="right") - 1
        inside = np.flatnonzero(launches & (under >= 0))
        inside = inside[times[inside] < ends[under[inside]]]
        times[inside] = starts[under[inside]]
        return np.maximum.accumulate(times)

    @cached_property
    def _computes(self) -> list[tuple[Floats, Floats]]:
        """Start and end of the LLM's compute phases of every class."""
        schedule, timeline = self._schedule, self._timeline
        works = (
            (schedule.lane == Lane.COMPUTE)
            & (self._op_kind <= OpKind.WEIGHT_GRAD)
            & (schedule.duration_s > 0)
        )
        rows = [np.flatnonzero(works & (schedule.device == device)) for device in range(schedule.num_devices)]
        return [(timeline.start_s[mine], timeline.finish_s[mine]) for mine in rows]

    @cached_property
    def _behind_launches(self) -> list[Ints]:
        """Per class and place among its LLM phases: the first place from there that separates no launch.

        A launch follows the phase before it directly: nothing may be inserted between them.
        """
        positions = []
        rows = np.flatnonzero(self._op_kind <= OpKind.WEIGHT_GRAD)
        for device, program in enumerate(self._orders):
            kinds = self._schedule.kind[rows[self._schedule.device[rows] == device]]
            free = np.append((kinds != OpKind.LAUNCH) | (program.place == 0), True)
            places = np.where(free, np.arange(len(free)), len(free))
            positions.append(np.minimum.accumulate(places[::-1])[::-1])
        return positions

    @cached_property
    def _keys(self) -> list[Floats]:
        """Times of the LLM phases of every class, never decreasing; launches, waits just before compute."""
        schedule, start_s = self._schedule, self._timeline.start_s
        keys = []
        for device in range(schedule.num_devices):
            rows = np.flatnonzero((schedule.device == device) & (self._op_kind <= OpKind.WEIGHT_GRAD))
            compute = (schedule.lane[rows] == Lane.COMPUTE) & (schedule.kind[rows] != OpKind.WAIT)
            times = np.where(compute, start_s[rows], np.nextafter(start_s[rows], -np.inf))
            keys.append(np.maximum.accumulate(times))
        return keys


def list_template_kernels(template: Template, *, mirrored: bool, stretch: float) -> list[TimedKernel]:
    """Returns the kernels of a template; mirrored, a wait starts communication and a launch ends it."""
    kernels: list[TimedKernel] = []
    for phase in template:
        if phase.kind == OpKind.LAUNCH:
            kernels.append((WAIT, 0.0) if mirrored else (LAUNCH, phase.duration_s))
        elif phase.kind == OpKind.WAIT:
            seconds = template[phase.after[0]].duration_s
            kernels.append((LAUNCH, seconds) if mirrored else (WAIT, 0.0))
        else:
            kernels.append((COMPUTE, phase.duration_s * stretch))
    return kernels[::-1] if mirrored else kernels


def _joined(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merges intervals that touch."""
    joined: list[tuple[float, float]] = []
    for begin, end in intervals:
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined
