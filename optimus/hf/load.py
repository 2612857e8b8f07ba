"""Builds a model of transformers on `meta` from a folder, without weights, downloads or remote code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForMultimodalLM

from optimus.errors import UserError
from optimus.hf.checkpoint import Checkpoint
from optimus.hf.families import find_family

ATTENTION = ("eager", "sdpa")  # compared equal by tests


def load_model(
    folder: str | Path, *, dtype: torch.dtype | None = None, attn_implementation: str = "sdpa"
) -> Any:
    """Returns the model of a folder on `meta`, in the dtype of its weights unless another is given."""
    folder = Path(folder)
    if attn_implementation not in ATTENTION:
        raise UserError(
            field="attn_implementation",
            value=attn_implementation,
            problem="is compared equal by no test",
            hint=f"use {' or '.join(ATTENTION)}",
        )
    checkpoint = Checkpoint(folder)  # refuses folders without safetensors
    if not (folder / "config.json").exists():
        raise UserError(
            field="config.json", problem="is missing", hint="give a model folder", file=str(folder)
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # of the class that the file names, or of code that it asks for
        problem = f"cannot be read: {(str(error).splitlines() or [type(error).__name__])[0]}"
        hint = "give a model of transformers itself; code in the folder is never run"
        raise UserError(field="config.json", problem=problem, hint=hint, file=str(folder)) from None
    find_family(config)
    dtype = dtype or config.dtype or _first_dtype(checkpoint)
    with torch.device("meta"):
        return AutoModelForMultimodalLM.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=False
        )


def _first_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Returns the dtype of the first floating tensor, as transformers does for configurations without one."""
    tensors = checkpoint.file(next(iter(checkpoint.weight_map.values()))).tensors
    return next(entry.dtype for entry in tensors.values() if entry.dtype.is_floating_point)
