"""Reads objects of a released config.json: typed values, and a list of what was derived instead of read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

from optimus.errors import show_value
from optimus.job.hf_defaults import find_class_defaults
from optimus.job.nodes import DocumentNode, make_argument_node, parse_json, read_text
from optimus.job.typed import Count, read_typed

CLASS_DEFAULT = "class default"
COPY_HINT = "released files lean on class defaults here: add the key to a copy, or write dimensions by hand"
T = TypeVar("T")


class HfConfig:
    """One object of a config.json; `derived` lists values that were computed rather than read."""

    def __init__(
        self, node: DocumentNode, derived: list[str] | None = None, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.node = node
        self.derived: list[str] = [] if derived is None else derived
        self.defaults = find_class_defaults(node["model_type"].value) if defaults is None else defaults

    @property
    def file(self) -> str | None:
        return self.node.document.file

    def __getitem__(self, key: str) -> DocumentNode:
        return self.node[key]

    def has(self, key: str) -> bool:
        return self[key].value is not None

    def knows(self, *keys: str) -> bool:
        """Tells whether the file or the defaults of its class have one of `keys`."""
        return any(self.has(key) or key in self.defaults for key in keys)

    @overload
    def read(self, kind: type[T], *keys: str) -> T: ...

    @overload
    def read(self, kind: Any, *keys: str) -> Any: ...

    def read(self, kind: Any, *keys: str) -> Any:
        """Returns the value of the first of `keys` that the object has."""
        for key in keys:
            if self.has(key):
                return read_typed(kind, self[key])
        for key in keys:
            if key in self.defaults:
                value = read_typed(kind, make_argument_node(key, self.defaults[key]))
                return self.derive(key, value, CLASS_DEFAULT)
        raise self[keys[0]].error("is missing", COPY_HINT)

    def count(self, *keys: str) -> int:
        number: int = self.read(Count, *keys)
        return number

    def inner(self, key: str) -> HfConfig:
        """Returns a nested object; one that is left out is the default of the class around it."""
        default = self.defaults.get(key)
        if not self.has(key) and isinstance(default, dict):
            self.derived.append(f"{self[key].field} ({CLASS_DEFAULT})")
            empty = DocumentNode({}, self.node.document, self[key].path)
            return HfConfig(empty, self.derived, find_class_defaults(default["model_type"]) | default)
        if not self.has(key):
            raise self[key].error("is missing", COPY_HINT)
        read_typed(dict[str, object], self[key])
        defaults = find_class_defaults(self[key]["model_type"].value)
        if isinstance(default, dict) and "model_type" in default and (not defaults or key in defaults):
            defaults = find_class_defaults(default["model_type"])  # also of files that name the whole here
        return HfConfig(self[key], self.derived, defaults)

    def read_or(self, default: T, kind: Any, *keys: str) -> T:
        """Returns the value of the first of `keys` that the object has, or else a default, which is noted."""
        if self.knows(*keys):
            value: T = self.read(kind, *keys)
            return value
        return self.derive(keys[0], default, CLASS_DEFAULT)

    def derive(self, key: str, value: T, how: str) -> T:
        """Notes a value that the file leaves out; the model's source lists it."""
        self.derived.append(f"{self[key].field} = {show_value(value)} ({how})")
        return value


def load_hf_config(path: Path) -> HfConfig:
    """Reads the root object of a config.json."""
    hint = "check the brackets, commas and quotes, or use the config.json of a released model"
    return HfConfig(parse_json(read_text(path), file=str(path), hint=hint))
