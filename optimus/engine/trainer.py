"""Trains one rank of a job: steps around the executor, with metrics and a watchdog."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from statistics import median

import torch
from torch import distributed as dist

from optimus import __version__
from optimus.engine.batch_plan import BatchPlan, BatchPlanBroadcast
from optimus.engine.build_rank import RankModel
from optimus.engine.compile import describe_line
from optimus.engine.config import (
    WAITING_SHARE,
    MemoryUse,
    StepMetrics,
    TrainingConfig,
    TrainingSummary,
)
from optimus.engine.evaluation import evaluate
from optimus.engine.memory_tracker import measure_step_memory
from optimus.engine.metrics_log import (
    MetricsLog,
    count_left_out,
    find_last_finite,
    read_peak_memory_bytes,
    reduce_metrics,
)
from optimus.engine.prefetched_data import PrefetchedDataset
from optimus.engine.process_groups import make_process_groups
from optimus.engine.rank_trainer import RankTrainer
from optimus.engine.rendezvous import (
    RunMembership,
    check_settings_agree,
    check_world_size,
    has_gpus,
    join_process_group,
)
from optimus.engine.run_checkpoints import RunCheckpoints, StopRequest, stop_on_signals
from optimus.engine.run_policy import PolicyWatch, no_way_back
from optimus.engine.stragglers import StragglerWatch
from optimus.engine.synthetic_data import SyntheticDataset
from optimus.engine.watchdog import FlightRecorder, StreamRecorder, Watchdog
from optimus.errors import UserError
from optimus.ir.op import Communicator
from optimus.ir.plan import ALL, Plan
from optimus.ir.ranks import LLM
from optimus.job.cluster import GB
from optimus.job.job import Job
from optimus.models.collectives import has_streams
from optimus.protocols import Dataset

JOIN_TIMEOUT_S = 120.0  # the slowest rank still imports torch
GROUP_TIMEOUT_S = 600.0  # the watchdog ends a rank long before
STEPS_OF_AN_OP = 2  # that an op may take: the host of a GPU waits for all of a step in its last op
FIRST_STEP_TIMEOUTS = 3  # of an op in the first step, which allocates buffers and fills caches
MEDIAN_STEPS = 20  # whose median is a usual step
LOSS, BATCH_PLAN, SAMPLES = range(3)  # what a step does besides the lines of its program
EXTRA_OPS = ("the loss of a step", "the batch plan of a step", "the samples of a step")
NAMED_SAMPLES = 5  # of those that were skipped
FINISH = "the end of all reductions and sends, the norm or the optimizer"

OnStep = Callable[[StepMetrics], None]


def train_rank(
    job: Job,
    plan: Plan,
    plan_hash: str,
    config: TrainingConfig,
    on_step: OnStep | None = None,
    *,
    load: Callable[[RankModel, int], object] | None = None,
    save: Callable[[RankTrainer], None] | None = None,
    dataset: Dataset | None = None,
) -> TrainingSummary:
    """Trains one rank in this process. Rank 0 writes metrics and calls `on_step`.

    `load` gives the parameters of a rank their values; `save` writes them after the last step, on all ranks.
    The data set is synthetic unless one is given, on all ranks.
    """
    torch.set_num_threads(1)
    check_world_size(plan)
    backend = "nccl" if has_gpus() else "gloo"
    member = join_process_group(timeout_s=JOIN_TIMEOUT_S, backend=backend)
    try:
        versions = {"optimus": __version__, "torch": torch.__version__}
        settings = {"plan": plan_hash, **config.settings(), **versions}
        check_settings_agree(member.store, member.rank, member.world, settings)
        loop = _TrainingLoop(job, plan, plan_hash, config, member, load, dataset)
        summary = loop.run(on_step if member.rank == 0 else None)
        if save is not None:
            buckets = loop.rank.executor.buckets
            for bucket in (*buckets, *buckets.frozen):  # masters to parameters
                bucket.gather()
                bucket.wait_gathered()
            save(loop.rank)
        return summary
    finally:
        dist.destroy_process_group()


def describe_status_line(plan: Plan, rank: int, line: int) -> str:
    """Describes a line of a rank's program; lines past its end are `EXTRA_OPS`."""
    device = plan.ranks.class_of(rank)
    extra = line - len(plan.programs[device])
    if extra >= 0:
        return EXTRA_OPS[extra]
    text = describe_line(plan, device, line)
    return FINISH if text.startswith(f"{ALL}.") else text


class _TrainingLoop:
    """The steps of one rank."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        plan_hash: str,
        config: TrainingConfig,
        member: RunMembership,
        load: Callable[[RankModel, int], object] | None,
        dataset: Dataset | None,
    ) -> None:
        self.job, self.plan, self.config, self.member = job, plan, config, member
        device = torch.device("cuda", member.local_rank) if has_gpus() else torch.device("cpu")
        self._log: MetricsLog | None = None
        if member.rank == 0 and config.run_dir is not None:  # others wait, for groups, without a watchdog
            settings = {"job": job.name, **config.settings()}
            self._log = MetricsLog(
                config.run_dir,
                config.log,
                settings=settings,
                restart=member.restart,
                goes_on=config.first_step > 0 or config.resume,
            )
        default = "bfloat16" if device.type == "cuda" else "float32"
        groups = make_process_groups(plan, member.rank, timeout_s=GROUP_TIMEOUT_S)
        program = plan.programs[plan.ranks.class_of(member.rank)]
        size = max(4096, 2 * len(program))
        on_stream = StreamRecorder(torch.cuda.Event, size) if has_streams(device) else None
        self.recorder = on_stream or FlightRecorder()
        self.rank = RankTrainer(
            job,
            plan,
            config,
            groups,
            dtype=getattr(torch, config.dtype or default),
            device=device,
            dataset=dataset,
            recorder=self.recorder,
            load=None if load is None else lambda model: load(model, member.rank),
        )
        self._extra_lines_begin = len(program)
        self._reads_data = plan.ranks.place(LLM, member.rank).pp == 0
        self._policy = PolicyWatch(config.policy)
        self._stragglers = StragglerWatch(plan, device)
        waiting = frozenset(action.line for action in self.rank.executor.actions if action.waits_for)
        if on_stream is None:
            self.recorder.waiting_lines = waiting
        else:  # the device waits, not the host
            on_stream.marked_lines = waiting
        self._memory: MemoryUse | None = None
        self._refusal: UserError | None = None  # of the policy for steps that cannot be trained
        self._stopped_by = 0  # the signal that ends the run, the same on all ranks
        self._batch_plan: BatchPlan | None = None  # of the next step
        self._batch_plans = BatchPlanBroadcast(
            plan,
            groups.control,
            reader=plan.ranks.group_of(LLM, Communicator.PP, member.rank)[0],
        )
        self._is_resumed = config.resume or member.restart > 0
        self._checkpoints: RunCheckpoints | None = None
        if config.checkpoint.every or config.resume:
            self._checkpoints = RunCheckpoints(self.rank, plan_hash, resume=self._is_resumed)
        self._first_step = config.first_step if self._checkpoints is None else self._checkpoints.load()

    # ------------------------------------------------------------------------ steps

    def run(self, on_step: OnStep | None) -> TrainingSummary:
        watchdog = Watchdog(
            rank=self.member.rank,
            world=self.member.world,
            recorder=self.recorder,
            store=self.member.store,
            describe=lambda line: describe_status_line(self.plan, self.member.rank, line),
            waits_for=self._waits_for,
            timeout_s=FIRST_STEP_TIMEOUTS * self._op_timeout_s(self.plan.claims.step_s),
            dump_dir=self.config.run_dir,
        )
        watchdog.start()
        steps: list[StepMetrics] = []
        try:
            with nullcontext(StopRequest()) if self._checkpoints is None else stop_on_signals() as signals:
                for metrics in self._run_steps(signals):
                    steps.append(metrics)
                    usual_s = median(metrics.step_s for metrics in steps[-MEDIAN_STEPS:])
                    watchdog.timeout_s = self._op_timeout_s(usual_s)
                    if self._log is not None:
                        begins = metrics.step == self.config.first_step and not self._is_resumed
                        self._log.write(metrics, begins=begins)
                    if on_step is not None and self._refusal is None:
                        on_step(metrics)
        except Exception as error:
            watchdog.fail(error)
        watchdog.stop()
        if self._log is not None:
            self._log.close()
        if self._refusal is not None:
            raise self._refusal
        timed = steps[:-1] if self._memory is not None else steps  # counting memory takes time
        return TrainingSummary(
            steps=len({metrics.step for metrics in steps}),
            final_loss=find_last_finite(m.loss for m in reversed(steps)),
            step_s_median=median(metrics.step_s for metrics in timed) if timed else None,
            rank=self.member.rank,
            device=self.rank.device.type,
            memory=self._memory_of_fullest_rank(),
            waiting_steps=sum(m.data_wait_s > WAITING_SHARE * m.step_s for m in steps),
            skipped_samples=sum(metrics.skipped_samples for metrics in steps),
            skipped_steps=count_left_out(steps),
            eval_loss=find_last_finite(m.eval_loss for m in reversed(steps)),
            skipped=self._name_skipped_samples(),
            stopped_by=self._stopped_by,
            goodput=None if self._log is None else self._log.goodput.share,
            checkpoint="" if self._checkpoints is None else self._checkpoints.last_saved,
        )

    def _op_timeout_s(self, step_s: float) -> float:
        """Returns the limit of an op in steps that take, or should take, `step_s`."""
        return max(self.config.op_timeout_s, STEPS_OF_AN_OP * step_s)

    def _run_steps(self, signals: StopRequest) -> Iterator[StepMetrics]:
        """Trains step by step, and saves checkpoints when they are due or a signal ends the run."""
        step, end = self._first_step, self.config.end_step
        if step < end:
            self._start_batch_plan(step)
        while step < end and not self._stopped_by:
            metrics = self._step(step, signals)
            if self._policy.wants_retry(metrics):
                yield metrics
                self._go_back_to(step)
                continue
            self._refusal = self._policy.find_stop(metrics)
            if self._refusal is None and self._policy.wants_rewind(metrics):
                yield metrics
                step = self._rewind(step)
                continue
            if self._refusal is not None:
                yield metrics
                break
            if self.config.eval_every and (step + 1) % self.config.eval_every == 0:
                metrics = replace(metrics, eval_loss=self._evaluate())
            begin = time.perf_counter()
            if self._is_checkpoint_due(step + 1):
                assert self._checkpoints is not None
                self._checkpoints.save(step + 1)
            yield replace(metrics, checkpoint_s=time.perf_counter() - begin)
            step += 1
        if self._checkpoints is not None:
            if self._stopped_by and self._refusal is None and self.config.checkpoint.every:
                self._checkpoints.save(step)
            self._checkpoints.wait()

    def _rewind(self, step: int) -> int:
        """Returns the step to go on with from the last checkpoint; the run ends if there is none."""
        assert self._checkpoints is not None
        earlier = self._checkpoints.rewind(step)
        if earlier is None:
            self._refusal = no_way_back(step)
            return self.config.end_step
        self._go_back_to(earlier)
        return earlier

    def _go_back_to(self, step: int) -> None:
        """Plans the batch of a step again, in place of that of the step that would have been next."""
        self._batch_plan = None
        self._start_batch_plan(step)

    def _is_checkpoint_due(self, step: int) -> bool:
        """Tells if a checkpoint is saved after `step` steps; that of a run that stops is its last act."""
        every = self.config.checkpoint.every
        is_due = every > 0 and (step == self.config.end_step or step % every == 0)
        return is_due and not self._stopped_by

    def _name_skipped_samples(self) -> tuple[str, ...]:
        """Returns why the first samples of the run were skipped, on any rank."""
        if isinstance(self.rank.dataset, SyntheticDataset):
            return ()
        skipped: list[dict[int, tuple[str, ...]]] = [{}] * self.member.world
        dist.all_gather_object(skipped, self.rank.skipped)
        reasons = {number: reasons for of_rank in skipped for number, reasons in of_rank.items()}
        named = [reason for number in sorted(reasons) for reason in reasons[number]]
        return tuple(dict.fromkeys(named))[:NAMED_SAMPLES]

    def _memory_of_fullest_rank(self) -> MemoryUse | None:
        if self._memory is None:
            return None
        memories: list[MemoryUse | None] = [None] * self.member.world
        dist.all_gather_object(memories, self._memory)
        return max((memory for memory in memories if memory is not None), key=lambda use: use.counted_peak)

    def _step(self, step: int, signals: StopRequest) -> StepMetrics:
        begin, waited_s, bubble_s = time.perf_counter(), self._data_wait_s, self.recorder.waited_s
        is_last = step + 1 == self.config.end_step
        batch_plan = self._batch_plan
        if batch_plan is None:
            batch_plan = self._take_batch_plan()
            self.rank.prefetch(batch_plan)
        if not is_last:
            self._start_batch_plan(step + 1)
        with self._recorded(SAMPLES):
            rank, batch = self.rank, self.rank.batch(step, batch_plan)
        if not is_last:
            self._batch_plan = self._take_batch_plan()
            rank.prefetch(self._batch_plan)
        assert rank.optimizer is not None
        lr = rank.optimizer.set_learning_rate(step)
        begin_ops = time.perf_counter()
        if self.config.count_memory and is_last:
            loss, self._memory = measure_step_memory(rank, batch)
        else:
            loss = rank.executor.step(batch)
        busy_s = time.perf_counter() - begin_ops - (self.recorder.waited_s - bubble_s)
        sums = (self._count_skipped(batch_plan), self.recorder.waited_s - bubble_s)
        maxima = [self._data_wait_s - waited_s, read_peak_memory_bytes(rank.device), signals.number]
        with self._recorded(LOSS):
            totals, maxima = reduce_metrics(loss, sums, maxima, rank.device)
            self._stragglers.add(busy_s)
        waited_s, peak_bytes, self._stopped_by = maxima[0], maxima[1], round(maxima[2])
        grad_norm, is_left_out = rank.optimizer.read_outcome()
        step_s = time.perf_counter() - begin
        tokens = self.job.workload.sequences_per_step * self.job.workload.sequence_tokens
        world, gpu = self.member.world, self.job.cluster.gpu
        on_gpu, flops = rank.device.type == "cuda", self.config.step_flops
        return StepMetrics(
            step=step,
            loss=totals[0],
            gradient_norm=grad_norm,
            lr=lr,
            step_s=step_s,
            tokens_per_s=tokens / step_s,
            tokens_per_s_per_gpu=tokens / step_s / world,
            mfu=flops / (step_s * world * gpu.peak_flops) if on_gpu and flops is not None else None,
            bubble_share=None if on_gpu or self._memory is not None else totals[2] / (world * step_s),
            peak_memory_gb=peak_bytes / GB,
            carried=batch_plan.carried,
            data_wait_s=waited_s,
            skipped_samples=round(totals[1]),
            skipped_steps=int(is_left_out),
        )

    @contextmanager
    def _recorded(self, extra_op: int) -> Iterator[None]:
        """Records an op that is no line of the program; if it fails, it stays open for the watchdog."""
        line = self._extra_lines_begin + extra_op
        self.recorder.begin(line)
        yield
        self.recorder.end(line)

    # ------------------------------------------------------------------------ data

    @property
    def _data_wait_s(self) -> float:
        dataset = self.rank.dataset
        return dataset.waited_s if isinstance(dataset, PrefetchedDataset) else 0.0

    def _count_skipped(self, batch_plan: BatchPlan) -> float:
        """Returns the skipped samples of a replica's step, on one rank of the replica."""
        place = self.plan.ranks.place(LLM, self.member.rank)
        if not self._reads_data or place.tp or place.cp:
            return 0.0
        numbers = chain.from_iterable(batch_plan.samples[self.rank.replica % self.plan.dealing_replicas])
        return float(sum(len(self.rank.skipped.get(number, ())) for number in numbers))

    def _evaluate(self) -> float:
        def share_plan(make: Callable[[], BatchPlan]) -> BatchPlan:
            self._batch_plans.start(make() if self._reads_data else None)
            return self._take_batch_plan()

        total, labels = evaluate(self.rank, share_plan, lambda: self._recorded(SAMPLES))
        with self._recorded(LOSS):
            (loss,), _ = reduce_metrics(total, [], [0.0], self.rank.device)
        return loss / max(1, labels)

    def _start_batch_plan(self, step: int) -> None:
        batch_plan = self.rank.batch_plan(step) if self._reads_data else None
        self._batch_plans.start(batch_plan)

    def _take_batch_plan(self) -> BatchPlan:
        with self._recorded(BATCH_PLAN):
            return self._batch_plans.wait()

    # ------------------------------------------------------------------------ watchdog and metrics

    def _waits_for(self, line: int) -> tuple[int, ...]:
        extra_op = line - self._extra_lines_begin
        if extra_op < 0:
            return self.rank.executor.waits_for(line)
        rank, world = self.member.rank, self.member.world
        if extra_op == LOSS:
            return tuple(sorted({(rank - 1) % world, (rank + 1) % world} - {rank}))
        if extra_op == SAMPLES:
            return ()
        pipeline = self.plan.ranks.group_of(LLM, Communicator.PP, rank)
        return tuple(other for other in pipeline if other != rank) if self._reads_data else pipeline[:1]
