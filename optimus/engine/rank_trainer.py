"""One rank of a run, ready to step: its part of the model, its optimizer, its program bound, and its data.

`trainer` and benches run it among others; `dry_run` by itself, at full size and without numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from optimus.engine.batch_plan import BatchPlan, plan_batch
from optimus.engine.batches import RankBatch
from optimus.engine.build_rank import build_rank
from optimus.engine.config import TrainingConfig
from optimus.engine.distributed_optimizer import ShardedBucket
from optimus.engine.executor import Executor, Recorder
from optimus.engine.optimizer import DistributedOptimizer
from optimus.engine.process_groups import ProcessGroups
from optimus.engine.replicated_buckets import ReplicatedBucket
from optimus.engine.synthetic_data import SyntheticDataset
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.models.kernels import KERNELS, Kernels, Numerics


class RankTrainer:
    """The only builder of a rank from a job; every rank passes the same job, plan and training.

    `groups` say which rank it is. `bucket_type` says how parameters are gathered and gradients reduced: with
    `ReplicatedBucket` there is no `optimizer`, and the caller finds gradients in `grad`. `numerics` overrides
    the constants of modules; with `fuse`, layers into which nothing is scheduled run as one piece.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        training: TrainingConfig,
        groups: ProcessGroups,
        *,
        dtype: torch.dtype,
        device: torch.device,
        recorder: Recorder | None = None,
        kernels: Kernels = KERNELS,
        numerics: Mapping[str, Numerics] = MappingProxyType({}),
        fuse: bool = True,
        bucket_type: type[ShardedBucket] | type[ReplicatedBucket] = ShardedBucket,
    ) -> None:
        self.job, self.plan, self.training, self.groups = job, plan, training, groups
        self.dtype, self.device, self._numerics = dtype, device, numerics
        self.sequences = job.workload.sequences_per_step // plan.ranks.llm.dp // plan.microbatches
        self.data = SyntheticDataset(job=job, seed=training.seed)
        self.replica = plan.ranks.place(LLM, groups.rank).dp
        self.model = build_rank(
            job.model,
            plan,
            groups,
            llm_tokens=self.sequences * job.workload.sequence_tokens,
            dtype=dtype,
            device=device,
            seed=training.seed,
            numerics=numerics,
            kernels=kernels,
            fuse=fuse,
        )
        self.executor = Executor(
            plan,
            groups,
            self.model.chunks,
            self.model.shapes,
            device=device,
            bucket_type=bucket_type,
            tied=self.model.tied,
            partial=self.model.partial,
            recorder=recorder,
        )
        self.optimizer = self._make_optimizer() if issubclass(bucket_type, ShardedBucket) else None
        self.executor.optimizer = self.optimizer

    def _make_optimizer(self) -> DistributedOptimizer:
        copies = {id(parameter) for parameter in self.model.copies}
        buckets = [bucket for bucket in self.executor.buckets if isinstance(bucket, ShardedBucket)]
        return DistributedOptimizer(
            buckets,
            [self.executor.buckets.counted(each) for each in buckets if id(each.parameters[0]) not in copies],
            learning_rate=self.training.learning_rate,
            weight_decay=self.training.weight_decay,
            clip=self.training.clip,
            device=self.device,
        )

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.model.parameters.values())

    def samples(self, step: int) -> range:
        """Numbers of the samples of this rank's replica."""
        own = self.sequences * self.plan.microbatches
        first = step * self.job.workload.sequences_per_step + self.replica * own
        return range(first, first + own)

    def table(self, step: int) -> BatchPlan:
        """From the sizes of samples; the same on all ranks of a replica."""
        return plan_batch(self.plan, [self.data.sizes(number) for number in self.samples(step)])

    def batch(
        self,
        step: int,
        table: BatchPlan | None = None,
        placed: Callable[[Tensor], Tensor] | None = None,
    ) -> RankBatch:
        """Data of a step for this rank, on its device or where `placed` puts it."""
        count = self.job.workload.sequences_per_step
        labels = sum(self.data.labels(number) for number in range(step * count, (step + 1) * count))
        return RankBatch(
            self.job.model,
            self.plan,
            self.groups.rank,
            table or self.table(step),
            self.data.sample,
            scale=1.0 / max(1, labels),
            seed=self.training.seed,
            step=step,
            dtype=self.dtype,
            placed=placed or (lambda tensor: tensor.to(self.device, non_blocking=True)),
            numerics=self._numerics,
        )
