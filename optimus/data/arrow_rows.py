"""Reads rows of a data set that `save_to_disk` of Hugging Face `datasets` wrote, with media undecoded."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from optimus.data.media_bytes import MediaBytes
from optimus.errors import UserError, one_of
from optimus.ir.op import Ints

STATE, SPLITS = "state.json", "dataset_dict.json"


def is_arrow_folder(path: Path) -> bool:
    """Returns whether `save_to_disk` wrote the folder."""
    return (path / STATE).is_file() or (path / SPLITS).is_file()


@dataclass(frozen=True, kw_only=True, eq=False)
class ArrowRows:
    """Rows of a data set by number."""

    path: Path
    rows: Ints
    digest: str

    @property
    def lines(self) -> Ints:
        """Numbers of rows, from 1."""
        return self.rows + 1

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, numbers: Ints) -> ArrowRows:
        """Returns the source with these rows alone."""
        return replace(self, rows=self.rows[numbers])

    @cached_property
    def _dataset(self) -> Any:
        return _load(self.path).with_format("arrow")  # rows as they are stored: nothing is decoded

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_dataset"}

    def read(self, number: int) -> dict[str, Any]:
        """Returns a row; images and sounds that it holds are embedded, others are paths."""
        (row,) = self._dataset[int(self.rows[number]) : int(self.rows[number]) + 1].to_pylist()
        embedded: dict[str, Any] = _embed(row, "")
        return embedded


def open_arrow_rows(path: Path) -> ArrowRows:
    """Opens a folder of one split."""
    if (path / SPLITS).is_file():
        splits = json.loads((path / SPLITS).read_text("utf-8")).get("splits", [])
        raise UserError(
            field=str(path),
            problem="has several splits",
            hint=f"give the folder of one: {one_of(str(path / str(split)) for split in splits)}",
        )
    digest = hashlib.blake2b((path / STATE).read_bytes(), digest_size=16).hexdigest()
    return ArrowRows(path=path, rows=np.arange(len(_load(path)), dtype=np.int64), digest=digest)


def _load(path: Path) -> Any:
    try:
        import datasets
    except ModuleNotFoundError:
        raise UserError(
            field=str(path),
            problem="is a data set of Hugging Face datasets, which is not installed",
            hint="pip install 'optimus-mllm[datasets]'",
        ) from None
    try:
        return datasets.load_from_disk(str(path))
    except Exception as error:  # of pyarrow, on files that are cut or missing
        problem = f"cannot be read: {(str(error).splitlines() or [type(error).__name__])[0]}"
        raise UserError(field=str(path), problem=problem, hint="write it again with save_to_disk") from None


def _embed(value: Any, name: str) -> Any:
    """Returns a value without keys whose value is missing, which Arrow adds, and with media embedded."""
    if isinstance(value, list):
        return [_embed(entry, f"{name}[{place}]") for place, entry in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if isinstance(content := value.get("bytes"), bytes):
        return MediaBytes(name=Path(value.get("path") or name).name, content=content)
    if set(value) == {"bytes", "path"}:
        return value["path"]
    return {
        key: _embed(entry, f"{name}.{key}" if name else key)
        for key, entry in value.items()
        if entry is not None
    }
