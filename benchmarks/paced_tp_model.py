"""Runs the engine's own layers on paced ranks, and replays their plans.

Values and collectives are real. A recorder of the executor spends the time of each line: the engine is
unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import distributed as dist

from benchmarks.paced_backend import PacedNetwork
from benchmarks.paced_clock import Draws
from benchmarks.paced_plan import PhaseRecorder, PlanReplay, drawn_s
from benchmarks.paced_tp_job import DP_LINK, TP, TP_LINK, WIDTH, link_of
from benchmarks.shaped import BlockingBucket
from optimus.engine.config import TrainingConfig
from optimus.engine.process_groups import make_process_groups
from optimus.engine.rank_trainer import RankTrainer
from optimus.engine.sharded_bucket import ShardedBucket
from optimus.ir.op import (
    COLLECTIVE_PHASES,
    COMPUTE_OPS,
    PARAMETER_TRAFFIC,
    Floats,
    KernelName,
    OpKind,
    Schedule,
)
from optimus.ir.plan import Phase, Plan
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.protocols import Dataset
from optimus.schedule.plan_schedule import build_plan_schedule
from optimus.schedule.schedule_builder import edges_to_csr
from optimus.schedule.simulator import simulate_schedule

DTYPE = torch.bfloat16
NORMS = (KernelName.NORM1, KernelName.NORM2)


def line_seconds(plan: Plan, device: int, draws: Draws) -> list[float]:
    """Returns the seconds of every line of a device class; transfers take the time of their link."""
    seconds = []
    for module, kind, chunk, microbatch, place in plan.programs[device].rows.tolist():
        name = plan.names[module]
        if (
            kind not in COMPUTE_OPS
            or phase_of(plan, device, module, kind, chunk, place).kind in COLLECTIVE_PHASES
        ):
            seconds.append(0.0)
            continue
        virtual = chunk * plan.modules[name].layout.pp + plan.ranks.stage_of(name, device)
        seconds.append(
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
    return seconds


def phase_of(plan: Plan, device: int, module: int, kind: int, chunk: int, place: int) -> Phase:
    """Returns the phase of a line."""
    name = plan.names[module]
    return plan.template_of(name, OpKind(kind), plan.ranks.stage_of(name, device), chunk)[place]


class PacingRecorder:
    """Recorder of the executor that spends the time of every line, also of those that run nothing."""

    def __init__(
        self,
        recorder: PhaseRecorder,
        network: PacedNetwork,
        plan: Plan,
        device: int,
        seconds: Sequence[float],
    ) -> None:
        self._recorder, self._clock, self._rows = recorder, network.clock, plan.programs[device].rows.tolist()
        self.seconds, self._next, self.is_free = seconds, 0, False
        # Ends of all phases but launches, whose collectives run on.
        self._is_recorded = [
            kind in COMPUTE_OPS and phase_of(plan, device, module, kind, chunk, place).kind != OpKind.LAUNCH
            for module, kind, chunk, _, place in self._rows
        ]

    def reset(self) -> None:
        self._recorder.reset()
        self._next = 0

    def begin(self, line: int) -> None:
        self._pass(line)
        self._recorder.begin(line)

    def end(self, line: int) -> None:
        self._spend(line)
        if self._is_recorded[line]:
            self._recorder.spent(tuple(self._rows[line]))
        self._next = line + 1

    def finish(self) -> None:
        self._pass(len(self._rows))

    def _pass(self, end: int) -> None:
        """Spends the time of lines at which nothing runs."""
        for line in range(self._next, end):
            self._recorder.begin(line)
            self._spend(line)
            if self._is_recorded[line]:
                self._recorder.passed(tuple(self._rows[line]))
        self._next = end

    def _spend(self, line: int) -> None:
        if self.seconds[line] and not self.is_free:
            self._clock.compute(self.seconds[line])


class PacedModel:
    """One rank of a plan over the engine's own layers."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        draws: Draws,
        network: PacedNetwork,
        *,
        timeout_s: float,
        blocking: bool = False,
        dataset: Dataset | None = None,
    ) -> None:
        rank = dist.get_rank()
        self.plan, self._device = plan, plan.ranks.class_of(rank)
        self.recorder = PhaseRecorder(network.clock)
        self._line_s = line_seconds(plan, self._device, draws)
        self._pacing = PacingRecorder(self.recorder, network, plan, self._device, self._line_s)
        torch.manual_seed(0)
        self._trainer = RankTrainer(
            job,
            plan,
            TrainingConfig(),
            make_process_groups(plan, rank, timeout_s=timeout_s, backend="paced", options_of=link_of),
            dtype=DTYPE,
            device=torch.device("cpu"),
            recorder=self._pacing,
            fuse=False,  # a layer in one piece would wait for its input behind the time of its first lines
            bucket_type=BlockingBucket if blocking else ShardedBucket,
            dataset=dataset,
        )
        self.executor, self._batch = self._trainer.executor, self._trainer.batch(0)
        self.executor.optimizer = None  # replays include neither norm nor AdamW

    def prepare(self) -> None:
        """Runs a step in which only transfers take time."""
        self._pacing.is_free = True
        self.step()
        self._pacing.is_free = False

    def with_batch(self, step: int, loads: Floats) -> PacedModel:
        """Returns this model with the batch of a step: the `loads` of encoder microbatches, over the mean."""
        other = copy(self)
        other._batch = self._trainer.batch(step)
        rows = self.plan.programs[self._device].rows.tolist()
        other._line_s = [
            seconds if self.plan.names[module] == LLM else seconds * float(loads[microbatch])
            for seconds, (module, _, _, microbatch, _) in zip(self._line_s, rows, strict=True)
        ]
        return other

    def step(self) -> None:
        self._pacing.seconds = self._line_s
        self._pacing.reset()
        self.executor.step(self._batch)
        self._pacing.finish()

    def traffic(self) -> RankTraffic:
        """Returns the seconds of this rank's transfers whose bytes a plan does not know exactly."""
        bucket_s = {}
        for name, module in self.plan.modules.items():
            stage = self.plan.ranks.stage_of(name, self._device)
            for place in range(len(module.buckets[stage])):
                buckets = self.executor.buckets.at(name, place)
                sizes = [len(bucket.grad_buffer) for bucket in buckets if isinstance(bucket, ShardedBucket)]
                bucket_s[name, place] = _bucket_s(sizes, module.layout.dp)
        program = self.plan.programs[self._device]
        runs_llm = (program.module[program.kind == OpKind.FORWARD] == self.plan.names.index(LLM)).any()
        seam = getattr(self._batch.context(LLM, 0), "seam", None) if runs_llm else None
        rows = (0, 0) if seam is None else (sum(seam.sent), sum(seam.received))
        gather_s, scatter_s = (
            TP_LINK.collective_s([torch.empty(count, WIDTH, dtype=DTYPE)], ranks=TP) for count in rows
        )
        return RankTraffic(
            bucket_s=bucket_s, seam_s={"seam.gather.tp": gather_s, "seam.scatter.tp": scatter_s}
        )


@dataclass(frozen=True, kw_only=True)
class RankTraffic:
    """Seconds of one rank to gather and to reduce each bucket, and of the seam's collectives."""

    bucket_s: Mapping[tuple[str, int], tuple[float, ...]]
    seam_s: Mapping[str, float]


def _bucket_s(sizes: Sequence[int], ranks: int) -> tuple[float, float]:
    """Returns the seconds to gather buckets in the compute dtype, and to reduce them in float32."""
    gather_s, reduce_s = (
        sum(DP_LINK.collective_s([torch.empty(size, dtype=dtype)], ranks=ranks) for size in sizes)
        for dtype in (DTYPE, torch.float32)
    )
    return gather_s, reduce_s


def replay_model(plan: Plan, draws: Draws, traffic: Sequence[RankTraffic]) -> PlanReplay:
    """Simulates the coupled graph of the programs with drawn durations and the links' times."""
    schedule = _coupled(plan)
    return _simulated(plan, schedule, _seconds(plan, schedule, draws, traffic))


def _coupled(plan: Plan) -> Schedule:
    """Returns the coupled graph of what the engine runs.

    Ranks of a tensor-parallel head meet in the small gather of their loss. Where nothing is tensor-parallel,
    a norm of a forward runs with the product behind it, and that line waits for what the norm waits for.
    """
    schedule = build_plan_schedule(plan, plan.programs)
    meeting = np.full(len(schedule), -1) if schedule.meeting is None else schedule.meeting.copy()
    first, at = meeting.max() + 1, 0
    runs_at = np.arange(len(schedule))
    for device, program in enumerate(plan.programs):
        line_of = {row: at + line for line, row in enumerate(map(tuple, program.rows.tolist()))}
        for module, kind, chunk, microbatch, place in line_of:
            if kind == OpKind.FORWARD:
                name = phase_of(plan, device, module, kind, chunk, place).name
                if name == KernelName.HEAD:
                    meeting[at] = first + microbatch
                elif name in NORMS and plan.modules[plan.names[module]].layout.tp == 1:
                    runs_at[at] = line_of[module, kind, chunk, microbatch, place + 1]
            at += 1
    waiting = runs_at[np.repeat(np.arange(len(schedule)), np.diff(schedule.dep_offset))]
    dep_offset, deps = edges_to_csr(np.stack([waiting, schedule.deps], axis=1), len(schedule))
    return replace(schedule, meeting=meeting, dep_offset=dep_offset, deps=deps)


def replay_blocking(plan: Plan, draws: Draws, traffic: Sequence[RankTraffic]) -> PlanReplay:
    """Replays with gathers before all compute and reduces after it.

    All ranks hold the encoder, so its reduces start when the last rank has computed.
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
    replay = _simulated(plan, schedule, seconds)
    return replace(replay, step_s=replay.step_s + sum(ends.values()))


def _seconds(plan: Plan, schedule: Schedule, draws: Draws, traffic: Sequence[RankTraffic]) -> Floats:
    """Returns the seconds of every line of all device classes."""
    seconds = schedule.duration_s.copy()
    seam_s = {name: max(rank.seam_s[name] for rank in traffic) for name in traffic[0].seam_s}
    of_class = {plan.ranks.class_of(rank): of_rank for rank, of_rank in enumerate(traffic)}
    at = 0
    for device, program in enumerate(plan.programs):
        drawn = line_seconds(plan, device, draws)
        for line, (module, kind, chunk, _, place) in enumerate(program.rows.tolist()):
            if kind in PARAMETER_TRAFFIC:
                seconds[at] = of_class[device].bucket_s[plan.names[module], place][kind == OpKind.REDUCE_GRAD]
            elif kind in COMPUTE_OPS:
                phase = phase_of(plan, device, module, kind, chunk, place)
                seconds[at] = (
                    seam_s.get(phase.name, seconds[at]) if phase.kind == OpKind.LAUNCH else drawn[line]
                )
            at += 1
    return seconds


def _simulated(plan: Plan, schedule: Schedule, seconds: Floats) -> PlanReplay:
    timeline = simulate_schedule(replace(schedule, duration_s=seconds))
    ends = np.flatnonzero(np.diff(schedule.device, prepend=-1, append=-1))
    moves = np.isin(schedule.kind, PARAMETER_TRAFFIC)
    return PlanReplay(
        step_s=timeline.step_s,
        ends_s=tuple(timeline.finish_s[a:b] for a, b in pairwise(ends.tolist())),
        traffic_s=float(np.bincount(schedule.device[moves], seconds[moves]).max(initial=0.0)),
    )
