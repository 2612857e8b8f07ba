"""Names, describes, verifies and removes the checkpoints of a run, without torch.

A checkpoint is a directory `step-00000120` of DCP's files and `manifest.json`, which has their lengths and
SHA-256 and its own. It is written under a temporary name and renamed when everything is on the disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from optimus.errors import UserError

FORMAT = 1
CHECKPOINTS = "checkpoints"  # folder in that of the run
MANIFEST, METADATA, LOCK = "manifest.json", "metadata.json", ".lock"
NAME = re.compile(r"step-(\d{8,18})")
TEMPORARY = re.compile(r"\.step-\d+\.[0-9a-f]+\.tmp")
LOCK_WAIT_S = 10.0  # until the first rank of a run that was killed is gone


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save checkpoints, and which ones to keep: `run.checkpoint` of a job file."""

    every: int = 0  # steps; 0 saves none
    keep_last: int = 2
    keep_every: int = 0  # keeps those of multiples of so many steps, too


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describes a checkpoint: its step, its files, and `facts` of the run that saved it."""

    step: int  # steps trained: the number of the next one
    facts: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]  # bytes and SHA-256 by name

    def dumps(self) -> str:
        """Returns the manifest as JSON that ends with its own SHA-256."""
        document: dict[str, Any] = {
            "format": FORMAT,
            "byteorder": sys.byteorder,
            "step": self.step,
            "facts": self.facts,
            "files": self.files,
        }
        return json.dumps({**document, "sha256": _hash_document(document)}, indent=1)

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Reads the manifest of a checkpoint; raises if it is not, byte by byte, one that was written."""
        try:
            if not _is_file(folder / MANIFEST):
                raise OSError("is no file")
            content = (folder / MANIFEST).read_text()
            document = json.loads(content)
            files = {name: (size, sha256) for name, (size, sha256) in document["files"].items()}
            manifest = cls(step=document["step"], facts=document["facts"], files=files)
            is_known = isinstance(manifest.facts, dict) and METADATA in files and all(map(_is_bare, files))
            if is_known and manifest.dumps() == content and folder.name == name_checkpoint(manifest.step):
                return manifest
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        raise damaged(folder, f"has no {MANIFEST} of its own")


def _hash_document(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _is_file(path: Path) -> bool:
    """Tells if a path is a file: no link, and nothing that is read without an end."""
    return stat.S_ISREG(path.lstat().st_mode)


def _is_bare(name: str) -> bool:
    return Path(name).name == name


def damaged(folder: Path, problem: str) -> UserError:
    """Returns the error for a checkpoint that is not whole."""
    return UserError(field=str(folder), problem=problem, hint="resume from another checkpoint")


def name_checkpoint(step: int) -> str:
    """Returns the name of the directory of a checkpoint."""
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder, newest first; none of them is verified."""
    paths = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def refuse_other_run(run_dir: Path) -> None:
    """Raises if a run that begins would mix its checkpoints with those of an earlier one."""
    if list_checkpoints(run_dir / CHECKPOINTS):
        raise UserError(
            field="--run-dir",
            value=str(run_dir),
            problem="has checkpoints of an earlier run",
            hint="add --resume to go on with it, or name another folder",
        )


def verify_files(folder: Path, manifest: Manifest, *, part: int = 0, parts: int = 1) -> None:
    """Raises unless the files of a checkpoint are those of its manifest; ranks share the work."""
    for name in sorted(manifest.files)[part::parts]:
        size, sha256 = manifest.files[name]
        try:
            is_same = _is_file(folder / name) and (folder / name).stat().st_size == size
            is_same = is_same and describe_file(folder / name) == (size, sha256)
        except OSError as error:
            raise damaged(folder, f"has no readable {name}: {error.strerror}") from None
        if not is_same:
            raise damaged(folder, f"has another {name} than was written")


def describe_file(path: Path) -> tuple[int, str]:
    """Returns length and SHA-256 of a file."""
    with path.open("rb") as stream:
        return os.fstat(stream.fileno()).st_size, hashlib.file_digest(stream, "sha256").hexdigest()


# ---------------------------------------------------------------------------- old ones


def list_expired(checkpoints: Sequence[Path], config: CheckpointConfig) -> list[Path]:
    """Returns the checkpoints, of a list from newest to oldest, that are not to be kept."""
    steps = {path: int(path.name.removeprefix("step-")) for path in checkpoints}
    older = checkpoints[config.keep_last :]
    return [path for path in older if not config.keep_every or steps[path] % config.keep_every]


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint, which has no name anymore when its files go."""
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with suppress(OSError):
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def lock_folder(folder: Path) -> BinaryIO:
    """Makes a folder of checkpoints this process's own while the result is open; removes leftovers.

    Raises if another run writes there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stream = (folder / LOCK).open("ab")
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise OSError("is where another run writes its checkpoints") from None
            time.sleep(0.1)
    for path in folder.iterdir():
        if TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    return stream
