"""Reads lines of a JSONL file by number, without loading the file: one scan finds where each line begins."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np

from optimus.errors import OptimusError, UserError
from optimus.ir.op import Ints

BLOCK_BYTES = 4 << 20
MAX_LINE_BYTES = 4 << 20
NEWLINE = ord("\n")


class SkipReason(StrEnum):
    """Why a sample cannot be used. A reason depends on files alone, so all ranks skip the same samples."""

    LONG_LINE = "line too long"
    NOT_JSON = "not JSON"
    UNKNOWN_FORM = "unknown form"
    UNSUPPORTED = "not supported"
    NO_ANSWER = "no answer to train on"
    TAGS = "tags without files"
    NOT_LOCAL = "not a local file"
    MISSING_FILE = "file missing"
    OUTSIDE = "file outside the folder"
    BAD_FILE = "unreadable file"
    TOO_LARGE = "file too large"
    BAD_TEXT = "text that is not Unicode"
    PLACEHOLDER = "placeholder in text"
    TEMPLATE = "refused by the chat template"
    PROCESSOR = "refused by the processor"
    TOO_LONG = "longer than a sequence"
    CHANGED = "changed since it was indexed"


class SkippedSample(OptimusError):
    """A sample that cannot be used: the reason, which is counted, and a detail, which is shown."""

    def __init__(self, reason: SkipReason, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(reason, detail)

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass(frozen=True, kw_only=True, eq=False)
class JsonlFile:
    """Lines of a file by number; blank ones are left out. Holds 24 bytes per line."""

    path: Path
    begins: Ints  # of every line that is not blank, in bytes
    ends: Ints
    lines: Ints  # their line numbers, from 1
    size_bytes: int
    modified_ns: int
    digest: str  # of the content

    def __len__(self) -> int:
        return len(self.begins)

    def select(self, numbers: Ints) -> JsonlFile:
        """Returns the file with these lines alone."""
        columns = {name: getattr(self, name)[numbers] for name in ("begins", "ends", "lines")}
        return replace(self, **columns)

    def read(self, number: int) -> bytes:
        """Returns a line; raises SkippedSample if it is longer than MAX_LINE_BYTES."""
        begin, end = int(self.begins[number]), int(self.ends[number])
        if end - begin > MAX_LINE_BYTES:
            raise SkippedSample(SkipReason.LONG_LINE, f"{end - begin:,} bytes")
        with self.path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if (status.st_size, status.st_mtime_ns) != (self.size_bytes, self.modified_ns):
                raise UserError(field=str(self.path), problem="changed while it was read", hint="start again")
            return os.pread(file.fileno(), end - begin, begin)


def scan_jsonl(path: Path) -> JsonlFile:
    """Finds the lines of a file, reading it once, block by block."""
    hint = "give a .jsonl file: one sample per line"
    if path.suffix == ".json":
        hint += f"; of a JSON list: jq -c '.[]' {path.name} > {path.stem}.jsonl"
    if not path.is_file() or path.suffix != ".jsonl":
        problem = "is not a .jsonl file" if path.is_file() else "is not a file"
        raise UserError(field=str(path), problem=problem, hint=hint)
    newlines, offset, digest = list[Ints](), 0, hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            while block := file.read(BLOCK_BYTES):
                newlines.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == NEWLINE) + offset)
                offset += len(block)
                digest.update(block)
    except OSError as error:
        raise UserError(field=str(path), problem=f"cannot be read: {error.strerror}", hint=hint) from None
    ends = np.concatenate([*newlines, np.array([offset])]).astype(np.int64)  # the last may lack its newline
    begins = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1] + 1])
    filled = np.flatnonzero(ends - begins > 1)  # one byte is no JSON object, and "\r" is blank
    return JsonlFile(
        path=path,
        begins=begins[filled],
        ends=ends[filled],
        lines=filled + 1,
        size_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        digest=digest.hexdigest(),
    )
