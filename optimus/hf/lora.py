"""Adds LoRA adapters (peft) to parts of a split model, and saves them as peft does."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import save_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from optimus.errors import UserError, one_of

ADAPTER = "default"
SUPPORTED = ("r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora")
SUPPORTED_VALUES = [  # of other fields
    *(("task_type", kind) for kind in TaskType),
    ("init_lora_weights", "gaussian"),
    ("inference_mode", True),
]
FILE, PREFIX = "adapter_model.safetensors", "base_model.model."  # as peft writes them


def add_lora(model: Any, parts: Sequence[nn.Module], config: LoraConfig) -> None:
    """Freezes a split model and adds adapters to its loaded parts; a part without a target gets none."""
    for name, default in vars(LoraConfig()).items():
        value = getattr(config, name)
        if name not in SUPPORTED and value != default and (name, value) not in SUPPORTED_VALUES:
            raise UserError(
                field=f"LoraConfig.{name}",
                value=value,
                problem="is compared equal by no test",
                hint=f"leave it out; use {one_of(SUPPORTED)}",
            )
    targets = [name for name, _ in model.named_modules() if check_target_module_exists(config, name)]
    if not targets or any(name.endswith(("embed_tokens", "lm_head")) for name in targets):
        raise UserError(
            field="target_modules",
            value=config.target_modules,
            problem="matches the embedding or the head" if targets else "matches no module",
            hint="use names of linear layers",
        )
    if any(isinstance(parameter, DTensor) for part in parts for parameter in part.parameters()):
        raise UserError(
            field="shard",
            problem="has sharded the parts, and adapters are not sharded with them",
            hint="leave out shard=True: adapters are small, and what is frozen has no gradients",
        )
    for part in parts:
        part.requires_grad_(False)
        dtype = next((p.dtype for p in part.parameters()), torch.float32)
        if any(check_target_module_exists(config, name) for name, _ in part.hf.named_modules()):
            part.hf.__dict__["get_input_embeddings"] = (
                nn.Module
            )  # that peft looks for ends of a tied parameter in
            inject_adapter_in_model(copy.deepcopy(config), part.hf, adapter_name=ADAPTER)
        for name, parameter in part.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.to(dtype)


def adapter_tensors(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Returns the adapters of parts by the names that peft stores; sharded ones are gathered."""
    tensors: dict[str, Tensor] = {}
    for part in parts:
        state = {name: value for name, value in part.hf.state_dict().items() if ".lora_" in name}
        if state:
            state = get_peft_model_state_dict(part.hf, state_dict=state, adapter_name=ADAPTER)
        for name, value in state.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            tensors[PREFIX + name] = whole.cpu().contiguous()
    return tensors


def save_lora(parts: Sequence[nn.Module], config: LoraConfig, into: str | Path) -> None:
    """Writes the adapters of parts as a folder of peft's; all ranks call this together, rank 0 writes."""
    tensors, rank = adapter_tensors(parts), 0
    if dist.is_initialized():
        rank = dist.get_rank()
        gathered: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(tensors, gathered)
        for other in gathered or ():
            tensors = {**other, **tensors}
    if rank == 0:
        folder = Path(into)
        folder.mkdir(parents=True, exist_ok=True)
        config = copy.deepcopy(config)
        config.inference_mode = True
        config.save_pretrained(folder)
        save_file(dict(sorted(tensors.items())), folder / FILE, metadata={"format": "pt"})
