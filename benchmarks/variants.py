"""Our step and those of torch's schedules on one rank, over the same layers and the same batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.communicators import TIMEOUT_S, group_among
from benchmarks.torch_stages import Prepared, TorchRun
from optimus.engine.config import TrainingConfig
from optimus.engine.process_groups import make_groups, replica_ranks
from optimus.engine.rank_trainer import RankTrainer
from optimus.engine.replicated_buckets import ReplicatedBucket
from optimus.engine.synthetic_data import SyntheticDataset
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.job.model import Encoder
from optimus.models.microbatch_inputs import (
    EncoderContext,
    LlmContext,
    bin_targets,
    encoder_inputs,
    llm_inputs,
)
from optimus.models.sample import Sample, placed_items

OURS = "optimus"
SEED = 0


class Load:
    """The batch of this rank's replica, for our engine and for torch's schedules."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.job, self.plan, self.device, self.dtype = job, plan, device, dtype
        self.rank, self.data = dist.get_rank(), SyntheticDataset(job=job, seed=SEED)
        count = job.workload.sequences_per_step
        own = count // plan.ranks.llm.dp
        first = plan.ranks.place(LLM, self.rank).dp * own
        self.numbers = range(first, first + own)
        self.scale = 1.0 / max(1, sum(self.data.labels(number) for number in range(count)))

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Pixels, ids and labels of all samples, as torch's schedules read them."""
        samples = [self.data.sample(number) for number in self.numbers]
        (encoder,) = self.job.model.encoders
        pixels = torch.cat([_encoder_inputs(encoder, sample, self.dtype)[0] for sample in samples])
        ids = torch.cat([sample.tokens for sample in samples])
        labels = torch.cat([sample.labels for sample in samples])
        return pixels.to(self.device), ids.to(self.device), labels.to(self.device)

    def contexts(self) -> dict[str, EncoderContext | LlmContext]:
        """Of every module; all samples have one shape."""
        sample = self.data.sample(self.numbers[0])
        (encoder,) = self.job.model.encoders
        return {
            encoder.name: _encoder_inputs(encoder, sample, self.dtype)[1].map(self._moved),
            LLM: _llm_context(self.job, sample, self.scale, self.dtype).map(self._moved),
        }


class Variants:
    """All variants on one rank, ready to step on the same batch."""

    def __init__(
        self,
        prepared: Prepared,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        built: Callable[[str], None] = lambda name: None,
    ) -> None:
        job, plan = prepared.job, prepared.plan
        load = Load(job, plan, device=device, dtype=dtype)
        self.device = device
        pipeline, replicas = _torch_groups(plan)  # first: ours are unequal in number on ranks
        ours, mine = _ours(load)
        self.steps: dict[str, Callable[[], Tensor | None]] = {OURS: ours}
        self.parameters: dict[str, list[Tensor]] = {OURS: mine}
        built(OURS)
        tensors, contexts = load.tensors(), load.contexts()
        counts = plan.ranks.place(LLM, load.rank).dp == 0
        for variant in prepared.variants:
            run = TorchRun(
                job.model,
                variant,
                contexts,
                microbatches=plan.microbatches,
                scale=load.scale,
                seed=SEED,
                dtype=dtype,
                device=device,
                pipeline=pipeline,
                replicas=replicas,
            )
            self.steps[variant.name] = partial(run.step, *tensors)
            self.parameters[variant.name] = run.parameters if counts else []
            built(variant.name)

    def squares(self, name: str) -> float:
        """Sum of squares of all gradients of the model after a step."""
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        for parameter in self.parameters[name]:
            if parameter.grad is not None:
                total += torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).square()
        dist.all_reduce(total)
        return float(total)


def _ours(load: Load) -> tuple[Callable[[], Tensor | None], list[Tensor]]:
    """Our step, and parameters of this rank, so that each of the model is on one of them."""
    plan, rank = load.plan, load.rank
    trainer = RankTrainer(
        load.job,
        plan,
        TrainingConfig(seed=SEED),
        make_groups(plan, rank, timeout_s=TIMEOUT_S),
        dtype=load.dtype,
        device=torch.device(load.device),
        bucket_type=ReplicatedBucket,
    )
    model = trainer.model
    held = {id(parameter) for parameter in model.partial}  # by every rank that shares a layer
    first = {name for name in plan.modules if rank == min(replica_ranks(plan, name, rank))}
    mine = []
    for name, parameter in model.parameters.items():
        module = name.partition(".")[0]
        counts = id(parameter) not in held or plan.ranks.place(module, rank).tp == 0
        mine += [parameter] if module in first and counts else []
    return partial(trainer.executor.step, trainer.batch(0)), mine


def _torch_groups(plan: Plan) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The pipeline of this rank for torch's schedules, and who holds the same stages; none if all, or none.

    Their pipelines have a stage or more on every rank of a replica, since their layers are whole.
    """
    world, replicas = plan.ranks.world, plan.ranks.llm.dp
    if replicas == 1:
        return None, None
    pipelines: list[list[int]] = [[] for _ in range(replicas)]
    for rank in range(world):
        pipelines[plan.ranks.place(LLM, rank).dp].append(rank)
    alike = [list(ranks) for ranks in zip(*pipelines, strict=True)]
    return group_among(pipelines), group_among(alike)


def _encoder_inputs(
    encoder: Encoder, sample: Sample, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, EncoderContext]:
    items = placed_items(sample, encoder.name)
    tokens = sum(item.tokens for _, _, item in items)
    return encoder_inputs(encoder, items, tokens, seed=SEED, step=0, dtype=dtype)


def _llm_context(job: Job, sample: Sample, scale: float, dtype: torch.dtype = torch.float32) -> LlmContext:
    (encoder,) = job.model.encoders
    items = placed_items(sample, encoder.name)
    tokens = sum(item.tokens for _, _, item in items)
    target = bin_targets(encoder, items, tokens, {sample.number: 0}, sample.length)
    how: dict[str, Any] = {"seed": SEED, "step": 0, "dtype": dtype}
    return llm_inputs(job.model.llm, [sample], [target], scale, **how)[1]
