"""Small parts of a page: escaped text, percentages, keys of colours, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from optimus.render.picture import clean


def text(words: object) -> str:
    """Words that may hold anything, as text of the page or of an attribute."""
    return clean(str(words))


def percent(share: float, digits: int = 0) -> str:
    """`81 %`, with a space as in all titles."""
    return f"{100 * share:.{digits}f} %"


def section(name: str, title: str, *body: str) -> str:
    """A picture under the sentence that it proves."""
    inside = "\n".join(part for part in body if part)
    return f"<section id='{name}'>\n<h2>{text(title)}</h2>\n{inside}\n</section>"


def note(words: str) -> str:
    """A remark below a picture."""
    return f"<p class='note'>{text(words)}</p>"


def key(parts: Iterable[tuple[str, str]]) -> str:
    """Swatches (class of the colour, words) in one line."""
    items = "".join(f"<li><i class='{name}'></i>{text(words)}</li>" for name, words in parts)
    return f"<ul class='key'>{items}</ul>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, name: str = "") -> str:
    """A table whose first `left` columns are words; the others are figures."""
    head = "".join(
        f"<th{' class=w' if at < left else ''}>{text(cell)}</th>" for at, cell in enumerate(header)
    )
    lines = [
        "<tr>"
        + "".join(f"<td{' class=w' if at < left else ''}>{text(cell)}</td>" for at, cell in enumerate(row))
        + "</tr>"
        for row in rows
    ]
    what = f" class='{name}'" if name else ""
    return (
        f"<div class='scroll'><table{what}><thead><tr>{head}</tr></thead>\n<tbody>\n"
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


def axis(last: float, unit: str, *, first: float = 0.0) -> str:
    """Ticks of a horizontal axis at round figures, as shares of its width."""
    step = tick_of(last - first)
    digits = max(0, -int(f"{step:e}".partition("e")[2]))
    places = range(ceil(first / step - 1e-9), int(last / step + 1e-9) + 1)
    ticks = [
        f"<span style='left:{100 * (place * step - first) / (last - first):.3f}%'>{place * step:.{digits}f}"
        f"{' ' + unit if place == places[0] else ''}</span>"
        for place in places
    ]
    return f"<div class='axis'>{''.join(ticks)}</div>"


def line_at(share: float, words: str) -> str:
    """A vertical line over a chart, its words above it and not beyond the edge."""
    side = " class='end'" if share > 0.88 else ""
    return f"<u style='left:{100 * share:.3f}%'><span{side}>{text(words)}</span></u>"


def tick_of(longest: float, count: int = 6) -> float:
    """A round distance between ticks, so that there are at most `count` of them."""
    rough = longest / count
    power = 10.0 ** int(f"{rough:e}".partition("e")[2])
    return next(power * nice for nice in (1.0, 2.0, 5.0, 10.0) if power * nice >= rough)
