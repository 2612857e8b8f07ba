"""Turns YAML nodes into typed dataclasses and remembers on which line every field stands."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from optimus.errors import UserError, nearest, one_of
from optimus.job.yaml_nodes import Node

MAX_COUNT = 1_000_000_000_000
T = TypeVar("T")

_RULES: dict[
    str, tuple[Callable[[float], bool], str]
] = {  # the words that Annotated[...] carries in the dataclasses
    "positive": (lambda number: number > 0, "more than 0"),
    "not negative": (lambda number: number >= 0, "0 or more"),
    "share": (lambda number: 0 <= number <= 1, "from 0 to 1"),
}


class Places:
    """Where every field stands, so that later checks can point to file and line."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}

    def note(self, field: str, node: Node) -> None:
        self._nodes[field] = node

    def find(self, field: str) -> Node | None:
        """The place of a field, or of the nearest block around it."""
        while field and field not in self._nodes:
            field = field.rpartition("[" if field.endswith("]") else ".")[0]
        return self._nodes.get(field)

    def error(self, field: str, problem: str, hint: str, value: object = None) -> UserError:
        node = self.find(field)
        file, line = (None, None) if node is None else (node.file, node.line)
        return UserError(field=field, value=value, problem=problem, hint=hint, file=file, line=line)

    # Typed reading ---------------------------------------------------------------------

    def read(self, kind: type[T], node: Node, field: str) -> T:
        """`node` as a value of type `kind`; every field below is noted."""
        return cast(T, self.read_as(kind, node, field))

    def read_as(self, kind: Any, node: Node, field: str) -> Any:
        self.note(field, node)
        if kind is Node:
            return node
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return self._dataclass(kind, node, field)
        if kind is Any:
            return self._plain(node, field)
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Annotated:
            number = self._scalar(arguments[0], node, field, shown=kind)
            holds, words = _RULES[arguments[1]]
            if not holds(number):
                raise node.error(field, f"is not {words}", f"use {describe(kind)}", node.value)
            return number
        if origin is Literal:
            if node.value not in arguments or isinstance(node.value, bool):
                raise self._refuse(kind, node, field)
            return node.value
        if origin in (Union, types.UnionType):
            inner = next(argument for argument in arguments if argument is not type(None))
            return None if node.value is None else self.read_as(inner, node, field)
        if origin is tuple:
            if not isinstance(node.value, list):
                raise self._refuse(kind, node, field)
            return tuple(
                self.read_as(arguments[0], item, f"{field}[{i}]") for i, item in enumerate(node.value)
            )
        if origin is dict:
            if not isinstance(node.value, dict):
                raise self._refuse(kind, node, field)
            return {
                key: self.read_as(arguments[1], item, join(field, key)) for key, item in node.value.items()
            }
        return self._scalar(kind, node, field)

    def _scalar(self, kind: Any, node: Node, field: str, *, shown: Any = None) -> Any:
        value = node.value
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self._refuse(shown or kind, node, field)
        if kind in (int, float) and abs(value) > MAX_COUNT:
            raise node.error(field, f"is more than {MAX_COUNT:,}", "use a smaller number", value)
        if kind is str and not value.isprintable():
            raise node.error(field, "has unprintable characters", "use printable characters", repr(value))
        return value

    def _refuse(self, kind: Any, node: Node, field: str) -> UserError:
        if node.value is None:
            return node.error(field, "has no value", f"use {describe(kind)}")
        shown = (
            "a list" if isinstance(node.value, list) else "a mapping" if isinstance(node.value, dict) else ""
        )
        if shown:
            return node.error(field, f"is {shown}, not {describe(kind)}", f"use {describe(kind)}")
        value = str(node.value).lower() if isinstance(node.value, bool) else node.value
        hint = f"use {describe(kind)}"
        if get_origin(kind) is Literal and isinstance(node.value, str):
            hint = nearest(node.value, [str(choice) for choice in get_args(kind)])
        return node.error(field, f"is not {describe(kind)}", hint, value)

    def _dataclass(self, kind: Any, node: Node, field: str) -> Any:
        if not isinstance(node.value, dict):
            raise self._refuse(kind, node, field)
        known, hints = {f.name: f for f in dataclasses.fields(kind)}, type_hints(kind)
        self.refuse_unknown(node, field, known)
        given = {}
        for name, part in known.items():
            if name in node.value:
                given[name] = self.read_as(hints[name], node.value[name], join(field, name))
            elif part.default is dataclasses.MISSING and part.default_factory is dataclasses.MISSING:
                hint = f"add {name}: {describe(hints[name])}"
                raise node.error(join(field, name), "is missing", hint)
        return kind(**given)

    def refuse_unknown(self, node: Node, field: str, known: Any) -> None:
        """Every key of a mapping is one of `known`."""
        for name, item in node.entries.items():
            if name not in known:
                shown = name if name.isprintable() else repr(name)
                raise item.error(join(field, shown), "is not known here", nearest(name, known))

    def _plain(self, node: Node, field: str) -> Any:
        if isinstance(node.value, dict):
            return {key: self._plain(item, join(field, key)) for key, item in node.value.items()}
        if isinstance(node.value, list):
            return [self._plain(item, f"{field}[{i}]") for i, item in enumerate(node.value)]
        return node.value


def join(field: str, name: str) -> str:
    """`layout` and `llm` are `layout.llm`."""
    return f"{field}.{name}" if field else name


@cache
def type_hints(kind: Any) -> dict[str, Any]:
    """The resolved annotations of a dataclass."""
    return get_type_hints(kind, include_extras=True)


def describe(kind: Any) -> str:
    """What a field takes, in words."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return f"{describe(arguments[0])}, {_RULES[arguments[1]][1]}"
    if origin is Literal:
        return one_of(arguments)
    if origin in (Union, types.UnionType):
        return describe(next(argument for argument in arguments if argument is not type(None)))
    if origin is tuple:
        return "a list"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(kind, "a mapping")
