"""Parses a YAML document into nodes with positions: plain data only, within limits on depth and aliases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from optimus.errors import UserError, show_value
from optimus.job.nodes import (
    DocumentNode,
    ParsedDocument,
    Position,
    YamlList,
    YamlMapping,
    read_text,
    show_field_path,
)

MAX_DEPTH = 32
MAX_ALIASES = 64
MAX_NODES = 100_000  # aliases counted as often as they are used
MAX_DIGITS = 15  # longer integers do not survive as floats

_Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CONSTANTS: dict[str, bool | None] = {"": None, "~": None, "null": None, "true": True, "false": False}
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.?(inf|nan|infinity)", re.IGNORECASE)


def load_yaml(path: Path) -> DocumentNode:
    """Reads the root mapping of a YAML file."""
    return parse_yaml(read_text(path), file=str(path))


def parse_yaml(text: str, *, file: str) -> DocumentNode:
    """Parses the root mapping of one YAML document."""
    try:
        document = _Composer(text, file).compose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be parsed"
        raise UserError(
            field="YAML",
            problem=f"is not valid: {show_value(problem)}",
            hint="check the indentation, colons, brackets and quotes on and above this line",
            file=file,
            line=None if mark is None else mark.line + 1,
        ) from None
    root = DocumentNode(document.root, document)
    if not isinstance(root.value, YamlMapping):
        raise root.error("is not a mapping", "write `key: value` lines, see `optimus init`", shown=False)
    return root


class _Composer:
    """Builds values from parser events; no object of any kind is constructed from tags."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.events: Iterator[yaml.Event] = yaml.parse(text, Loader=_Loader)
        self.anchors: dict[str, tuple[Any, int] | None] = {}  # value and size; None: still open
        self.aliases = self.size = 0
        self.path: list[str | int] = []  # of the value being read

    def compose(self) -> ParsedDocument:
        empty = ParsedDocument(root=YamlMapping({}, {}), file=self.file, line=1)
        document: ParsedDocument | None = None
        for event in self.events:
            if isinstance(event, yaml.NodeEvent):
                if document is not None:
                    raise self._refuse(event, "has a second document", "keep one document per file")
                document = ParsedDocument(
                    root=self._value(event), file=self.file, line=self._position(event)[1]
                )
        return empty if document is None or document.root is None else document

    def _position(self, event: yaml.Event) -> Position:
        return self.file, None if event.start_mark is None else event.start_mark.line + 1

    def _refuse(self, event: yaml.Event, problem: str, hint: str, value: object = None) -> UserError:
        file, line = self._position(event)
        field = show_field_path(tuple(self.path)) or "YAML"
        return UserError(field=field, value=value, problem=problem, hint=hint, file=file, line=line)

    def _value(self, event: yaml.Event) -> Any:
        if len(self.path) > MAX_DEPTH:
            raise self._refuse(event, f"is nested deeper than {MAX_DEPTH} levels", "flatten it")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        tag = getattr(event, "tag", None)
        if tag not in (None, "!"):
            hint = "remove the tag: only plain data is read"
            raise self._refuse(event, f"has a tag ({show_value(tag)})", hint)
        anchor = event.anchor if isinstance(event, yaml.NodeEvent) else None
        if anchor:
            self.anchors[anchor] = None
        before = self.size
        self._count(event, 1)
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event)
        else:
            value = self._list() if isinstance(event, yaml.SequenceStartEvent) else self._mapping()
        if anchor:
            self.anchors[anchor] = value, self.size - before
        return value

    def _alias(self, event: yaml.AliasEvent) -> Any:
        self.aliases += 1
        if self.aliases > MAX_ALIASES:
            raise self._refuse(event, f"makes more than {MAX_ALIASES} aliases", "write the values out")
        if event.anchor not in self.anchors:
            raise self._refuse(event, f"has an alias *{event.anchor} without its anchor", "define it above")
        anchored = self.anchors[event.anchor]
        if anchored is None:
            raise self._refuse(event, f"has an alias *{event.anchor} inside its own anchor", "write it out")
        self._count(event, anchored[1])
        return anchored[0]

    def _count(self, event: yaml.Event, values: int) -> None:
        """Refuses the entry in which the document becomes too large."""
        self.size += values
        if self.size > MAX_NODES:
            while self.path and isinstance(self.path[-1], int):
                self.path.pop()
            raise self._refuse(event, f"has more than {MAX_NODES:,} values", "use fewer values or aliases")

    def _list(self) -> YamlList:
        items: list[Any] = []
        positions: dict[int, Position] = {}
        for event in self.events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            positions[len(items)] = self._position(event)
            self.path.append(len(items))
            items.append(self._value(event))
            self.path.pop()
        return YamlList(items, positions)

    def _mapping(self) -> YamlMapping:
        entries: dict[str, Any] = {}
        positions: dict[str, Position] = {}
        for event in self.events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            if not isinstance(event, yaml.ScalarEvent):
                raise self._refuse(event, "has a key that is not a word", "write `key: value`")
            if event.anchor or event.tag:
                raise self._refuse(event, "has an anchor or a tag on a key", "put it on the value")
            key = event.value
            self.path.append(key)
            if key in entries:
                problem = f"is given twice, first on line {positions[key][1]}"
                raise self._refuse(event, problem, "keep one")
            positions[key] = self._position(event)
            entries[key] = self._value(next(self.events))
            self.path.pop()
        return YamlMapping(entries, positions)

    def _scalar(self, event: yaml.ScalarEvent) -> str | float | bool | None:
        """Resolves plain scalars by YAML 1.2's core rules: `yes` and dates are text, 1e-5 is a number."""
        text: str = event.value
        if event.style:
            return text
        if text.lower() in _CONSTANTS and text in (text.lower(), text.capitalize(), text.upper()):
            return _CONSTANTS[text.lower()]
        if _INT.fullmatch(text):
            if len(text.lstrip("+-")) > MAX_DIGITS:
                raise self._refuse(event, f"has more than {MAX_DIGITS} digits", "use a smaller number", text)
            return int(text)
        if _FLOAT.fullmatch(text):
            number = float(text)
            if abs(number) < float("inf"):
                return number
        elif not _NOT_FINITE.fullmatch(text):
            return text
        raise self._refuse(event, "is not a finite number", "write a finite number", text)
