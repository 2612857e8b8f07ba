"""Lays out text for the terminal: aligned columns and paragraphs with a label in the margin."""

from __future__ import annotations

from collections.abc import Sequence


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Aligns the first `left` columns to the left and the others to the right."""
    widths = [max(len(row[place]) for row in (header, *rows)) for place in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def wrap(label: str, text: str, *, width: int = 100, indent: int = 15) -> list[str]:
    """Breaks `text` between words and puts `label` in the margin of its first line."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width - indent:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    lines.append(line)
    margins = [label.ljust(indent), *[" " * indent] * (len(lines) - 1)]
    return [f"{margin}{part}".rstrip() for margin, part in zip(margins, lines, strict=True)]


def time_gap(a_s: float, b_s: float) -> str:
    """Says how far two times are apart; a gap below a nanosecond counts as equal."""
    gap_s = abs(a_s - b_s)
    return "within 1e-9 s" if gap_s <= 1e-9 else f"{gap_s:.1e} s apart"
