"""Parses YAML into nodes that know their file and line, within limits on size, depth and aliases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import yaml

from optimus.errors import UserError, show_value

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_ALIASES = 64
MAX_NODES = 100_000  # aliases counted as often as they are used
MAX_DIGITS = 15  # larger whole numbers would not survive as floats

Scalar = str | int | float | bool | None

_Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_WORDS: dict[str, Scalar] = {"": None, "~": None, "null": None, "true": True, "false": False}
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.?(inf|nan|infinity)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, eq=False)
class Node:
    """A scalar, a list or a mapping, and where it stands."""

    value: Scalar | list[Node] | dict[str, Node]
    file: str
    line: int | None
    size: int = 1

    @property
    def entries(self) -> dict[str, Node]:
        """Of a mapping; empty for anything else."""
        return self.value if isinstance(self.value, dict) else {}

    def error(self, field: str, problem: str, hint: str, value: object = None) -> UserError:
        return UserError(field=field, value=value, problem=problem, hint=hint, file=self.file, line=self.line)

    def without(self, *names: str) -> Node:
        """The same mapping, fewer keys."""
        return replace(self, value={key: node for key, node in self.entries.items() if key not in names})


def merged(base: Node, over: Node) -> Node:
    """`base` with everything that `over` states, mapping by mapping."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    value = dict(base.value)
    for key, node in over.value.items():
        value[key] = merged(value[key], node) if key in value else node
    return replace(over, value=value)


def read_text(path: Path, *, limit: int = MAX_BYTES) -> str:
    """A regular file of at most `limit` bytes of UTF-8."""

    def refuse(problem: str, hint: str) -> NoReturn:
        raise UserError(field=str(path), problem=problem, hint=hint) from None

    try:
        if not path.is_file():
            missing = "is not a file" if path.exists() else "does not exist"
            refuse(missing, "check the path; relative paths in a job file start at the job file")
        with path.open("rb") as stream:
            content = stream.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        refuse(f"cannot be read: {reason}", "check the path and its permissions")
    if len(content) > limit:
        refuse(f"is larger than {limit:,} bytes", f"keep it below {limit:,} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        refuse(f"is not UTF-8 text (byte {error.start:,})", "save it as UTF-8")


def load_yaml(path: Path) -> Node:
    """The root node of a YAML file, which must be a mapping."""
    return parse_yaml(read_text(path), file=str(path))


def parse_yaml(text: str, *, file: str) -> Node:
    """The root node of one YAML document, which must be a mapping."""
    try:
        root = _Composer(text, file).compose()
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
    if not isinstance(root.value, dict):
        raise root.error("the file", "is not a mapping", "write `key: value` lines, see `optimus init`")
    return root


def _line(event: yaml.Event) -> int | None:
    return None if event.start_mark is None else event.start_mark.line + 1


class _Composer:
    """Builds nodes from parser events; no object of any kind is constructed from tags."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.events: Iterator[yaml.Event] = yaml.parse(text, Loader=_Loader)
        self.anchors: dict[str, Node | None] = {}  # None: still open
        self.aliases = 0
        self.path: list[str] = []  # of what is being read

    def compose(self) -> Node:
        empty = Node(value={}, file=self.file, line=1)
        root: Node | None = None
        for event in self.events:
            if isinstance(event, yaml.NodeEvent):
                if root is not None:
                    raise self._refuse(event, "has a second document", "keep one document per file")
                root = self._node(event)
        return empty if root is None or root.value is None else root

    def _refuse(self, event: yaml.Event, problem: str, hint: str, value: object = None) -> UserError:
        shown = [part if part.isprintable() else repr(part) for part in self.path]
        field = show_value(".".join(shown).replace(".[", "[")) or "YAML"
        return UserError(
            field=field, value=value, problem=problem, hint=hint, file=self.file, line=_line(event)
        )

    def _node(self, event: yaml.Event) -> Node:
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
        node = self._scalar(event) if isinstance(event, yaml.ScalarEvent) else self._collection(event)
        if anchor:
            self.anchors[anchor] = node
        return node

    def _collection(self, event: yaml.Event) -> Node:
        value: list[Node] | dict[str, Node]
        if isinstance(event, yaml.SequenceStartEvent):
            value = self._items()
            inside = sum(item.size for item in value)
        else:
            value = self._mapping()
            inside = sum(item.size for item in value.values())
        if inside > MAX_NODES:
            raise self._refuse(event, f"has more than {MAX_NODES:,} values", "use fewer values or aliases")
        return Node(value=value, file=self.file, line=_line(event), size=1 + inside)

    def _alias(self, event: yaml.AliasEvent) -> Node:
        self.aliases += 1
        if self.aliases > MAX_ALIASES:
            raise self._refuse(event, f"makes more than {MAX_ALIASES} aliases", "write the values out")
        if event.anchor not in self.anchors:
            raise self._refuse(event, f"has an alias *{event.anchor} without its anchor", "define it above")
        node = self.anchors[event.anchor]
        if node is None:
            raise self._refuse(event, f"has an alias *{event.anchor} inside its own anchor", "write it out")
        return node

    def _items(self) -> list[Node]:
        items: list[Node] = []
        for event in self.events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            self.path.append(f"[{len(items)}]")
            items.append(self._node(event))
            self.path.pop()
        return items

    def _mapping(self) -> dict[str, Node]:
        entries: dict[str, Node] = {}
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
                raise self._refuse(event, f"is given twice, first on line {entries[key].line}", "keep one")
            entries[key] = replace(self._node(next(self.events)), line=_line(event))
            self.path.pop()
        return entries

    def _scalar(self, event: yaml.ScalarEvent) -> Node:
        plain = event.style is None or event.style == ""
        value = self._resolve(event) if plain else event.value
        return Node(value=value, file=self.file, line=_line(event))

    def _resolve(self, event: yaml.ScalarEvent) -> Scalar:
        """YAML 1.2's core rules: `yes`, `on`, 12:30 and dates are text, 1e-5 is a number."""
        text: str = event.value
        if text.lower() in _WORDS and text in (text.lower(), text.capitalize(), text.upper()):
            return _WORDS[text.lower()]
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
