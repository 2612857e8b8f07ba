"""Typed errors that name the field, both numbers and the nearest valid choice."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice
from typing import Any

MAX_CHOICES = 4000  # that a hint looks at
MAX_LISTED = 30  # that it lists in full
FEW_LISTED = 5  # that it lists of more
MAX_SHOWN = 60  # characters of a value
MAX_LINE = 4096  # characters of a line or a paragraph: a path is not longer


class OptimusError(Exception):
    """Anything Optimus raises on purpose."""


class UserError(OptimusError):
    """A mistake in what the user wrote: where it stands, what is wrong, what would be right."""

    def __init__(
        self,
        *,
        field: str,
        problem: str,
        hint: str,
        value: object = None,
        file: str | None = None,
        line: int | None = None,
    ) -> None:
        self.field, self.value, self.problem, self.hint = field, value, problem, hint
        self.file, self.line = file, line
        super().__init__(field, problem)

    def __reduce__(self) -> tuple[Any, ...]:
        return _user_error, (self.field, self.problem, self.hint, self.value, self.file, self.line)

    def __str__(self) -> str:
        where = "" if self.file is None else show_line(self.file)
        if self.file is not None and self.line is not None:
            where += f":{self.line}"
        what = show_line(self.field)
        if self.value is not None:
            what += f" = {show_value(self.value)}"
        head = " ".join(part for part in (where, what, show_line(self.problem)) if part)
        return f"error: {head}\nhint: {show_line(self.hint)}"


def _user_error(
    field: str, problem: str, hint: str, value: object, file: str | None, line: int | None
) -> UserError:
    """Builds an error from its pickled state, e.g. from a worker process."""
    return UserError(field=field, problem=problem, hint=hint, value=value, file=file, line=line)


class DoesNotFit(OptimusError):
    """The answer is no: nothing of what was asked for fits or can run."""

    def __init__(self, problem: str, hint: str) -> None:
        self.problem, self.hint = problem, hint
        super().__init__(problem, hint)

    def __str__(self) -> str:
        return f"no: {show_line(self.problem)}\nhint: {show_line(self.hint)}"


def nearest(name: str, choices: Iterable[str]) -> str:
    """A hint that proposes the closest of `choices` to what was written, then lists them."""
    known = sorted(islice(choices, MAX_CHOICES))
    close = difflib.get_close_matches(name[:MAX_SHOWN], known, n=1, cutoff=0.5)
    listed = one_of(known)
    if len(known) > MAX_LISTED:
        listed = f"{', '.join(known[:FEW_LISTED])} and {len(known) - FEW_LISTED} more"
    return f"did you mean {close[0]}? known: {listed}" if close and len(known) > 1 else f"use {listed}"


def one_of(choices: Iterable[object]) -> str:
    """`1, 2, 4 or 8`."""
    words = [str(choice) for choice in choices]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} or {words[-1]}"


def escape_unprintable(text: str) -> str:
    """Escapes control codes, overrides of the writing direction and lone surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str, limit: int = MAX_LINE) -> str:
    """Returns a text of at most `limit` characters: its start and its end."""
    if len(text) <= limit:
        return text
    start = (limit - 3) * 2 // 3
    return f"{text[:start]}...{text[start + 3 - limit :]}"


def show_line(text: str) -> str:
    """Returns a text of others as a terminal may print it: on one line, of bounded length."""
    return shorten(escape_unprintable(shorten(text).expandtabs()))


def show_value(value: object) -> str:
    """A value as the user would recognise it, never longer than a line."""
    text = value if isinstance(value, str) else repr(value)
    text = escape_unprintable(" ".join(text[:MAX_LINE].split()))
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
