"""Draws systems as an SVG: a row per stage, time to the right, and idle time tinted by its cause.

Area is time: what fills a box is stacked in it by its share of the box's time, so that TP bubbles of 300 us
show in a picture of seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

import numpy as np

from optimus.errors import DoesNotFit, UserError, show_value
from optimus.planner.compare import Comparison
from optimus.planner.systems.base import SimulatedSystem
from optimus.render.boxes import (
    ENCODER,
    IDLE_DP,
    IDLE_PP,
    IDLE_TP,
    LLM,
    OPTIMIZER,
    STACK,
    TRAFFIC,
    Box,
    Fill,
    Row,
    boxes_of,
    device_rows,
)

MAX_BYTES = 250_000  # of the file; boxes get coarser until it is smaller
BOX_PX = (8.0, 12.0, 18.0, 27.0, 40.0, 60.0)  # narrower boxes are joined up to this width
OWN_BOX_PX = 3.0  # an op at least this wide is a box of its own
STRIP_PX = 3  # height of the strip of data-parallel traffic
LINE_PX = 6.0  # boxes at least this wide have a line between them

WIDTH, LEFT, RIGHT, MARGIN = 1000, 74, 24, 16
PLOT = WIDTH - LEFT - RIGHT
UNIT = 0.25  # px of the integers in paths
FONT = "font-family='Helvetica,Arial,sans-serif'"
INK, FAINT, PAPER = "#1a1a1a", "#5f6368", "#ffffff"


_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_picture(comparison: Comparison, path: Path) -> None:
    """Draws every system of the comparison, one above the other on one time scale."""
    if not comparison.systems:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in comparison.missing.items())
        raise DoesNotFit(f"there is no system to draw: {reasons}", "name another system with --system")
    job = comparison.job
    note = f"{job.cluster.gpus} x {job.cluster.gpu.name}, preset {comparison.assumptions.name}, simulated."
    picture = timeline_svg(list(comparison.systems.values()), job=job.name, note=note)
    try:
        path.write_text(picture, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UserError(
            field="--picture", value=str(path), problem=f"cannot be written: {error.strerror}",
            hint="name a file in a folder that exists and is yours",
        ) from None  # fmt: skip


def timeline_svg(systems: Sequence[SimulatedSystem], *, job: str, note: str = "") -> str:
    """The systems' steps as one SVG of at most MAX_BYTES; the same bytes for the same systems."""
    rows = [device_rows(system) for system in systems]
    picture = ""
    for box_px in BOX_PX:
        picture = _draw(systems, rows, job, note, box_px)
        if len(picture.encode()) <= MAX_BYTES:
            break
    return picture


def headline(system: SimulatedSystem, job: str) -> str:
    """What the picture of a system says: `paper/A, stage0: 5.86 s a step, 68 % of GPU time idle`."""
    idle = 100 * system.bubbles.total / system.step_s
    text = (
        f"{show_value(job)}, {system.name}: {digits(system.step_s)} s a step, {idle:.0f} % of GPU time idle"
    )
    return text if system.fits else f"{text}; does not fit in memory"


def digits(value: float) -> str:
    """Three significant digits: 0.512, 5.86, 12.0, 1234."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:.0f}"


@dataclass(frozen=True)
class Scale:
    """Seconds to pixels, and to the integers of paths."""

    longest_s: float

    def px(self, time_s: float) -> float:
        return PLOT * time_s / self.longest_s

    def units(self, time_s: float) -> int:
        return round(self.px(time_s) / UNIT)

    def seconds(self, px: float) -> float:
        return px * self.longest_s / PLOT


def _draw(
    systems: Sequence[SimulatedSystem], rows: Sequence[Sequence[Row]], job: str, note: str, box_px: float
) -> str:
    scale = Scale(max(system.step_s for system in systems))
    body: list[str] = []
    top = MARGIN
    for system, own in zip(systems, rows, strict=True):
        body.append(svg_text(MARGIN, top + 15, headline(system, job), size=16, weight="bold"))
        top += 26
        height = max(9, min(20, 200 // len(own)))
        for row in own:
            body += row_svg(row, scale, top, height, box_px)
            top += height + STRIP_PX + 3
        body += axis_svg(scale, system.step_s, top)
        top += 38
    legend, top = _legend(_present(rows), top + 4)
    words = f"{note} Area is time: what fills a box takes that share of its time.".strip()
    body += [*legend, svg_text(MARGIN, top + 14, words, size=12, colour=FAINT)]
    title = "; ".join(headline(system, job) for system in systems)
    size = f"width='{WIDTH}' height='{top + 28}' viewBox='0 0 {WIDTH} {top + 28}'"
    head = [
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img' {FONT}>",
        f"<title>{clean(title)}</title>",
        f"<rect width='100%' height='100%' rx='6' fill='{PAPER}'/>",
    ]
    return "\n".join([*head, *body, "</svg>", ""])


def row_svg(row: Row, scale: Scale, top: int, height: int, box_px: float) -> Iterator[str]:
    """One device: its compute lane, and below it the strip of its data-parallel traffic."""
    boxes = list(boxes_of(row.intervals, scale.seconds(OWN_BOX_PX), scale.seconds(box_px)))
    tall = round(height / UNIT)
    yield svg_text(LEFT - 8, top + height - (height - 9) / 2, row.label, size=12, anchor="end")
    yield f"<g transform='translate({LEFT} {top + height}) scale({UNIT} -{UNIT})'>"
    yield f"<path fill='{IDLE_PP.colour}' d='M0 0h{scale.units(boxes[-1].end_s)}v{tall}H0z'/>"
    for place in reversed(range(len(STACK) - 1)):
        if path := _layer(boxes, place, scale, tall):
            yield f"<path fill='{STACK[place].colour}' d='{path}'/>"
    if lines := _lines(boxes, scale, tall):
        yield f"<path stroke='{PAPER}' stroke-width='2' d='{lines}'/>"
    for kind, fill in TRAFFIC.items():
        if path := _strip(row.traffic[kind], scale):
            yield f"<path fill='{fill.colour}' d='{path}'/>"
    yield "</g>"


def _layer(boxes: Sequence[Box], place: int, scale: Scale, tall: int) -> str:
    """Outlines, up to the top of one fill of the stack, of the boxes that have some of it."""
    parts: list[str] = []
    height = 0  # of the open outline; 0: none is open
    for box in boxes:
        low, high = (round(tall * sum(box.shares[:end])) for end in (place, place + 1))
        begin, end = scale.units(box.begin_s), scale.units(box.end_s)
        if end == begin:
            continue
        if high == low:
            parts += ["V0z"] if height else []
            height = 0
            continue
        parts += [] if height else [f"M{begin} 0"]
        parts += [f"v{high - height}"] if high != height else []
        parts.append(f"H{end}")
        height = high
    return "".join(parts) + ("V0z" if height else "")


def _lines(boxes: Sequence[Box], scale: Scale, tall: int) -> str:
    """Between ops wide enough to be told apart."""
    least = scale.seconds(LINE_PX)
    return "".join(
        f"M{scale.units(box.begin_s)} 0v{tall}"
        for before, box in pairwise(boxes)
        if box.is_op and before.is_op and min(box.end_s - box.begin_s, before.end_s - before.begin_s) >= least
    )


def _strip(times: Sequence[tuple[float, float]], scale: Scale) -> str:
    """Intervals as a strip below the row, joined where less than a pixel lies between."""
    joined: list[list[int]] = []
    for begin_s, end_s in times:
        begin, end = scale.units(begin_s), scale.units(end_s)
        if joined and begin - joined[-1][1] < 1 / UNIT:
            joined[-1][1] = max(joined[-1][1], end)
        elif end > begin:
            joined.append([begin, end])
    depth = round(STRIP_PX / UNIT)
    return "".join(f"M{begin} 0v-{depth}H{end}V0z" for begin, end in joined)


def axis_svg(scale: Scale, step_s: float, top: int) -> Iterator[str]:
    """Ticks up to the longest step of the picture, and where this one ends."""
    rough = scale.longest_s / 6
    power = 10.0 ** math.floor(math.log10(rough))
    tick = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough)
    digits = max(0, -math.floor(math.log10(tick)))
    end = LEFT + scale.px(step_s)
    yield f"<path stroke='{FAINT}' d='M{LEFT} {top + 1.5}H{LEFT + PLOT}'/>"
    for place in range(math.floor(scale.longest_s / tick) + 1):
        x = LEFT + scale.px(place * tick)
        yield f"<path stroke='{FAINT}' d='M{x:.1f} {top + 1.5}v4'/>"
        words = f"{place * tick:.{digits}f}" + ("" if place else " s")
        yield svg_text(x, top + 18, words, size=12, anchor="middle")
    yield f"<path stroke='{INK}' stroke-width='2' d='M{end:.1f} {top - 4}v10'/>"


def _present(rows: Sequence[Sequence[Row]]) -> list[Fill]:
    """What the picture holds, in the order of the legend."""
    devices = [row for own in rows for row in own]
    places = {int(place) for row in devices for place in np.unique(row.intervals.fill)}
    work = (*LLM.values(), *ENCODER.values(), OPTIMIZER, IDLE_TP, IDLE_PP, IDLE_DP)
    found = [fill for fill in dict.fromkeys(work) if STACK.index(fill) in places]
    return found + [fill for kind, fill in TRAFFIC.items() if any(row.traffic[kind] for row in devices)]


def _legend(fills: Sequence[Fill], top: int) -> tuple[list[str], int]:
    """A swatch and words for each fill, in as many lines as they need."""
    lines, x = [], MARGIN
    for fill in fills:
        width = 34 + round(sum(3.8 if letter in " :fijlrt" else 7.4 for letter in fill.label))
        if x + width > WIDTH - MARGIN:
            x, top = MARGIN, top + 20
        lines.append(f"<rect x='{x}' y='{top}' width='14' height='12' fill='{fill.colour}'/>")
        lines.append(svg_text(x + 19, top + 11, fill.label, size=13))
        x += width
    return lines, top + 20


def svg_text(
    x: float, y: float, words: str, *, size: int, colour: str = INK, anchor: str = "", weight: str = ""
) -> str:
    """Words at a place."""
    extra = (f" text-anchor='{anchor}'" if anchor else "") + (f" font-weight='{weight}'" if weight else "")
    return f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{colour}'{extra}>{clean(words)}</text>"


def clean(words: str) -> str:
    """Words as XML text: markup escaped, and what XML cannot hold replaced."""
    return escape(_NOT_XML.sub("?", words))
