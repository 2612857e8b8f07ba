"""Trains one rank from the weights of a model folder, and saves them as a folder.

`python -m optimus.hf.train_folder FOLDER` is one rank of `optimus train --model`, as the launcher starts it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from optimus.engine import trainer
from optimus.engine.build_rank import RankModel
from optimus.engine.config import TrainingConfig, TrainingSummary
from optimus.engine.launcher import train_as_rank
from optimus.engine.rank_trainer import RankTrainer
from optimus.errors import UserError
from optimus.hf.checkpoint import Checkpoint
from optimus.hf.own_layers import list_layer_tensors, load_layers, save_layers
from optimus.ir.plan import Plan
from optimus.job.job import Job


def train_rank(
    job: Job, plan: Plan, plan_hash: str, config: TrainingConfig, on_step: trainer.OnStep | None = None
) -> TrainingSummary:
    """Trains one rank as `trainer.train_rank`, from `config.model_dir` to `config.save_dir`."""
    folder, into = config.model_dir, config.save_dir
    assert folder is not None

    def load(model: RankModel, rank: int) -> None:
        dtype = next(iter(model.parameters.values())).dtype
        _refuse_narrower(folder, dtype)
        load_layers(job.model, list_layer_tensors(model, plan, rank), folder, cast=True)

    def save(rank: RankTrainer) -> None:
        assert into is not None
        save_layers(job.model, list_layer_tensors(rank.model, plan, rank.groups.rank), folder, into)

    if into is not None and torch.cuda.is_available():
        raise UserError(
            field="--save",
            value=str(into),
            problem="has not been run with GPUs yet",
            hint="hide them (CUDA_VISIBLE_DEVICES=) or leave out --save",
        )
    return trainer.train_rank(
        job, plan, plan_hash, config, on_step, load=load, save=None if into is None else save
    )


def _refuse_narrower(folder: Path, dtype: torch.dtype) -> None:
    """Raises if training would round the weights of a folder."""
    checkpoint = Checkpoint(folder)
    for tensor in checkpoint.weight_map:
        stored = checkpoint.file_of(tensor).tensors[tensor].dtype
        if stored.is_floating_point and torch.promote_types(stored, dtype) != dtype:
            name = str(stored).removeprefix("torch.")
            raise UserError(
                field="run.dtype",
                value=str(dtype).removeprefix("torch."),
                problem=f"is narrower than {tensor} of {folder}, which is {name}",
                hint=f"use dtype: {name}",
            )


if __name__ == "__main__":
    sys.exit(train_as_rank(Path(sys.argv[1]), train_rank))
