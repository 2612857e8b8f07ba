"""Runs a user's stages and blocks as segments, with the inputs of their microbatch that every rank knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from optimus.engine.fsdp_ddp import make_module_segment
from optimus.engine.p2p import TensorSpec
from optimus.engine.stage_profile import StageInputs, is_on_meta
from optimus.errors import UserError
from optimus.ir.op import KernelName
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.models.collectives import AsyncCollective, TpGroup
from optimus.models.microbatch_inputs import SeamRoute
from optimus.models.segment import Gradients, ModuleSegment, NeedsGrad, Segment, State, WeightGradStore
from optimus.models.tensor_parallel import TpCollective

LossFn = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class DealtRows:
    """Way of one encoder's rows to the replicas of their sequences, for one LLM microbatch and rank.

    The route's pieces are this replica's encoder microbatches. `order` sorts received rows.
    """

    route: SeamRoute
    order: Tensor  # int64


@dataclass(frozen=True, kw_only=True)
class MicrobatchContext:
    """Inputs of one microbatch for the segments of a module; `inputs` is None if it has none."""

    inputs: StageInputs | None
    output_specs: Callable[[int], tuple[TensorSpec, ...]]  # by number of the stage or block
    target: Any = None
    num_items: float | Tensor = 1.0
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    keeps_output: bool = False
    # Of every encoder of a plan that deals images over replicas: the way, the specs of its rows.
    deal: Sequence[tuple[DealtRows, tuple[TensorSpec, ...]]] = ()


class DealtRowsExchange(TpCollective):
    """Exchanges encoder rows between replicas before the first stage: its inputs to its inputs.

    The first microbatch of an encoder gets all rows of the LLM microbatch's images, in their order, the
    others none.
    """

    axis = "deal"
    forward_name, backward_name = f"{KernelName.SEAM.gather}.deal", f"{KernelName.SEAM.scatter}.deal"

    def __init__(self, group: TpGroup, trains: Sequence[bool]) -> None:
        super().__init__(group, -1)
        self.trains = tuple(trains)  # by encoder: whether its rows need gradients, on all ranks alike

    def has_backward(self, needs_grad: NeedsGrad) -> bool:
        return any(self.trains)

    def launch(self, state: State, context: MicrobatchContext) -> AsyncCollective:
        args = _count_args(state, context)
        flights, at = list[AsyncCollective](), args
        for dealt, specs in context.deal:
            route = dealt.route
            for number in range(len(specs)):
                end = at + len(route.pieces) * len(specs)
                rows = torch.cat([piece.detach() for piece in state[at + number : end : len(specs)]])
                flight = self.tp_group.all_to_all(rows[route.leaving], route.sent, route.received)
                flights.append(flight.then(partial(torch.index_select, dim=0, index=dealt.order)))
            at += len(route.pieces) * len(specs)

        def place(received: list[Tensor]) -> State:
            placed, rows = list(state[:args]), iter(received)
            for dealt, specs in context.deal:
                own = [next(rows) for _ in specs]
                placed += own
                placed += [each[:0] for each in own] * (len(dealt.route.pieces) - 1)
            return tuple(placed)

        return _join(flights).then(place)

    def launch_backward(self, gradients: Gradients, context: MicrobatchContext) -> AsyncCollective:
        args, flights = _count_args(gradients, context), list[AsyncCollective]()
        at = args
        for (dealt, specs), trains in zip(context.deal, self.trains, strict=True):
            route = dealt.route
            for number, spec in enumerate(specs) if trains else ():
                gradient = gradients[at + number]
                sorted_rows = spec.with_rows(sum(route.received)).empty(dealt.order.device).zero_()
                if gradient is not None:
                    sorted_rows.index_copy_(0, dealt.order, gradient)
                flights.append(self.tp_group.all_to_all(sorted_rows, route.received, route.sent))
            at += len(route.pieces) * len(specs)

        def place(returned: list[Tensor]) -> Gradients:
            rows, placed = iter(returned), list[Tensor | None]([None] * args)
            for (dealt, specs), trains in zip(context.deal, self.trains, strict=True):
                route = dealt.route
                if not trains:
                    placed += [None] * (len(route.pieces) * len(specs))
                    continue
                by_output = []
                for _ in specs:
                    came = next(rows)
                    whole = came.new_zeros(sum(route.pieces), *came.shape[1:])
                    by_output.append(whole.index_copy_(0, route.leaving, came).split(route.pieces))
                placed += [of_output[piece] for piece in range(len(route.pieces)) for of_output in by_output]
            return tuple(placed)

        return _join(flights).then(place)


def _count_args(state: Sequence[Any], context: MicrobatchContext) -> int:
    return len(state) - sum(len(dealt.route.pieces) * len(specs) for dealt, specs in context.deal)


def _join(flights: Sequence[AsyncCollective]) -> AsyncCollective:
    """Returns a collective whose result is the list of theirs."""
    return AsyncCollective(None, lambda: [flight.wait() for flight in flights])


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


def check_modules(
    plan: Plan,
    stages: Sequence[nn.Module],
    encoders: Mapping[str, Sequence[nn.Module]],
    shapes: Mapping[str, Any],
) -> None:
    """Raises unless stages, blocks and functions of shapes are those that the plan has."""
    unknown = sorted(set(shapes) - set(plan.modules))
    if unknown:
        raise UserError(
            field="shapes",
            value=unknown,
            problem=f"are not modules of the plan, {sorted(plan.modules)}",
            hint="give a function for those only",
        )
    if set(encoders) != set(plan.encoders):
        raise UserError(
            field="encoders",
            value=sorted(encoders),
            problem=f"are not those of the plan, {sorted(plan.encoders)}",
            hint="give a list of blocks for each of them",
        )
    for name, blocks in encoders.items():
        planned = sum(chunk.layers for chunk in plan.modules[name].chunks)
        if len(blocks) != planned:
            raise UserError(
                field=f"encoders.{name}",
                value=len(blocks),
                problem=f"blocks were given, and the plan has {planned}",
                hint="plan again for these blocks",
            )
    if len(stages) != plan.ranks.llm.chunks:
        raise UserError(
            field="stages",
            value=len(stages),
            problem=f"stages were given for a rank that runs {plan.ranks.llm.chunks}",
            hint="give this rank's stages in order",
        )
