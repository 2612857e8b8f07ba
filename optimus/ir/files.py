"""Writes files so that a reader finds the old content or the new one, never a part of it.

A temporary file in the same directory, with a name that nobody can guess, is written, synced and renamed.
What a killed process left behind is removed by a later write to the directory.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from optimus.errors import UserError

PREFIX, SUFFIX = ".optimus-", ".tmp"  # of temporary files
ABANDONED_S = 86_400.0  # since its last change a temporary file belongs to no writer that is alive


def write_file_atomically(path: Path, text: str | bytes) -> str:
    """Writes a file, or leaves the previous one on failure; returns the SHA-256 of its bytes."""
    content = text.encode() if isinstance(text, str) else text
    with open_atomically(path) as stream:
        stream.write(content)
    return hashlib.sha256(content).hexdigest()


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing that takes its name when the block ends without an error.

    A link of that name is replaced, not followed.
    """
    try:
        if "\0" in str(path):
            raise OSError(errno.EINVAL, "its name has a null character")
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is a directory or a device")
        with _open_temporary(path.parent) as (temporary, stream):
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        raise UserError(
            field=str(path), problem=problem, hint="check the directory, its permissions and space"
        ) from None


@contextmanager
def _open_temporary(directory: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Opens a new file, and removes it at the end unless it was renamed."""
    _sweep(directory)
    temporary = directory / f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    try:
        with os.fdopen(os.open(temporary, flags, 0o666), "wb") as stream:
            yield temporary, stream
    finally:
        temporary.unlink(missing_ok=True)


def _sweep(directory: Path) -> None:
    """Removes temporary files of this user that no living process writes."""
    for path in directory.glob(f"{PREFIX}*{SUFFIX}"):
        with suppress(OSError):
            found = path.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > ABANDONED_S:
                path.unlink()


def sync_directory(directory: Path) -> None:
    """Makes a rename survive a crash of the host, where directories can be read and synced."""
    try:
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EINVAL, errno.ENOTSUP):
            raise
