"""Checks the folders and opens the data set of a training run, before anything is planned."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from optimus.cli.flags import import_extra
from optimus.errors import UserError

if TYPE_CHECKING:
    from optimus.data.index_lengths import Progress
    from optimus.data.sample_index import IndexedData
    from optimus.engine.config import TrainingConfig
    from optimus.job.data_source import DataSource
    from optimus.job.job import Job


def add_folders(
    training: TrainingConfig, job: Job, model: str | Path | None, save: str | Path | None
) -> TrainingConfig:
    """Adds data and folders to a configuration, and checks them before anything is planned."""
    training = replace(training, data=None if job.data is None else job.data.absolute())
    if model is None and job.model_dir is not None and any(job.model_dir.glob("*.safetensors")):
        model = job.model_dir
    if model is None:
        if save is not None:
            hint = "add --model FOLDER: its names, dtypes and files are written"
            raise UserError(field="--save", value=str(save), problem="needs --model", hint=hint)
        return training
    from optimus.job.own_layers import refuse_other_model

    if find_spec("transformers") is None:
        raise UserError(
            field="transformers", problem="is not installed", hint="pip install 'optimus-mllm[hf]'"
        )
    folder, into = Path(model).absolute(), None if save is None else Path(save).absolute()
    refuse_other_model(job.model, folder)
    if into is not None:
        if into.resolve() == folder.resolve():
            problem = "is the folder of the weights that are trained"
            raise UserError(field="--save", value=str(save), problem=problem, hint="name another folder")
        make_folder("--save", into)
    return replace(training, model_dir=folder, save_dir=into)


def open_data(source: DataSource, *, progress: Progress | None) -> IndexedData:
    """Opens the data set of a job; with `progress`, its index is built if it is missing."""
    data: IndexedData = import_extra("optimus.data.sample_index", "data").open_data(source, progress=progress)
    return data


def describe_data(job: Job, source: DataSource) -> str:
    """Says how many samples and sequences a data set has."""
    index = open_data(source, progress=None).index
    epoch = len(index.sequences) / job.workload.sequences_per_step
    skipped = f", {index.skipped.total():,} skipped" if index.skipped else ""
    assert job.data is not None
    return (
        f"{job.data.path}: {len(index):,} samples{skipped}, in {len(index.sequences):,} sequences of "
        f"{source.sequence_tokens:,}; an epoch is {epoch:,.1f} steps"
    )


def make_folder(field: str, folder: Path) -> Path:
    """Creates the folder if it is missing and checks that files can be written to it."""
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UserError(
            field=field,
            value=str(folder),
            problem=f"cannot be written: {error.strerror}",
            hint="name a folder that is yours, in one that exists",
        ) from None
