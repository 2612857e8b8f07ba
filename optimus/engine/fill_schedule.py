"""Provides a pipeline schedule with torch's interface that runs encoders in the pipeline's bubbles.

Users keep their modules, optimizer and trainer. Where a script has

    schedule = Schedule1F1B(stage, n_microbatches, loss_fn)
    schedule.step(tokens, images, target=labels)

with the encoder inside stage 0, it makes the encoder a list of blocks of its own:

    schedule = FillSchedule([stage], {"images": blocks}, plan, loss_fn=loss_fn)
    schedule.step(tokens, images=images, target=labels)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from optimus.engine.buckets import list_all_layers
from optimus.engine.build_rank import check_plan_on_ranks
from optimus.engine.distributed_optimizer import CLIP_EPS
from optimus.engine.executor import Executor
from optimus.engine.fsdp_ddp import (
    disable_fsdp_hooks,
    list_fsdp_modules,
    make_module_segment,
    make_param_bucket,
    reject_wrapped_modules,
    unshard_all,
    unwrap_ddp,
)
from optimus.engine.process_groups import (
    connect_groups,
    find_replica_ranks,
    make_process_groups,
    needs_backward,
)
from optimus.engine.stage_profile import ProfiledStages, profile_stages
from optimus.engine.stage_segments import (
    DealtRows,
    DealtRowsExchange,
    LossFn,
    LossSegment,
    check_modules,
    make_stage_segment,
)
from optimus.engine.step_batch import OutputShapes, StepBatch, StepSpecs, find_block_range
from optimus.engine.tied_weights import check_tied_ends, reject_undeclared_ties
from optimus.engine.torch_private import reshard_fsdp_after_forward
from optimus.errors import UserError
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.models.chunk import SegmentedChunk, trainable_parameters
from optimus.models.segment import Segment


class FillSchedule:
    """A schedule with `step` and `eval` as torch's have, which runs encoders in the pipeline's bubbles.

    `stages` are this rank's stages of the LLM in order, modules or `PipelineStage`s. `encoders` are lists of
    blocks: the plan says which of them a rank runs; those of other ranks may be on `meta`. The first stage is
    called with the positional arguments of `step` and the outputs of every encoder microbatch that feeds it,
    every stage with the keyword arguments. Blocks likewise get the inputs of their encoder, a keyword
    argument of `step` with the encoder's name.

    Gradients are added to `grad`, as by torch's schedules, and are reduced over replicas when `step` returns.
    All replicas start with the parameters of the first. `tied` are this rank's ends of a parameter that the
    first and the last stage share; their gradients are summed, and the last starts with the first's values.

    `shapes` has a function for the LLM ("llm") and for each encoder whose microbatches differ in shape: it
    returns the shapes of the outputs of a stage or block for the inputs of one microbatch. Without it, all
    microbatches of a module must have equal shapes.

    Stages and blocks may be wrapped in DDP, or sharded by FSDP2 over the plan's replicas of their module (see
    `replica_mesh`): then lines of the plan gather and reduce them, and `grad` holds this rank's shard.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        encoders: Mapping[str, Sequence[nn.Module]],
        plan: Plan,
        *,
        loss_fn: LossFn | None = None,
        tied: Sequence[nn.Parameter] | None = None,
        shapes: Mapping[str, OutputShapes] = MappingProxyType({}),
        profiles: ProfiledStages | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.plan, self.rank = plan, dist.get_rank()
        self.stages = [unwrap_ddp(getattr(stage, "submod", stage)) for stage in stages]
        check_modules(plan, self.stages, encoders, shapes)
        self.encoders = {name: [unwrap_ddp(block) for block in encoders[name]] for name in plan.encoders}
        self.loss_fn, self._shapes, self._tied = loss_fn, shapes, list(tied or ())
        check_plan_on_ranks(plan)
        self._groups = make_process_groups(plan, self.rank, timeout_s=timeout_s)
        connect_groups(plan, self._groups, self._device)
        self._chunks = self._make_chunks()
        _check_backwards(plan, self.rank, self._chunks)
        self._disable_fsdp_hooks()
        self._sharded = [part for layer in list_all_layers(self._chunks) for part in list_fsdp_modules(layer)]
        self._frozen = [part for part in self._sharded if not any(p.requires_grad for p in part.parameters())]
        self._broadcast_parameters()
        if tied is None:
            reject_undeclared_ties(self.stages, is_first=self.is_first, is_last=self.is_last)
        self._profiles, self._specs = profiles, StepSpecs(plan)
        self._executor: Executor | None = None

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        num_items: float | Tensor | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        deal: Sequence[Mapping[str, DealtRows]] = (),
        **kwargs: Any,
    ) -> Any:
        """Runs forward and backward of a batch; returns the last stage's outputs on its rank.

        A tensor is split along its first dimension; a list has one entry per microbatch. An entry of an
        encoder is a tensor, a tuple of them, keyword arguments, `StageInputs`, or None if the microbatch
        has no inputs for it.

        `loss_fn` is called with the last stage's outputs, the target and `loss_kwargs`. The loss is the mean
        of its values over microbatches and replicas; with `num_items`, their sum divided by that number:
        the labels of the whole batch, for example, if `loss_fn` returns a sum over labels.

        If the plan deals images over replicas, `deal` says for every microbatch, by encoder, how rows get to
        the replica of their sequence; the first stage needs it.
        """
        if self.is_first and len(deal) != self.plan.microbatches * (self.plan.dealing_replicas > 1):
            raise UserError(
                field="step: deal",
                value=len(deal),
                problem=f"ways of rows were given, and the plan deals images over "
                f"{self.plan.dealing_replicas} replicas in {self.plan.microbatches} microbatches",
                hint="give one per microbatch if the plan deals images, else none",
            )
        if self.is_last and self.loss_fn is not None and target is None:
            raise UserError(
                field="step: target",
                problem="is missing on the rank that computes the loss",
                hint="give target=, or call eval",
            )
        options = {"target": target, "num_items": num_items, "loss_kwargs": loss_kwargs or {}, "deal": deal}
        executor, batch = self._begin(args, kwargs, {**options, "keeps_output": return_outputs})
        executor.step(batch)
        return self._result(executor, losses, return_outputs=return_outputs)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs forward of a batch without gradients; returns the last stage's outputs on its rank."""
        options = {"target": target, "num_items": None, "loss_kwargs": loss_kwargs or {}}
        executor, batch = self._begin(args, kwargs, {**options, "keeps_output": return_outputs})
        executor.eval(batch)
        for module in self._sharded:
            if module not in self._frozen:
                reshard_fsdp_after_forward(module)
        return self._result(executor, losses, return_outputs=return_outputs)

    @property
    def is_first(self) -> bool:
        """True if this rank runs the first stage, to which encoder rows go."""
        return self.plan.ranks.place(LLM, self.rank).pp == 0

    @property
    def is_last(self) -> bool:
        """True if this rank computes the loss."""
        return self.plan.ranks.place(LLM, self.rank).pp == self.plan.ranks.llm.pp - 1

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters of this rank's stages and blocks, for an optimizer."""
        for layer in list_all_layers(self._chunks):
            yield from layer.parameters()

    def count_labels(self, *targets: Tensor, ignore_index: int = -100) -> int:
        """Returns how many labels enter the loss over all replicas, as `num_items` of `step`.

        Every rank calls it, with the targets of all `step` calls before the next optimizer step.
        """
        count = torch.tensor([sum(int((target != ignore_index).sum()) for target in targets)])
        group = self._groups.get(f"{LLM}.dp")
        if group is not None:
            count = count.to(self._device)
            dist.all_reduce(count, dist.ReduceOp.SUM, group)
        return int(count)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips gradients by one norm over all ranks, in which every parameter counts once; returns it.

        `torch.nn.utils.clip_grad_norm_` would take the norm of this rank's stages and blocks alone.
        """
        repeated = {id(p) for p in (self._tied if self._is_last_of_many else self._tied[1:])}
        squares = [torch.zeros((), dtype=torch.float64, device=self._device)]
        grads: list[Tensor] = []
        for name, chunks in self._chunks.items():
            counts_here = find_replica_ranks(self.plan, name, self.rank)[0] == self.rank
            for parameter in trainable_parameters(list_all_layers({name: chunks})):
                if parameter.grad is None:
                    continue
                grads.append(_local(parameter.grad))
                is_sharded = isinstance(parameter, DTensor)
                if (is_sharded or counts_here) and id(parameter) not in repeated:
                    squares.append(grads[-1].double().square().sum())
        total = torch.stack(squares).sum()
        dist.all_reduce(total)
        norm = total.sqrt()
        scale = torch.clamp(max_norm / (norm + CLIP_EPS), max=1.0)
        for grad in grads:
            grad.mul_(scale)
        return norm

    # ------------------------------------------------------------------------ modules as chunks

    @property
    def _is_last_of_many(self) -> bool:
        return self.is_last and self.plan.ranks.llm.pp > 1

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
        """Broadcasts parameters and buffers of the first replica, as DDP does; shards have one owner.

        Then the first stage's end of a tied parameter goes to the last stage.
        """
        for name, chunks in self._chunks.items():
            group = self._groups.get(f"{name}.dp")
            if group is None:
                continue
            source = self._groups.members[f"{name}.dp"][0]
            for layer in (layer for chunk in chunks for layer in chunk.layers):
                for tensor in (*layer.parameters(), *layer.buffers()):
                    if not isinstance(tensor, DTensor):
                        dist.broadcast(tensor.detach(), source, group)
        group = self._groups.get("ends")
        if group is not None:
            check_tied_ends(self._tied, group)
            for parameter in self._tied:
                dist.broadcast(_local(parameter.detach()), self._groups.members["ends"][0], group)

    def _make_chunks(self) -> dict[str, tuple[SegmentedChunk, ...]]:
        device = self.plan.ranks.class_of(self.rank)
        chunks: dict[str, tuple[SegmentedChunk, ...]] = {}
        for name, blocks in self.encoders.items():
            first, end = find_block_range(self.plan.modules[name], self.plan.ranks.stage_of(name, device))
            field = f"encoders.{name}"
            layers = [[make_stage_segment(blocks[number], field, number)] for number in range(first, end)]
            chunks[name] = (SegmentedChunk(layers),)
        number, pp = self.plan.ranks.stage_of(LLM, device), self.plan.ranks.llm.pp
        segments: list[Segment] = [
            make_stage_segment(module, LLM, at * pp + number) for at, module in enumerate(self.stages)
        ]
        if self.is_last:
            last = make_module_segment(self.stages[-1])
            segments[-1] = LossSegment(last, len(self.stages) * pp - 1, self.loss_fn)
        stages = [[segment] for segment in segments]
        if self.is_first and self.plan.dealing_replicas > 1:
            trains = [needs_backward(self.plan, name) for name in self.plan.encoders]
            stages[0].insert(0, DealtRowsExchange(self._groups.deal_group(self.plan), trains))
        return {**chunks, LLM: tuple(SegmentedChunk([stage], opaque=True) for stage in stages)}

    def _begin(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[Executor, StepBatch]:
        """Splits a batch; before the first step ranks exchange the specs of messages."""
        missing = [name for name in self.encoders if name not in kwargs]
        if missing:
            raise UserError(
                field="step",
                problem=f"has inputs for {sorted(kwargs)}, and none for the encoders {missing}",
                hint="give one keyword argument per encoder, on every rank",
            )
        batch = StepBatch(self.plan, args, kwargs, self._shapes, **options)
        batch.profiles = self._profiles = self._profiles or self._profile(batch)
        batch.check_signatures()
        if self._executor is None:
            self._specs.batch = batch
            self._executor = Executor(
                self.plan,
                self._groups,
                self._chunks,
                self._specs,
                device=self._device,
                bucket_type=partial(make_param_bucket, self._sharded),
                tied=self._tied,
            )
        self._gather_frozen()
        return self._executor, batch

    def _profile(self, batch: StepBatch) -> ProfiledStages:
        """Runs one microbatch through all modules, for the number, dtypes and shapes of their outputs."""
        number = [batch.find_complete_microbatch()]
        dist.broadcast_object_list(number, 0)
        if number[0] is None:
            raise UserError(
                field="step",
                problem="has no microbatch with inputs for every encoder on the first replica",
                hint="begin with one that has, or pass `profiles` of profile_stages",
            )
        with unshard_all(self._sharded), torch.no_grad():
            return profile_stages(
                self.stages,
                self.encoders,
                batch.stage_inputs(LLM, number[0]),
                {
                    name: [batch.stage_inputs(name, each) for each in module.microbatches_of(number[0])]
                    for name, module in self.plan.encoders.items()
                },
                pp=self.plan.ranks.llm.pp,
            )

    @property
    def _device(self) -> torch.device:
        parameter = next((p for stage in self.stages for p in stage.parameters()), None)
        return torch.device("cpu") if parameter is None else parameter.device

    def _result(self, executor: Executor, losses: list[Tensor] | None, *, return_outputs: bool) -> Any:
        outputs = [output for _, output in sorted(executor.outputs.items())]
        executor.outputs.clear()
        if losses is not None:
            losses[:] = [loss for loss, *_ in outputs]
        if not outputs or not return_outputs:
            return None
        merged = tuple(_merge(tensors) for tensors in zip(*(kept for _, *kept in outputs), strict=True))
        return merged[0] if len(merged) == 1 else merged


def _check_backwards(plan: Plan, rank: int, chunks: Mapping[str, Sequence[SegmentedChunk]]) -> None:
    """Raises if the plan has no backward of a stage or block that trains: it would get no gradient."""
    device = plan.ranks.class_of(rank)
    for name, of_module in chunks.items():
        module, stage = plan.modules[name], plan.ranks.stage_of(name, device)
        for at, chunk in enumerate(of_module):
            templates = module.chunks[at * module.layout.pp + stage].templates
            named = [templates.get(kind) for kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD)]
            planned = {phase.layer for each in named if each for phase in plan.templates[each]}
            for number, layer in enumerate(chunk.layers):
                if number not in planned and trainable_parameters([layer]):
                    raise UserError(
                        field=f"plan.modules.{name}",
                        problem="was planned as frozen, and has parameters that train",
                        hint="plan again, or freeze them",
                    )


def _merge(tensors: Sequence[Tensor]) -> Tensor | list[Tensor]:
    """Concatenates outputs of microbatches, or lists them if their shapes differ."""
    mergeable = all(t.ndim > 0 and t.shape[1:] == tensors[0].shape[1:] for t in tensors)
    return torch.cat(list(tensors)) if mergeable else list(tensors)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
