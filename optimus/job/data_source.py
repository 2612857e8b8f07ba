"""Reads `data:` of a job file: the samples to train on, and the model folder whose processor reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from optimus.job.array_file import read_arrays
from optimus.job.nodes import DocumentNode, is_dir, is_file
from optimus.job.typed import Count, read_typed

CONFIG = "config.json"
DEFAULT_WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class DataBlock:
    """`data:` of a job file."""

    path: str
    media_dir: str | None = None
    index: str | None = None
    max_pixels: Count | None = None
    max_audio_s: Count | None = None
    workers: Count = DEFAULT_WORKERS


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A chat data set and how it is read; never part of a plan's hash, but its lengths are."""

    path: Path
    media_dir: Path
    index: Path
    model_dir: Path  # with the processor
    sequence_tokens: int
    max_pixels: int | None
    max_audio_s: int | None
    workers: int  # processes of a rank that decode files

    def absolute(self) -> DataSource:
        """Returns the source as other processes find it."""
        paths = {name: getattr(self, name).absolute() for name in ("path", "media_dir", "index", "model_dir")}
        return replace(self, **paths)

    @property
    def lengths(self) -> Path:
        """The file of packed lengths that is written with the index."""
        return find_lengths_file(self.index)

    def read_packed_tokens(self) -> int | None:
        """Returns the length to which the index packs samples, 0 if it does not; None without an index."""
        try:
            header = json.loads(read_arrays(self.index, ["header"])["header"].tobytes())
            return int(header["key"]["sequence_tokens"] or 0)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    @property
    def command(self) -> str:
        """The command that writes the index."""
        words = ["optimus data index", str(self.path), "--model", str(self.model_dir)]
        words += ["--sequence-tokens", str(self.sequence_tokens)]
        if self.media_dir != self.path.parent:
            words += ["--media-dir", str(self.media_dir)]
        for flag, value in (("--max-pixels", self.max_pixels), ("--max-audio-s", self.max_audio_s)):
            words += [] if value is None else [flag, str(value)]
        if self.index != find_index_file(self.path):
            words += ["--output", str(self.lengths)]
        return " ".join(words)


def find_index_file(lengths_or_data: Path) -> Path:
    """Returns the index beside a data set, or beside its file of lengths."""
    name = lengths_or_data.name.removesuffix(".jsonl").removesuffix(".lengths")
    return lengths_or_data.with_name(f"{name}.index.npz")


def find_lengths_file(index: Path) -> Path:
    """Returns the file of lengths beside an index."""
    return index.with_name(f"{index.name.removesuffix('.npz').removesuffix('.index')}.lengths.jsonl")


def find_model_dir(node: DocumentNode, folder: Path) -> Path | None:
    """Returns the folder that `model: {hf: FOLDER}` names; None if that is a file."""
    path = None if "hf" not in node else folder / read_typed(str, node["hf"])
    return path if path is not None and is_dir(path) else None


def read_data_source(root: DocumentNode, folder: Path) -> DataSource | None:
    """Reads `data:` of a job file whose relative paths start at `folder`; None if it has none."""
    if "data" not in root:
        return None
    block = read_typed(DataBlock, root["data"])
    model_dir = find_model_dir(root["model"], folder)
    if model_dir is None and "hf" in root["model"]:
        config = folder / read_typed(str, root["model"]["hf"])
        if not is_file(config):
            problem = "is neither a model folder nor a config.json"
            raise root["model"]["hf"].error(problem, "give the folder, seen from that of the job file")
        model_dir = config.parent
    if model_dir is None:
        problem = "needs a model folder, whose processor reads the data"
        raise root["data"].error(problem, "use model: {hf: FOLDER}", shown=False)
    if "workload" not in root or "sequence_tokens" not in root["workload"]:
        hint = "add workload: {sequence_tokens: 4096, sequences_per_step: 256}"
        raise root["data"].error(
            "needs workload.sequence_tokens, to which samples are packed", hint, shown=False
        )
    path = folder / block.path
    if block.index is not None and not block.index.endswith(".npz"):
        raise root["data"]["index"].error("is not a .npz file", f"use {find_index_file(path).name}")
    return DataSource(
        path=path,
        media_dir=path.parent if block.media_dir is None else folder / block.media_dir,
        index=find_index_file(path) if block.index is None else folder / block.index,
        model_dir=model_dir,
        sequence_tokens=read_typed(Count, root["workload"]["sequence_tokens"]),
        max_pixels=block.max_pixels,
        max_audio_s=block.max_audio_s,
        workers=block.workers,
    )
