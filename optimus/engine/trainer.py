"""Trains a job on made-up data: one rank's loop around the executor, with metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.engine.batch_table import BatchTable, TableExchange, make_table
from optimus.engine.batches import SampleBatch
from optimus.engine.executor import Executor
from optimus.engine.groups import make_groups
from optimus.engine.rank_model import build_rank
from optimus.engine.rendezvous import Membership, agree, join
from optimus.engine.synthetic import Synthetic
from optimus.engine.watch import Ring, Watch
from optimus.errors import UserError
from optimus.job.job import Job
from optimus.program.plan import Plan
from optimus.program.ranks import LLM

JOIN_S = 120.0  # to come together: the slowest rank still imports torch


@dataclass(frozen=True, kw_only=True)
class Training:
    """How to train; what a job file says under `run:`."""

    steps: int = 20
    seed: int = 0
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    limit_s: float = 8.0  # how long one op may take before a rank gives up and says why
    run_dir: Path | None = None  # for metrics and, on errors, the last ops


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One line of the metrics file."""

    step: int
    loss: float
    step_s: float
    tokens_per_s: float


@dataclass(kw_only=True)
class Summary:
    """What a run ends with."""

    steps: int
    final_loss: float | None
    step_s_median: float | None
    rank: int
    device: str


def training_of(settings: Mapping[str, Any], *, steps: int | None, run_dir: Path | None = None) -> Training:
    """What a job's `run:` says, as far as it is known here; `steps` overrides it."""
    default, optimizer = Training(), settings.get("optimizer", {})
    found = Training(
        steps=settings.get("steps", default.steps) if steps is None else steps,
        seed=settings.get("seed", default.seed),
        learning_rate=optimizer.get("lr", default.learning_rate),
        weight_decay=optimizer.get("weight_decay", default.weight_decay),
        run_dir=run_dir,
    )
    for name, value, kind in (
        ("steps", found.steps, int),
        ("seed", found.seed, int),
        ("optimizer.lr", found.learning_rate, float),
        ("optimizer.weight_decay", found.weight_decay, float),
    ):
        if not isinstance(value, int | kind) or isinstance(value, bool) or value < 0:
            raise UserError(
                field=f"run.{name}",
                value=value,
                problem=f"is not a{' whole' if kind is int else ''} number of 0 or more",
                hint=f"use {name.split('.')[-1]}: {getattr(default, name, default.learning_rate)}",
            )
    return found


Report = Callable[[StepMetrics], None]


def train_rank(job: Job, plan: Plan, plan_hash: str, training: Training, report: Report) -> Summary:
    """This process as one rank of the run. Rank 0 writes metrics and reports."""
    torch.set_num_threads(1)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    member = join(timeout_s=JOIN_S, backend=backend)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        if member.world != plan.ranks.world:
            raise UserError(
                field="plan",
                value=plan.ranks.world,
                problem=f"ranks are planned, and {member.world} were started",
                hint=f"start {plan.ranks.world}, or plan for {member.world} GPUs",
            )
        agree(member.store, member.rank, member.world, "plan", plan_hash)
        loop = _Loop(job, plan, training, member)
        return loop.run(report if member.rank == 0 else _quiet)


def _quiet(metrics: StepMetrics) -> None:
    """Rank 0 speaks for all."""


class _Loop:
    """One rank: its part of the model, its optimizer, and step after step."""

    def __init__(self, job: Job, plan: Plan, training: Training, member: Membership) -> None:
        self.job, self.plan, self.training, self.member = job, plan, training, member
        rank = member.rank
        self.device = (
            torch.device("cuda", member.local_rank) if torch.cuda.is_available() else torch.device("cpu")
        )
        self.sequences = job.workload.sequences_per_step // plan.ranks.llm.dp // plan.microbatches
        self.data = Synthetic(job=job, seed=training.seed)
        self.model = build_rank(
            job.model,
            plan,
            rank,
            llm_tokens=self.sequences * job.workload.sequence_tokens,
            dtype=torch.float32,
            device=self.device,
            seed=training.seed,
        )
        self.groups = make_groups(plan, rank, timeout_s=max(30.0, 4 * training.limit_s))
        self.ring = Ring()
        self.executor = Executor(
            plan,
            self.groups,
            self.model.chunks,
            self.model.shapes,
            device=self.device,
            tied=self.model.tied,
            recorder=self.ring,
        )
        trained = self.model.trained
        self.optimizer = (
            torch.optim.AdamW(trained, lr=training.learning_rate, weight_decay=training.weight_decay)
            if trained
            else None
        )
        place = plan.ranks.place(LLM, rank)
        self.replica, self.reads = place.dp, place.pp == 0
        self.tables = TableExchange(
            plan,
            self.groups.get("pipeline"),
            reader=plan.ranks.rank_of(0, self.replica, 0, 0),
            rows=self._most_items(),
        )

    # ------------------------------------------------------------------------ steps

    def run(self, report: Report) -> Summary:
        watch = Watch(
            rank=self.member.rank,
            world=self.member.world,
            ring=self.ring,
            store=self.member.store,
            text=self._text,
            waits_for=self._waits_for,
            limit_s=self.training.limit_s,
            dump_into=self.training.run_dir,
        )
        watch.start()
        found: list[StepMetrics] = []
        try:
            self._start_table(0)
            for step in range(self.training.steps):
                metrics = self._step(step)
                found.append(metrics)
                self._write(metrics)
                report(metrics)
        except Exception as error:
            watch.failed(error)
        watch.stop()
        return Summary(
            steps=len(found),
            final_loss=found[-1].loss if found else None,
            step_s_median=median(each.step_s for each in found) if found else None,
            rank=self.member.rank,
            device=self.device.type,
        )

    def _step(self, step: int) -> StepMetrics:
        begin = time.perf_counter()
        table = self.tables.take()
        if step + 1 < self.training.steps:
            self._start_table(step + 1)
        loss = self.executor.step(self._batch(step, table))
        if self.optimizer is not None:
            self.optimizer.step()
        total = self._total(loss)
        step_s = time.perf_counter() - begin
        tokens = self.job.workload.sequences_per_step * self.job.workload.sequence_tokens
        return StepMetrics(step=step, loss=total, step_s=step_s, tokens_per_s=tokens / step_s)

    def _total(self, loss: Tensor | None) -> float:
        """The loss of the whole batch, on every rank."""
        total = torch.zeros((), device=self.device) if loss is None else loss.float()
        line = len(self.plan.programs[self._device_class])
        self.ring.begin(line)
        dist.all_reduce(total)
        self.ring.end(line)
        return float(total)

    @property
    def _device_class(self) -> int:
        return self.plan.ranks.class_of(self.member.rank)

    # ------------------------------------------------------------------------ data

    def _mine(self, step: int) -> range:
        """Numbers of the samples of this rank's replica."""
        own = self.sequences * self.plan.microbatches
        first = step * self.job.workload.sequences_per_step + self.replica * own
        return range(first, first + own)

    def _most_items(self) -> int:
        """Items of all encoders that one replica's step may have."""
        most = max(
            sum(len(lengths) for _, lengths in sequence.items) for sequence in self.job.workload.sequences
        )
        return max(1, most * self.sequences * self.plan.microbatches)

    def _start_table(self, step: int) -> None:
        mine = self._mine(step)
        table = make_table(self.plan, [self.data.sizes(n) for n in mine]) if self.reads else None
        self.tables.start(table, len(mine))

    def _batch(self, step: int, table: BatchTable) -> SampleBatch:
        count = self.job.workload.sequences_per_step
        labels = sum(self.data.labels(number) for number in range(step * count, (step + 1) * count))
        return SampleBatch(
            self.job.model,
            self.plan,
            self._device_class,
            table,
            self.data.sample,
            scale=1.0 / max(1, labels),
            seed=self.training.seed,
            step=step,
            dtype=torch.float32,
            device=self.device,
        )

    # ------------------------------------------------------------------------ words

    def _text(self, line: int) -> str:
        if line == len(self.plan.programs[self._device_class]):
            return "the loss of a step"
        return self.executor.describe(line)

    def _waits_for(self, line: int) -> tuple[int, ...]:
        if line == len(self.plan.programs[self._device_class]):
            rank, world = self.member.rank, self.member.world
            return tuple(sorted({(rank - 1) % world, (rank + 1) % world} - {rank}))
        return self.executor.waits_for(line)

    def _write(self, metrics: StepMetrics) -> None:
        if self.member.rank == 0 and self.training.run_dir is not None:
            line: dict[str, Any] = {**asdict(metrics), "restart": self.member.restart, "time": time.time()}
            with (self.training.run_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
