"""Strict JSON whose values are handed out typed, so that whatever is wrong is named by its field."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from math import isfinite
from typing import Any, TypeVar

from optimus.errors import UserError, nearest, show_value

INT32, INT64 = 2**31 - 1, 2**63 - 1
MAX_NUMBER = 1e18
MAX_CHOICES = 60  # that are looked at for a hint
MAX_DEPTH = 20  # of values that nothing depends on
T = TypeVar("T")


class Json:
    """A value, and where it stands: below `above`, as its entry `name`."""

    __slots__ = ("above", "file", "name", "text", "value")

    def __init__(self, value: Any, name: str | int = "", above: Json | None = None) -> None:
        self.value, self.name, self.above = value, name, above
        self.file, self.text = "", ""  # known to the root alone

    # ------------------------------------------------------------------------ where it stands

    @property
    def path(self) -> list[Json]:
        """From the root, which has no name, to this value."""
        return [self] if self.above is None else [*self.above.path, self]

    @property
    def field(self) -> str:
        names = [f"[{at.name}]" if isinstance(at.name, int) else f".{at.name}" for at in self.path[1:]]
        text = "".join(names).removeprefix(".") or "plan"
        return text if text.isprintable() else repr(text)[1:-1]

    def line(self, *texts: str) -> int | None:
        """The line of this value, or of the nearest around it that opens a line; then of texts below it."""
        root, *path = self.path
        names = [f"\n{_quoted(step.name)}:" for step in path if isinstance(step.name, str)]
        at = 0
        for wanted in [*names, *map(_quoted, texts)]:
            found = root.text.find(wanted, at)
            at = at if found < 0 else found + 1
        return root.text.count("\n", 0, at) + 1 if at else None

    def error(self, problem: str, hint: str, *, shown: bool = True, line: int | None = None) -> UserError:
        whole = isinstance(self.value, dict | list)
        return UserError(
            field=show_value(self.field),
            problem=problem,
            hint=hint,
            value=None if whole or not shown else show_value(json.dumps(self.value)),
            file=self.path[0].file,
            line=self.line() if line is None else line,
        )

    # ------------------------------------------------------------------------ what it holds

    def object(self, names: Iterable[str]) -> dict[str, Json]:
        """The entries of an object that has these, all of them and no others."""
        found, known = self.entries(), dict.fromkeys(names)
        for name, entry in found.items():
            if name not in known:
                raise entry.error("is not known here", known_names(name, known), shown=False)
        for name in known:
            if name not in found:
                missing = Json(None, name, self)
                raise missing.error("is missing", f"add {name}, or plan again", shown=False)
        return found

    def entries(self) -> dict[str, Json]:
        """The entries of an object, whatever their printable names."""
        if not isinstance(self.value, dict):
            raise self.error("is not an object", "write {...}")
        found = {name: Json(value, name, self) for name, value in self.value.items()}
        for name, entry in found.items():
            if not name.isprintable():
                raise entry.error("has unprintable characters in its name", "rename it", shown=False)
        return found

    def items(self, count: int | None = None, what: str = "items") -> list[Json]:
        """The items of a list, which has `count` of them if that is given."""
        if not isinstance(self.value, list):
            raise self.error("is not a list", "write [...]")
        if count is not None and len(self.value) != count:
            raise self.error(f"has {len(self.value):,} {what}, not {count:,}", f"give {count:,} {what}")
        return [Json(value, place, self) for place, value in enumerate(self.value)]

    def whole(self, least: int = 0, most: int = INT64) -> int:
        if type(self.value) is not int or not least <= self.value <= most:
            raise self.error(f"is not a whole number from {least} to {most}", "correct it, or plan again")
        return self.value

    def wholes(self, most: int = INT32, least: int = 0) -> tuple[int, ...]:
        """A list of whole numbers, looked at all at once."""
        values = self.items()
        if set(map(type, self.value)) <= {int} and all(least <= value <= most for value in self.value):
            return tuple(self.value)
        return tuple(value.whole(least, most) for value in values)

    def number(self) -> float:
        """Seconds or a share: finite, not negative."""
        if type(self.value) not in (int, float) or not 0 <= self.value <= MAX_NUMBER:
            raise self.error("is not a number, 0 or more", "correct it, or plan again")
        return float(self.value)

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.error("is not true or false", "write true or false")
        return self.value

    def word(self) -> str:
        """Printable text."""
        if not isinstance(self.value, str) or not self.value.isprintable():
            raise self.error("is not printable text", "write it in quotes, without control characters")
        return self.value

    def one_of(self, choices: Mapping[str, T], what: str) -> T:
        """What the text stands for."""
        if not isinstance(self.value, str) or self.value not in choices:
            raise self.error(f"is not a known {what}", known_names(str(self.value), choices))
        return choices[self.value]

    def plain(self, depth: int = 0) -> Any:
        """The value as it is: nothing depends on it, but it can be written again."""
        if depth > MAX_DEPTH:
            raise self.error(f"is nested more than {MAX_DEPTH} deep", "make it flatter")
        if isinstance(self.value, dict):
            names = [Json(name, name, self).plain(depth + 1) for name in self.value]
            return {name: Json(self.value[name], name, self).plain(depth + 1) for name in names}
        if isinstance(self.value, list):
            return [item.plain(depth + 1) for item in self.items()]
        if isinstance(self.value, str) and any("\ud800" <= letter <= "\udfff" for letter in self.value):
            raise self.error("has half a character", "write it as UTF-8")
        if type(self.value) is int:
            return self.whole(-INT64)
        if isinstance(self.value, float) and not isfinite(self.value):
            raise self.error("is not a finite number", "write a finite number")
        return self.value


def known_names(name: str, choices: Iterable[str]) -> str:
    """A hint that stays short, however many there are."""
    return nearest(name[:60], list(islice(choices, MAX_CHOICES)))


def _quoted(text: str | int) -> str:
    return json.dumps(text, ensure_ascii=False)


def read_json(text: str, file: str) -> Json:
    """The root of a JSON document: no key twice, no NaN, nothing nested without end."""

    def refuse(problem: str, hint: str, *, field: str = "JSON", line: int | None = None) -> UserError:
        return UserError(field=field, problem=problem, hint=hint, file=file, line=line)

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(found)
        if len(entries) < len(found):
            counts = Counter(name for name, _ in found)
            twice = next(name for name, count in counts.items() if count > 1)
            raise refuse("is given twice", "keep one", field=show_value(repr(twice)[1:-1]))
        return entries

    def constant(name: str) -> Any:
        raise refuse(f"has {name}, which is not a finite number", "write a finite number")

    try:
        root = Json(json.loads(text, object_pairs_hook=pairs, parse_constant=constant))
    except json.JSONDecodeError as error:
        problem, hint = f"is not valid: {error.msg}", "undo the last edit, or plan again"
        raise refuse(problem, hint, line=error.lineno) from None
    except (ValueError, RecursionError, MemoryError):
        problem = "is nested too deeply, or has too long a number"
        raise refuse(problem, "use a file that Optimus wrote") from None
    root.file, root.text = file, text
    return root
