"""The engine's own layers on paced ranks: real numbers and collectives, and the time that plans give them.

Nothing in the engine knows of it: whoever is told which line runs lets its time pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import distributed as dist

from benchmarks.divided_job import DP_LINK, TP, TP_LINK, WIDTH
from benchmarks.draws import Draws
from benchmarks.paced_backend import PacedNetwork
from benchmarks.paced_plan import Journal, drawn_s
from benchmarks.paced_replays import PlanReplay
from benchmarks.shaped import BlockingBucket
from optimus.engine.config import TrainingConfig
from optimus.engine.distributed_optimizer import ShardedBucket
from optimus.engine.process_groups import ProcessGroups
from optimus.engine.rank_trainer import RankTrainer
from optimus.ir.op import COLLECTIVE_PHASES, COMPUTE_OPS, Floats, OpKind, Schedule
from optimus.ir.plan import Phase, Plan
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.schedule.dependencies import couple
from optimus.schedule.simulate import evaluate

DTYPE = torch.bfloat16


def line_seconds(plan: Plan, device: int, draws: Draws) -> list[float]:
    """What every line of a device class takes by itself; what travels takes what its link says."""
    found = []
    for module, kind, chunk, microbatch, place in plan.programs[device].rows.tolist():
        name = plan.names[module]
        if (
            kind not in COMPUTE_OPS
            or phase_of(plan, device, module, kind, chunk, place).kind in COLLECTIVE_PHASES
        ):
            found.append(0.0)
            continue
        virtual = chunk * plan.modules[name].layout.pp + plan.ranks.stage_of(name, device)
        found.append(
            drawn_s(
                plan,
                draws,
                module=name,
                kind=OpKind(kind),
                virtual=virtual,
                microbatch=microbatch,
                place=place,
            )
        )
    return found


def phase_of(plan: Plan, device: int, module: int, kind: int, chunk: int, place: int) -> Phase:
    """What a line plays."""
    name = plan.names[module]
    return plan.template_of(name, OpKind(kind), plan.ranks.stage_of(name, device), chunk)[place]


class Pacer:
    """A recorder of the executor: a line is over when its time has passed, also one that runs nothing."""

    def __init__(
        self, journal: Journal, network: PacedNetwork, plan: Plan, device: int, draws: Draws
    ) -> None:
        self._journal, self._clock, self._rows = journal, network.clock, plan.programs[device].rows.tolist()
        self._seconds, self._next, self.free = line_seconds(plan, device, draws), 0, False
        # Whose end is written down: all phases but launches, which go on beside the rank.
        self._told = [
            kind in COMPUTE_OPS and phase_of(plan, device, module, kind, chunk, place).kind != OpKind.LAUNCH
            for module, kind, chunk, _, place in self._rows
        ]

    def reset(self) -> None:
        self._journal.reset()
        self._next = 0

    def begin(self, line: int) -> None:
        self._pass(line)
        self._journal.begin(line)

    def end(self, line: int) -> None:
        self._spend(line)
        if self._told[line]:
            self._journal.spent(tuple(self._rows[line]))
        self._next = line + 1

    def finish(self) -> None:
        self._pass(len(self._rows))

    def _pass(self, end: int) -> None:
        """Lines at which a rank has nothing to do but let time go by."""
        for line in range(self._next, end):
            self._journal.begin(line)
            self._spend(line)
            if self._told[line]:
                self._journal.passed(tuple(self._rows[line]))
        self._next = end

    def _spend(self, line: int) -> None:
        if self._seconds[line] and not self.free:
            self._clock.compute(self._seconds[line])


class PacedModel:
    """This rank's part of a plan: made once, then played step by step."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        draws: Draws,
        network: PacedNetwork,
        groups: ProcessGroups,
        *,
        waits: bool = False,
    ) -> None:
        rank, self.plan = dist.get_rank(), plan
        self.journal = Journal(network.clock)
        self._pacer = Pacer(self.journal, network, plan, plan.ranks.class_of(rank), draws)
        trainer = RankTrainer(
            job,
            plan,
            TrainingConfig(),
            groups,
            dtype=DTYPE,
            device=torch.device("cpu"),
            recorder=self._pacer,
            bucket_type=BlockingBucket if waits else ShardedBucket,
        )
        self.executor, self._batch = trainer.executor, trainer.batch(0)
        self.executor.optimizer = None  # a replay knows neither norm nor AdamW

    def prepare(self) -> None:
        """One step in which only what travels takes time."""
        self._pacer.free = True
        self.play()
        self._pacer.free = False

    def play(self) -> None:
        self._pacer.reset()
        self.executor.step(self._batch)
        self._pacer.finish()

    def traffic(self) -> Traffic:
        """What this rank's travels take that a plan does not know to the byte."""
        moved = {}
        for name, module in self.plan.modules.items():
            stage = self.plan.ranks.stage_of(name, self.plan.ranks.class_of(dist.get_rank()))
            for place in range(len(module.buckets[stage])):
                buckets = self.executor.buckets.at(name, place)
                sizes = [len(bucket.gradients) for bucket in buckets if isinstance(bucket, ShardedBucket)]
                moved[name, place] = _move_s(sizes, module.layout.dp)
        seam = getattr(self._batch.context(LLM, 0), "seam", None)
        rows = (0, 0) if seam is None else (sum(seam.sent), sum(seam.received))
        there_s, back_s = (
            TP_LINK.collective_s([torch.empty(count, WIDTH, dtype=DTYPE)], ranks=TP) for count in rows
        )
        return Traffic(buckets=moved, seam_s={"seam.gather.tp": there_s, "seam.scatter.tp": back_s})


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of one rank: seconds to gather and to reduce each bucket, and of encoder rows there and back."""

    buckets: Mapping[tuple[str, int], tuple[float, ...]]
    seam_s: Mapping[str, float]


def _move_s(sizes: Sequence[int], ranks: int) -> tuple[float, float]:
    """To gather some buckets in the type they compute in, and to reduce them in a wider one."""
    found = [
        sum(DP_LINK.collective_s([torch.empty(size, dtype=dtype)], ranks=ranks) for size in sizes)
        for dtype in (DTYPE, torch.float32)
    ]
    return found[0], found[1]


def replay_model(plan: Plan, draws: Draws, traffic: Sequence[Traffic]) -> PlanReplay:
    """The coupled graph of the programs, played with drawn durations and the links' times."""
    schedule = _coupled(plan)
    return _played(plan, schedule, _seconds(plan, schedule, draws, traffic))


def _coupled(plan: Plan) -> Schedule:
    """As plans know it, and ranks that share a head meet there: their loss needs a small gather."""
    schedule = couple(plan, plan.programs)
    meeting = np.full(len(schedule), -1) if schedule.meeting is None else schedule.meeting.copy()
    first, at = meeting.max() + 1, 0
    for device, program in enumerate(plan.programs):
        for module, kind, chunk, microbatch, place in program.rows.tolist():
            if kind == OpKind.FORWARD and phase_of(plan, device, module, kind, chunk, place).name == "head":
                meeting[at] = first + microbatch
            at += 1
    return replace(schedule, meeting=meeting)


def replay_waiting(plan: Plan, draws: Draws, traffic: Sequence[Traffic]) -> PlanReplay:
    """The same with all parameter traffic apart: gathers before anything computes, reduces after everything.

    All ranks hold the encoder, so that its reduces begin when the last rank has computed.
    """
    schedule = _coupled(plan)
    seconds = _seconds(plan, schedule, draws, traffic)
    kinds = np.concatenate([program.kind for program in plan.programs])
    modules = np.concatenate([program.module for program in plan.programs])
    phases = kinds <= OpKind.WEIGHT_GRAD
    first = {
        device: np.flatnonzero((schedule.device == device) & phases)[0]
        for device in range(len(plan.programs))
    }
    ends: dict[bool, float] = {}
    for kind in (OpKind.UNSHARD, OpKind.REDUCE_GRAD):
        moves = kinds == kind
        for of_llm in (False, True):
            mine = moves & ((modules == plan.names.index(LLM)) == of_llm)
            sums = np.bincount(schedule.device[mine], seconds[mine], minlength=len(plan.programs))
            if kind == OpKind.REDUCE_GRAD:
                ends[of_llm] = float(sums.max())
            else:
                for device, at in first.items():
                    seconds[at] += sums[device]
        seconds[moves] = 0.0
    found = _played(plan, schedule, seconds)
    return replace(found, step_s=found.step_s + sum(ends.values()))


def _seconds(plan: Plan, schedule: Schedule, draws: Draws, traffic: Sequence[Traffic]) -> Floats:
    """Of every line of all device classes."""
    seconds = schedule.duration_s.copy()
    seam_s = {name: max(own.seam_s[name] for own in traffic) for name in traffic[0].seam_s}
    of_class = {plan.ranks.class_of(rank): own for rank, own in enumerate(traffic)}
    at = 0
    for device, program in enumerate(plan.programs):
        drawn = line_seconds(plan, device, draws)
        for line, (module, kind, chunk, _, place) in enumerate(program.rows.tolist()):
            if kind in (OpKind.UNSHARD, OpKind.REDUCE_GRAD):
                seconds[at] = of_class[device].buckets[plan.names[module], place][kind == OpKind.REDUCE_GRAD]
            elif kind in COMPUTE_OPS:
                phase = phase_of(plan, device, module, kind, chunk, place)
                seconds[at] = (
                    seam_s.get(phase.name, seconds[at]) if phase.kind == OpKind.LAUNCH else drawn[line]
                )
            at += 1
    return seconds


def _played(plan: Plan, schedule: Schedule, seconds: Floats) -> PlanReplay:
    timeline = evaluate(replace(schedule, duration_s=seconds))
    ends = np.flatnonzero(np.diff(schedule.device, prepend=-1, append=-1))
    moves = np.isin(schedule.kind, (OpKind.UNSHARD, OpKind.REDUCE_GRAD))
    return PlanReplay(
        step_s=timeline.step_s,
        ends_s=tuple(timeline.finish_s[a:b] for a, b in pairwise(ends.tolist())),
        traffic_s=float(np.bincount(schedule.device[moves], seconds[moves]).max(initial=0.0)),
    )
