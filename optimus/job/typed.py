"""Reads typed dataclasses from nodes; a value that does not fit is an error with its file, line and field."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache, partial
from math import isfinite
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from optimus.errors import nearest, one_of, show_value
from optimus.job.nodes import DocumentNode

MAX_NUMBER = 1_000_000_000_000  # upper end of ranges that state none
MIN_NUMBER = 1e-100  # smaller ones, but for 0, are mistakes: divided by, they overflow
MAX_FLOAT = sys.float_info.max
MAX_PLAIN_DEPTH = 20
INT32, INT64 = 2**31 - 1, 2**63 - 1
T = TypeVar("T")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")
Reader = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class NumberRange:
    """Range of the numbers that an annotated field takes."""

    least: float | None = None
    most: float | None = None
    above: float | None = None  # exclusive

    def describe(self) -> str:
        if self.most is not None:
            return f"from {self.least} to {self.most}"
        return f"{self.least} or more" if self.above is None else f"more than {self.above}"


ROW = "row"  # annotates a dataclass that is written as a list: its fields in order
Count = Annotated[int, NumberRange(above=0)]
Whole = Annotated[int, NumberRange(least=0)]
Amount = Annotated[float, NumberRange(above=0)]
NonNegative = Annotated[float, NumberRange(least=0)]
Share = Annotated[float, NumberRange(least=0, most=1)]


# ---------------------------------------------------------------------------- reading


@overload
def read_typed(kind: type[T], node: DocumentNode, *, complete: bool = False) -> T: ...


@overload
def read_typed(kind: Any, node: DocumentNode, *, complete: bool = False) -> Any: ...


def read_typed(kind: Any, node: DocumentNode, *, complete: bool = False) -> Any:
    """Reads a node as `kind`: a dataclass, scalar, `Annotated` number, `Literal`, enum or container.

    A field of type `object` is left as it is, for the caller to read; one of type `Any` takes plain data.
    `complete`: dataclasses must have every field, also those that have defaults.
    """
    try:
        return _reader(kind, complete)(node.value)
    except _Mismatch as mismatch:
        for step in mismatch.path:
            node = node[step]
        raise node.error(mismatch.problem, mismatch.hint, shown=mismatch.shown) from None


def refuse_unknown_keys(
    node: DocumentNode, known: Collection[str], problem: str = "is not known here"
) -> None:
    """Raises an error at the first entry of a mapping that is not `known`."""
    for name in node.entries():
        if name not in known:
            raise node[name].error(problem, nearest(name, known), shown=False)


class _Mismatch(Exception):
    """A value that does not fit its type, at `path` below the value being read."""

    def __init__(self, problem: str, hint: str, *, path: tuple[str | int, ...] = (), shown: bool = True):
        super().__init__(problem)
        self.problem, self.hint, self.path, self.shown = problem, hint, path, shown

    def below(self, step: str | int) -> _Mismatch:
        """Returns the mismatch as seen from the container that has the value at `step`."""
        self.path = (step, *self.path)
        return self


@cache
def _reader(kind: Any, complete: bool) -> Reader:
    """Returns the function that reads one kind of value, built once per kind: plan files have many rows."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is object:
        return lambda value: value
    if kind is Any:
        return _plain
    if origin is Annotated and arguments[1] == ROW:
        return _dataclass_reader(arguments[0], complete, row=kind)
    if origin is Annotated:
        return _number_reader(kind, arguments[0], arguments[1])
    if kind in (int, float):
        return _number_reader(kind, kind, NumberRange())
    if kind in (str, bool):
        return _text if kind is str else _flag
    if origin is Literal:
        return _choice_reader(kind, {choice: choice for choice in arguments})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _choice_reader(kind, _words(kind))
    if origin in (Union, types.UnionType):
        inner = _reader(_not_none(arguments), complete)
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        return _tuple_reader(kind, arguments, complete)
    if origin in (dict, Mapping):
        return _mapping_reader(kind, *(_reader(argument, complete) for argument in arguments))
    return _dataclass_reader(kind, complete)


def _mismatch(kind: Any, value: Any) -> _Mismatch:
    """Returns the mismatch of a value of another type."""
    wanted = describe_type(kind)
    if value is None:
        return _Mismatch("has no value", f"use {wanted}")
    if isinstance(value, list | dict):
        shape = "a list" if isinstance(value, list) else "a mapping"
        return _Mismatch(f"is {shape}, not {wanted}", f"use {wanted}")
    example = f", for example [{show_value(value)}]" if get_origin(kind) is tuple else ""
    return _Mismatch(f"is not {wanted}", f"use {wanted}{example}")


def _number_reader(kind: Any, number: type, allowed: NumberRange) -> Reader:
    types_allowed = (int,) if number is int else (int, float)
    least = next((end for end in (allowed.least, allowed.above) if end is not None), -MAX_FLOAT)
    limit = MAX_FLOAT if allowed == NumberRange() else MAX_NUMBER
    most = limit if allowed.most is None else allowed.most

    def read_number(value: Any) -> Any:
        if type(value) not in types_allowed:
            raise _mismatch(kind, value)
        if 0 < abs(value) < MIN_NUMBER:
            raise _Mismatch(f"is closer to 0 than {MIN_NUMBER:g}", "use a larger number, or 0")
        if least <= value <= most and value != allowed.above:
            return number(value)
        if isinstance(value, float) and not isfinite(value):
            raise _Mismatch("is not a finite number", "write a finite number")
        if allowed.most is None and value > most:
            raise _Mismatch(f"is more than {most:,}", "use a smaller number")
        words = allowed.describe() if allowed.most is None else describe_type(kind)
        raise _Mismatch(f"is not {words}", f"use {describe_type(kind)}")

    return read_number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _mismatch(str, value)
    if not value.isprintable():
        raise _Mismatch("has unprintable characters", "use printable characters")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _mismatch(bool, value)
    return value


def _choice_reader(kind: Any, choices: Mapping[str, Any]) -> Reader:
    def read_choice(value: Any) -> Any:
        if not isinstance(value, str):
            raise _mismatch(kind, value)
        if value not in choices:
            raise _Mismatch(f"is not {describe_type(kind)}", nearest(value, choices))
        return choices[value]

    return read_choice


def _read_items(items: Iterable[tuple[Any, Reader, Any]]) -> dict[Any, Any]:
    """Reads the values of a container, each given with its key or index and its reader."""
    values, step = {}, ""
    try:
        for step, read_item, value in items:
            values[step] = read_item(value)
    except _Mismatch as mismatch:
        raise mismatch.below(step) from None
    return values


def _tuple_reader(kind: Any, arguments: tuple[Any, ...], complete: bool) -> Reader:
    """Reads `tuple[X, ...]` from a list of any length, `tuple[X, Y]` from one of two items."""
    readers = [_reader(argument, complete) for argument in arguments if argument is not ...]

    def read_tuple(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise _mismatch(kind, value)
        item_readers = readers if arguments[-1] is not ... else readers * len(value)
        _check_length(value, len(item_readers), "items")
        return tuple(_read_items(zip(range(len(value)), item_readers, value, strict=True)).values())

    return read_tuple


def _mapping_reader(kind: Any, read_key: Reader, read_value: Reader) -> Reader:
    def read_mapping(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise _mismatch(kind, value)
        keys = []
        for name in value:
            try:
                keys.append(read_key(name))
            except _Mismatch as mismatch:
                raise _Mismatch(mismatch.problem, mismatch.hint, path=(name,), shown=False) from None
        items = _read_items((name, read_value, item) for name, item in value.items())
        return dict(zip(keys, items.values(), strict=True))

    return read_mapping


def _dataclass_reader(kind: Any, complete: bool, row: Any = None) -> Reader:
    """Reads a mapping, or a list with one item per field if the annotated type `row` is given."""
    hints, fields = get_type_hints(kind, include_extras=True), dataclasses.fields(kind)
    readers = {field.name: _reader(hints[field.name], complete) for field in fields}
    required = [
        field.name
        for field in fields
        if complete or (field.default is field.default_factory is dataclasses.MISSING)
    ]

    def read_dataclass(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _mismatch(kind, value)
        for name in value:
            if name not in readers:
                hint = nearest(name, readers)
                raise _Mismatch("is not known here", hint, path=(name,), shown=False)
        for name in required:
            if name not in value:
                raise _Mismatch("is missing", f"add {name}: {describe_type(hints[name])}", path=(name,))
        return kind(**_read_items((name, readers[name], item) for name, item in value.items()))

    def read_row(value: Any) -> Any:
        if not isinstance(value, list):
            raise _mismatch(row, value)
        _check_length(value, len(readers), "columns")
        items = _read_items(zip(range(len(value)), readers.values(), value, strict=True))
        return kind(**dict(zip(readers, items.values(), strict=True)))

    return read_dataclass if row is None else read_row


def _check_length(value: Sequence[Any], length: int, unit: str) -> None:
    if len(value) != length:
        raise _Mismatch(f"has {len(value):,} {unit}, not {length:,}", f"give {length:,} {unit}")


def _plain(value: Any, depth: int = 0) -> Any:
    """Copies plain data that can be written again: finite numbers, whole characters, few levels."""
    if depth > MAX_PLAIN_DEPTH:
        raise _Mismatch(f"is nested more than {MAX_PLAIN_DEPTH} deep", "make it flatter")
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        inner = partial(_plain, depth=depth + 1)
        copies = _read_items((_plain(step), inner, item) for step, item in items)
        return copies if isinstance(value, dict) else list(copies.values())
    if (
        isinstance(value, str)
        and not value.isascii()
        and any("\ud800" <= letter <= "\udfff" for letter in value)
    ):
        raise _Mismatch("has half a character", "write it as UTF-8")
    if isinstance(value, float) and not isfinite(value):
        raise _Mismatch("is not a finite number", "write a finite number")
    if isinstance(value, int) and abs(value) > INT64:
        raise _Mismatch(f"is more than {INT64}", "use a smaller number")
    return value


# ---------------------------------------------------------------------------- types in words


def describe_type(kind: Any) -> str:
    """Describes what a field takes: `a whole number, more than 0`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated and arguments[1] == ROW:
        return "a list"
    if origin is Annotated:
        comma = "," if arguments[1].most is None else ""
        return f"{describe_type(arguments[0])}{comma} {arguments[1].describe()}"
    if origin is Literal:
        return one_of(arguments)
    if origin in (Union, types.UnionType):
        return describe_type(_not_none(arguments))
    if origin is tuple:
        item = describe_type(arguments[0]).removeprefix("a ")
        return (
            f"a list of {item.partition(',')[0]}s"
            if item.startswith(("whole number", "number"))
            else "a list"
        )
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"a known {_CAPITAL.sub(' ', kind.__name__).lower()}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
        kind, "a mapping"
    )


def _not_none(arguments: tuple[Any, ...]) -> Any:
    return next(argument for argument in arguments if argument is not type(None))


def _words(kind: type[Enum]) -> dict[str, Enum]:
    """Returns the members of an enum as files name them: by `word`, else in small letters."""
    return {getattr(member, "word", member.name.lower()): member for member in kind}
