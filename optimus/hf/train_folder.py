"""Trains one rank from the weights of a model folder, on files, and saves the weights as a folder.

`python -m optimus.hf.train_folder FOLDER` is one rank of `optimus train --model` or of a job with `data:`, as
the launcher starts it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from optimus.data.sample_index import open_data
from optimus.engine import trainer
from optimus.engine.build_rank import RankModel
from optimus.engine.config import TrainingConfig, TrainingSummary
from optimus.engine.launcher import train_as_rank
from optimus.engine.packed_data import PackedDataset
from optimus.engine.prefetched_data import PrefetchedDataset
from optimus.engine.rank_trainer import RankTrainer
from optimus.errors import UserError
from optimus.hf.chat_dataset import ChatDataset
from optimus.hf.checkpoint import Checkpoint
from optimus.hf.own_layers import list_layer_tensors, load_layers, save_layers
from optimus.ir.plan import Plan
from optimus.job.data_source import DataSource
from optimus.job.job import Job


def train_rank(
    job: Job, plan: Plan, plan_hash: str, config: TrainingConfig, on_step: trainer.OnStep | None = None
) -> TrainingSummary:
    """Trains one rank as `trainer.train_rank`, from `config.model_dir` to `config.save_dir`."""
    folder, into = config.model_dir, config.save_dir

    def load(model: RankModel, rank: int) -> None:
        assert folder is not None
        dtype = next(iter(model.parameters.values())).dtype
        _refuse_narrower(folder, dtype)
        load_layers(job.model, list_layer_tensors(model, plan, rank), folder, cast=True)

    def save(rank: RankTrainer) -> None:
        assert folder is not None and into is not None
        save_layers(job.model, list_layer_tensors(rank.model, plan, rank.groups.rank), folder, into)

    if into is not None and torch.cuda.is_available():
        raise UserError(
            field="--save",
            value=str(into),
            problem="has not been run with GPUs yet",
            hint="hide them (CUDA_VISIBLE_DEVICES=) or leave out --save",
        )
    return trainer.train_rank(
        job,
        plan,
        plan_hash,
        config,
        on_step,
        load=None if folder is None else load,
        save=None if into is None else save,
        dataset=None if config.data is None else open_dataset(job, config.data, config),
    )


def open_dataset(job: Job, source: DataSource, config: TrainingConfig) -> PrefetchedDataset:
    """Opens a packed data set, and waits until a worker has loaded a first sequence.

    Workers take seconds to import transformers: later, other ranks would wait for this one.
    """
    data = open_data(source)
    chat = ChatDataset.open(data.file, data.index, folder=data.folder, model_dir=source.model_dir)
    held_out, sequences = config.eval_batches * job.workload.sequences_per_step, data.index.sequences
    if held_out >= len(sequences):
        raise UserError(
            field="run.eval.batches",
            value=config.eval_batches,
            problem=f"hold out {held_out} of {len(sequences)} sequences, and none is left to train on",
            hint="use fewer batches, or more data",
        )
    packed = PackedDataset(
        dataset=chat,
        sequences=sequences,
        length=source.sequence_tokens,
        seed=config.seed_of_data,
        held_out=held_out,
    )
    dataset = PrefetchedDataset(packed, workers=source.workers, preload=[ChatDataset.__module__])
    dataset.start([(config.first_step * job.workload.sequences_per_step, frozenset())])
    dataset.wait()
    return dataset


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
