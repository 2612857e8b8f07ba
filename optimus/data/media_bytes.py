"""Media that are not files of their own: bytes in memory, and a part of a larger file."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO


@dataclass(frozen=True, kw_only=True)
class MediaBytes:
    """Contents of a file, and the name by which messages call it."""

    name: str
    content: bytes

    def open(self) -> BinaryIO:
        """Returns a stream of its own."""
        return _open_range(self.name, io.BytesIO(self.content), 0, len(self.content))

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """A file inside another, such as a member of a tar file; reads no more than what is asked for."""

    name: str
    path: Path
    begin: int
    size: int

    def open(self) -> BinaryIO:
        """Returns a stream of its own."""
        return _open_range(self.name, self.path.open("rb"), self.begin, self.size)

    def __str__(self) -> str:
        return self.name


EmbeddedMedia = MediaBytes | FilePart
Media = Path | EmbeddedMedia


def _open_range(name: str, stream: BinaryIO, begin: int, size: int) -> BinaryIO:
    """Returns a buffered stream that prints as its name: messages are the same in every process."""
    raw: Any = _Range(name, stream, begin, size)
    return io.BufferedReader(raw, 1 << 16)


class _Range(io.RawIOBase):
    """A part of a stream."""

    def __init__(self, name: str, stream: BinaryIO, begin: int, size: int) -> None:
        self.name, self._stream, self._begin, self._size = name, stream, begin, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        self._stream.seek(self._begin + self._position)
        content = self._stream.read(max(0, min(len(buffer), self._size - self._position)))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        self._stream.close()
        super().close()
