"""What paced steps should take by the rules alone: nothing that was measured goes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from benchmarks.draws import Draws
from benchmarks.paced_job import TorchVariant, bucket
from benchmarks.paced_plan import Played, drawn_s
from benchmarks.pacing import Link
from benchmarks.torch_replay import Programs, replay_step
from optimus.ir.op import COMPUTE_OPS, Floats, OpKind
from optimus.ir.plan import Plan
from optimus.schedule.dependencies import couple
from optimus.schedule.simulate import evaluate

# How often what a line gathers or reduces goes around: parameters in parts, whole everywhere, or not at all.
Traffic = Literal["sharded", "whole", "none"]
PASSES: Mapping[Traffic, Mapping[int, int]] = {
    "sharded": {OpKind.UNSHARD: 1, OpKind.REDUCE_GRAD: 1},
    "whole": {OpKind.UNSHARD: 0, OpKind.REDUCE_GRAD: 2},
    "none": {OpKind.UNSHARD: 0, OpKind.REDUCE_GRAD: 0},
}
NEAR_S = 1e-6  # ideal times are exact; this is for sums of floats


@dataclass(frozen=True, kw_only=True)
class PlanReplay:
    """When the step is over, and every line of every device class; collectives of the busiest one."""

    step_s: float
    ends_s: tuple[Floats, ...]
    traffic_s: float


def replay_plan(plan: Plan, draws: Draws, link: Link, *, traffic: Traffic = "whole") -> PlanReplay:
    """The coupled graph of the programs, played with drawn durations and the links' times."""
    schedule = couple(plan, plan.programs)
    device = schedule.device
    seconds = schedule.duration_s.copy()  # sends stand there as the planner was told of the links
    moves_s = np.zeros(len(plan.programs))
    rows = np.concatenate([program.rows for program in plan.programs]).tolist()
    for at, (number, kind, chunk, microbatch, place) in enumerate(rows):
        if kind in (OpKind.UNSHARD, OpKind.REDUCE_GRAD):
            name, passes = plan.names[number], PASSES[traffic][kind]
            moved = _bucket_at(plan, name, int(device[at]), place)
            replicas = plan.modules[name].layout.dp
            seconds[at] = link.collective_s([moved], ranks=replicas, passes=passes) if passes else 0.0
            moves_s[device[at]] += seconds[at]
        elif kind in COMPUTE_OPS:
            name = plan.names[number]
            virtual = chunk * plan.modules[name].layout.pp + plan.ranks.stage_of(name, int(device[at]))
            seconds[at] = drawn_s(
                plan, draws, module=name, kind=OpKind(kind), virtual=virtual, microbatch=microbatch,
                place=place,
            )  # fmt: skip
    timeline = evaluate(replace(schedule, duration_s=seconds))
    ends = np.flatnonzero(np.diff(device, prepend=-1, append=-1))
    return PlanReplay(
        step_s=timeline.step_s,
        ends_s=tuple(timeline.finish_s[a:b] for a, b in pairwise(ends.tolist())),
        traffic_s=float(moves_s.max()),
    )


def _bucket_at(plan: Plan, name: str, device: int, place: int) -> torch.Tensor:
    """What is gathered and reduced by one line."""
    module = plan.modules[name]
    planned = module.buckets[plan.ranks.stage_of(name, device)][place]
    return bucket(planned.end_layer - planned.first_layer, module.layout.dp)


def replay_torch(variant: TorchVariant, programs: Programs, *, draws: Draws, link: Link) -> float:
    """A step of one of torch's schedules."""
    return replay_step(variant.pipeline, programs, partial(torch_s, variant, draws), link)


def torch_s(variant: TorchVariant, draws: Draws, kind: str, stage: int, microbatch: int) -> float:
    """What one op of a virtual stage takes."""
    named = f"{variant.pipeline.schedule} of {len(variant.forward_s)}"
    factor = draws.factor(module=named, kind=kind, virtual_stage=stage, microbatch=microbatch)
    return variant.mean_s(kind, stage) * factor


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How a step differs from its program and its replay."""

    out_of_order: int  # lines begun, or phases run, elsewhere than where the program has them
    # The most by which a phase was over before it could be, and the most by which one was late: beyond what
    # all hosts gave up, since where one is late on a lane that others share, they come earlier.
    early_s: float
    late_s: float

    def words(self) -> tuple[str, ...]:
        """None if the step is as it should be."""
        found = []
        if self.out_of_order:
            found.append(f"{self.out_of_order} lines were played out of program order")
        if self.early_s > NEAR_S:
            found.append(f"an op was over {self.early_s:.4f} s before everything it waits for allows")
        if self.late_s > NEAR_S:
            found.append(f"an op was {self.late_s:.4f} s late, which no lateness of the host explains")
        return tuple(found)


def compare_step(
    plan: Plan,
    replayed: PlanReplay,
    begun: Sequence[Sequence[int]],
    played: Sequence[Sequence[Played]],
    *,
    start_s: float,
    given_up_s: float,
) -> Faults:
    """What all ranks played against program and replay; each list has one entry per rank."""
    wrong, early_s, late_s = 0, 0.0, 0.0
    for rank, (lines, phases) in enumerate(zip(begun, played, strict=True)):
        device = plan.ranks.class_of(rank)
        program, ends_s = plan.programs[device].rows, replayed.ends_s[device]
        wrong += _differences(range(len(program)), list(lines))
        told = [
            tuple(row)
            for row in program.tolist()
            if row[1] <= OpKind.WEIGHT_GRAD and not _is_launch(plan, device, row)
        ]
        wrong += _differences(told, [phase.row for phase in phases])
        wrong += sum(tuple(program[phase.line].tolist()) != phase.row for phase in phases)
        for phase in phases:
            gap_s = phase.end_s - start_s - float(ends_s[phase.line])
            early_s, late_s = max(early_s, -gap_s - given_up_s), max(late_s, gap_s - given_up_s)
    return Faults(out_of_order=wrong, early_s=early_s, late_s=late_s)


def _is_launch(plan: Plan, device: int, row: Sequence[int]) -> bool:
    """Whether a line only begins something, which goes on beside the rank."""
    module, kind, chunk, _, place = row
    name = plan.names[module]
    template = plan.template_of(name, OpKind(kind), plan.ranks.stage_of(name, device), chunk)
    return template[place].kind == OpKind.LAUNCH


def _differences(wanted: Sequence[object], found: Sequence[object]) -> int:
    return abs(len(wanted) - len(found)) + sum(a != b for a, b in zip(wanted, found, strict=False))
