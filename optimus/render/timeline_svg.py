"""Draws systems as an SVG: a row per stage, time to the right, and idle time tinted by its cause.

Area is time: what fills a box is stacked in it by its share of the box's time, so that TP bubbles of 300 us
show in a picture of seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from optimus.errors import DoesNotFit, show_value
from optimus.ir.files import write_file_atomically
from optimus.ir.op import Floats, Ints, Lane, OpKind, Schedule
from optimus.planner.compare import Comparison
from optimus.planner.systems.base import SimulatedSystem
from optimus.render.format_numbers import format_three_digits
from optimus.render.markup import FAINT, FONT, INK, PAPER, escape_markup, render_svg_text
from optimus.render.palette import (
    ENCODER_WORK,
    IDLE_DP,
    IDLE_FILLS,
    IDLE_PP,
    IDLE_TP,
    LLM_WORK,
    OPTIMIZER,
    STACK,
    TRAFFIC,
    LegendEntry,
)
from optimus.schedule.bubbles import IdleIntervals, find_idle_intervals
from optimus.schedule.simulator import Timeline

MAX_BYTES = 250_000  # file size above which boxes get coarser
BOX_PX = (8.0, 12.0, 18.0, 27.0, 40.0, 60.0)  # narrower boxes are joined up to this width
OWN_BOX_PX = 3.0  # an op at least this wide is a box of its own
STRIP_PX = 3  # height of the strip of data-parallel traffic
LINE_PX = 6.0  # boxes at least this wide have a line between them

WIDTH, LEFT, RIGHT, MARGIN = 1000, 74, 24, 16
PLOT = WIDTH - LEFT - RIGHT
UNIT = 0.25  # px of the integers in paths
GAP = -1  # `owner` of an interval between ops


def write_timeline_svg(comparison: Comparison, path: Path) -> None:
    """Writes an SVG of every system of the comparison, one above the other on one time scale."""
    if not comparison.systems:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in comparison.missing.items())
        raise DoesNotFit(f"there is no system to draw: {reasons}", "name another system with --system")
    job = comparison.job
    note = f"{job.cluster.gpus} x {job.cluster.gpu.name}, preset {comparison.assumptions.name}, simulated."
    picture = render_timeline_svg(list(comparison.systems.values()), job=job.name, note=note)
    write_file_atomically(path, picture)


def render_timeline_svg(systems: Sequence[SimulatedSystem], *, job: str, note: str = "") -> str:
    """Returns the systems' steps as one SVG of at most MAX_BYTES; deterministic."""
    rows = [build_timeline_rows(system) for system in systems]
    picture = ""
    for box_px in BOX_PX:
        picture = _draw(systems, rows, job, note, box_px)
        if len(picture.encode()) <= MAX_BYTES:
            break
    return picture


def _headline(system: SimulatedSystem, job: str) -> str:
    """Says `paper/A, stage0: 5.86 s a step, 68 % of GPU time idle`."""
    idle = 100 * system.bubbles.total / system.step_s
    step = f"{format_three_digits(system.step_s)} s a step"
    words = f"{show_value(job)}, {system.name}: {step}, {idle:.0f} % of GPU time idle"
    return words if system.fits else f"{words}; does not fit in memory"


@dataclass(frozen=True)
class TimeScale:
    """Scale of the time axis: seconds to pixels, and to the integers of paths."""

    longest_s: float

    def px(self, time_s: float) -> float:
        return PLOT * time_s / self.longest_s

    def units(self, time_s: float) -> int:
        return round(self.px(time_s) / UNIT)

    def seconds(self, px: float) -> float:
        return px * self.longest_s / PLOT


def _draw(
    systems: Sequence[SimulatedSystem],
    rows: Sequence[Sequence[TimelineRow]],
    job: str,
    note: str,
    box_px: float,
) -> str:
    scale = TimeScale(max(system.step_s for system in systems))
    body: list[str] = []
    top = MARGIN
    for system, system_rows in zip(systems, rows, strict=True):
        body.append(render_svg_text(MARGIN, top + 15, _headline(system, job), size=16, weight="bold"))
        top += 26
        height = max(9, min(20, 200 // len(system_rows)))
        for row in system_rows:
            body += render_device_row(row, scale, top, height, box_px)
            top += height + STRIP_PX + 3
        body += render_time_axis(scale, system.step_s, top)
        top += 38
    legend, top = _legend(_present(rows), top + 4)
    words = f"{note} Area is time: what fills a box takes that share of its time.".strip()
    body += [*legend, render_svg_text(MARGIN, top + 14, words, size=12, colour=FAINT)]
    title = "; ".join(_headline(system, job) for system in systems)
    size = f"width='{WIDTH}' height='{top + 28}' viewBox='0 0 {WIDTH} {top + 28}'"
    head = [
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img' {FONT}>",
        f"<title>{escape_markup(title)}</title>",
        f"<rect width='100%' height='100%' rx='6' fill='{PAPER}'/>",
    ]
    return "\n".join([*head, *body, "</svg>", ""])


def render_device_row(
    row: TimelineRow, scale: TimeScale, top: int, height: int, box_px: float
) -> Iterator[str]:
    """Yields one device: its compute lane, and below it the strip of its data-parallel traffic."""
    boxes = list(_merge_into_boxes(row.intervals, scale.seconds(OWN_BOX_PX), scale.seconds(box_px)))
    tall = round(height / UNIT)
    yield render_svg_text(LEFT - 8, top + height - (height - 9) / 2, row.label, size=12, anchor="end")
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


def _layer(boxes: Sequence[_TimelineBox], place: int, scale: TimeScale, tall: int) -> str:
    """Outlines, up to the top of one fill of the stack, the boxes that have some of it."""
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


def _lines(boxes: Sequence[_TimelineBox], scale: TimeScale, tall: int) -> str:
    """Draws lines between ops that are wide enough to be told apart."""
    least = scale.seconds(LINE_PX)
    return "".join(
        f"M{scale.units(box.begin_s)} 0v{tall}"
        for before, box in pairwise(boxes)
        if box.is_op and before.is_op and min(box.end_s - box.begin_s, before.end_s - before.begin_s) >= least
    )


def _strip(times: Sequence[tuple[float, float]], scale: TimeScale) -> str:
    """Draws intervals as a strip below the row, joined where less than a pixel lies between."""
    joined: list[list[int]] = []
    for begin_s, end_s in times:
        begin, end = scale.units(begin_s), scale.units(end_s)
        if joined and begin - joined[-1][1] < 1 / UNIT:
            joined[-1][1] = max(joined[-1][1], end)
        elif end > begin:
            joined.append([begin, end])
    depth = round(STRIP_PX / UNIT)
    return "".join(f"M{begin} 0v-{depth}H{end}V0z" for begin, end in joined)


def render_time_axis(scale: TimeScale, step_s: float, top: int) -> Iterator[str]:
    """Yields ticks up to the longest step of the picture, and a mark where this step ends."""
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
        yield render_svg_text(x, top + 18, words, size=12, anchor="middle")
    yield f"<path stroke='{INK}' stroke-width='2' d='M{end:.1f} {top - 4}v10'/>"


def _present(rows: Sequence[Sequence[TimelineRow]]) -> list[LegendEntry]:
    """Returns the fills that the picture holds, in the order of the legend."""
    devices = [row for system_rows in rows for row in system_rows]
    places = {int(place) for row in devices for place in np.unique(row.intervals.fill)}
    work = (*LLM_WORK.values(), *ENCODER_WORK.values(), OPTIMIZER, IDLE_TP, IDLE_PP, IDLE_DP)
    work_fills = [fill for fill in dict.fromkeys(work) if STACK.index(fill) in places]
    moved = [fill for kind, fill in TRAFFIC.items() if any(row.traffic[kind] for row in devices)]
    return work_fills + list(dict.fromkeys(moved))


def _legend(fills: Sequence[LegendEntry], top: int) -> tuple[list[str], int]:
    """Draws a swatch and a label for each fill, in as many lines as they need."""
    lines, x = [], MARGIN
    for fill in fills:
        width = 34 + round(sum(3.8 if letter in " :fijlrt" else 7.4 for letter in fill.label))
        if x + width > WIDTH - MARGIN:
            x, top = MARGIN, top + 20
        lines.append(f"<rect x='{x}' y='{top}' width='14' height='12' fill='{fill.colour}'/>")
        lines.append(render_svg_text(x + 19, top + 11, fill.label, size=13))
        x += width
    return lines, top + 20


# ---------------------------------------------------------------------------- intervals and boxes


@dataclass(frozen=True, eq=False)
class _DeviceIntervals:
    """Consecutive intervals of a device's whole step; those with an equal `owner` are one op."""

    begin_s: Floats
    end_s: Floats
    fill: Ints  # index into STACK
    owner: Ints  # op it belongs to, or GAP


@dataclass(frozen=True, eq=False)
class TimelineRow:
    """One device of a timeline, before it is drawn."""

    label: str
    intervals: _DeviceIntervals
    traffic: dict[OpKind, list[tuple[float, float]]]


@dataclass(frozen=True)
class _TimelineBox:
    """Part of a row, with the share of its time that each fill takes."""

    begin_s: float
    end_s: float
    shares: tuple[float, ...]  # by index into STACK
    is_op: bool


class SimulatedSchedule(Protocol):
    """A schedule and the times of its ops: a simulated system, or a replayed plan."""

    @property
    def schedule(self) -> Schedule: ...

    @property
    def timeline(self) -> Timeline: ...


def build_timeline_rows(system: SimulatedSchedule) -> list[TimelineRow]:
    """Returns a row for every device of a system."""
    idle = find_idle_intervals(system.schedule, system.timeline)
    return [
        TimelineRow(
            label=system.schedule.device_name(device),
            intervals=_intervals(system, device, idle),
            traffic={kind: _traffic(system, device, kind) for kind in TRAFFIC},
        )
        for device in range(system.schedule.num_devices)
    ]


def _intervals(system: SimulatedSchedule, device: int, idle: IdleIntervals) -> _DeviceIntervals:
    """Returns work and idle time of one device, from 0 to the end of the step, in order."""
    schedule, timeline = system.schedule, system.timeline
    ops = np.flatnonzero((schedule.device == device) & (schedule.lane == Lane.COMPUTE))
    gaps = np.flatnonzero(idle.device == device)
    begin = np.concatenate([timeline.start_s[ops], idle.begin_s[gaps]])
    end = np.concatenate([timeline.finish_s[ops], idle.end_s[gaps]])
    owner = _owners(system, ops)
    # A gap inside an op is the op's: it lies before an op's row that does not begin the op.
    inside = np.full(len(schedule) + 1, GAP)
    inside[ops[1:]] = np.where(owner[1:] == owner[:-1], owner[1:], GAP)
    fill = np.concatenate([_fills(system, ops), IDLE_FILLS[idle.cause[gaps]]])
    owners = np.concatenate([owner, inside[idle.op[gaps]]])
    order = np.lexsort((end, begin))
    order = order[(end > begin)[order]]
    return _DeviceIntervals(begin_s=begin[order], end_s=end[order], fill=fill[order], owner=owners[order])


def _fills(system: SimulatedSchedule, ops: Ints) -> Ints:
    """Returns the indices into STACK of what ops do."""
    schedule = system.schedule
    by_module = [LLM_WORK if name == "llm" else ENCODER_WORK for name in schedule.modules]
    table = [[STACK.index(fills.get(kind, OPTIMIZER)) for kind in OpKind] for fills in by_module]
    return np.array(table, np.int64)[schedule.module[ops], schedule.kind[ops]]


def _owners(system: SimulatedSchedule, ops: Ints) -> Ints:
    """Returns a number that changes where another op begins: F, backward or W of a chunk and microbatch."""
    schedule = system.schedule
    part = np.array(
        [{OpKind.FORWARD: 0, OpKind.WEIGHT_GRAD: 2, OpKind.OPTIMIZER: 3}.get(kind, 1) for kind in OpKind]
    )
    columns = part[schedule.kind], schedule.module, schedule.chunk, schedule.microbatch
    keys = np.stack([column[ops] for column in columns])
    changes = np.any(keys[:, 1:] != keys[:, :-1], axis=0)
    return np.concatenate([[0], np.cumsum(changes)])[: len(ops)]


def _traffic(system: SimulatedSchedule, device: int, kind: OpKind) -> list[tuple[float, float]]:
    """Returns when a device gathers parameters or reduces gradients, in order."""
    schedule, timeline = system.schedule, system.timeline
    ops = np.flatnonzero((schedule.device == device) & (schedule.kind == kind))
    times = zip(timeline.start_s[ops].tolist(), timeline.finish_s[ops].tolist(), strict=True)
    return sorted(times)


def _merge_into_boxes(intervals: _DeviceIntervals, own_s: float, joined_s: float) -> Iterator[_TimelineBox]:
    """Yields ops and gaps of `own_s` or more as boxes of their own, shorter ones joined up to `joined_s`."""
    changes = np.flatnonzero(np.diff(intervals.owner)) + 1
    starts = np.concatenate([[0], changes, [len(intervals.owner)]])
    gaps = np.flatnonzero(intervals.owner == GAP)
    starts = np.unique(np.concatenate([starts, gaps, gaps + 1]))  # each cause by itself
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
        yield _TimelineBox(
            float(begin[place]), float(end[stop - 1]), tuple((parts / parts.sum()).tolist()), is_op
        )
        place = stop
