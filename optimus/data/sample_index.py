"""Keeps which samples of a data set can be used, their lengths and which share a sequence, in one file.

The file holds arrays (.npz). It is valid for one content of the data set, one processor and one set of
options: `IndexKey`. Files that samples name may change later; that is noticed when they are decoded.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from optimus.data.chat_source import ChatSource, open_chat_source
from optimus.data.index_lengths import (
    IndexedLengths,
    LengthsTable,
    Progress,
    SkippedExamples,
    index_lengths,
)
from optimus.data.jsonl_file import SkipReason
from optimus.data.media_headers import MAX_AUDIO_S, MAX_PIXELS, MediaFolder
from optimus.data.packing import pack_documents
from optimus.errors import UserError, show_value
from optimus.ir.files import write_file_atomically
from optimus.ir.op import Ints
from optimus.job.array_file import read_arrays
from optimus.job.data_source import DataSource

FORMAT = "optimus.index/1"
PROCESSOR_ENDINGS = (".json", ".jinja", ".txt", ".model")
WEIGHT_MAP = ".index.json"  # of weights, not of the processor


@dataclass(frozen=True, kw_only=True)
class IndexKey:
    """Identifies an index by what it depends on, besides the files that samples name."""

    data: str  # hash of the data set
    processor: str  # hash of the model folder's small files, and the version of transformers
    media_dir: str  # seen from the data set's folder
    sequence_tokens: int | None
    decode: bool
    max_pixels: int
    max_audio_s: int

    @classmethod
    def make(
        cls, file: ChatSource, *, model: Path, folder: MediaFolder, sequence_tokens: int | None
    ) -> IndexKey:
        return cls(
            data=file.digest,
            processor=_hash_processor(model),
            media_dir=os.path.relpath(folder.root.resolve(), file.path.resolve().parent),
            sequence_tokens=sequence_tokens,
            decode=folder.decode,
            max_pixels=folder.max_pixels,
            max_audio_s=folder.max_audio_s,
        )

    def serves(self, other: IndexKey) -> bool:
        """Tells whether an index can be used for another key: files may have been decoded for nothing."""
        return other in (self, replace(self, decode=False))


def _hash_processor(folder: Path) -> str:
    digest = hashlib.blake2b(transformers.__version__.encode(), digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.name.endswith(PROCESSOR_ENDINGS) and not path.name.endswith(WEIGHT_MAP):
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


class Groups(Sequence[tuple[int, ...]]):
    """Groups of numbers in two arrays: 8 bytes per number and per group."""

    def __init__(self, members: Ints, ends: Ints) -> None:
        self.members, self.ends = members, ends

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]]) -> Groups:
        members = [number for group in groups for number in group]
        ends = np.cumsum([len(group) for group in groups], dtype=np.int64)
        return cls(np.array(members, dtype=np.int64), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, place: Any) -> Any:
        begin = self.ends[place - 1] if place else 0
        return tuple(self.members[begin : self.ends[place]].tolist())


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleIndex:
    """Samples that can be used, by number: a data set without the others."""

    key: IndexKey
    numbers: Ints  # among the lines that are not blank
    lengths: LengthsTable
    sequences: Groups  # numbers of packed samples; each sample alone if they are not packed
    skipped: Counter[SkipReason]  # samples that cannot
    examples: SkippedExamples

    @classmethod
    def make(cls, key: IndexKey, indexed: IndexedLengths) -> SampleIndex:
        """Packs what was measured."""
        totals = map(int, indexed.samples.tokens())
        length = key.sequence_tokens
        packed = (
            ([n] for n in range(len(indexed.samples))) if length is None else pack_documents(totals, length)
        )
        return cls(
            key=key,
            numbers=np.array(indexed.numbers, dtype=np.int64),
            lengths=indexed.samples,
            sequences=Groups.of(list(packed)),
            skipped=indexed.skipped,
            examples=indexed.examples,
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def packed_lengths(self) -> LengthsTable:
        """Returns the lengths of sequences."""
        return self.lengths.join(self.sequences)

    def save(self, path: Path) -> None:
        """Writes the index."""
        skipped = {"skipped": dict(self.skipped), "examples": self.examples}
        header = {"format": FORMAT, "key": asdict(self.key), **skipped}
        arrays = {
            "header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
            "numbers": self.numbers,
            "members": self.sequences.members,
            "ends": self.sequences.ends,
            **{f"lengths.{name}": column for name, column in self.lengths.columns().items()},
        }
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        write_file_atomically(path, buffer.getvalue())

    @classmethod
    def load(cls, path: Path, key: IndexKey) -> SampleIndex | None:
        """Reads an index; None if there is none that serves this key."""
        try:
            header = json.loads(read_arrays(path, ["header"])["header"].tobytes())
            if header["format"] != FORMAT or not IndexKey(**header["key"]).serves(key):
                return None
            arrays, prefix = read_arrays(path), "lengths."
            columns = {name.removeprefix(prefix): arrays[name] for name in arrays if prefix in name}
            return cls(
                key=key,
                numbers=arrays["numbers"],
                lengths=LengthsTable.of_columns(columns),
                sequences=Groups(arrays["members"], arrays["ends"]),
                skipped=Counter({SkipReason(name): count for name, count in header["skipped"].items()}),
                examples={
                    SkipReason(name): [(int(line), str(detail)) for line, detail in named]
                    for name, named in header["examples"].items()
                },
            )
        except (AttributeError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None


def build_index(
    file: ChatSource, key: IndexKey, *, model: Path, folder: MediaFolder, workers: int, progress: Progress
) -> SampleIndex:
    """Measures all samples of a file and packs them."""
    indexed = index_lengths(
        file,
        model=model,
        folder=folder,
        sequence_tokens=key.sequence_tokens,
        workers=workers,
        progress=progress,
    )
    return SampleIndex.make(key, indexed)


def save_index(index: SampleIndex, path: Path, lengths: Path) -> None:
    """Writes an index, and the lengths of its sequences as a job file reads them."""
    write_file_atomically(lengths, index.packed_lengths().rows())
    index.save(path)


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexedData:
    """The data set of a job file, with its index."""

    file: ChatSource
    index: SampleIndex
    folder: MediaFolder


def open_data(source: DataSource, *, progress: Progress | None = None) -> IndexedData:
    """Opens a data set with its index; with `progress`, one is built and written where it is missing."""
    file = open_chat_source(source.path)
    folder = MediaFolder(
        root=source.media_dir,
        max_pixels=source.max_pixels or MAX_PIXELS,
        max_audio_s=source.max_audio_s or MAX_AUDIO_S,
    )
    key = IndexKey.make(file, model=source.model_dir, folder=folder, sequence_tokens=source.sequence_tokens)
    index = SampleIndex.load(source.index, key)
    if index is None or not source.lengths.is_file():
        if progress is None:
            raise UserError(
                field="data.index",
                value=str(source.index),
                problem="is missing, or of other data, another processor or other options",
                hint=f"run {source.command}",
            )
        index = build_index(
            file, key, model=source.model_dir, folder=folder, workers=os.cpu_count() or 1, progress=progress
        )
        if not len(index):
            raise UserError(
                field="data.path",
                value=str(source.path),
                problem=f"has no sample that can be used: {_describe_skipped(index)}",
                hint=f"{source.command} says more",
            )
        save_index(index, source.index, source.lengths)
    return IndexedData(file=file, index=index, folder=folder)


def _describe_skipped(index: SampleIndex) -> str:
    reasons = []
    for reason, count in index.skipped.most_common(3):
        line, detail = index.examples[reason][0]
        reasons.append(f"{count:,} {reason} (line {line}: {show_value(detail)})")
    return ", ".join(reasons) or "it is empty"
