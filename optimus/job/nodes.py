"""Parses YAML and JSON into nodes that know their field, file and line, within limits on size and depth."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from optimus.errors import UserError, show_value

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_ALIASES = 64
MAX_NODES = 100_000  # aliases counted as often as they are used
MAX_DIGITS = 15  # longer integers do not survive as floats

Steps = tuple[str | int, ...]  # keys of mappings and indices of lists, from the root
Position = tuple[str | None, int | None]  # file and line

_Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CONSTANTS: dict[str, bool | None] = {"": None, "~": None, "null": None, "true": True, "false": False}
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.?(inf|nan|infinity)", re.IGNORECASE)
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_SPACE = re.compile(r"[ \t\n\r]*")


# ---------------------------------------------------------------------------- nodes


class YamlMapping(dict[str, Any]):
    """A mapping of a YAML file with the position of each entry."""

    def __init__(self, entries: dict[str, Any], positions: dict[str, Position]) -> None:
        super().__init__(entries)
        self.positions = positions


class YamlList(list[Any]):
    """A list of a YAML file with the position of each item."""

    def __init__(self, items: list[Any], positions: dict[int, Position]) -> None:
        super().__init__(items)
        self.positions = positions


@dataclass(frozen=True, kw_only=True, eq=False)
class Document:
    """A parsed file. YAML containers carry positions; those of JSON are looked up in `text`."""

    root: Any
    file: str | None = None
    line: int | None = None  # of the root
    text: str | None = None  # of a JSON document
    name: str = "the file"  # of the root in error messages

    def locate(self, path: Steps) -> Position:
        """File and line of the value at `path`, or of the innermost block around it."""
        if self.text is not None:
            return self.file, (self.line or 1) + _json_line(self.text, path)
        value, position = self.root, (self.file, self.line)
        for step in path:
            positions = getattr(value, "positions", {})
            if step not in positions:
                break
            value, position = value[step], positions[step]
        return position


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """A value of a document and its path from the root."""

    value: Any  # None where the document has nothing
    document: Document
    path: Steps = ()

    @property
    def root(self) -> Node:
        return Node(self.document.root, self.document)

    @property
    def field(self) -> str:
        """`encoders[0].stack.hidden`."""
        return show_field(self.path) or self.document.name

    def __contains__(self, name: str) -> bool:
        return isinstance(self.value, dict) and name in self.value

    def __getitem__(self, step: str | int) -> Node:
        """The entry of a mapping or the item of a list, with the value None if there is none."""
        try:
            value = self.value[step]
        except (KeyError, IndexError, TypeError):
            value = None
        return Node(value, self.document, (*self.path, step))

    def at(self, field: str) -> Node:
        """The value at `encoders[0].stack.hidden` below this one."""
        node = self
        for step in parse_field(field):
            node = node[step]
        return node

    def entries(self) -> dict[str, Node]:
        """Entries of a mapping; none for any other value."""
        return {name: self[name] for name in self.value} if isinstance(self.value, dict) else {}

    def without(self, *names: str) -> Node:
        """A YAML mapping without the entries `names`; any other value as it is."""
        value = self.value
        if isinstance(value, YamlMapping):
            kept = {name: item for name, item in value.items() if name not in names}
            value = YamlMapping(kept, value.positions)
        return Node(value, self.document, self.path)

    def replaced(self, value: Any, position: Position | None = None) -> Node:
        """The node of a copy of a YAML document that has `value` here, which comes from `position`."""
        blocks = [self.document.root]
        for step in self.path[:-1]:
            blocks.append(blocks[-1][step])
        root = value
        for step in reversed(self.path):
            block = blocks.pop()
            positions = dict(block.positions) if position is None else {**block.positions, step: position}
            root, position = _with_item(block, step, root, positions), None
        return Node(value, replace(self.document, root=root), self.path)

    def error(self, problem: str, hint: str, value: object = None, *, shown: bool = True) -> UserError:
        """An error at this node; shows `value`, or else the node's own if it is a scalar."""
        file, line = self.document.locate(self.path)
        if value is None and shown and not isinstance(self.value, dict | list):
            value = self.value
            if isinstance(value, bool) or (value is not None and self.document.text is not None):
                value = json.dumps(value)
        return UserError(field=self.field, value=value, problem=problem, hint=hint, file=file, line=line)


def _with_item(block: Any, step: Any, value: Any, positions: Any) -> YamlMapping | YamlList:
    if isinstance(block, dict):
        return YamlMapping({**block, step: value}, positions)
    return YamlList([*block[:step], value, *block[step + 1 :]], positions)


def argument(name: str, value: Any) -> Node:
    """A value given on the command line or by a caller, without a file."""
    return Node(value, Document(root=value, name=name))


NO_FILE = argument("job", YamlMapping({}, {}))  # of a job made in memory


def merged(base: Any, over: Any) -> Any:
    """YAML values: `base` with everything that `over` states, mapping by mapping."""
    if not (isinstance(base, YamlMapping) and isinstance(over, YamlMapping)):
        return over
    entries = dict(base)
    for name, value in over.items():
        entries[name] = merged(base[name], value) if name in base else value
    return YamlMapping(entries, {**base.positions, **over.positions})


def parse_field(field: str) -> Steps:
    """`encoders[0].name` as ("encoders", 0, "name")."""
    return tuple(int(index) if index else name for name, index in _STEP.findall(field))


def show_field(path: Steps) -> str:
    """("encoders", 0, "name") as `encoders[0].name`, never longer than a line."""
    names = (step if isinstance(step, int) or step.isprintable() else repr(step) for step in path)
    text = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)
    return show_value(text.removeprefix("."))


# ---------------------------------------------------------------------------- files


def read_text(path: Path, *, limit: int = MAX_BYTES) -> str:
    """The text of a regular UTF-8 file of at most `limit` bytes."""

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


# ---------------------------------------------------------------------------- JSON


def parse_json(text: str, *, file: str, line: int = 1, name: str = "JSON", hint: str) -> Node:
    """The root object of a JSON document that begins on `line`: no NaN, no key twice, no endless nesting.

    `hint` is given for a text that is not JSON; `name` is the root's in error messages.
    """

    def refuse(problem: str, hint: str, *, field: str = "JSON", line: int | None = None) -> UserError:
        return UserError(field=field, problem=problem, hint=hint, file=file, line=line)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            twice = next(key for key, count in counts.items() if count > 1)
            raise refuse("is given twice", "keep one", field=show_field((twice,)))
        return entries

    def constant(word: str) -> NoReturn:
        raise refuse(f"has {word}, which is not a finite number", "write a finite number")

    try:
        root = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise refuse(f"is not valid: {error.msg}", hint, line=line + error.lineno - 1) from None
    except (ValueError, RecursionError, MemoryError):
        raise refuse("is nested too deeply, or has too long a number", hint) from None
    if not isinstance(root, dict):
        raise refuse("is not an object", hint, line=line)
    return Node(root, Document(root=root, file=file, line=line, text=text, name=name))


def _json_line(text: str, path: Steps) -> int:
    """Lines before the value at `path`, or before the innermost block around it."""
    start = value = _skip_space(text, 0)
    for step in path:
        entry = _json_entry(text, value, step)
        if entry is None:
            break
        start, value = entry
    return text.count("\n", 0, start)


def _json_entry(text: str, at: int, step: str | int) -> tuple[int, int] | None:
    """Offsets of the entry `step` of the container at `at`, and of its value."""
    if text[at] not in "{[":
        return None
    decoder, index, in_object = json.JSONDecoder(), 0, text[at] == "{"
    at = _skip_space(text, at + 1)
    while text[at] not in "}]":
        start, key = at, index
        if in_object:
            key, at = decoder.raw_decode(text, at)
            at = _skip_space(text, _skip_space(text, at) + 1)  # the colon
        if key == step:
            return start, at
        at = _skip_space(text, decoder.raw_decode(text, at)[1])
        at = _skip_space(text, at + 1) if text[at] == "," else at
        index += 1
    return None


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


# ---------------------------------------------------------------------------- YAML


def load_yaml(path: Path) -> Node:
    """The root mapping of a YAML file."""
    return parse_yaml(read_text(path), file=str(path))


def parse_yaml(text: str, *, file: str) -> Node:
    """The root mapping of one YAML document."""
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
    root = Node(document.root, document)
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

    def compose(self) -> Document:
        empty = Document(root=YamlMapping({}, {}), file=self.file, line=1)
        document: Document | None = None
        for event in self.events:
            if isinstance(event, yaml.NodeEvent):
                if document is not None:
                    raise self._refuse(event, "has a second document", "keep one document per file")
                document = Document(root=self._value(event), file=self.file, line=self._position(event)[1])
        return empty if document is None or document.root is None else document

    def _position(self, event: yaml.Event) -> Position:
        return self.file, None if event.start_mark is None else event.start_mark.line + 1

    def _refuse(self, event: yaml.Event, problem: str, hint: str, value: object = None) -> UserError:
        file, line = self._position(event)
        field = show_field(tuple(self.path)) or "YAML"
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
        self.size += 1
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event)
        else:
            value = self._list() if isinstance(event, yaml.SequenceStartEvent) else self._mapping()
            if self.size - before > MAX_NODES:
                raise self._refuse(
                    event, f"has more than {MAX_NODES:,} values", "use fewer values or aliases"
                )
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
        self.size += anchored[1]
        return anchored[0]

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
