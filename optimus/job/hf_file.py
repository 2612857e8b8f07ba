"""Reads objects of a released config.json: typed values, and a list of what was derived instead of read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, overload

from optimus.errors import show_value
from optimus.job.nodes import DocumentNode, parse_json, read_text
from optimus.job.typed import Count, read_typed

COPY_HINT = "released files lean on class defaults here: add the key to a copy, or write dimensions by hand"
T = TypeVar("T")


class HfConfig:
    """One object of a config.json; `derived` lists values that were computed rather than read."""

    def __init__(self, node: DocumentNode, derived: list[str] | None = None) -> None:
        self.node = node
        self.derived: list[str] = [] if derived is None else derived

    @property
    def file(self) -> str | None:
        return self.node.document.file

    def __getitem__(self, key: str) -> DocumentNode:
        return self.node[key]

    def has(self, key: str) -> bool:
        return self[key].value is not None

    @overload
    def read(self, kind: type[T], *keys: str) -> T: ...

    @overload
    def read(self, kind: Any, *keys: str) -> Any: ...

    def read(self, kind: Any, *keys: str) -> Any:
        """Returns the value of the first of `keys` that the object has."""
        for key in keys:
            if self.has(key):
                return read_typed(kind, self[key])
        raise self[keys[0]].error("is missing", COPY_HINT)

    def count(self, *keys: str) -> int:
        number: int = self.read(Count, *keys)
        return number

    def inner(self, key: str) -> HfConfig:
        """Returns a nested object."""
        self.read(dict[str, object], key)
        return HfConfig(self[key], self.derived)

    def read_or(self, default: T, kind: Any, *keys: str) -> T:
        """Returns the value of the first of `keys` that the object has, or else a default, which is noted."""
        if any(self.has(key) for key in keys):
            value: T = self.read(kind, *keys)
            return value
        return self.derive(keys[0], default, "class default")

    def derive(self, key: str, value: T, how: str) -> T:
        """Notes a value that the file leaves out; the model's source lists it."""
        self.derived.append(f"{self[key].field} = {show_value(value)} ({how})")
        return value


def load_hf_config(path: Path) -> HfConfig:
    """Reads the root object of a config.json."""
    hint = "check the brackets, commas and quotes, or use the config.json of a released model"
    return HfConfig(parse_json(read_text(path), file=str(path), hint=hint))
