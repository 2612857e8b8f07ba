"""Runs a filled pipeline inside the trainer of torchtitan 0.3.0.

torchtitan's trainer, configuration, optimizers, checkpoints and metrics stay as they are. A model names the
function that this module makes as the `pipelining_fn` of its `ModelSpec`:

    ModelSpec(..., pipelining_fn=fill_pipeline({"images": Encoder(blocks="vision", inputs=["pixel_values"])}))

Stages of the LLM are cut and sharded by torchtitan. Blocks of an encoder are distributed over all ranks and
sharded with FSDP2 over their own replicas, which are not those of the LLM: so torchtitan's `clip_grad_norm_`,
which knows one mesh and counts an encoder once per stage, is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import pipeline_parallel as pp
from torchtitan.distributed import utils as dist_utils

from optimus.engine.fill_schedule import FillSchedule
from optimus.engine.fsdp_ddp import disable_fsdp_hooks, unshard_all
from optimus.engine.process_groups import find_replica_ranks, replica_mesh
from optimus.engine.stage_profile import ProfiledStages, StageInputs, profile_stages
from optimus.engine.step_batch import OutputShapes, find_block_range
from optimus.errors import UserError, one_of
from optimus.ir.plan import EncoderBlocks, Plan, Seconds
from optimus.ir.planfile import load_plan, save_plan
from optimus.ir.ranks import LLM
from optimus.planner.user_modules import plan_modules

RELEASE = "0.3.0"
ORDERS = {"1F1B": "1f1b", "Interleaved1F1B": "interleaved"}  # torchtitan's names, and ours
PROFILE_REPEATS = 3

if version("torchtitan") != RELEASE:
    raise UserError(
        field="torchtitan",
        value=version("torchtitan"),
        problem=f"is installed, and this adapter is for {RELEASE}: torchtitan's interfaces move",
        hint=f"pip install torchtitan=={RELEASE}",
    )


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """An encoder of a torchtitan model: its blocks, its inputs, and how many pipeline stages it has.

    `blocks` names a `ModuleDict` of the model. `inputs` are keys of the data loader's dictionary, with which
    the first block is called; a microbatch in which all of them are None has no inputs. `shapes` is needed
    if microbatches differ in shape: see `FillSchedule`.
    """

    blocks: str
    inputs: Sequence[str]
    pp: int = 1
    shapes: OutputShapes | None = None


def fill_pipeline(
    encoders: Mapping[str, Encoder], *, plan: str | Path | None = None, timeout_s: float = 600.0
) -> Callable[..., Any]:
    """Returns a `pipelining_fn` that runs encoders in the bubbles of the LLM's pipeline.

    Stages and blocks are profiled at the first step, on its real data, and planned. With `plan`, a plan that
    the file holds is used instead; if there is no such file, the new plan is written to it.
    """
    return partial(_fill_pipeline, encoders=encoders, plan_file=plan, timeout_s=timeout_s)


class FilledPipeline:
    """A pipeline schedule as torchtitan's trainer and validator call it.

    It is made before weights exist, so the plan and the `FillSchedule` are made at the first call.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        encoders: Mapping[str, Encoder],
        blocks: Mapping[str, Sequence[nn.Module]],
        layout: Plan,
        *,
        loss_fn: Callable[..., Any],
        microbatch_shape: tuple[int, int],
        plan_file: str | Path | None,
        timeout_s: float,
    ) -> None:
        self.stages, self.encoders, self.blocks, self.layout = stages, encoders, blocks, layout
        self.loss_fn, self.microbatch_shape = loss_fn, microbatch_shape
        self._plan_file = None if plan_file is None else Path(plan_file)
        self._timeout_s = timeout_s
        self.schedule: FillSchedule | None = None

    def step(
        self,
        *,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]],
        target_mbs: list[Tensor] | None = None,
        losses: list[Tensor] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        return_outputs: bool = False,
    ) -> None:
        """Runs forward and backward of a step; torchtitan's loss is a sum already divided by all labels."""
        args, kwargs = self._split(arg_mbs, kwarg_mbs)
        options: dict[str, Any] = {
            "target": target_mbs,
            "losses": losses,
            "loss_kwargs": loss_kwargs,
            **kwargs,
        }
        self._ready(args, kwargs).step(*args, num_items=1, return_outputs=False, **options)

    def eval(
        self,
        *,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]],
        target_mbs: list[Tensor] | None = None,
        losses: list[Tensor] | None = None,
    ) -> None:
        """Runs forward of a step."""
        args, kwargs = self._split(arg_mbs, kwarg_mbs)
        options: dict[str, Any] = {"target": target_mbs, "losses": losses, **kwargs}
        self._ready(args, kwargs).eval(*args, return_outputs=False, **options)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, **options: Any) -> Tensor:
        """Stands in for torchtitan's: one norm over all meshes, in which every parameter counts once."""
        assert self.schedule is not None, "gradients are clipped after a step"
        return self.schedule.clip_grad_norm_(max_norm)

    def _loss(self, output: Tensor, target: Tensor, **loss_kwargs: Any) -> Tensor:
        loss: Tensor = self.loss_fn(output, target, **loss_kwargs)[0]
        return loss

    def _split(
        self, arg_mbs: Sequence[tuple[Any, ...]] | None, kwarg_mbs: Sequence[Mapping[str, Any]]
    ) -> tuple[list[list[Any]], dict[str, list[Any]]]:
        """Returns positional and keyword arguments of `FillSchedule.step`, each a list over microbatches.

        torchtitan gives tokens to ranks with the first stage only; others need to know their shape.
        """
        if arg_mbs is None:
            arg_mbs = [(torch.empty(self.microbatch_shape, dtype=torch.int64, device="meta"),)] * len(
                kwarg_mbs
            )
        args = [list(values) for values in zip(*arg_mbs, strict=True)]
        inputs = {name for encoder in self.encoders.values() for name in encoder.inputs}
        names = dict.fromkeys(name for kwargs in kwarg_mbs for name in kwargs if name not in inputs)
        kwargs = {name: [kwargs.get(name) for kwargs in kwarg_mbs] for name in names}
        for name, encoder in self.encoders.items():
            values = [tuple(kwargs.get(each) for each in encoder.inputs) for kwargs in kwarg_mbs]
            kwargs[name] = [None if all(each is None for each in value) else value for value in values]
        return args, kwargs

    def _ready(self, args: list[list[Any]], kwargs: Mapping[str, list[Any]]) -> FillSchedule:
        """Returns the schedule; plans it first if there is none."""
        if self.schedule is None:
            plan, profiles = self._read_plan(), None
            if plan is None:
                profiles = self._profile(args, kwargs)
                plan = plan_modules(
                    stages=profiles.stage_seconds,
                    encoders={
                        name: EncoderBlocks(blocks=profiles.block_seconds(name), pp=encoder.pp)
                        for name, encoder in self.encoders.items()
                    },
                    microbatches=self.layout.microbatches,
                    ranks=self.layout.ranks.world,
                    pp=self.layout.ranks.llm.pp,
                    order=self.layout.order,
                )
                if self._plan_file is not None and dist.get_rank() == 0:
                    save_plan(plan, self._plan_file)
            shapes = {name: each.shapes for name, each in self.encoders.items() if each.shapes is not None}
            self.schedule = FillSchedule(
                self.stages,
                self.blocks,
                plan,
                loss_fn=self._loss,
                shapes=shapes,
                profiles=profiles,
                timeout_s=self._timeout_s,
            )
        return self.schedule

    def _read_plan(self) -> Plan | None:
        """Returns the plan of the user's file, which rank 0 reads; None if there is none."""
        path = self._plan_file
        message = [load_plan(path) if path is not None and dist.get_rank() == 0 and path.exists() else None]
        dist.broadcast_object_list(message, 0)
        return message[0]

    def _profile(self, args: list[list[Any]], kwargs: Mapping[str, list[Any]]) -> ProfiledStages:
        """Measures all stages and blocks on the first microbatch with inputs for every encoder."""
        complete = zip(*(kwargs[name] for name in self.encoders), strict=True)
        number = [next((at for at, each in enumerate(complete) if all(v is not None for v in each)), None)]
        dist.broadcast_object_list(number, 0)
        at = number[0]
        if at is None:
            raise UserError(
                field="data",
                problem="has no microbatch with inputs for every encoder in the first step",
                hint="begin with one that has, or give fill_pipeline a plan",
            )
        return self._profile_microbatch(
            [values[at] for values in args], {n: v[at] for n, v in kwargs.items()}
        )

    def _profile_microbatch(self, args: list[Any], kwargs: dict[str, Any]) -> ProfiledStages:
        """Gathers what FSDP2 shards, since ranks run one after another, and shards it again."""
        rank = dist.get_rank()
        modules = {**self.blocks, LLM: self.stages}
        for name, of_module in modules.items():
            for module in of_module:
                disable_fsdp_hooks(module, name, find_replica_ranks(self.layout, name, rank))
        inputs = {name: [kwargs.pop(name)] for name in self.encoders}
        # A validator may come first: it disables gradients.
        with unshard_all(chain.from_iterable(modules.values())), torch.enable_grad():
            return profile_stages(
                self.stages,
                self.blocks,
                StageInputs(args=tuple(args), kwargs=kwargs),
                inputs,
                pp=self.layout.ranks.llm.pp,
                repeats=PROFILE_REPEATS,
            )


def _fill_pipeline(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    device: torch.device,
    model_config: Any,
    parallelize_fn: Callable[..., nn.Module],
    loss_fn: Callable[..., Any],
    encoders: Mapping[str, Encoder],
    plan_file: str | Path | None,
    timeout_s: float,
    **options: Any,
) -> tuple[FilledPipeline, list[nn.Module], bool, bool]:
    """Has the arguments and results of torchtitan's `pipeline_llm`."""
    compiled = options["compile_config"]
    _reject_unsupported(model, parallel_dims, training, parallelism, compiled, loss_fn, encoders)
    virtual, *counts = pp._get_pipeline_metadata(parallel_dims, parallelism, model_config)
    names = parallelism.module_fqns_per_model_part
    names = names or pp._generate_llm_fqn_per_model_part(virtual, *counts)
    _reject_unassigned(model, names, encoders)
    second = Seconds(forward_s=1.0, backward_s=1.0)  # layouts do not depend on seconds
    blocks_of = {name: _find_blocks(model, name, encoder) for name, encoder in encoders.items()}
    layout = plan_modules(
        stages=[second] * len(names),
        encoders={
            name: EncoderBlocks(blocks=[second] * len(blocks_of[name]), pp=encoder.pp)
            for name, encoder in encoders.items()
        },
        microbatches=training.local_batch_size // parallelism.pipeline_parallel_microbatch_size,
        ranks=dist.get_world_size(),
        pp=parallel_dims.pp,
        order=ORDERS[parallelism.pipeline_parallel_schedule],
    )
    here = parallel_dims.get_mesh("pp").get_local_rank()
    stages = [pp._split_module(model, part) for part in names[here :: parallel_dims.pp]]
    options |= {"parallel_dims": parallel_dims, "training": training, "parallelism": parallelism}
    stages = [_parallelize(stage, parallelize_fn, **options) for stage in stages]
    parts, blocks = [], {}
    for name, encoder in encoders.items():
        part, blocks[name] = _split_encoder(model, name, encoder, layout, training)
        parts.append(part)
    pipeline = FilledPipeline(
        stages,
        encoders,
        blocks,
        layout,
        loss_fn=loss_fn,
        microbatch_shape=(parallelism.pipeline_parallel_microbatch_size, training.seq_len),
        plan_file=plan_file,
        timeout_s=timeout_s,
    )
    dist_utils.clip_grad_norm_ = pipeline.clip_grad_norm_
    return pipeline, [*parts, *stages], here == 0, here == parallel_dims.pp - 1


def _parallelize(stage: nn.Module, parallelize_fn: Callable[..., nn.Module], **options: Any) -> nn.Module:
    """Shards a stage if it has several replicas, and makes it recompute activations if torchtitan would."""
    if options["parallel_dims"].dp_shard > 1:
        return parallelize_fn(stage, **options)
    if options["ac_config"] is not None:
        options["ac_config"].build(dump_folder=options["dump_folder"]).apply(stage)
    return stage


def _split_encoder(
    model: nn.Module, name: str, encoder: Encoder, layout: Plan, training: Any
) -> tuple[nn.Module, list[nn.Module]]:
    """Returns the model with this rank's blocks of an encoder alone, and all blocks: others stay on meta."""
    stage = layout.ranks.stage_of(name, layout.ranks.class_of(dist.get_rank()))
    first, end = find_block_range(layout.modules[name], stage)
    whole = _find_blocks(model, name, encoder)
    keys = list(whole)[first:end]
    part = pp._split_module(model, [f"{encoder.blocks}.{key}" for key in keys])
    own = getattr(part, encoder.blocks)
    mesh = replica_mesh(layout, name)
    if mesh.size() > 1:
        dtypes = (training.mixed_precision_param, training.mixed_precision_reduce)
        policy = MixedPrecisionPolicy(*(TORCH_DTYPE_MAP[dtype] for dtype in dtypes))
        for block in own.values():
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return part, [own[key] if key in keys else block for key, block in whole.items()]


def _find_blocks(model: nn.Module, name: str, encoder: Encoder) -> nn.ModuleDict:
    blocks = getattr(model, encoder.blocks, None)
    if not isinstance(blocks, nn.ModuleDict):
        raise UserError(
            field=f"encoders.{name}.blocks",
            value=encoder.blocks,
            problem=f"is {type(blocks).__name__} in the model, so checkpoints could not name blocks by key",
            hint="name a ModuleDict that is an attribute of the model",
        )
    return blocks


def _reject_unassigned(
    model: nn.Module, names: Sequence[Sequence[str]], encoders: Mapping[str, Encoder]
) -> None:
    """Raises for parameters that no stage and no encoder would hold: torchtitan drops their modules."""
    assigned = {
        *(name for part in names for name in part),
        *(encoder.blocks for encoder in encoders.values()),
    }
    prefixes = tuple(f"{name}." for name in assigned)
    unassigned = [name for name, _ in model.named_parameters() if not name.startswith(prefixes)]
    if unassigned:
        raise UserError(
            field="model",
            problem=f"has parameters in no stage of the LLM and no encoder, {unassigned[0]} first",
            hint="move them into a block, or name them in parallelism.module_fqns_per_model_part",
        )


def _reject_unsupported(
    model: nn.Module,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    loss_fn: Any,
    encoders: Mapping[str, Encoder],
) -> None:
    """Raises for what no test compares with one process."""
    if parallelism.pipeline_parallel_schedule not in ORDERS or parallelism.pipeline_parallel_schedule_csv:
        raise UserError(
            field="parallelism.pipeline_parallel_schedule",
            value=parallelism.pipeline_parallel_schedule_csv or parallelism.pipeline_parallel_schedule,
            problem="cannot be filled from torchtitan",
            hint=f"use {one_of(ORDERS)}",
        )
    is_mixed = training.mixed_precision_param != training.dtype
    unsupported = {
        "parallelism.spmd_backend": parallelism.spmd_backend != "partial_dtensor",
        "parallelism.tensor_parallel_degree": parallel_dims.tp > 1,
        "parallelism.context_parallel_degree": parallel_dims.cp > 1,
        "parallelism.expert_parallel_degree": parallel_dims.ep > 1,
        "parallelism.data_parallel_replicate_degree": parallel_dims.dp_replicate > 1,
        "parallelism.fsdp_reshard_after_forward": parallelism.fsdp_reshard_after_forward == "always",
        "parallelism.enable_fsdp_symm_mem": parallelism.enable_fsdp_symm_mem,
        # FSDP2 casts parameters, and a module with one replica is not sharded.
        "training.mixed_precision_param": is_mixed and parallel_dims.dp_shard == 1,
        "training.enable_cpu_offload": training.enable_cpu_offload,
        "compile.enable": compile_config.enable,
        "loss: ChunkedLossWrapper": isinstance(loss_fn, ChunkedLossWrapper),
        "model: mixture of experts": any(getattr(each, "moe_enabled", False) for each in model.modules()),
        "encoders: none": not encoders,
    }
    for field, is_unsupported in unsupported.items():
        if is_unsupported:
            raise UserError(
                field=field,
                problem="is set to what a filled pipeline in torchtitan does not support",
                hint="see the limits in docs/torchtitan.md",
            )
