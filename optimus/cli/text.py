"""Lays out text within the width of the terminal: tables, and paragraphs with a label in the margin."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from optimus.errors import shorten

if TYPE_CHECKING:
    from optimus.ir.plan import Plan

PIPED_WIDTH = 80
MIN_WIDTH = 40
MARGIN = 15  # columns before a labelled paragraph
BREAK = r"\s+(?!(?:s|ms|us|GB|MB|GB/s|%)(?:\W|$))"  # between words, but not before a unit
MAX_CELL = 200  # characters of a table's cell
SHORT_MARGIN = 6  # columns before the closing lines: wrote, note, next


def _terminal_width() -> int:
    """Returns the columns of the terminal, or PIPED_WIDTH when standard output is piped."""
    return max(MIN_WIDTH, shutil.get_terminal_size((PIPED_WIDTH, 24)).columns)


def wrap_text(label: str, text: str, *, indent: int = MARGIN) -> list[str]:
    """Breaks `text` between words and puts `label` in the margin of its first line."""
    margin = label.ljust(indent - 1) + " " if label else " " * indent
    return _fill(re.split(BREAK, shorten(text.strip())), margin, " " * indent)


def format_plan_title(plan: Plan, *details: str) -> list[str]:
    """Names a plan, its GPUs and its layouts, and further details."""
    layouts = (f"{name} {module.layout}" for name, module in plan.modules.items())
    return wrap_text("plan", "; ".join([f"{plan.name} on {plan.ranks.world} GPUs", *layouts, *details]))


def wrap_remark(text: str) -> list[str]:
    """Breaks a remark below a table."""
    return wrap_text("", text, indent=2)


def wrap_closing_line(label: str, text: str) -> list[str]:
    """Breaks a closing line, such as a note or the name of a file that was written."""
    return wrap_text(label, text, indent=SHORT_MARGIN)


def format_next_commands(*commands: str, label: str = "next") -> list[str]:
    """Lists commands to try next; one that is too long is continued before a flag, as a shell reads it."""
    lines: list[str] = []
    for command in commands:
        margin = " " * SHORT_MARGIN if lines else label.ljust(SHORT_MARGIN)
        lines += _fill(re.split(r" (?=--)", command), margin, " " * (SHORT_MARGIN + 4), end=" \\")
    return lines


def wrap_usage(line: str) -> list[str]:
    """Breaks a usage line between its arguments."""
    return _fill(re.findall(r"\[[^\]]*\]|\S+", line), "", " " * 7)


def _fill(words: Iterable[str], margin: str, next_margin: str, *, end: str = "") -> list[str]:
    """Joins words into lines of at most the terminal's width; `end` marks a line that is continued."""
    lines, line = list[str](), margin
    for word in words:
        if line not in (margin, next_margin) and len(line) + len(word) + len(end) > _terminal_width():
            lines.append(line.rstrip() + end)
            line = next_margin
        line += f"{word} "
    return [*lines, line.rstrip()]


def align_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, breaks: Sequence[int] = ()
) -> list[str]:
    """Aligns the first `left` columns to the left and the others to the right.

    A table wider than the terminal is split into several, at the columns `breaks` and wherever else it must
    be; each repeats the left columns.
    """
    header, rows = _shorten_cells(header), [_shorten_cells(row) for row in rows]
    widths = [max(len(row[place]) for row in (header, *rows)) for place in range(len(header))]
    lines: list[str] = []
    blocks = _split_columns(widths, left, breaks)
    for block in blocks:
        shown = [row for row in rows if len(blocks) == 1 or any(row[place] for place in block)]
        lines += [""] if lines else []
        for row in (header, *shown):
            cells = [row[place].ljust(widths[place]) for place in range(left)]
            cells += [row[place].rjust(widths[place]) for place in block]
            lines.append("  " + "  ".join(cells).rstrip())
    return lines


def _shorten_cells(cells: Sequence[str]) -> list[str]:
    return [shorten(cell, MAX_CELL) for cell in cells]


def _split_columns(widths: Sequence[int], left: int, breaks: Sequence[int]) -> list[list[int]]:
    """Groups the columns after the first `left` into tables that fit the terminal."""
    room = _terminal_width() - sum(2 + width for width in widths[:left])
    if sum(2 + width for width in widths[left:]) <= room:
        return [list(range(left, len(widths)))]
    blocks, used = list[list[int]]([[]]), 0
    for place in range(left, len(widths)):
        needed = 2 + widths[place]
        if blocks[-1] and (place in breaks or used + needed > room):
            blocks.append([])
            used = 0
        blocks[-1].append(place)
        used += needed
    return blocks


def format_time_gap(a_s: float, b_s: float) -> str:
    """Says how far two times are apart; a gap below a nanosecond counts as equal."""
    gap_s = abs(a_s - b_s)
    return "within 1e-9 s" if gap_s <= 1e-9 else f"{gap_s:.1e} s apart"
