"""Trains a job on made-up data: one rank's loop around the executor, with metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.engine.batch_plan import BatchPlanExchange
from optimus.engine.compile import describe
from optimus.engine.config import METRICS, MemoryUse, StepMetrics, TrainingConfig, TrainingSummary
from optimus.engine.memory_use import count_step
from optimus.engine.process_groups import make_groups
from optimus.engine.rank_trainer import RankTrainer
from optimus.engine.rendezvous import Membership, agree, join
from optimus.engine.watchdog import FlightRecorder, Watchdog
from optimus.environment import launched
from optimus.errors import UserError
from optimus.ir.plan import ALL, Plan
from optimus.ir.ranks import LLM
from optimus.job.job import Job

JOIN_S = 120.0  # to come together: the slowest rank still imports torch
GROUP_S = 600.0  # the watch ends a rank long before
FIRST_STEP_LIMITS = 3  # so many times as long may an op of the first step take: much is made in it
LAST_STEPS = 20  # an op may take as long as their median
LOSS, TABLE = range(2)  # what a step does beside the lines of its program
FINISH_WORDS = "the end of all reductions and sends, the norm or the optimizer"
BESIDES = ("the loss of a step", "the table of a step")

Report = Callable[[StepMetrics], None]


def train_rank(
    job: Job, plan: Plan, plan_hash: str, training: TrainingConfig, report: Report
) -> TrainingSummary:
    """This process as one rank of the run. Rank 0 writes metrics and reports."""
    torch.set_num_threads(1)
    check_world_size(plan)
    backend = "nccl" if _on_gpus() else "gloo"
    member = join(timeout_s=JOIN_S, backend=backend)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        agree(member.store, member.rank, member.world, "plan", plan_hash)
        loop = _Loop(job, plan, training, member)
        return loop.run(report if member.rank == 0 else _quiet)


def check_world_size(plan: Plan) -> None:
    """Before anybody waits for anybody."""
    place = launched()
    if place is not None and place.world != plan.ranks.world:
        raise UserError(
            field="plan",
            problem=f"is for {plan.ranks.world} ranks, and {place.world} were started",
            hint=f"start {plan.ranks.world} (torchrun --nproc-per-node), or plan for {place.world} GPUs",
        )


def describe_line(plan: Plan, rank: int, line: int) -> str:
    """What a rank does at a line of its program, or besides."""
    device = plan.ranks.class_of(rank)
    beside = line - len(plan.programs[device])
    if beside >= 0:
        return BESIDES[beside]
    words = describe(plan, device, line)
    return FINISH_WORDS if words.startswith(f"{ALL}.") else words


def _on_gpus() -> bool:
    """Whether every rank of this host has a GPU to itself."""
    place = launched()
    return place is not None and torch.cuda.device_count() >= place.local_world


def _quiet(metrics: StepMetrics) -> None:
    """Rank 0 speaks for all."""


class _Loop:
    """One rank: its part of the model, its optimizer, and step after step."""

    def __init__(self, job: Job, plan: Plan, training: TrainingConfig, member: Membership) -> None:
        self.job, self.plan, self.training, self.member = job, plan, training, member
        rank = member.rank
        device = torch.device("cuda", member.local_rank) if _on_gpus() else torch.device("cpu")
        usual = "bfloat16" if device.type == "cuda" else "float32"
        groups = make_groups(plan, rank, timeout_s=GROUP_S)
        self.ring = FlightRecorder()
        self.rank = RankTrainer(
            job,
            plan,
            training,
            groups,
            dtype=getattr(torch, training.dtype or usual),
            device=device,
            recorder=self.ring,
        )
        self.reads = plan.ranks.place(LLM, rank).pp == 0
        self._used: MemoryUse | None = None
        self.tables = BatchPlanExchange(
            plan,
            groups.control,
            reader=plan.ranks.rank_of(0, self.rank.replica, 0, 0),
            rows=self._most_items(),
        )

    # ------------------------------------------------------------------------ steps

    def run(self, report: Report) -> TrainingSummary:
        watch = Watchdog(
            rank=self.member.rank,
            world=self.member.world,
            ring=self.ring,
            store=self.member.store,
            text=self._text,
            waits_for=self._waits_for,
            limit_s=FIRST_STEP_LIMITS * self.training.limit_s,
            dump_into=self.training.run_dir,
        )
        watch.start()
        found: list[StepMetrics] = []
        try:
            self._start_table(0)
            for step in range(self.training.steps):
                metrics = self._step(step)
                found.append(metrics)
                usual_s = median(each.step_s for each in found[-LAST_STEPS:])
                watch.limit_s = max(self.training.limit_s, usual_s)
                self._write(metrics)
                report(metrics)
        except Exception as error:
            watch.failed(error)
        watch.stop()
        timed = found[:-1] if self._used is not None else found  # to count takes time
        return TrainingSummary(
            steps=len(found),
            final_loss=found[-1].loss if found else None,
            step_s_median=median(each.step_s for each in timed) if timed else None,
            rank=self.member.rank,
            device=self.rank.device.type,
            memory=self._fullest(),
        )

    def _fullest(self) -> MemoryUse | None:
        """What was counted on the rank that held most."""
        if self._used is None:
            return None
        found: list[MemoryUse | None] = [None] * self.member.world
        dist.all_gather_object(found, self._used)
        return max((use for use in found if use is not None), key=lambda use: use.counted_peak)

    def _step(self, step: int) -> StepMetrics:
        begin = time.perf_counter()
        with self._beside(TABLE):
            table = self.tables.take()
            if step + 1 < self.training.steps:
                self._start_table(step + 1)
        rank, batch = self.rank, self.rank.batch(step, table)
        if self.training.counts_memory and step + 1 == self.training.steps:
            loss, self._used = count_step(rank, batch)
        else:
            loss = rank.executor.step(batch)
        total = self._total(loss)
        assert rank.optimizer is not None and rank.optimizer.norm is not None
        norm = float(rank.optimizer.norm)
        step_s = time.perf_counter() - begin
        tokens = self.job.workload.sequences_per_step * self.job.workload.sequence_tokens
        return StepMetrics(
            step=step, loss=total, gradient_norm=norm, step_s=step_s, tokens_per_s=tokens / step_s
        )

    def _total(self, loss: Tensor | None) -> float:
        """The loss of the whole batch, on every rank."""
        zero = torch.zeros((), dtype=torch.float64, device=self.rank.device)
        total = zero if loss is None else loss.double()
        with self._beside(LOSS):
            dist.all_reduce(total)
            return float(total)

    @contextmanager
    def _beside(self, what: int) -> Iterator[None]:
        """An op that is no line of the program, for those who watch; one that fails stays open."""
        line = len(self.plan.programs[self._device_class]) + what
        self.ring.begin(line)
        yield
        self.ring.end(line)

    @property
    def _device_class(self) -> int:
        return self.plan.ranks.class_of(self.member.rank)

    # ------------------------------------------------------------------------ data

    def _most_items(self) -> int:
        """Items of all encoders that one replica's step may have."""
        most = max(
            sum(len(lengths) for _, lengths in sequence.items) for sequence in self.job.workload.sequences
        )
        return max(1, most * self.rank.sequences * self.plan.microbatches)

    def _start_table(self, step: int) -> None:
        self.tables.start(self.rank.table(step) if self.reads else None, len(self.rank.samples(step)))

    # ------------------------------------------------------------------------ words

    def _text(self, line: int) -> str:
        return describe_line(self.plan, self.member.rank, line)

    def _waits_for(self, line: int) -> tuple[int, ...]:
        beside = line - len(self.plan.programs[self._device_class])
        if beside < 0:
            return self.rank.executor.waits_for(line)
        rank, world = self.member.rank, self.member.world
        if beside == LOSS:
            return tuple(sorted({(rank - 1) % world, (rank + 1) % world} - {rank}))
        return () if self.reads else (self.tables.reader,)

    def _write(self, metrics: StepMetrics) -> None:
        """A line; a new run begins the file, a restart goes on."""
        if self.member.rank == 0 and self.training.run_dir is not None:
            line: dict[str, Any] = {**asdict(metrics), "restart": self.member.restart, "time": time.time()}
            begins = metrics.step == 0 and self.member.restart == 0
            with (self.training.run_dir / METRICS).open("w" if begins else "a") as file:
                file.write(json.dumps(line) + "\n")
