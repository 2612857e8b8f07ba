"""Builds small HTML and SVG elements: escaped text, tables, legends, axes."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape
from math import ceil

FONT = "font-family='Helvetica,Arial,sans-serif'"
INK, FAINT, PAPER = "#1a1a1a", "#5f6368", "#ffffff"
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape_markup(value: object) -> str:
    """Escapes markup and replaces characters that XML cannot hold, for text and attributes."""
    return escape(_NOT_XML.sub("?", str(value)))


def render_content_policy(script: str = "") -> str:
    """Returns the policy of a page: it loads nothing, and runs no script but the one given."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"'sha256-{digest}'" if script else "'none'"
    rules = ["default-src 'none'", "style-src 'unsafe-inline'", "img-src data:", f"script-src {allowed}"]
    policy = "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])
    return f'<meta http-equiv="Content-Security-Policy" content="{policy}">'


def render_section(name: str, title: str, *body: str) -> str:
    """Returns a chart under its title, a sentence that the chart proves."""
    inside = "\n".join(part for part in body if part)
    return f"<section id='{name}'>\n<h2>{escape_markup(title)}</h2>\n{inside}\n</section>"


def render_note(words: str) -> str:
    """Returns a remark below a chart."""
    return f"<p class='note'>{escape_markup(words)}</p>"


def render_legend(parts: Iterable[tuple[str, str]]) -> str:
    """Returns swatches (CSS class of the colour, label) in one line."""
    items = "".join(f"<li><i class='{name}'></i>{escape_markup(words)}</li>" for name, words in parts)
    return f"<ul class='key'>{items}</ul>"


def render_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, name: str = ""
) -> str:
    """Returns a table whose first `left` columns are words; the others are figures."""
    head = "".join(
        f"<th{' class=w' if at < left else ''}>{escape_markup(cell)}</th>" for at, cell in enumerate(header)
    )
    lines = [
        "<tr>"
        + "".join(
            f"<td{' class=w' if at < left else ''}>{escape_markup(cell)}</td>" for at, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    ]
    what = f" class='{name}'" if name else ""
    return (
        f"<div class='scroll'><table{what}><thead><tr>{head}</tr></thead>\n<tbody>\n"
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


def render_axis(last: float, unit: str, *, first: float = 0.0) -> str:
    """Returns the ticks of a horizontal axis at round figures, as shares of its width."""
    step = choose_tick_spacing(last - first)
    digits = max(0, -int(f"{step:e}".partition("e")[2]))
    places = range(ceil(first / step - 1e-9), int(last / step + 1e-9) + 1)
    ticks = [
        f"<span style='left:{100 * (place * step - first) / (last - first):.3f}%'>{place * step:.{digits}f}"
        f"{' ' + unit if place == places[0] else ''}</span>"
        for place in places
    ]
    return f"<div class='axis'>{''.join(ticks)}</div>"


def render_marker_line(share: float, words: str) -> str:
    """Returns a vertical line over a chart, with its label above it and inside the edge."""
    side = " class='end'" if share > 0.88 else ""
    return f"<u style='left:{100 * share:.3f}%'><span{side}>{escape_markup(words)}</span></u>"


def choose_tick_spacing(longest: float, count: int = 6) -> float:
    """Returns a round distance between ticks, so that there are at most `count` of them."""
    rough = longest / count
    power = 10.0 ** int(f"{rough:e}".partition("e")[2])
    return next(power * nice for nice in (1.0, 2.0, 5.0, 10.0) if power * nice >= rough)


def render_svg_text(
    x: float, y: float, words: str, *, size: int, colour: str = INK, anchor: str = "", weight: str = ""
) -> str:
    """Returns an SVG text element."""
    extra = (f" text-anchor='{anchor}'" if anchor else "") + (f" font-weight='{weight}'" if weight else "")
    place = f"x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{colour}'{extra}"
    return f"<text {place}>{escape_markup(words)}</text>"


def render_titled_svg(title: str, body: Iterable[str], *, width: int, height: int) -> str:
    """Returns an SVG file: a title of two lines, cut at its first semicolon, above `body`."""
    head, _, rest = title.partition("; ")
    size = f"width='{width}' height='{height}' viewBox='0 0 {width} {height}'"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img' {FONT}>",
        f"<title>{escape_markup(title)}</title>",
        f"<rect width='100%' height='100%' rx='6' fill='{PAPER}'/>",
        render_svg_text(16, 26, head, size=16, weight="bold"),
        render_svg_text(16, 46, rest, size=14),
        *body,
        "</svg>",
        "",
    ]
    return "\n".join(parts)
