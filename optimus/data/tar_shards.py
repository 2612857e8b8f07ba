"""Reads samples of WebDataset shards by number, from where they begin in their tar files.

Members whose names agree up to the first dot are a sample: `12.json`, in a form of `chat_format`, and its
media, `12.jpg` or `12.0.jpg`. A folder that energon has prepared (`.nv-meta`) states its shards and has an
index beside each (`.tar.idx`); the shards of other folders are scanned.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from optimus.data.chat_format import COLUMNS, PATH_KEYS
from optimus.data.jsonl_file import MAX_LINE_BYTES, SkippedSample, SkipReason
from optimus.data.media_bytes import FilePart
from optimus.errors import UserError, one_of
from optimus.ir.op import Ints
from optimus.job.nodes import NO_FILE, DocumentNode
from optimus.job.typed import read_typed
from optimus.job.yaml_parser import load_yaml

META, PART = ".nv-meta", "train"
CRUDE = "CrudeWebdataset"  # energon's class of samples without a field map
NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # key and ending, as in energon
RANGE = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")
MAX_SHARDS = 1_000_000
ENDINGS = {
    "image": ("bmp", "gif", "jpeg", "jpg", "png", "tif", "tiff", "webp"),
    "audio": ("flac", "mp3", "ogg", "wav"),
}


def is_shard_folder(path: Path) -> bool:
    """Returns whether a folder has tar files, or energon's."""
    return path.is_dir() and ((path / META).is_dir() or any(path.glob("*.tar")))


@dataclass(frozen=True, kw_only=True, eq=False)
class TarShards:
    """Samples of shards by number. Holds 32 bytes per sample."""

    path: Path
    shards: tuple[str, ...]
    owners: Ints  # by sample: its shard
    begins: Ints
    ends: Ints
    lines: Ints  # places among all samples, from 1
    digest: str

    def __len__(self) -> int:
        return len(self.begins)

    def select(self, numbers: Ints) -> TarShards:
        """Returns the source with these samples alone."""
        columns = {name: getattr(self, name)[numbers] for name in ("owners", "begins", "ends", "lines")}
        return replace(self, **columns)

    def read(self, number: int) -> dict[str, Any]:
        """Returns a sample with its media embedded; raises SkippedSample if its members are no sample."""
        path = self.path / self.shards[self.owners[number]]
        begin, end = int(self.begins[number]), int(self.ends[number])
        parts = dict[str, FilePart]()
        try:
            for member in _list_members(FilePart(name=path.name, path=path, begin=begin, size=end - begin)):
                name = NAME.match(member.name)
                if member.isreg() and name is not None:
                    parts[name[2].lower()] = FilePart(
                        name=PurePosixPath(member.name).name,
                        path=path,
                        begin=begin + member.offset_data,
                        size=member.size,
                    )
        except Exception as error:  # hostile bytes make readers raise almost anything
            raise SkippedSample(SkipReason.BAD_FILE, f"{path.name}: {error}") from None
        return _embed(_read_json(parts, path.name), parts)


def scan_shards(path: Path) -> TarShards:
    """Finds the samples of all shards: from energon's indices where there are, or by their tar headers."""
    shards, excluded = _list_shards(path)
    if not shards:
        raise UserError(
            field=str(path), problem="has no shards of the part train", hint="give a folder of tar files"
        )
    digest = hashlib.blake2b(digest_size=16)
    columns: list[tuple[Ints, Ints, Ints]] = []
    for place, name in enumerate(shards):
        offsets = _read_offsets(path / name)
        digest.update(f"{name} {len(offsets)} ".encode() + offsets.tobytes())
        kept = np.array([n for n in range(len(offsets) - 1) if f"{name}/{n}" not in excluded], dtype=np.int64)
        columns.append((np.full(len(kept), place), offsets[kept], offsets[kept + 1]))
    owners, begins, ends = (np.concatenate(column) for column in zip(*columns, strict=True))
    return TarShards(
        path=path,
        shards=shards,
        owners=owners,
        begins=begins,
        ends=ends,
        lines=np.arange(1, len(owners) + 1),
        digest=digest.hexdigest(),
    )


# ---------------------------------------------------------------------------- shards of a folder


def _list_shards(path: Path) -> tuple[tuple[str, ...], frozenset[str]]:
    """Returns the names of shards, and of what is excluded: shards, or samples as shard/number."""
    meta = path / META
    if not meta.is_dir():
        return tuple(sorted(file.name for file in path.glob("*.tar"))), frozenset()
    dataset = _read_meta(meta, "dataset").value
    typed = dataset.get("sample_type")
    kind = (typed if isinstance(typed, dict) else dataset).get("__class__", CRUDE)
    if kind != CRUDE:
        raise UserError(
            field="__class__",
            value=kind,
            problem="is no class of energon that is read here",
            hint=f"use {CRUDE}, with messages and answers in the JSON of each sample",
            file=str(meta / "dataset.yaml"),
        )
    splits = _read_meta(meta, "split")
    parts = splits["split_parts"]
    if PART not in parts:
        hint = f"name one of {one_of(parts.entries())} {PART}" if parts.entries() else "run energon prepare"
        raise UserError(
            field=f"split_parts.{PART}", problem="is missing", hint=hint, file=str(meta / "split.yaml")
        )
    left_out = read_typed(tuple[str, ...] | None, splits["exclude"]) or ()
    excluded = frozenset(name for entry in left_out for name in _expand(entry))
    listed = read_typed(tuple[str, ...], parts[PART])
    names = [name for entry in listed for name in _expand(entry) if name not in excluded]
    for name in names:
        if not (path / name).resolve().is_relative_to(path.resolve()) or not (path / name).is_file():
            raise UserError(field=name, problem="is no shard in the folder", hint="run energon prepare again")
    return tuple(names), excluded


def _read_meta(meta: Path, stem: str) -> DocumentNode:
    for name in (f"{stem}.yaml", f"{stem}.json"):
        if (meta / name).is_file():
            return load_yaml(meta / name)
    return NO_FILE


def _expand(pattern: str) -> list[str]:
    """Returns the names of a pattern like shard_{000..011}.tar."""
    found = RANGE.search(pattern)
    if math.prod(max(0, int(last) + 1 - int(first)) for first, last in RANGE.findall(pattern)) > MAX_SHARDS:
        problem = f"names more than {MAX_SHARDS:,} shards"
        raise UserError(field=pattern, problem=problem, hint="run energon prepare again")
    if found is None:
        return [pattern]
    first, last = found[1], found[2]
    is_padded = any(bound.startswith("0") and len(bound) > 1 for bound in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    numbers = (f"{number:0{width}d}" for number in range(int(first), int(last) + 1))
    return [
        name
        for number in numbers
        for name in _expand(pattern[: found.start()] + number + pattern[found.end() :])
    ]


# ---------------------------------------------------------------------------- samples of a shard


def _read_offsets(shard: Path) -> Ints:
    """Returns where every sample begins, and where the last one ends."""
    index = shard.with_suffix(".tar.idx")
    if index.is_file():
        offsets = np.fromfile(index, dtype="<u8").astype(np.int64)
        if (
            len(offsets)
            and (np.diff(offsets) > 0).all()
            and offsets[0] >= 0
            and offsets[-1] <= shard.stat().st_size
        ):
            return offsets
    begins, end, key = list[int](), 0, None
    try:
        for member in _list_members(
            FilePart(name=shard.name, path=shard, begin=0, size=shard.stat().st_size)
        ):
            name = NAME.match(member.name)
            if member.isreg() and name is not None and name[1] != key:
                key = name[1]
                begins.append(member.offset)
            end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    except Exception as error:
        raise UserError(
            field=str(shard), problem=f"is no whole tar file: {error}", hint="write it again"
        ) from None
    return np.array([*begins, end] if begins else [0], dtype=np.int64)


def _list_members(part: FilePart) -> Iterator[tarfile.TarInfo]:
    with part.open() as stream, tarfile.open(fileobj=stream, mode="r:") as members:
        yield from members


def _read_json(parts: dict[str, FilePart], shard: str) -> dict[str, Any]:
    part = parts.get("json")
    if part is None:
        raise SkippedSample(SkipReason.UNKNOWN_FORM, f"{shard}: {', '.join(sorted(parts)[:6])} without json")
    if part.size > MAX_LINE_BYTES:
        raise SkippedSample(SkipReason.LONG_LINE, f"{part.name} has {part.size:,} bytes")
    try:
        with part.open() as stream:
            row = json.load(stream)
    except (ValueError, RecursionError) as error:
        raise SkippedSample(SkipReason.NOT_JSON, f"{part.name}: {error}") from None
    if not isinstance(row, dict):
        raise SkippedSample(SkipReason.UNKNOWN_FORM, f"{part.name} is no object")
    return row


def _embed(row: dict[str, Any], parts: dict[str, FilePart]) -> dict[str, Any]:
    """Returns a row whose paths are members of its sample; without paths it has all members in order."""
    by_name = {part.name: part for part in parts.values()} | parts
    embedded: dict[str, Any] = _replace_paths(row, by_name, is_path=False)
    for kind, endings in ENDINGS.items():
        members = [part for ending, part in parts.items() if ending.rpartition(".")[2] in endings]
        if not any(_holds(embedded, member) for member in members) and not any(map(row.get, COLUMNS[kind])):
            embedded[COLUMNS[kind][0]] = members
    return embedded


def _replace_paths(value: Any, by_name: dict[str, FilePart], *, is_path: bool) -> Any:
    if isinstance(value, str):
        return by_name.get(value, value) if is_path else value
    if isinstance(value, list):
        return [_replace_paths(entry, by_name, is_path=is_path) for entry in value]
    if isinstance(value, dict):
        return {key: _replace_paths(entry, by_name, is_path=key in PATH_KEYS) for key, entry in value.items()}
    return value


def _holds(value: Any, part: FilePart) -> bool:
    if isinstance(value, list | dict):
        return any(_holds(entry, part) for entry in (value.values() if isinstance(value, dict) else value))
    return value is part
