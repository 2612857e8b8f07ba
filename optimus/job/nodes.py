"""Locates values of YAML and JSON files: nodes that know their field, file and line, and the JSON parser."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from optimus.errors import MAX_SHOWN, UserError

PATH_START = 20  # characters of a path that is too long for a line
MAX_BYTES = 1 << 20

Steps = tuple[str | int, ...]  # keys of mappings and indices of lists, from the root
Position = tuple[str | None, int | None]  # file and line

_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_SPACE = re.compile(r"[ \t\n\r]*")


# ---------------------------------------------------------------------------- nodes


class YamlMapping(dict[str, Any]):
    """Mapping of a YAML file with the position of each entry."""

    def __init__(self, entries: dict[str, Any], positions: dict[str, Position]) -> None:
        super().__init__(entries)
        self.positions = positions


class YamlList(list[Any]):
    """List of a YAML file with the position of each item."""

    def __init__(self, items: list[Any], positions: dict[int, Position]) -> None:
        super().__init__(items)
        self.positions = positions


@dataclass(frozen=True, kw_only=True, eq=False)
class ParsedDocument:
    """Parsed file. YAML containers carry positions; those of JSON are looked up in `text`."""

    root: Any
    file: str | None = None
    line: int | None = None  # of the root
    text: str | None = None  # of a JSON document
    name: str = "the file"  # of the root in error messages

    def locate(self, path: Steps) -> Position:
        """Returns file and line of the value at `path`, or of the innermost block around it."""
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
class DocumentNode:
    """Value of a document and its path from the root."""

    value: Any  # None where the document has nothing
    document: ParsedDocument
    path: Steps = ()

    @property
    def root(self) -> DocumentNode:
        return DocumentNode(self.document.root, self.document)

    @property
    def field(self) -> str:
        """Path such as `encoders[0].stack.hidden`."""
        return show_field_path(self.path) or self.document.name

    def __contains__(self, name: str) -> bool:
        return isinstance(self.value, dict) and name in self.value

    def __getitem__(self, step: str | int) -> DocumentNode:
        """Returns the entry of a mapping or the item of a list; its value is None if there is none."""
        try:
            value = self.value[step]
        except (KeyError, IndexError, TypeError):
            value = None
        return DocumentNode(value, self.document, (*self.path, step))

    def at(self, field: str) -> DocumentNode:
        """Returns the node at `encoders[0].stack.hidden` below this one."""
        node = self
        for step in parse_field_path(field):
            node = node[step]
        return node

    def entries(self) -> dict[str, DocumentNode]:
        """Returns the entries of a mapping; none for any other value."""
        return {name: self[name] for name in self.value} if isinstance(self.value, dict) else {}

    def without(self, *names: str) -> DocumentNode:
        """Returns a YAML mapping without the entries `names`; any other value as it is."""
        value = self.value
        if isinstance(value, YamlMapping):
            kept = {name: item for name, item in value.items() if name not in names}
            value = YamlMapping(kept, value.positions)
        return DocumentNode(value, self.document, self.path)

    def replaced(self, value: Any, position: Position | None = None) -> DocumentNode:
        """Returns the node in a copy of a YAML document that has `value`, from `position`, here."""
        blocks = [self.document.root]
        for step in self.path[:-1]:
            blocks.append(blocks[-1][step])
        root = value
        for step in reversed(self.path):
            block = blocks.pop()
            positions = dict(block.positions) if position is None else {**block.positions, step: position}
            root, position = _with_item(block, step, root, positions), None
        return DocumentNode(value, replace(self.document, root=root), self.path)

    def error(self, problem: str, hint: str, value: object = None, *, shown: bool = True) -> UserError:
        """Returns an error at this node; it shows `value`, or else the node's own if it is a scalar."""
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


def make_argument_node(name: str, value: Any) -> DocumentNode:
    """Returns a node for a value given on the command line or by a caller, without a file."""
    return DocumentNode(value, ParsedDocument(root=value, name=name))


NO_FILE = make_argument_node("job", YamlMapping({}, {}))  # root of a job made in memory


def merge_yaml(base: Any, over: Any) -> Any:
    """Returns the YAML value `base` with everything that `over` states, mapping by mapping."""
    if not (isinstance(base, YamlMapping) and isinstance(over, YamlMapping)):
        return over
    entries = dict(base)
    for name, value in over.items():
        entries[name] = merge_yaml(base[name], value) if name in base else value
    return YamlMapping(entries, {**base.positions, **over.positions})


def parse_field_path(field: str) -> Steps:
    """Parses `encoders[0].name` into ("encoders", 0, "name")."""
    return tuple(int(index) if index else name for name, index in _STEP.findall(field))


def show_field_path(path: Steps) -> str:
    """Formats ("encoders", 0, "name") as `encoders[0].name`; a long path keeps its start and its key."""
    names = (step if isinstance(step, int) or step.isprintable() else repr(step) for step in path)
    text = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)
    text = " ".join(text.removeprefix(".").split())
    return text if len(text) <= MAX_SHOWN else f"{text[:PATH_START]}...{text[PATH_START + 3 - MAX_SHOWN :]}"


# ---------------------------------------------------------------------------- files


def is_file(path: Path) -> bool:
    """Tells whether a path is that of a file; one that the system cannot look up is not."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_dir(path: Path) -> bool:
    """Tells whether a path is that of a directory; one that the system cannot look up is not."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def read_text(path: Path, *, limit: int = MAX_BYTES) -> str:
    """Reads a regular UTF-8 file of at most `limit` bytes."""

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


def parse_json(text: str, *, file: str, line: int = 1, name: str = "JSON", hint: str) -> DocumentNode:
    """Parses the root object of a JSON document that begins on `line`: no NaN, no key twice, bounded depth.

    `hint` is given for a text that is not JSON; `name` is the root's in error messages.
    """

    def refuse(problem: str, hint: str, *, field: str = "JSON", line: int | None = None) -> UserError:
        return UserError(field=field, problem=problem, hint=hint, file=file, line=line)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            twice = next(key for key, count in counts.items() if count > 1)
            raise refuse("is given twice", "keep one", field=show_field_path((twice,)))
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
    return DocumentNode(root, ParsedDocument(root=root, file=file, line=line, text=text, name=name))


def _json_line(text: str, path: Steps) -> int:
    """Returns the number of lines before the value at `path`, or before the innermost block around it."""
    start = value = _skip_space(text, 0)
    for step in path:
        entry = _json_entry(text, value, step)
        if entry is None:
            break
        start, value = entry
    return text.count("\n", 0, start)


def _json_entry(text: str, at: int, step: str | int) -> tuple[int, int] | None:
    """Returns the offsets of the entry `step` of the container at `at`, and of its value."""
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
