"""Runs a user's stages and blocks as segments, with the inputs of their microbatch that every rank knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from optimus.engine.fsdp_ddp import make_module_segment
from optimus.engine.p2p import TensorSpec
from optimus.engine.stage_profile import StageInputs, is_on_meta
from optimus.errors import UserError
from optimus.ir.ranks import LLM
from optimus.models.segment import Gradients, ModuleSegment, Segment, State, WeightGradStore

LossFn = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class MicrobatchContext:
    """Inputs of one microbatch for the segments of a module; `inputs` is None if it has none."""

    inputs: StageInputs | None
    output_specs: Callable[[int], tuple[TensorSpec, ...]]  # by number of the stage or block
    target: Any = None
    num_items: float | Tensor = 1.0
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    keeps_output: bool = False


class StageSegment(Segment):
    """A stage or block with the keyword inputs of its microbatch; checks the shapes of its outputs."""

    def __init__(self, stage: ModuleSegment, field: str, number: int) -> None:
        super().__init__()
        self.stage, self.field, self.number = stage, field, number

    @property
    def trainable(self) -> list[nn.Parameter]:
        return self.stage.trainable

    def add_gradients(self, parameters: Sequence[Tensor], gradients: Gradients) -> None:
        self.stage.add_gradients(parameters, gradients)

    def forward(
        self, state: State, context: MicrobatchContext, weight_grads: WeightGradStore | None = None
    ) -> State:
        specs = context.output_specs(self.number)
        if context.inputs is None:
            return tuple(spec.empty(self._device) for spec in specs)
        outputs: State = self.stage(state, context.inputs.kwargs)
        shapes, expected = [tuple(t.shape) for t in outputs], [spec.shape for spec in specs]
        if shapes != expected:
            raise UserError(
                field=f"{self.field}[{self.number}]",
                problem=f"returned shapes {shapes}, and the ranks that wait for them expect {expected}",
                hint="correct the function in `shapes=` that says so, or return equal shapes every time",
            )
        dtypes, planned = [t.dtype for t in outputs], [spec.dtype for spec in specs]
        if dtypes != planned:
            raise UserError(
                field=f"{self.field}[{self.number}]",
                problem=f"returned {dtypes}, and the ranks that wait for them expect {planned}",
                hint="use the same autocast in every step, from the one on that is profiled",
            )
        return outputs

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self.stage.parameters()), torch.device("cpu"))


class LossSegment(StageSegment):
    """The last stage and the loss. Outputs are the scaled loss, the loss, and the stage's outputs if kept."""

    def __init__(self, stage: ModuleSegment, number: int, loss_fn: LossFn | None) -> None:
        super().__init__(stage, LLM, number)
        self.loss_fn = loss_fn

    def forward(
        self, state: State, context: MicrobatchContext, weight_grads: WeightGradStore | None = None
    ) -> State:
        assert context.inputs is not None
        outputs = self.stage(state, context.inputs.kwargs)
        kept = outputs if context.keeps_output else ()
        if context.target is None or self.loss_fn is None:
            zero = outputs[0].new_zeros(())
            return zero, zero, *kept
        loss = self.loss_fn(*outputs, context.target, **context.loss_kwargs)
        return loss / context.num_items, loss.detach(), *kept


def make_stage_segment(module: nn.Module, field: str, number: int) -> StageSegment:
    """Makes a segment of a stage or block that runs on this rank."""
    if is_on_meta(module):
        raise UserError(
            field=f"{field}[{number}]",
            problem="is on the meta device, and runs on this rank",
            hint="load its parameters and buffers first",
        )
    return StageSegment(make_module_segment(module), field, number)
