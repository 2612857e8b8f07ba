"""Draws the report's bar charts: the step of each system, the memory of the worst rank, the sensitivity."""

from __future__ import annotations

import numpy as np

from optimus.errors import one_of
from optimus.ir.op import Floats
from optimus.render.format_numbers import GB, format_gigabytes, format_percent, format_seconds
from optimus.render.markup import (
    escape_markup,
    render_axis,
    render_legend,
    render_marker_line,
    render_note,
    render_section,
    render_table,
)
from optimus.render.palette import PARTS, memory_css_class
from optimus.render.report_data import PlanSummary, StepBreakdown, SystemStepTime, WorstRankMemory
from optimus.schedule.bubbles import CAUSES
from optimus.sensitivity.tornado import Tornado, TornadoBar

STEP_AXIS_ROOM = 1.02  # length of the axis over the longest bar
MIN_LABELLED_SHARE = 0.055  # a part at least this share of the axis has its figure inside
WIDTH, HEIGHT = 1000, 200  # of the memory curve, in its own units
MEMORY_AXIS_ROOM = 1.04
TORNADO_AXIS_ROOM = 1.15  # length of each side over the longest bar
WINNERS_SHOWN = 5


# ---------------------------------------------------------------------------- step of each system


def _step_time_title(summary: PlanSummary, breakdown: StepBreakdown) -> str:
    """Says `Filling hides 81 % of the encoder; 4 % of the step is left idle, most of it waiting for TP`."""
    parts, step = breakdown.reported.parts, breakdown.reported.step_s
    idle = sum(parts[cause] for cause in CAUSES) / step
    sorts = {sort: sum(parts[c] for c in CAUSES if c.startswith(sort.lower())) for sort in ("TP", "PP", "DP")}
    most = max(sorts, key=lambda sort: sorts[sort])
    waits = {"TP": "TP collectives", "PP": "the pipeline", "DP": "DP traffic"}[most]
    left = f"{format_percent(idle)} of the step is left idle"
    if idle > 0:
        share = "most of it" if sorts[most] > idle * step / 2 else "the largest part"
        left += f", {share} waiting for {waits} ({format_percent(sorts[most] / step)})"
    hidden = summary.hidden_strict
    if hidden is None:
        return left
    who = "encoder" if len(summary.chosen) == 2 else "encoders"
    return f"Filling hides {format_percent(hidden) if hidden > 0 else 'nothing'} of the {who}; {left}"


def render_step_time_section(summary: PlanSummary, breakdown: StepBreakdown) -> str:
    """Returns a bar per system: compute first, then idle time by cause; and the figures as a table."""
    longest = STEP_AXIS_ROOM * max(bar.step_s for bar in breakdown.bars)
    floor = (
        ""
        if breakdown.floor_s is None
        else render_marker_line(breakdown.floor_s / longest, f"floor {format_seconds(breakdown.floor_s)} s")
    )
    bars = "\n".join(_step_time_bar(bar, longest) for bar in breakdown.bars)
    chart = f"<div class='bars'>{bars}\n<div class='over'>{floor}</div></div>{render_axis(longest, 's')}"
    known = [bar for bar in breakdown.bars if bar.parts]
    shown = [part for part in PARTS if any(bar.parts.get(part, 0.0) > 0 for bar in known)]
    words = [(f"p-{part}", PARTS[part][0]) for part in shown]
    if len(known) < len(breakdown.bars):
        words.append(("p-total", "not divided: the plan file holds the total only"))
    remark = "Seconds of the mean GPU. " + ("" if floor == "" else "The line is the floor, the LLM alone. ")
    if len(known) < len(breakdown.bars):
        remark += "With --job all systems are divided."
    missing = [render_note(f"{name} is not possible: {reason}") for name, reason in breakdown.missing.items()]
    return render_section(
        "where",
        _step_time_title(summary, breakdown),
        render_legend(words),
        chart,
        render_note(remark.strip()),
        *missing,
        _step_time_table(breakdown, shown),
    )


def _step_time_bar(bar: SystemStepTime, longest: float) -> str:
    name = "llm-only (floor)" if bar.name == "llm-only" else bar.name
    label = f"<b>{escape_markup(name)} (this plan)</b>" if bar.is_reported else escape_markup(name)
    if bar.fits is False:
        label += " <em>does not fit</em>"
    pieces = []
    parts = {part: bar.parts.get(part, 0.0) for part in PARTS} if bar.parts else {"total": bar.step_s}
    for part, value in parts.items():
        if value > 0:
            share = value / longest
            words = PARTS[part][0] if part in PARTS else "step"
            of_step = f"{format_percent(value / bar.step_s, 1)} of the step"
            tip = escape_markup(f"{name}: {words} {format_seconds(value)} s, {of_step}")
            inside = format_percent(value / bar.step_s) if bar.parts and share >= MIN_LABELLED_SHARE else ""
            width = f"width:{100 * share:.3f}%"
            pieces.append(f"<i class='p-{escape_markup(part)}' style='{width}' title='{tip}'>{inside}</i>")
    ordered = "".join(pieces)
    how = f" title='{escape_markup(bar.how)}'" if bar.how else ""
    step = f"<span class='step'>{format_seconds(bar.step_s)} s</span>"
    return (
        f"<div class='bar{' own' if bar.is_reported else ''}'><div class='name'{how}>{label} {step}</div>"
        f"<div class='line'>{ordered}</div></div>"
    )


def _step_time_table(breakdown: StepBreakdown, shown: list[str]) -> str:
    """Returns the figures of the bars as a table."""
    header = ["system", "step s", "over floor", *(f"{PARTS[part][0]} %" for part in shown)]
    rows = []
    for bar in breakdown.bars:
        over = "-" if breakdown.floor_s is None else f"{bar.step_s / breakdown.floor_s:.3f}"
        parts = bar.parts
        shares = [f"{100 * parts.get(part, 0.0) / bar.step_s:.1f}" if parts else "" for part in shown]
        rows.append([bar.name, format_seconds(bar.step_s), over, *shares])
    return render_table(header, rows)


# ---------------------------------------------------------------------------- memory of the worst rank


def _memory_title(memory: WorstRankMemory) -> str:
    """Says `The worst rank (stage 0) needs 58.5 of 80.0 GB: 21.5 GB are left`."""
    peak, capacity = format_gigabytes(memory.peak_bytes), format_gigabytes(memory.capacity_bytes)
    needs = f"The worst rank ({memory.name}) needs {peak} of {capacity} GB"
    left = memory.capacity_bytes - memory.peak_bytes
    return (
        f"{needs}: {format_gigabytes(left)} GB are left"
        if left >= 0
        else f"{needs}: {format_gigabytes(-left)} GB too much"
    )


def render_memory_section(memory: WorstRankMemory) -> str:
    """Returns the worst rank's memory: a bar of components, a curve over the step, and the figures."""
    longest = MEMORY_AXIS_ROOM * max(memory.peak_bytes, memory.capacity_bytes)
    words = [
        (memory_css_class(name), f"{name} {format_gigabytes(size)} GB")
        for name, size in memory.components.items()
    ]
    pieces = "".join(
        f"<i class='{memory_css_class(name)}' style='width:{100 * size / longest:.3f}%' "
        f"title='{escape_markup(name)} {format_gigabytes(size)} GB, "
        f"{format_percent(size / memory.peak_bytes, 1)}'></i>"
        for name, size in memory.components.items()
    )
    line = render_marker_line(memory.capacity_bytes / longest, "capacity")
    chart = (
        "<div class='bars'><div class='bar own'><div class='name'>at its peak</div>"
        f"<div class='line'>{pieces}</div></div>\n<div class='over'>{line}</div></div>"
        f"{render_axis(longest / GB, 'GB')}"
    )
    return render_section(
        "memory",
        _memory_title(memory),
        render_legend(words),
        chart,
        _memory_curve(memory, longest),
        render_note(
            "Over the step, what is always there is at the bottom. Activations live from their forward to "
            "their backward, in the order of the program."
        ),
        render_table(["component", "GB", "% of the peak"], _memory_cells(memory)),
    )


def _memory_cells(memory: WorstRankMemory) -> list[list[str]]:
    sizes = memory.components.items()
    return [[name, format_gigabytes(size), f"{100 * size / memory.peak_bytes:.1f}"] for name, size in sizes]


def _memory_curve(memory: WorstRankMemory, longest: float) -> str:
    """Draws stacked step functions; the SVG is stretched, so it holds shapes and no text."""
    base: Floats = np.full(len(memory.times_s), float(memory.fixed_bytes))
    layers = [("m-fixed", base)]
    for name, sizes in memory.alive.items():
        base = base + sizes
        layers.append((memory_css_class(name), base))
    paths = [
        f"<path class='{name}' d='{_step_outline(memory.times_s, top, memory.step_s, longest)}'/>"
        for name, top in reversed(layers)
    ]
    capacity = format_gigabytes(memory.capacity_bytes)
    capacity_top = 100 * (1 - memory.capacity_bytes / longest)
    return (
        f"<div class='curve'><b>over the step</b><svg viewBox='0 0 {WIDTH} {HEIGHT}' "
        f"preserveAspectRatio='none' role='img' aria-label='memory over the step'>{''.join(paths)}</svg>"
        f"<u style='top:{capacity_top:.2f}%'><span>capacity {capacity} GB</span></u></div>"
        f"{render_axis(memory.step_s, 's')}"
    )


def _step_outline(times: Floats, values: Floats, end: float, longest: float) -> str:
    """Returns an outline with the highest value of every unit of width."""
    edges = np.searchsorted(times, np.linspace(0.0, end, WIDTH + 1))
    first = np.maximum(edges[:-1] - 1, 0)  # what was alive when the unit begins
    pairs = np.stack([first, np.maximum(edges[1:], first + 1)], axis=1).ravel()
    highest = np.maximum.reduceat(np.append(values, 0.0), pairs)[::2]
    heights = np.round(HEIGHT * (1 - highest / longest), 1)
    changes = np.flatnonzero(np.append(True, heights[1:] != heights[:-1]))
    parts = [f"H{x}V{y:g}" for x, y in zip(changes.tolist(), heights[changes].tolist(), strict=True)]
    return f"M0 {HEIGHT}{''.join(parts)}H{WIDTH}V{HEIGHT}z"


# ---------------------------------------------------------------------------- sensitivity


def _sensitivity_title(tornado: Tornado) -> str:
    """Says `The step depends most on compute efficiency: 2.909 s (+19 %) if it is 20 % lower`."""
    most = max(tornado.wide, key=_reach)
    worse_low = most.low_s >= most.high_s
    step, label = (most.low_s, most.low_label) if worse_low else (most.high_s, most.high_label)
    change = f"{100 * (step / tornado.step_s - 1):+.0f} %"
    title = f"The step depends most on {most.name}: {format_seconds(step)} s ({change}) at {label}"
    if tornado.winner is None:
        return title
    winners = _winners(tornado)
    same = sum(winner == tornado.winner for winner in winners)
    others = sorted({winner for winner in winners if winner != tornado.winner})[:WINNERS_SHOWN]
    wins = f"{tornado.winner} is the fastest in {same} of {len(winners)} perturbed replays"
    wins += f", else {one_of(others)}" if others else ""
    return f"{wins}; the plan's step moves most with {most.name}"


def _reach(row: TornadoBar) -> float:
    return abs(row.high_s - row.low_s)


def _winners(tornado: Tornado) -> list[str]:
    rows = (*tornado.wide, *tornado.narrow)
    return [winner for row in rows for winner in (row.winner_low, row.winner_high) if winner is not None]


def render_sensitivity_section(tornado: Tornado) -> str:
    """Returns the step under perturbed assumptions as a tornado chart, the widest bar first."""
    narrow = {row.name: row for row in tornado.narrow}
    rows = sorted(tornado.wide, key=_reach, reverse=True)
    ends = [end for row in rows for end in (row.low_s, row.high_s)]
    reach = TORNADO_AXIS_ROOM * max(1e-9, *(abs(end - tornado.step_s) for end in ends))
    left = max(0.0, tornado.step_s - reach)
    bars = "\n".join(_tornado_row(tornado, row, narrow.get(row.name), left, 2 * reach) for row in rows)
    middle = render_marker_line((tornado.step_s - left) / (2 * reach), f"{format_seconds(tornado.step_s)} s")
    amounts = dict.fromkeys(row.high_label.lstrip("+") for row in (*rows, *tornado.narrow))
    words = [
        (f"t-{name}", f"{label} lower or higher")
        for name, label in zip(("wide", "narrow"), amounts, strict=False)
    ]
    return render_section(
        "sure",
        _sensitivity_title(tornado),
        render_legend(words) if len(amounts) <= 2 else "",
        f"<div class='bars tornado'>{bars}\n<div class='over'>{middle}</div></div>",
        render_note(f"{tornado.how[:1].upper()}{tornado.how[1:]}." if tornado.how else ""),
        render_table(*_sensitivity_cells(tornado, rows, narrow)),
    )


def _tornado_row(
    tornado: Tornado, wide: TornadoBar, narrow: TornadoBar | None, left: float, width: float
) -> str:
    pieces = [_tornado_bar("t-wide", wide, left, width)]
    if narrow is not None:
        pieces.append(_tornado_bar("t-narrow", narrow, left, width))
    low, high = format_seconds(wide.low_s), format_seconds(wide.high_s)
    name = escape_markup(wide.name)
    ends = escape_markup(f"{wide.low_label}: {low} s, {wide.high_label}: {high} s")
    return (
        f"<div class='bar'><div class='name'>{name} <span class='step'>{ends}</span></div>"
        f"<div class='line'>{''.join(pieces)}</div></div>"
    )


def _tornado_bar(name: str, row: TornadoBar, left: float, width: float) -> str:
    begin, end = sorted((row.low_s, row.high_s))
    low, high = format_seconds(row.low_s), format_seconds(row.high_s)
    tip = f"{row.name}: {row.low_label} {low} s, {row.high_label} {high} s"
    place = f"left:{100 * (begin - left) / width:.3f}%;width:{max(0.1, 100 * (end - begin) / width):.3f}%"
    return f"<i class='{name}' style='{place}' title='{escape_markup(tip)}'></i>"


def _sensitivity_cells(
    tornado: Tornado, rows: list[TornadoBar], narrow: dict[str, TornadoBar]
) -> tuple[list[str], list[list[str]]]:
    """Returns a row per assumption; names the winner where it differs from the unperturbed one."""
    body = []
    for row in rows:
        low, high = _cell(tornado, row, high=False), _cell(tornado, row, high=True)
        inner = narrow.get(row.name)
        between = (
            [] if inner is None else [_cell(tornado, inner, high=False), _cell(tornado, inner, high=True)]
        )
        body.append([row.name, low, *between, high])
    width = max(len(cells) for cells in body)
    header = [
        "step s if it is",
        *(["lower", "higher"] if width == 3 else ["lowest", "lower", "higher", "highest"]),
    ]
    return header, [[*cells[:2], *[""] * (width - len(cells)), *cells[2:]] for cells in body]


def _cell(tornado: Tornado, row: TornadoBar, *, high: bool) -> str:
    label, step_s, winner = (
        (row.high_label, row.high_s, row.winner_high) if high else (row.low_label, row.low_s, row.winner_low)
    )
    change = round(100 * (step_s / tornado.step_s - 1), 1) + 0.0  # never -0.0
    cell = f"{label}: {format_seconds(step_s)} ({change:+.1f} %)"
    return cell if winner == tornado.winner else f"{cell}, {winner} wins"
