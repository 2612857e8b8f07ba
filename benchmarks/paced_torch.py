"""torch's own pipeline schedules over modules that sleep, on the links that our engine meets too.

A paced stage computes something tiny and takes a given time. In its backward, time is spent in two nodes that
do nothing else: one on the way to the input, one on the way to the weight. So torch's split backward spends
each part where torch runs it; a single custom function for both would run whole in the first part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from benchmarks.pacing import PacedClock

Seconds = Callable[[str, int, int], float]  # of kind (F, B, I or W), virtual stage and microbatch


class Passing(torch.autograd.Function):
    """The same tensor; its backward takes time."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, spend: Callable[[], None]) -> Tensor:
        context.spend = spend
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context.spend()
        return gradient, None


class PacedStage(nn.Module):
    """One virtual stage. `split`: its backward is I and W, also where torch runs both at once; else one B."""

    def __init__(self, clock: PacedClock, seconds: Seconds, *, stage: int, width: int, split: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width) * (1 + stage / 64))  # told apart, and known to tests
        self._clock, self._seconds, self._stage, self._split = clock, seconds, stage, split
        self.free = False  # takes no time: for the step in which torch prepares itself

    def forward(self, rows: Tensor, microbatch: Tensor) -> Tensor:
        number = int(microbatch)
        if not rows.requires_grad:  # the input gradient of the first stage is work too, if nobody takes it
            rows = rows.detach().requires_grad_()
        rows = Passing.apply(rows, lambda: self._spend("I" if self._split else "B", number))
        weight = self.weight
        if self._split:
            weight = Passing.apply(weight, lambda: self._spend("W", number))
        found = torch.tanh(rows @ weight)
        self._spend("F", number)
        return found

    def _spend(self, kind: str, microbatch: int) -> None:
        if not self.free:
            self._clock.compute(self._seconds(kind, self._stage, microbatch))


@dataclass(frozen=True, kw_only=True)
class TorchPipeline:
    """A schedule of torch by its class name, as `get_schedule_class` takes it."""

    schedule: str
    num_microbatches: int
    chunks: int = 1  # per rank
    rows: int = 2  # of one microbatch
    width: int = 4
    dtype: torch.dtype = torch.float32

    @property
    def splits(self) -> bool:
        return "ZeroBubble" in self.schedule or "ZBV" in self.schedule or "DualPipe" in self.schedule

    def data(self) -> tuple[Tensor, Tensor]:
        """Rows and targets of all microbatches."""
        count = self.num_microbatches * self.rows * self.width
        rows = torch.linspace(-1, 1, count).reshape(-1, self.width)
        return rows.to(self.dtype), torch.sin(7 * rows).to(self.dtype)

    @property
    def example(self) -> Tensor:
        """One microbatch, as it travels."""
        return torch.zeros(self.rows, self.width, dtype=self.dtype)

    def stages_of(self, rank: int, ranks: int) -> list[int]:
        """Virtual stages of a rank: round and round, or down and up again for schedules shaped like a V."""
        if "ZBV" in self.schedule or "DualPipe" in self.schedule:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + ranks * chunk for chunk in range(self.chunks)]


class PacedPipeline:
    """This rank's part of a pipeline of torch: made once, then played step by step."""

    def __init__(
        self,
        pipeline: TorchPipeline,
        *,
        clock: PacedClock,
        seconds: Seconds,
        group: dist.ProcessGroup | None = None,
        make: Callable[[int], Any] | None = None,  # the module of a virtual stage; else a `PacedStage`
    ) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._pipeline, self._ranks = pipeline, ranks
        numbers = pipeline.stages_of(rank, ranks)
        make = make or (
            lambda number: PacedStage(
                clock, seconds, stage=number, width=pipeline.width, split=pipeline.splits
            )
        )
        self._modules = [make(number) for number in numbers]
        example = pipeline.example.requires_grad_()
        stages = [
            PipelineStage(
                module,
                number,
                ranks * len(numbers),
                torch.device("cpu"),
                input_args=example.detach() if number == 0 else example,
                output_args=example,
                group=group,
            )
            for module, number in zip(self._modules, numbers, strict=True)
        ]
        made = get_schedule_class(pipeline.schedule)
        single = issubclass(made, PipelineScheduleSingle)
        self.schedule = made(
            stages[0] if single else stages, pipeline.num_microbatches, loss_fn=loss, scale_grads=False
        )
        self._first, self._last = 0 in numbers, ranks * len(numbers) - 1 in numbers

    def prepare(self) -> None:
        """The first step, in which torch connects stages: nothing takes time in it except messages."""
        self._set_free(True)
        self.play()
        self._set_free(False)

    def actions(self) -> list[list[str]]:
        """What torch listed for every rank; its 1F1B lists nothing."""
        order = getattr(self.schedule, "pipeline_order_with_comms", {})
        return [[str(action) for action in order.get(rank, ())] for rank in range(self._ranks)]

    def gradients(self) -> list[Tensor]:
        """Of every weight of this rank, by chunk."""
        return [module.weight.grad for module in self._modules]

    def _set_free(self, free: bool) -> None:
        for module in self._modules:
            module.free = free

    def play(self) -> None:
        """One step."""
        shape, count = self._pipeline, self._pipeline.num_microbatches
        for module in self._modules:
            module.zero_grad()
        rows, targets = shape.data()
        inputs, target = (rows,) if self._first else (), targets if self._last else None
        self.schedule.step(*inputs, target=target, microbatch=torch.arange(count), return_outputs=False)


def loss(found: Tensor, target: Tensor) -> Tensor:
    """Differs between microbatches, so that gradients tell if one took the place of another."""
    return ((found - target) ** 2).sum()
