"""Builds one rank of a job, ready to step: its part of the model, its optimizer, its executor and its data.

The trainer and benchmarks step it among other ranks; a dry run steps it alone, at full size on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from optimus.data.step_samples import StepSamples
from optimus.engine.batch_plan import BatchPlan, plan_batch
from optimus.engine.buckets import ReplicatedBucket
from optimus.engine.build_rank import RankModel, build_rank_model
from optimus.engine.config import TrainingConfig
from optimus.engine.distributed_optimizer import DistributedOptimizer
from optimus.engine.executor import Executor
from optimus.engine.optimizer_config import ParamGroup
from optimus.engine.prefetched_data import PrefetchedDataset
from optimus.engine.process_groups import ProcessGroups, connect_groups
from optimus.engine.rank_batch import RankBatch, list_needed_samples
from optimus.engine.sharded_bucket import ShardedBucket
from optimus.engine.synthetic_data import SyntheticDataset
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.models.context_parallel import check_sequence_length
from optimus.models.kernels import KernelSet, choose_kernels
from optimus.models.sample import ItemKeys, Sample
from optimus.protocols import Dataset, Recorder


class RankTrainer:
    """A rank built from a job; every rank passes the same job, plan and configuration.

    `groups` determines the rank. `bucket_type` decides how parameters are gathered and gradients reduced:
    with `ReplicatedBucket` there is no `optimizer`, and the caller reads gradients from `grad`. `dataset` is
    synthetic by default. With `fuse`, layers into which nothing is scheduled run as one segment. `load` gives
    all parameters their values, which are random otherwise.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        config: TrainingConfig,
        groups: ProcessGroups,
        *,
        dtype: torch.dtype,
        device: torch.device,
        dataset: Dataset | None = None,
        recorder: Recorder | None = None,
        kernels: KernelSet | None = None,
        fuse: bool = True,
        bucket_type: type[ShardedBucket] | type[ReplicatedBucket] = ShardedBucket,
        load: Callable[[RankModel], object] | None = None,
    ) -> None:
        self.job, self.plan, self.config, self.groups = job, plan, config, groups
        self.dtype, self.device = dtype, device
        connect_groups(plan, groups, device)
        sequences_per_replica = job.workload.sequences_per_step // plan.ranks.llm.dp
        self.sequences_per_microbatch = sequences_per_replica // plan.microbatches
        self.dataset = dataset or SyntheticDataset(job=job, seed=config.seed_of_data)
        self.skipped: dict[int, tuple[str, ...]] = {}  # by number: why documents of a sample have no labels
        self.replica = plan.ranks.place(LLM, groups.rank).dp
        workload, encoders = job.workload, job.model.encoders
        self.step_samples = StepSamples(
            self._count_tokens,
            workload.sequences_per_step,
            {each.name: workload.step_capacity(each.name, each.projector.merge) for each in encoders},
            config.left_out,
        )
        if plan.ranks.llm.cp > 1:
            check_sequence_length(job.workload.sequence_tokens, plan.ranks.llm.cp)
        self.model = build_rank_model(
            job.model,
            plan,
            groups,
            llm_tokens=self.sequences_per_microbatch * job.workload.sequence_tokens,
            dtype=dtype,
            device=device,
            seed=config.seed if load is None else None,
            kernels=kernels or choose_kernels(device, dtype),
            fuse=fuse,
        )
        if load is not None:
            load(self.model)
        self._names = {id(parameter): name for name, parameter in self.model.parameters.items()}
        self.executor = Executor(
            plan,
            groups,
            self.model.chunks,
            self.model.specs,
            device=device,
            bucket_type=bucket_type,
            tied=self.model.tied,
            partial=self.model.partial,
            group_of=self._group_of,
            recorder=recorder,
        )
        self.optimizer = self._make_optimizer() if issubclass(bucket_type, ShardedBucket) else None
        self.executor.optimizer = self.optimizer

    def _make_optimizer(self) -> DistributedOptimizer:
        policy = self.config.policy
        copies = {id(parameter) for parameter in self.model.copies}
        rank_buckets = self.executor.buckets
        buckets = [bucket for bucket in rank_buckets if isinstance(bucket, ShardedBucket)]
        return DistributedOptimizer(
            buckets,
            [
                rank_buckets.grad_for_norm(bucket)
                for bucket in buckets
                if id(bucket.parameters[0]) not in copies
            ],
            config=self.config.optimizer,
            group_of=self._group_of,
            device=self.device,
            spike_factor=0.0 if policy.on_spike == "ignore" else policy.spike_factor,
        )

    def _group_of(self, parameter: Tensor) -> ParamGroup:
        return self.config.optimizer.group_of(self._names[id(parameter)], parameter.dim())

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.model.parameters.values())

    def _count_tokens(self, number: int) -> dict[str, int]:
        return {name: sum(sizes) for name, sizes in self.dataset.sizes(number).items.items()}

    def prefetch(self, batch_plan: BatchPlan) -> None:
        """Starts to load this rank's samples of a batch, if the data set has workers for that."""
        if isinstance(self.dataset, PrefetchedDataset):
            self.dataset.start(list_needed_samples(self.plan, self.groups.rank, batch_plan).items())

    def batch_plan(self, step: int) -> BatchPlan:
        """Plans a batch from the sizes of its samples; the result is the same on all ranks of the group."""
        return self._plan_batch(self.step_samples.numbers(step), self.step_samples.count_carried(step))

    def eval_batch_plan(self, number: int) -> BatchPlan:
        """Plans a held-out batch, as `batch_plan` does."""
        return self._plan_batch(self._eval_numbers[number])

    @cached_property
    def _eval_numbers(self) -> list[list[int]]:
        """Returns the numbers of held-out samples, by batch; what a batch has no room for is in the next."""
        return self.step_samples.held_out(self.config.eval_batches)

    def _plan_batch(self, numbers: Sequence[int], carried: int = 0) -> BatchPlan:
        return plan_batch(
            self.plan,
            [self.dataset.sizes(number) for number in numbers],
            self.replica // self.plan.dealing_replicas,
            labels=sum(map(self.dataset.labels, numbers)),
            carried=carried,
        )

    def batch(
        self,
        step: int | None,
        batch_plan: BatchPlan | None = None,
        place: Callable[[Tensor], Tensor] | None = None,
    ) -> RankBatch:
        """Returns the data of a step for this rank, moved to its device or by `place`.

        Without a step, those of a plan are returned, and nothing is dropped.
        """
        if batch_plan is None:
            assert step is not None
            batch_plan = self.batch_plan(step)
        return RankBatch(
            self.job.model,
            self.plan,
            self.groups.rank,
            batch_plan,
            self._read,
            seed=self.config.seed,
            step=step,
            dtype=self.dtype,
            place=place or self._place,
        )

    def _read(self, number: int, items: ItemKeys) -> Sample:
        sample = self.dataset.sample(number, items)
        if sample.skipped:
            self.skipped[number] = sample.skipped
        return sample

    def _place(self, tensor: Tensor) -> Tensor:
        """Moves a tensor to the device; the host does not wait for copies from pinned memory."""
        pinned = tensor.pin_memory() if self.device.type == "cuda" else tensor
        return pinned.to(self.device, non_blocking=True)
