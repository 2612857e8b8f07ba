"""Writes files atomically."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from optimus.errors import UserError


def write_file_atomically(path: Path, text: str | bytes) -> str:
    """Writes a file, or leaves the previous one on failure; returns the SHA-256 of its bytes."""
    content = text.encode() if isinstance(text, str) else text
    try:
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with unfinished.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        problem = f"cannot be written: {getattr(error, 'strerror', None) or error}"
        raise UserError(
            field=str(path), problem=problem, hint="check the directory, its permissions and space"
        ) from None
    return hashlib.sha256(content).hexdigest()
