"""Words and columns for the terminal, the same when piped."""

from __future__ import annotations

from collections.abc import Sequence

GB = 1e9


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Aligned columns, the first `left` to the left, the others to the right."""
    widths = [max(len(row[place]) for row in (header, *rows)) for place in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def gigabytes(size_bytes: float) -> str:
    """Decimal gigabytes, one digit."""
    return f"{size_bytes / GB:.1f}"


def seconds(value_s: float) -> str:
    """Four significant digits, never in exponents."""
    if value_s >= 1000:
        return f"{value_s:.0f}"
    return f"{value_s:.3f}" if value_s < 10 else f"{value_s:.2f}"


def apart(a_s: float, b_s: float) -> str:
    """How far two times are apart; less than a nanosecond is nothing that anybody measures."""
    gap = abs(a_s - b_s)
    return "within 1e-9 s" if gap <= 1e-9 else f"{gap:.1e} s apart"


def billions(count: float) -> str:
    """Parameters as people say them: 0.67B, 72.7B, 1026B."""
    value = count / 1e9
    return f"{value:.0f}B" if value >= 100 else f"{value:.3g}B"


def wrap(label: str, text: str, *, width: int = 100, indent: int = 15) -> list[str]:
    """`label` in the margin, `text` beside it, broken between words."""
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
