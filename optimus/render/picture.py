"""Draws systems as an SVG: a row per stage, time to the right, and idle time tinted by its cause.

Area is time. A box that is wide enough is one op of one microbatch; narrower ones share a box. What
fills a box is stacked in it by its share of the box's time, so that TP bubbles of 300 us show in a picture
of seconds.
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
from optimus.program.op import Floats, Ints, Kind, Lane
from optimus.schedule.bubbles import _is_layer_collective, _last_wait
from optimus.schedule.systems import System
from optimus.search.compare import Comparison

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


@dataclass(frozen=True)
class Fill:
    """What an interval of a compute lane is spent on: its words and its colour."""

    label: str
    colour: str


# Okabe and Ito's colours, which colour-blind readers tell apart; within a module dark is late.
ENCODER = {
    Kind.F: Fill("encoder forward", "#e69f00"),
    Kind.R: Fill("encoder recompute", "#f7d68a"),
    Kind.B: Fill("encoder backward", "#c2500a"),
    Kind.I: Fill("encoder backward", "#c2500a"),
    Kind.W: Fill("encoder weight gradient", "#7a2f04"),
}
LLM = {
    Kind.F: Fill("LLM forward", "#56b4e9"),
    Kind.R: Fill("LLM recompute", "#b5dcf5"),
    Kind.B: Fill("LLM backward", "#0072b2"),
    Kind.I: Fill("LLM backward", "#0072b2"),
    Kind.W: Fill("LLM weight gradient", "#00395c"),
}
OPTIMIZER = Fill("optimizer", "#4d4d4d")
IDLE_TP = Fill("idle: waits for TP", "#e8bcd4")
IDLE_DP = Fill("idle: waits for DP", "#93d3bd")
IDLE_PP = Fill("idle: waits for the pipeline", "#e3e3e3")
# From the bottom of a box to its top.
STACK = tuple(dict.fromkeys([*ENCODER.values(), *LLM.values(), OPTIMIZER, IDLE_TP, IDLE_DP, IDLE_PP]))
TRAFFIC = {
    Kind.GATHER: Fill("DP all-gather", "#00b383"),
    Kind.REDUCE: Fill("DP reduce-scatter", "#00543d"),
}
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
GAP = -1  # `owner` of an interval between ops


@dataclass(frozen=True, eq=False)
class Intervals:
    """A device's whole step as consecutive intervals; equal `owner` is one op."""

    begin_s: Floats
    end_s: Floats
    fill: Ints  # place in STACK
    owner: Ints


@dataclass(frozen=True, eq=False)
class Row:
    """One device, before it is drawn."""

    label: str
    intervals: Intervals
    traffic: dict[Kind, list[tuple[float, float]]]


@dataclass(frozen=True)
class Box:
    """A part of a row, with the share of its time that each fill takes."""

    begin_s: float
    end_s: float
    shares: tuple[float, ...]  # by place in STACK
    is_op: bool


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


def timeline_svg(systems: Sequence[System], *, job: str, note: str = "") -> str:
    """The systems' steps as one SVG of at most MAX_BYTES; the same bytes for the same systems."""
    rows = [_rows(system) for system in systems]
    picture = ""
    for box_px in BOX_PX:
        picture = _draw(systems, rows, job, note, box_px)
        if len(picture.encode()) <= MAX_BYTES:
            break
    return picture


def headline(system: System, job: str) -> str:
    """What the picture of a system says: `paper/A, stage0: 5.86 s a step, 68 % of GPU time idle`."""
    idle = 100 * system.bubbles.total / system.step_s
    text = (
        f"{show_value(job)}, {system.name}: {_digits(system.step_s)} s a step, {idle:.0f} % of GPU time idle"
    )
    return text if system.fits else f"{text}; does not fit in memory"


def _digits(value: float) -> str:
    """Three significant digits: 0.512, 5.86, 12.0, 1234."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:.0f}"


# ---------------------------------------------------------------- from a timeline to intervals


def _rows(system: System) -> list[Row]:
    """Every device of a system."""
    waits = _waits(system)
    return [
        Row(
            label=_label(system, device),
            intervals=_intervals(system, device, waits),
            traffic={kind: _traffic(system, device, kind) for kind in TRAFFIC},
        )
        for device in range(system.schedule.num_devices)
    ]


def _label(system: System, device: int) -> str:
    count = system.schedule.num_devices
    if count == 1:
        return "every GPU"
    return "encoders" if system.name == "separate-gpus" and device == count - 1 else f"stage {device}"


def _waits(system: System) -> tuple[Floats, Floats, Floats]:
    """Of every op: when its parameters were there, and when the collective it waited for began and ended.

    The rules are those of `bubbles`; an optimizer waits for no parameters but for its device's reductions.
    """
    schedule, timeline = system.schedule, system.timeline
    collective = _last_wait(schedule, timeline, _is_layer_collective(schedule))
    gather = _last_wait(schedule, timeline, schedule.kind == Kind.GATHER)
    begin, end = np.append(timeline.start_s, 0.0), np.append(timeline.finish_s, 0.0)  # [-1]: no wait
    gathered = np.maximum(end[gather], end[np.append(gather, -1)[collective]])
    finish = schedule.kind == Kind.FINISH
    reduced = np.array([_reduced_s(system, device) for device in range(schedule.num_devices)])
    return (
        np.where(finish, reduced[schedule.device], gathered),
        begin[collective],
        np.where(finish, 0.0, end[collective]),
    )


def _reduced_s(system: System, device: int) -> float:
    schedule = system.schedule
    reduces = (schedule.device == device) & (schedule.kind == Kind.REDUCE)
    return float(system.timeline.finish_s[reduces].max(initial=0.0))


def _intervals(system: System, device: int, waits: tuple[Floats, Floats, Floats]) -> Intervals:
    """Work and idle time of one device, from 0 to the end of the step, in order."""
    schedule, timeline = system.schedule, system.timeline
    ops = np.flatnonzero((schedule.device == device) & (schedule.lane == Lane.COMPUTE))
    begin, end = timeline.start_s[ops], timeline.finish_s[ops]
    left = np.concatenate([[0.0], end])[:-1]
    # Before each op: a wait for parameters, for the pipeline, for a collective, for the pipeline or the host.
    ready, collective_begin, collective_end = (times[ops] for times in waits)
    first = np.maximum(left, np.minimum(begin, ready))
    second = np.clip(collective_begin, first, begin)
    third = np.maximum(second, np.minimum(begin, collective_end))
    edges = np.stack([left, first, second, third, begin, end], axis=1)
    idle = [STACK.index(cause) for cause in (IDLE_DP, IDLE_PP, IDLE_TP, IDLE_PP)]
    fills = np.stack([*(np.full(len(ops), cause) for cause in idle), _fills(system, ops)], axis=1)
    owner = _owners(system, ops)
    same = np.concatenate([[False], owner[1:] == owner[:-1]])[: len(ops)]
    owners = np.stack([*([np.where(same, owner, GAP)] * len(idle)), owner], axis=1)
    last = float(end[-1]) if len(ops) else 0.0
    tail = [last, max(last, _reduced_s(system, device)), timeline.step_s]
    begins, ends = np.append(edges[:, :-1], tail[:-1]), np.append(edges[:, 1:], tail[1:])
    some = ends > begins
    return Intervals(
        begin_s=begins[some],
        end_s=ends[some],
        fill=np.append(fills, idle[:2])[some],
        owner=np.append(owners, [GAP, GAP])[some],
    )


def _fills(system: System, ops: Ints) -> Ints:
    """Places in STACK of what ops do."""
    schedule = system.schedule
    by_module = [LLM if name == "llm" else ENCODER for name in schedule.modules]
    table = [[STACK.index(fills.get(kind, OPTIMIZER)) for kind in Kind] for fills in by_module]
    return np.array(table, np.int64)[schedule.module[ops], schedule.kind[ops]]


def _owners(system: System, ops: Ints) -> Ints:
    """A number that changes wherever another op begins: F, backward or W of a chunk and microbatch."""
    schedule = system.schedule
    part = np.array([{Kind.F: 0, Kind.W: 2, Kind.FINISH: 3}.get(kind, 1) for kind in Kind])
    columns = part[schedule.kind], schedule.module, schedule.chunk, schedule.microbatch
    keys = np.stack([column[ops] for column in columns])
    changes = np.any(keys[:, 1:] != keys[:, :-1], axis=0)
    return np.concatenate([[0], np.cumsum(changes)])[: len(ops)]


def _traffic(system: System, device: int, kind: Kind) -> list[tuple[float, float]]:
    """When a device gathers parameters or reduces gradients, in order."""
    schedule, timeline = system.schedule, system.timeline
    ops = np.flatnonzero((schedule.device == device) & (schedule.kind == kind))
    times = zip(timeline.start_s[ops].tolist(), timeline.finish_s[ops].tolist(), strict=True)
    return sorted(times)


# ---------------------------------------------------------------- from intervals to boxes


def _boxes(intervals: Intervals, own_s: float, joined_s: float) -> Iterator[Box]:
    """Ops and gaps of `own_s` or more as boxes of their own, what is shorter joined up to `joined_s`."""
    changes = np.flatnonzero(np.diff(intervals.owner)) + 1
    starts = np.concatenate([[0], changes, [len(intervals.owner)]])
    gap_pieces = np.flatnonzero(intervals.owner == GAP)
    starts = np.unique(np.concatenate([starts, gap_pieces, gap_pieces + 1]))  # each cause by itself
    seconds = np.zeros((len(intervals.fill), len(STACK)))
    seconds[np.arange(len(intervals.fill)), intervals.fill] = intervals.end_s - intervals.begin_s
    totals = np.add.reduceat(seconds, starts[:-1], axis=0)
    begin, end = intervals.begin_s[starts[:-1]], intervals.end_s[starts[1:] - 1]
    wide = end - begin >= own_s
    place, count = 0, len(begin)
    while place < count:
        stop = place + 1
        if not wide[place]:
            while stop < count and not wide[stop] and end[stop - 1] - begin[place] < joined_s:
                stop += 1
        parts = totals[place:stop].sum(axis=0)
        is_op = bool(wide[place]) and intervals.owner[starts[place]] != GAP
        yield Box(float(begin[place]), float(end[stop - 1]), tuple((parts / parts.sum()).tolist()), is_op)
        place = stop


# ---------------------------------------------------------------- from boxes to SVG


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
    systems: Sequence[System], rows: Sequence[Sequence[Row]], job: str, note: str, box_px: float
) -> str:
    scale = Scale(max(system.step_s for system in systems))
    body: list[str] = []
    top = MARGIN
    for system, own in zip(systems, rows, strict=True):
        body.append(_text(MARGIN, top + 15, headline(system, job), size=16, weight="bold"))
        top += 26
        height = max(9, min(20, 200 // len(own)))
        for row in own:
            body += _row(row, scale, top, height, box_px)
            top += height + STRIP_PX + 3
        body += _axis(scale, system.step_s, top)
        top += 38
    legend, top = _legend(_present(rows), top + 4)
    words = f"{note} Area is time: what fills a box takes that share of its time.".strip()
    body += [*legend, _text(MARGIN, top + 14, words, size=12, colour=FAINT)]
    title = "; ".join(headline(system, job) for system in systems)
    size = f"width='{WIDTH}' height='{top + 28}' viewBox='0 0 {WIDTH} {top + 28}'"
    head = [
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img' {FONT}>",
        f"<title>{_clean(title)}</title>",
        f"<rect width='100%' height='100%' rx='6' fill='{PAPER}'/>",
    ]
    return "\n".join([*head, *body, "</svg>", ""])


def _row(row: Row, scale: Scale, top: int, height: int, box_px: float) -> Iterator[str]:
    """One device: its compute lane, and below it the strip of its data-parallel traffic."""
    boxes = list(_boxes(row.intervals, scale.seconds(OWN_BOX_PX), scale.seconds(box_px)))
    tall = round(height / UNIT)
    yield _text(LEFT - 8, top + height - (height - 9) / 2, row.label, size=12, anchor="end")
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


def _axis(scale: Scale, step_s: float, top: int) -> Iterator[str]:
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
        yield _text(x, top + 18, words, size=12, anchor="middle")
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
        lines.append(_text(x + 19, top + 11, fill.label, size=13))
        x += width
    return lines, top + 20


def _text(
    x: float, y: float, words: str, *, size: int, colour: str = INK, anchor: str = "", weight: str = ""
) -> str:
    extra = (f" text-anchor='{anchor}'" if anchor else "") + (f" font-weight='{weight}'" if weight else "")
    return f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{colour}'{extra}>{_clean(words)}</text>"


def _clean(words: str) -> str:
    """Words as XML text: markup escaped, and what XML cannot hold replaced."""
    return escape(_NOT_XML.sub("?", words))
