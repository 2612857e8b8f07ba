"""Reads ranges of rows of safetensors files into memory that exists, and writes files tensor by tensor.

The format is a length, a JSON header and the tensors' bytes. The safetensors package maps whole files and
writes them from whole dictionaries; a rank of a large model can afford neither.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from optimus.errors import UserError
from optimus.ir.files import open_atomically

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LONGEST_HEADER = 16_000_000  # bytes: some 100,000 tensors in one file; the format allows six times as many


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Dtype, shape and position of a tensor in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int  # of the file

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """A file's header: its first bytes as they are, and its tensors in the order of their bytes."""

    path: Path
    head: bytes
    tensors: dict[str, TensorEntry]


def read_header(path: Path) -> TensorFile:
    """Returns the header of a file; a truncated file is an error that names its first missing tensor."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(LONGEST_HEADER, size - 8):
                raise _broken(path, "header", "is truncated or no safetensors header")
            body = file.read(length)
    except OSError as error:
        raise _broken(path, "file", f"cannot be read: {error.strerror}") from None
    try:
        fields: dict[str, Any] = json.loads(body, object_pairs_hook=_read_unique)
        fields.pop("__metadata__", None)
        entries = {name: _entry(field, 8 + length) for name, field in fields.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _broken(path, "header", "is no safetensors header") from None
    tensors = dict(sorted(entries.items(), key=lambda item: item[1].offset_bytes))
    end = 8 + length
    for name, entry in tensors.items():
        if entry.offset_bytes != end:
            raise _broken(path, name, "does not begin where the tensor before it ends")
        end += entry.size_bytes
        if end > size:
            raise _broken(path, name, f"is truncated: it ends at byte {end}, the file at byte {size}")
    return TensorFile(path=path, head=length.to_bytes(8, "little") + body, tensors=tensors)


def _entry(field: dict[str, Any], begin: int) -> TensorEntry:
    (first, end), shape = field["data_offsets"], field["shape"]
    if not isinstance(shape, list) or not all(
        type(size) is int and size >= 0 for size in (*shape, first, end)
    ):
        raise ValueError
    entry = TensorEntry(dtype=DTYPES[field["dtype"]], shape=tuple(shape), offset_bytes=begin + first)
    if entry.size_bytes != end - first:
        raise ValueError
    return entry


def _read_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds an object of JSON, and refuses one that has a name twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError
    return fields


def _broken(path: Path, field: str, problem: str) -> UserError:
    return UserError(field=field, problem=problem, hint="copy the file again", file=str(path))


def as_bytes(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor of the host."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")


def read_rows(file: TensorFile, name: str, into: Tensor, first: int = 0) -> int:
    """Fills a contiguous tensor with rows of a stored one, from row `first`; returns the bytes read."""
    entry = file.tensors[name]
    row_bytes = entry.size_bytes // entry.shape[0] if entry.shape and entry.shape[0] else 0
    memory = as_bytes(into)
    with file.path.open("rb", buffering=0) as stream:
        stream.seek(entry.offset_bytes + first * row_bytes)
        done = 0
        while done < len(memory):
            count = stream.readinto(memory[done:])
            if not count:
                raise _broken(file.path, name, "is truncated")
            done += count
    return done


def read_columns(file: TensorFile, name: str, into: Tensor, first: int = 0) -> int:
    """Fills a contiguous matrix with columns of a stored one, from column `first`; returns the bytes read."""
    entry = file.tensors[name]
    item_bytes = int(entry.dtype.itemsize)
    row_bytes, offset = entry.shape[1] * item_bytes, entry.offset_bytes + first * item_bytes
    with file.path.open("rb", buffering=0) as stream:
        for row, columns in enumerate(into):
            if os.preadv(stream.fileno(), [as_bytes(columns)], offset + row * row_bytes) != columns.nbytes:
                raise _broken(file.path, name, "is truncated")
    return int(into.nbytes)


class TensorFileWriter:
    """Writes a file under another's header: the same names, dtypes, shapes and order, tensor by tensor."""

    def __init__(self, path: Path, like: TensorFile) -> None:
        self.path, self.like = path, like
        self._rest: Iterator[tuple[str, TensorEntry]] = iter(like.tensors.items())
        self._opened = ExitStack()
        self._file: BinaryIO = self._opened.enter_context(open_atomically(path))
        self._file.write(like.head)

    def write(self, name: str, tensor: Tensor) -> None:
        """Appends the next tensor of the header."""
        expected, entry = next(self._rest)
        assert (name, tuple(tensor.shape), tensor.dtype) == (expected, entry.shape, entry.dtype)
        self._file.write(as_bytes(tensor.contiguous()))

    def close(self) -> None:
        """Gives the complete file its name."""
        assert next(self._rest, None) is None
        self._opened.close()
