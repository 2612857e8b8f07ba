"""Prints, as JSON, the interfaces of torchtitan that the adapter uses, and what the adapter refuses."""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torchtitan_vlm.train_on_cpu  # noqa: F401  before torchtitan
from torch import nn
from torchtitan.components import loss, validate
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, activation_checkpoint, pipeline_parallel, utils
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from optimus.errors import UserError
from optimus.integrations import torchtitan


def parameters(function: Any) -> str:
    return ", ".join(inspect.signature(function).parameters)


def call(function: Any, name: str) -> str:
    """The keywords with which a function calls `name`, a dotted end of what is called."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [node for node in calls if ast.unparse(node.func).endswith(name)]
    return "; ".join(", ".join(str(keyword.arg) for keyword in node.keywords) for node in found)


def config_fields(config: Any, names: str) -> str:
    return ", ".join(name for name in names.split() if name in {field.name for field in fields(config)})


def contract() -> dict[str, str]:
    pp = pipeline_parallel
    dims = {*dir(ParallelDims), *ParallelDims.__dataclass_fields__}
    training = (
        "dtype mixed_precision_param mixed_precision_reduce enable_cpu_offload local_batch_size seq_len"
    )
    parallelism = (
        "spmd_backend pipeline_parallel_schedule pipeline_parallel_schedule_csv module_fqns_per_model_part "
        "pipeline_parallel_microbatch_size fsdp_reshard_after_forward enable_fsdp_symm_mem"
    )
    return {
        "pipeline_parallel._get_pipeline_metadata": parameters(pp._get_pipeline_metadata),
        "pipeline_parallel._generate_llm_fqn_per_model_part": parameters(pp._generate_llm_fqn_per_model_part),
        "pipeline_parallel._split_module": parameters(pp._split_module),
        "pipeline_parallel.pipeline_llm": parameters(pp.pipeline_llm),
        "stages of rank 1 of 2, interleaved": str(
            pp._get_pp_rank_to_stage_indices_mapping(1, 2, "Interleaved1F1B", 4)
        ),
        "utils.clip_grad_norm_": parameters(utils.clip_grad_norm_),
        "Trainer.train_step: clip_grad_norm_": call(Trainer.train_step, "dist_utils.clip_grad_norm_"),
        "Trainer.pp_forward_backward_step: step": call(
            Trainer.pp_forward_backward_step, "self.pp_schedule.step"
        ),
        "Trainer.__init__: pipelining_fn": call(Trainer.__init__, "model_spec.pipelining_fn"),
        "Trainer._forward_backward_body: loss_fn": call(Trainer._forward_backward_body, "self.loss_fn"),
        "Validator.validate: eval": call(validate.Validator.validate, "self.pp_schedule.eval"),
        "ModelSpec": ", ".join(field.name for field in fields(ModelSpec)),
        "BaseLoss.__call__": parameters(loss.BaseLoss.__call__),
        "ChunkedLossWrapper": loss.ChunkedLossWrapper.__base__.__name__,
        "ActivationCheckpointing.apply": parameters(activation_checkpoint.ActivationCheckpointing.apply),
        "TrainingConfig": config_fields(TrainingConfig, training),
        "ParallelismConfig": config_fields(ParallelismConfig, parallelism),
        "CompileConfig": config_fields(CompileConfig, "enable"),
        "ParallelDims": ", ".join(
            each for each in ["pp", "dp_shard", "dp_replicate", "tp", "cp", "ep", "get_mesh"] if each in dims
        ),
        "TORCH_DTYPE_MAP": ", ".join(TORCH_DTYPE_MAP),
    }


class ExpertLayer(nn.Module):  # type: ignore[misc]
    """A layer that says of itself what torchtitan's mixtures of experts do."""

    moe_enabled = True


def refusals() -> dict[str, str]:
    """The field of the error for each setting that is changed alone; "" where there is none."""
    base: dict[str, dict[str, Any]] = {
        "parallel_dims": {"tp": 1, "cp": 1, "ep": 1, "dp_replicate": 1, "dp_shard": 1},
        "training": {"mixed_precision_param": "float32", "dtype": "float32", "enable_cpu_offload": False},
        "parallelism": {
            "spmd_backend": "partial_dtensor",
            "pipeline_parallel_schedule": "1F1B",
            "pipeline_parallel_schedule_csv": "",
            "fsdp_reshard_after_forward": "default",
            "enable_fsdp_symm_mem": False,
        },
        "compile_config": {"enable": False},
    }
    chunked = loss.ChunkedLossWrapper.__new__(loss.ChunkedLossWrapper)
    changes: dict[str, tuple[str, Any]] = {
        "": ("parallelism.pipeline_parallel_schedule", "Interleaved1F1B"),
        "ZBVZeroBubble": ("parallelism.pipeline_parallel_schedule", "ZBVZeroBubble"),
        "csv": ("parallelism.pipeline_parallel_schedule_csv", "a.csv"),
        "spmd_types": ("parallelism.spmd_backend", "spmd_types"),
        "tp": ("parallel_dims.tp", 2),
        "cp": ("parallel_dims.cp", 2),
        "ep": ("parallel_dims.ep", 2),
        "replicate": ("parallel_dims.dp_replicate", 2),
        "reshard": ("parallelism.fsdp_reshard_after_forward", "always"),
        "symmetric memory": ("parallelism.enable_fsdp_symm_mem", True),
        "bfloat16": ("training.mixed_precision_param", "bfloat16"),
        "offload": ("training.enable_cpu_offload", True),
        "compile": ("compile_config.enable", True),
        "chunked loss": ("loss_fn", chunked),
        "experts": ("model", nn.Sequential(ExpertLayer())),
        "no encoders": ("encoders", {}),
    }
    messages = {}
    for name, (path, value) in changes.items():
        section, _, field = path.partition(".")
        arguments: dict[str, Any] = {key: SimpleNamespace(**values) for key, values in base.items()}
        arguments |= {"model": nn.Linear(1, 1), "loss_fn": print, "encoders": {"images": None}}
        if field:
            setattr(arguments[section], field, value)
        else:
            arguments[section] = value
        try:
            torchtitan._reject_unsupported(**arguments)
            messages[name] = ""
        except UserError as error:
            messages[name] = error.field
    model = nn.Module()
    model.blocks, model.projector = nn.ModuleList([nn.Linear(1, 1)]), nn.Linear(1, 1)
    encoder = torchtitan.Encoder(blocks="blocks", inputs=["pixels"])
    try:
        torchtitan._find_blocks(model, "images", encoder)
    except UserError as error:
        messages["module list"] = error.field
    torchtitan._reject_unassigned(model, [["projector"]], {"images": encoder})
    try:
        torchtitan._reject_unassigned(model, [["proj"]], {"images": encoder})
    except UserError as error:
        messages["projector in no stage"] = error.problem
    return messages


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"contract": contract(), "refusals": refusals()}))
