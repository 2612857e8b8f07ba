"""Provides a pipeline schedule with torch's interface that runs encoders in the pipeline's bubbles.

Users keep their modules, optimizer and trainer. Where a script has

    schedule = Schedule1F1B(stage, n_microbatches, loss_fn)
    schedule.step(tokens, images, target=labels)

with the encoder inside stage 0, it makes the encoder a list of blocks of its own:

    schedule = FillSchedule([stage], {"images": blocks}, plan, loss_fn=loss_fn)
    schedule.step(tokens, images=images, target=labels)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from optimus.engine.buckets import list_all_layers
from optimus.engine.build_rank import reject_unsupported_plan
from optimus.engine.compile import MessageSpecs
from optimus.engine.executor import Executor
from optimus.engine.fsdp_ddp import (
    disable_fsdp_hooks,
    list_fsdp_modules,
    make_module_segment,
    make_param_bucket,
    reject_wrapped_modules,
    unwrap_ddp,
)
from optimus.engine.p2p import TensorSpec
from optimus.engine.process_groups import find_replica_ranks, make_process_groups
from optimus.engine.stage_profile import ProfiledStages, profile_stages
from optimus.engine.torch_private import reshard_fsdp_after_forward
from optimus.errors import UserError
from optimus.ir.plan import Plan, PlannedModule
from optimus.ir.planfile import hash_plan
from optimus.ir.ranks import LLM
from optimus.models.chunk import SegmentedChunk
from optimus.models.segment import Gradients, ModuleSegment, Segment, State, WeightGradStore
from optimus.verify.validator import check_plan

Loss = Callable[[Any, Tensor], Tensor]
Target = tuple[Tensor | None, float]  # of one microbatch: labels, and the factor of its loss


class _LossSegment(Segment):
    """The last stage and the loss. Outputs are the scaled loss, the loss, and the stage's output."""

    def __init__(self, stage: ModuleSegment, loss: Loss | None) -> None:
        super().__init__()
        self.stage, self.loss = stage, loss

    @property
    def trainable(self) -> list[nn.Parameter]:
        return self.stage.trainable

    def add_gradients(self, parameters: Sequence[Tensor], gradients: Gradients) -> None:
        self.stage.add_gradients(parameters, gradients)

    def forward(self, state: State, context: Target, weight_grads: WeightGradStore | None = None) -> State:
        (output,) = self.stage(state, None)
        target, scale = context
        if target is None or self.loss is None:
            zero = output.new_zeros(())
            return zero, zero, output
        loss = self.loss(output, target)
        return loss * scale, loss.detach(), output


class FillSchedule:
    """A schedule with `step` and `eval` as torch's have; every encoder's inputs are a keyword argument.

    `stages` are this rank's stages of the LLM in order, modules or `PipelineStage`s. The first gets the
    positional arguments of `step`, then the output of every encoder microbatch that feeds it. `encoders` are
    lists of blocks, complete on every rank: the plan says which of them a rank runs, and only those are
    trained there. Every `step` zeroes gradients first; they are of the loss's mean over microbatches and
    replicas, and are reduced when it returns. All replicas start with the parameters of the first.

    Stages and blocks may be wrapped in DDP, or sharded by FSDP2 over the plan's replicas of their module (see
    `replica_mesh`): then lines of the plan gather and reduce them, and `grad` holds this rank's shard.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        encoders: Mapping[str, Sequence[nn.Module]],
        plan: Plan,
        *,
        loss_fn: Loss | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.plan, self.rank = plan, dist.get_rank()
        self.stages = [unwrap_ddp(getattr(stage, "submod", stage)) for stage in stages]
        _check_modules(plan, self.stages, encoders)
        self.encoders = {name: [unwrap_ddp(block) for block in encoders[name]] for name in plan.encoders}
        self.loss_fn = loss_fn
        _check_plan(plan)
        self._groups = make_process_groups(plan, self.rank, timeout_s=timeout_s)
        self._chunks = self._make_chunks()
        self._disable_fsdp_hooks()
        self._sharded = [part for layer in list_all_layers(self._chunks) for part in list_fsdp_modules(layer)]
        self._frozen = [part for part in self._sharded if not any(p.requires_grad for p in part.parameters())]
        self._broadcast_parameters()
        self._executor: Executor | None = None
        self._input_shapes: dict[str, tuple[int, ...]] = {}

    def step(
        self,
        *args: Tensor,
        target: Tensor | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        **inputs: Tensor,
    ) -> Tensor | None:
        """Runs forward and backward of a batch; returns the last stage's output on its rank."""
        if self.is_last and self.loss_fn is not None and target is None:
            raise UserError(
                field="step: target",
                problem="is missing on the rank that computes the loss",
                hint="give target=, or call eval",
            )
        batch = self._batch(args, inputs, target)
        executor = self._prepared_executor(batch)
        self._gather_frozen()
        executor.step(batch)
        return self._result(executor, losses, return_outputs=return_outputs)

    def eval(
        self,
        *args: Tensor,
        target: Tensor | None = None,
        losses: list[Tensor] | None = None,
        **inputs: Tensor,
    ) -> Tensor | None:
        """Runs forward of a batch without gradients; returns the last stage's output on its rank."""
        batch = self._batch(args, inputs, target)
        executor = self._prepared_executor(batch)
        self._gather_frozen()
        executor.eval(batch)
        for module in self._sharded:
            if module not in self._frozen:
                reshard_fsdp_after_forward(module)
        return self._result(executor, losses, return_outputs=True)

    @property
    def is_last(self) -> bool:
        """True if this rank computes the loss."""
        return self.plan.ranks.place(LLM, self.rank).pp == self.plan.ranks.llm.pp - 1

    # ------------------------------------------------------------------------ modules as chunks

    def _disable_fsdp_hooks(self) -> None:
        """Leaves FSDP2's collectives to the program; raises for wrapped blocks of other ranks."""
        for name, chunks in self._chunks.items():
            for layer in (layer for chunk in chunks for layer in chunk.layers):
                disable_fsdp_hooks(layer, name, find_replica_ranks(self.plan, name, self.rank))
        on_this_rank = {id(part) for layer in list_all_layers(self._chunks) for part in layer.modules()}
        for name, blocks in self.encoders.items():
            for block in blocks:
                if id(block) not in on_this_rank:
                    reject_wrapped_modules(block, f"encoders.{name}")

    def _gather_frozen(self) -> None:
        """Gathers frozen modules, for which the program has no lines; they stay unsharded."""
        for module in self._frozen:
            module.unshard()

    def _broadcast_parameters(self) -> None:
        """Broadcasts parameters and buffers of the first replica, as DDP does; shards have one owner."""
        for name, chunks in self._chunks.items():
            group = self._groups.get(f"{name}.dp")
            if group is None:
                continue
            source = self._groups.members[f"{name}.dp"][0]
            for layer in (layer for chunk in chunks for layer in chunk.layers):
                for tensor in (*layer.parameters(), *layer.buffers()):
                    if not isinstance(tensor, DTensor):
                        dist.broadcast(tensor.detach(), source, group)

    def _make_chunks(self) -> dict[str, tuple[SegmentedChunk, ...]]:
        device = self.plan.ranks.class_of(self.rank)
        chunks: dict[str, tuple[SegmentedChunk, ...]] = {}
        for name, blocks in self.encoders.items():
            first, end = _block_range(self.plan.modules[name], self.plan.ranks.stage_of(name, device))
            chunks[name] = (SegmentedChunk([[make_module_segment(block)] for block in blocks[first:end]]),)
        segments: list[Segment] = [make_module_segment(stage) for stage in self.stages]
        if self.is_last:
            segments[-1] = _LossSegment(make_module_segment(self.stages[-1]), self.loss_fn)
        return {**chunks, LLM: tuple(SegmentedChunk([[segment]], opaque=True) for segment in segments)}

    def _prepared_executor(self, batch: _SplitBatch) -> Executor:
        """Returns the executor; before the first step ranks exchange the shapes of messages."""
        if self._executor is None:
            encoder_microbatches = {
                name: (batch.inputs(name, 0)[0], self.plan.modules[name].microbatches_per_llm_microbatch)
                for name in self.encoders
            }
            for module in self._sharded:
                module.unshard()  # a collective: profiling itself runs on one rank at a time
            with torch.no_grad():
                profiles = profile_stages(
                    self.stages,
                    self.encoders,
                    batch.inputs(LLM, 0),
                    encoder_microbatches,
                    pp=self.plan.ranks.llm.pp,
                )
            for module in self._sharded:
                reshard_fsdp_after_forward(module)
            self._executor = Executor(
                self.plan,
                self._groups,
                self._chunks,
                _message_specs(self.plan, profiles),
                device=self._device,
                bucket_type=partial(make_param_bucket, self._sharded),
            )
        return self._executor

    @property
    def _device(self) -> torch.device:
        parameter = next((p for stage in self.stages for p in stage.parameters()), None)
        return torch.device("cpu") if parameter is None else parameter.device

    # ------------------------------------------------------------------------ data

    def _batch(
        self, args: tuple[Tensor, ...], inputs: Mapping[str, Tensor], target: Tensor | None
    ) -> _SplitBatch:
        if set(inputs) != set(self.encoders):
            raise UserError(
                field="step",
                problem=f"has inputs for {sorted(inputs)}, and the encoders are {sorted(self.encoders)}",
                hint="give one keyword argument per encoder, on every rank",
            )
        batch = _SplitBatch(self.plan, args, inputs, target)
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        shapes |= {f"argument {at}": tuple(tensor.shape) for at, tensor in enumerate(args)}
        self._input_shapes = self._input_shapes or shapes
        if shapes != self._input_shapes:
            raise UserError(
                field="step",
                problem=f"has shapes {shapes}, and the first step had {self._input_shapes}",
                hint="pad batches to one shape: messages between ranks have a fixed size",
            )
        return batch

    def _result(
        self, executor: Executor, losses: list[Tensor] | None, *, return_outputs: bool
    ) -> Tensor | None:
        outputs = [output for _, output in sorted(executor.outputs.items())]
        executor.outputs.clear()
        if losses is not None:
            losses[:] = [loss for loss, _ in outputs]
        if not outputs or not return_outputs:
            return None
        return torch.cat([output for _, output in outputs])


class _SplitBatch:
    """A batch split along its first dimension, as torch's schedules split it."""

    def __init__(
        self, plan: Plan, args: tuple[Tensor, ...], inputs: Mapping[str, Tensor], target: Tensor | None
    ) -> None:
        count = plan.microbatches
        self._inputs: dict[str, list[tuple[Tensor, ...]]] = {
            name: [
                (part,) for part in _split(name, inputs[name], count * module.microbatches_per_llm_microbatch)
            ]
            for name, module in plan.encoders.items()
        }
        parts = [_split(f"argument {at}", argument, count) for at, argument in enumerate(args)]
        self._inputs[LLM] = [tuple(part[i] for part in parts) for i in range(count)]
        targets = [None] * count if target is None else _split("target", target, count)
        scale = 1.0 / (count * plan.ranks.llm.dp)
        self._targets: list[Target] = [(labels, scale) for labels in targets]

    def inputs(self, module: str, microbatch: int) -> State:
        return self._inputs[module][microbatch]

    def context(self, module: str, microbatch: int) -> Any:
        return self._targets[microbatch] if module == LLM else None


def _split(name: str, tensor: Tensor, count: int) -> list[Tensor]:
    if tensor.shape[0] % count:
        raise UserError(
            field=f"step: {name}",
            value=tuple(tensor.shape),
            problem=f"cannot be divided into {count} microbatches of equal size",
            hint=f"give a first dimension that is a multiple of {count}",
        )
    return list(tensor.chunk(count))


def _block_range(module: PlannedModule, stage: int) -> tuple[int, int]:
    """Returns the first and end block of an encoder stage."""
    ends = [0, *accumulate(chunk.layers for chunk in module.chunks)]
    return ends[stage], ends[stage + 1]


def _check_modules(
    plan: Plan, stages: Sequence[nn.Module], encoders: Mapping[str, Sequence[nn.Module]]
) -> None:
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


def _check_plan(plan: Plan) -> None:
    """Raises unless the plan holds, is for this world size, and is the same on every rank."""
    reject_unsupported_plan(plan)
    world = dist.get_world_size()
    if plan.ranks.world != world:
        raise UserError(
            field="plan",
            value=plan.ranks.world,
            problem=f"ranks are planned, and there are {world}",
            hint="plan for as many ranks as run",
        )
    report = check_plan(plan)
    if not report.ok:
        first = report.violations[0]
        raise UserError(
            field=first.where, problem=f"breaks the rule `{first.rule}`: {first.problem}", hint="plan again"
        )
    digests: list[Any] = [None] * world
    dist.all_gather_object(digests, hash_plan(plan))
    if len(set(digests)) > 1:
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        raise UserError(
            field="plan",
            problem=f"is another on ranks {different} than on rank 0",
            hint="make it from the same times on every rank; profile_stages gives them to all",
        )


def _message_specs(plan: Plan, profiles: ProfiledStages) -> MessageSpecs:
    inputs: dict[str, list[tuple[TensorSpec, ...]]] = {
        LLM: [(), *(profile.output for profile in profiles.stages[:-1])]
    }
    for name, module in plan.encoders.items():
        blocks = profiles.encoders[name]
        firsts = [_block_range(module, stage)[0] for stage in range(module.layout.pp)]
        inputs[name] = [blocks[first - 1].output if first else () for first in firsts]
    rows = {name: blocks[-1].output for name, blocks in profiles.encoders.items()}
    return MessageSpecs(inputs=inputs, rows=rows)
