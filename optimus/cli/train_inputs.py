"""Checks the folders and opens the data set of a training run, before anything is planned."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimus.cli.data import build_skipped_json, format_skipped
from optimus.cli.flags import import_extra
from optimus.cli.text import wrap_text
from optimus.errors import UserError

if TYPE_CHECKING:
    from optimus.data.index_lengths import Progress
    from optimus.data.sample_index import IndexedData, SampleIndex
    from optimus.engine.config import TrainingConfig
    from optimus.job.data_source import DataSource
    from optimus.job.job import Job


def add_folders(
    training: TrainingConfig, job: Job, model: str | Path | None, save: str | Path | None
) -> TrainingConfig:
    """Adds data and folders to a configuration, and checks them before anything is planned."""
    from optimus.cost.flops import step_flops

    training = replace(
        training,
        data=None if job.data is None else job.data.absolute(),
        step_flops=step_flops(job.model, job.workload),
    )
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


def refuse_other_lengths(job: Job, index: SampleIndex) -> None:
    """Raises unless a job's workload has the lengths of its data; they may have changed since it was read."""
    lengths, sequences = index.packed_lengths(), job.workload.sequences
    same = len(lengths) == len(sequences) and all(
        (ours.text, *map(ours.lengths, lengths.items)) == (theirs.text, *theirs.items.values())
        for ours, theirs in zip(sequences, map(lengths.__getitem__, range(len(lengths))), strict=True)
    )
    if not same:
        assert job.data is not None
        raise UserError(
            field="workload.lengths",
            value=str(job.data.lengths),
            problem="has other lengths than the data, so that a plan for it would be one for other data",
            hint=f"run {job.data.command}, then read the job again",
        )


def format_data(job: Job, index: SampleIndex) -> list[str]:
    """Says how many samples and sequences the data of a job have, and what was skipped."""
    assert job.data is not None
    epoch = len(index.sequences) / job.workload.sequences_per_step
    words = (
        f"{job.data.path}: {len(index):,} samples, in {len(index.sequences):,} sequences of "
        f"{job.data.sequence_tokens:,}; an epoch is {epoch:,.1f} steps"
    )
    return [*wrap_text("data", words), *format_skipped(build_skipped_json(index))]


def build_data_json(index: SampleIndex) -> dict[str, Any]:
    """Returns the same for `--json`."""
    skipped = build_skipped_json(index)
    return {"samples": len(index), "sequences": len(index.sequences), "skipped": skipped}


def make_folder(field: str, folder: Path) -> Path:
    """Creates the folder if it is missing and checks that files can be written to it."""
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError) as error:
        raise UserError(
            field=field,
            value=str(folder),
            problem=f"cannot be written: {getattr(error, 'strerror', error)}",
            hint="name a folder that is yours, in one that exists",
        ) from None
