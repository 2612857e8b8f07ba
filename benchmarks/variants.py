"""Our step and the steps of torch's schedules on one rank, over the same layers and the same batch.

For torch's schedules the layers of a model are in model order, encoder first, and any range of them is a
stage, with plain autograd. All microbatches have the same shape, so contexts are part of a stage; token ids
go to every stage as a keyword argument of the schedule, and the stage with the embedding uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional

from benchmarks.ranks import GROUP_TIMEOUT_S, new_subgroup
from optimus.engine.buckets import ReplicatedBucket
from optimus.engine.config import TrainingConfig
from optimus.engine.process_groups import find_replica_ranks, make_process_groups
from optimus.engine.rank_trainer import RankTrainer
from optimus.engine.synthetic_data import SyntheticDataset
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.job.model import Encoder, Llm, Model
from optimus.models.build import build_layers, count_layers
from optimus.models.end_layers import LossHead, TokenEmbedding
from optimus.models.microbatch_inputs import (
    EncoderMicrobatchContext,
    LlmMicrobatchContext,
    build_encoder_inputs,
    build_llm_inputs,
    find_llm_row_targets,
)
from optimus.models.sample import Sample, list_placed_items
from optimus.models.segment import Segment
from optimus.protocols import Batch

OURS = "optimus"
SEED = 0

Cut = tuple[int, ...]  # of all layers in model order: 0, ..., their number
Contexts = dict[str, EncoderMicrobatchContext | LlmMicrobatchContext]  # by module


def stages_of(schedule: str, rank: int, ranks: int, virtual_stages: int) -> list[int]:
    """Returns the virtual stages of a rank: round-robin, or a V for schedules of that shape."""
    if "ZBV" in schedule or "DualPipe" in schedule:
        return [rank, virtual_stages - 1 - rank]
    return list(range(rank, virtual_stages, ranks))


@dataclass(frozen=True, kw_only=True)
class TorchVariant:
    """A schedule of torch over one cut of the layers."""

    name: str
    schedule: str  # torch's name of it
    cut: Cut

    @property
    def virtual_stages(self) -> int:
        return len(self.cut) - 1

    def stages_of(self, rank: int, ranks: int) -> list[int]:
        """Returns the virtual stages of a rank."""
        return stages_of(self.schedule, rank, ranks, self.virtual_stages)


@dataclass(frozen=True, kw_only=True)
class StepSetup:
    """Decisions that precede the start of ranks."""

    job: Job
    plan: Plan
    variants: tuple[TorchVariant, ...]
    bound_s: float
    encoder_share: float  # work of the encoders over that of the LLM
    how: str  # description of our plan


class Variants:
    """All variants on one rank, ready to step on the same batch."""

    def __init__(
        self,
        setup: StepSetup,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        on_built: Callable[[str], None] = lambda name: None,
    ) -> None:
        job, plan = setup.job, setup.plan
        batch = TorchBatch(job, plan, device=device, dtype=dtype)
        self.device = device
        pipeline, replicas = _torch_groups(plan)  # first: ranks make different numbers of our groups
        trainer = RankTrainer(
            job,
            plan,
            TrainingConfig(seed=SEED),
            make_process_groups(plan, dist.get_rank(), timeout_s=GROUP_TIMEOUT_S),
            dtype=dtype,
            device=torch.device(device),
            bucket_type=ReplicatedBucket,
        )
        self.steps: dict[str, Callable[[], Tensor | None]] = {
            OURS: partial(_run_step, trainer, trainer.batch(0))
        }
        self._parameters: dict[str, list[Tensor]] = {OURS: _counted_parameters(trainer)}
        on_built(OURS)
        tensors, contexts = batch.tensors(), batch.contexts()
        is_first_replica = plan.ranks.place(LLM, dist.get_rank()).dp == 0
        for variant in setup.variants:
            step = TorchStep(
                job.model,
                variant,
                contexts,
                microbatches=plan.microbatches,
                scale=batch.scale,
                dtype=dtype,
                device=device,
                pipeline=pipeline,
                replicas=replicas,
            )
            self.steps[variant.name] = partial(step.run, *tensors)
            self._parameters[variant.name] = step.parameters if is_first_replica else []
            on_built(variant.name)

    def grad_squares(self, name: str) -> float:
        """Returns the sum of squares of all gradients of the model after a step."""
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        for parameter in self._parameters[name]:
            if parameter.grad is not None:
                total += torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).square()
        dist.all_reduce(total)
        return float(total)


def _run_step(trainer: RankTrainer, batch: Batch) -> Tensor | None:
    """Runs a step from new gradients: replicated buckets add to what `grad` holds."""
    for parameter in trainer.model.trained:
        parameter.grad = None
    return trainer.executor.step(batch)


def _counted_parameters(trainer: RankTrainer) -> list[Tensor]:
    """Returns parameters of this rank such that every element of the model is counted on one rank."""
    plan, rank, model = trainer.plan, dist.get_rank(), trainer.model
    replicated = {id(parameter) for parameter in model.partial}  # on every rank of a TP group
    first = {name for name in plan.modules if rank == min(find_replica_ranks(plan, name, rank))}
    parameters = []
    for name, parameter in model.parameters.items():
        module = name.partition(".")[0]
        is_counted = id(parameter) not in replicated or plan.ranks.place(module, rank).tp == 0
        parameters += [parameter] if module in first and is_counted else []
    return parameters


def _torch_groups(plan: Plan) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Returns this rank's pipeline for torch's schedules and the replicas of its stages.

    Both are None without replicas. A pipeline has a stage on every rank of a replica, since torch's layers
    are not tensor-parallel.
    """
    replicas = plan.ranks.llm.dp
    if replicas == 1:
        return None, None
    pipelines: list[list[int]] = [[] for _ in range(replicas)]
    for rank in range(plan.ranks.world):
        pipelines[plan.ranks.place(LLM, rank).dp].append(rank)
    stages = [list(ranks) for ranks in zip(*pipelines, strict=True)]
    return new_subgroup(pipelines), new_subgroup(stages)


# ---------------------------------------------------------------------------- torch's schedules


class TorchStep:
    """One of torch's schedules on this rank.

    `pipeline` is the group of its stages, by default all ranks. `replicas` is the group of ranks with the
    same stages: it sums gradients after the schedule.
    """

    def __init__(
        self,
        model: Model,
        variant: TorchVariant,
        contexts: Contexts,
        *,
        microbatches: int,
        scale: float,
        dtype: torch.dtype,
        device: torch.device | str,
        pipeline: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None,
    ) -> None:
        rank, ranks = dist.get_rank(pipeline), dist.get_world_size(pipeline)
        layers, numbers = layers_in_order(model), variant.stages_of(rank, ranks)
        self._is_first, self._is_last = 0 in numbers, variant.virtual_stages - 1 in numbers
        self._replicas = replicas
        modules = [
            stage_of_layers(
                layers[variant.cut[number] : variant.cut[number + 1]], contexts, dtype=dtype, device=device
            )
            for number in numbers
        ]
        self.parameters = [parameter for module in modules for parameter in module.parameters()]
        stages = [
            PipelineStage(module, number, variant.virtual_stages, torch.device(device), group=pipeline)
            for number, module in zip(numbers, modules, strict=True)
        ]

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return summed_loss(logits, labels) * scale

        schedule = get_schedule_class(variant.schedule)
        is_single = len(stages) == 1 and variant.schedule in ("1F1B", "GPipe")
        self._schedule = schedule(
            stages[0] if is_single else stages, microbatches, loss_fn=loss, scale_grads=False
        )

    def run(self, pixels: Tensor, ids: Tensor, labels: Tensor) -> Tensor | None:
        """Runs one step of the whole batch, one sample a microbatch; returns the loss on the last stage."""
        for parameter in self.parameters:
            parameter.grad = None
        losses: list[Tensor] = []
        args = (pixels,) if self._is_first else ()
        if self._is_last:
            self._schedule.step(*args, ids=ids, target=labels, losses=losses, return_outputs=False)
        else:
            self._schedule.step(*args, ids=ids, return_outputs=False)
        self._sum_over_replicas()
        return torch.stack(losses).sum().detach() if losses else None

    def _sum_over_replicas(self) -> None:
        if self._replicas is not None:
            grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            works = [dist.all_reduce(grad, group=self._replicas, async_op=True) for grad in grads]
            for work in works:
                work.wait()


class LayersStage(nn.Module):
    """Layers in model order as one module; its input is pixels or hidden states, by its first layer."""

    def __init__(
        self, layers: Sequence[tuple[Encoder | Llm, Sequence[Segment]]], contexts: dict[str, Any]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(segments) for _, segments in layers)
        self._modules_of_layers = [module.name for module, _ in layers]
        self._contexts = contexts

    def forward(self, x: Tensor, *, ids: Tensor | None = None) -> Tensor:
        state: tuple[Tensor, ...] = (x,)
        for name, segments in zip(self._modules_of_layers, self.layers, strict=True):
            context = self._contexts[name]
            for segment in segments:
                if isinstance(segment, LossHead):
                    return segment.logits(state)
                if isinstance(segment, TokenEmbedding):
                    state = (ids, *state)
                state = segment.forward(state, context)
        return state[0].clone() if state[0]._is_view() else state[0]  # torch detaches it in place


def layers_in_order(model: Model) -> list[tuple[Encoder | Llm, int]]:
    """Returns module and number of every layer, encoders first."""
    return [(module, layer) for module in model.modules for layer in range(count_layers(module))]


def stage_of_layers(
    layers: Sequence[tuple[Encoder | Llm, int]],
    contexts: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LayersStage:
    """Builds layers, named by module and number, as one module."""
    options: dict[str, Any] = {"dtype": dtype, "device": device, "seed": SEED}
    built = [(module, build_layers(module, first=at, end=at + 1, **options)[0]) for module, at in layers]
    return LayersStage(built, contexts)


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross entropy summed over all rows with a label."""
    return functional.cross_entropy(logits.float(), labels.flatten(), reduction="sum")


# ---------------------------------------------------------------------------- the batch


class TorchBatch:
    """The batch of this rank's replica as torch's schedules read it."""

    def __init__(self, job: Job, plan: Plan, *, device: torch.device | str, dtype: torch.dtype) -> None:
        self._job, self._device, self._dtype = job, device, dtype
        self._data = SyntheticDataset(job=job, seed=SEED)
        sequences = job.workload.sequences_per_step
        per_replica = sequences // plan.ranks.llm.dp
        first = plan.ranks.place(LLM, dist.get_rank()).dp * per_replica
        self.samples = range(first, first + per_replica)
        self.scale = 1.0 / max(1, sum(self._data.labels(number) for number in range(sequences)))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns pixels, ids and labels of all samples."""
        samples = [self._data.sample(number) for number in self.samples]
        (encoder,) = self._job.model.encoders
        pixels = torch.cat([pixels_of(encoder, sample, self._dtype)[0] for sample in samples])
        ids = torch.cat([sample.tokens for sample in samples])
        labels = torch.cat([sample.labels for sample in samples])
        return self._to_device(pixels), self._to_device(ids), self._to_device(labels)

    def contexts(self) -> Contexts:
        """Returns the context of every module; all samples have one shape."""
        sample = self._data.sample(self.samples[0])
        (encoder,) = self._job.model.encoders
        return {
            encoder.name: pixels_of(encoder, sample, self._dtype)[1].map(self._to_device),
            LLM: llm_context(self._job, sample, self.scale, self._dtype).map(self._to_device),
        }

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)


def pixels_of(
    encoder: Encoder, sample: Sample, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, EncoderMicrobatchContext]:
    """Returns the encoder's input and context for one sample."""
    items = list_placed_items(sample, encoder.name)
    tokens = sum(item.tokens for _, _, item in items)
    return build_encoder_inputs(encoder, items, tokens, seed=SEED, step=0, dtype=dtype)


def llm_context(
    job: Job, sample: Sample, scale: float, dtype: torch.dtype = torch.float32
) -> LlmMicrobatchContext:
    """Returns the LLM's context for one sample."""
    (encoder,) = job.model.encoders
    items = list_placed_items(sample, encoder.name)
    tokens = sum(item.tokens for _, _, item in items)
    target = find_llm_row_targets(encoder, items, tokens, {sample.number: 0}, sample.length)
    options: dict[str, Any] = {"seed": SEED, "step": 0, "dtype": dtype}
    return build_llm_inputs(job.model.llm, [sample], [target], scale, **options)[1]
