"""A job's model as modules for torch's own pipeline schedules: the same layers, plain autograd.

Layers stand in model order, encoder first, and any range of them is a stage. All microbatches of the bench
have the same shape, so contexts are part of a stage; token ids go to every stage as a keyword argument, as
torch hands them out, and the one with the embedding uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional

from optimus.engine.torch_private import is_view
from optimus.ir.plan import Plan
from optimus.job.job import Job
from optimus.job.model import Encoder, Llm, Model
from optimus.models.build import build_layers, layer_count
from optimus.models.llm_ends import Embedding, Head
from optimus.models.microbatch_inputs import EncoderContext, LlmContext
from optimus.models.segment import Segment

Cut = tuple[int, ...]  # of all layers in model order: 0, ..., their number


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A schedule of torch's over one cut of the layers."""

    name: str
    schedule: str  # torch's name of it
    cut: Cut

    @property
    def virtual_stages(self) -> int:
        return len(self.cut) - 1

    def stages_of(self, rank: int, ranks: int) -> list[int]:
        """Virtual stages on a rank: in rounds, or for ZBV there and back."""
        if self.schedule == "ZBVZeroBubble":
            return [rank, self.virtual_stages - 1 - rank]
        return list(range(rank, self.virtual_stages, ranks))


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a bench decides before any rank starts."""

    job: Job
    plan: Plan
    variants: tuple[Variant, ...]
    bound_s: float
    encoder_share: float
    how: str


class StageOfLayers(nn.Module):
    """Some layers in model order. Where it begins decides whether it reads pixels or rows."""

    def __init__(
        self, layers: Sequence[tuple[Encoder | Llm, Sequence[Segment]]], contexts: dict[str, Any]
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.ModuleList(segments) for _, segments in layers)
        self._names = [module.name for module, _ in layers]
        self._contexts = contexts

    def forward(self, x: Tensor, *, ids: Tensor | None = None) -> Tensor:
        state: tuple[Tensor, ...] = (x,)
        for name, segments in zip(self._names, self.parts, strict=True):
            context = self._contexts[name]
            for segment in segments:
                if isinstance(segment, Head):
                    return segment.logits(state)
                if isinstance(segment, Embedding):
                    state = (ids, *state)
                state = segment.forward(state, context)
        return state[0].clone() if is_view(state[0]) else state[0]  # torch detaches it in place


def layers_in_order(model: Model) -> list[tuple[Encoder | Llm, int]]:
    """Every layer of the encoder, then of the LLM."""
    return [(module, layer) for module in model.modules for layer in range(layer_count(module))]


class TorchRun:
    """One of torch's schedules on this rank.

    `pipeline` are the ranks of its stages: all, if left out. `replicas` hold the same stages: their gradients
    are summed when the schedule is over.
    """

    def __init__(
        self,
        model: Model,
        variant: Variant,
        contexts: dict[str, EncoderContext | LlmContext],
        *,
        microbatches: int,
        scale: float,
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        pipeline: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        rank, ranks = dist.get_rank(pipeline), dist.get_world_size(pipeline)
        order, self.mine = layers_in_order(model), variant.stages_of(rank, ranks)
        self.last, self._replicas = variant.virtual_stages - 1, replicas
        modules = [
            stage_of_layers(
                order[variant.cut[at] : variant.cut[at + 1]], contexts, seed=seed, dtype=dtype, device=device
            )
            for at in self.mine
        ]
        self.parameters = [p for module in modules for p in module.parameters()]
        stages = [
            PipelineStage(module, at, variant.virtual_stages, torch.device(device), group=pipeline)
            for at, module in zip(self.mine, modules, strict=True)
        ]

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return summed_loss(logits, labels) * scale

        made = get_schedule_class(variant.schedule)
        single = len(stages) == 1 and variant.schedule in ("1F1B", "GPipe")
        self.schedule = made(stages[0] if single else stages, microbatches, loss_fn=loss, scale_grads=False)

    def step(self, pixels: Tensor, ids: Tensor, labels: Tensor) -> Tensor | None:
        """One step of the whole batch, a sample in each microbatch; the loss where it is made."""
        for parameter in self.parameters:
            parameter.grad = None
        losses: list[Tensor] = []
        args = (pixels,) if 0 in self.mine else ()
        if self.last in self.mine:
            self.schedule.step(*args, ids=ids, target=labels, losses=losses, return_outputs=False)
        else:
            self.schedule.step(*args, ids=ids, return_outputs=False)
        self._sum_over_replicas()
        return torch.stack(losses).sum().detach() if losses else None

    def _sum_over_replicas(self) -> None:
        if self._replicas is not None:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            works = [dist.all_reduce(each, group=self._replicas, async_op=True) for each in gradients]
            for work in works:
                work.wait()


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Over all rows that are asked for something."""
    return functional.cross_entropy(logits.float(), labels.flatten(), reduction="sum")


def stage_of_layers(
    layers: Sequence[tuple[Encoder | Llm, int]],
    contexts: dict[str, Any],
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> StageOfLayers:
    """Some layers, named by module and number, as one module."""
    how: dict[str, Any] = {"dtype": dtype, "device": device, "seed": seed}
    built = [(module, build_layers(module, first=at, end=at + 1, **how)[0]) for module, at in layers]
    return StageOfLayers(built, contexts)
