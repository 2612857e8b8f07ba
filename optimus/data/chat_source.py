"""Opens samples of a chat data set by number: lines of JSONL, WebDataset shards, rows of `datasets`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, Self

from optimus.data.arrow_rows import is_arrow_folder, open_arrow_rows
from optimus.data.jsonl_file import scan_jsonl
from optimus.data.tar_shards import is_shard_folder, scan_shards
from optimus.errors import UserError
from optimus.ir.op import Ints


class ChatSource(Protocol):
    """Samples by number."""

    @property
    def path(self) -> Path:
        """The file or folder."""

    @property
    def lines(self) -> Ints:
        """Places of samples in the data set, from 1, by which messages name them."""

    @property
    def digest(self) -> str:
        """A hash that differs if the samples do."""

    def __len__(self) -> int: ...

    def select(self, numbers: Ints) -> Self:
        """Returns the source with these samples alone."""

    def read(self, number: int) -> bytes | dict[str, Any]:
        """Returns a sample in a form of `chat_format`, as JSON or as an object whose media are embedded."""


def open_chat_source(path: Path) -> ChatSource:
    """Opens a data set by what it is; raises UserError if it is none."""
    if is_arrow_folder(path):
        return open_arrow_rows(path)
    if is_shard_folder(path):
        return scan_shards(path)
    if path.is_dir():
        raise UserError(
            field=str(path),
            problem="holds no shards (*.tar) and no data set of save_to_disk",
            hint="give such a folder, or a .jsonl file: one sample per line",
        )
    return scan_jsonl(path)
