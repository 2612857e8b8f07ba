"""Writes a checkpoint of our own layers as a model folder of transformers, in one process."""

from __future__ import annotations

from pathlib import Path

import torch

from optimus.engine.checkpoint import load_alone
from optimus.engine.checkpoint_state import describe_tensor
from optimus.engine.checkpoint_storage import read_metadata
from optimus.hf.own_layers import LayerTensor, save_layers
from optimus.job.hf_config import read_hf_config

WEIGHTS = "model."  # prefix of parameters in a checkpoint


def export_checkpoint(path: Path, folder: Path, into: Path) -> None:
    """Writes the weights of a verified checkpoint under the names, dtypes and files of a model folder.

    Parameters are made whole in memory first: four bytes for each that trains.
    """
    stored = read_metadata(path).state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if name.startswith(WEIGHTS)
    }
    load_alone(path, {name: describe_tensor(tensor) for name, tensor in tensors.items()})
    own = [LayerTensor(name=name.removeprefix(WEIGHTS), tensor=tensor) for name, tensor in tensors.items()]
    into.mkdir(parents=True, exist_ok=True)
    save_layers(read_hf_config(folder / "config.json"), own, folder, into)
