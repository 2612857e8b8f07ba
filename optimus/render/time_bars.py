"""Draws where the step goes: a bar per system, compute first, then idle time by cause, and the floor."""

from __future__ import annotations

from optimus.render.colours import PARTS
from optimus.render.markup import axis, key, line_at, note, percent, section, table, text
from optimus.render.report_data import Bar, Summary, Where
from optimus.render.units import seconds
from optimus.schedule.bubbles import CAUSES

ROOM = 1.02  # of the axis beyond the longest bar
WORDS = 0.055  # a part at least this share of the axis has its figure inside


def where_title(summary: Summary, where: Where) -> str:
    """`Filling hides 81 % of the encoder; 4 % of the step is left idle, most of it waiting for TP (3 %)`."""
    parts, step = where.own.parts, where.own.step_s
    idle = sum(parts[cause] for cause in CAUSES) / step
    sorts = {sort: sum(parts[c] for c in CAUSES if c.startswith(sort.lower())) for sort in ("TP", "PP", "DP")}
    most = max(sorts, key=lambda sort: sorts[sort])
    waits = {"TP": "TP collectives", "PP": "the pipeline", "DP": "DP traffic"}[most]
    left = f"{percent(idle)} of the step is left idle"
    if idle > 0:
        share = "most of it" if sorts[most] > idle * step / 2 else "the largest part"
        left += f", {share} waiting for {waits} ({percent(sorts[most] / step)})"
    hidden = summary.hidden_strict
    if hidden is None:
        return left
    who = "encoder" if len(summary.chosen) == 2 else "encoders"
    return f"Filling hides {percent(hidden) if hidden > 0 else 'nothing'} of the {who}; {left}"


def where_section(summary: Summary, where: Where) -> str:
    """The bars, their key, and the same figures as a table."""
    longest = ROOM * max(bar.step_s for bar in where.bars)
    floor = (
        "" if where.floor_s is None else line_at(where.floor_s / longest, f"floor {seconds(where.floor_s)} s")
    )
    bars = "\n".join(_bar(bar, longest) for bar in where.bars)
    chart = f"<div class='bars'>{bars}\n<div class='over'>{floor}</div></div>{axis(longest, 's')}"
    known = [bar for bar in where.bars if bar.parts]
    shown = [part for part in PARTS if any(bar.parts.get(part, 0.0) > 0 for bar in known)]
    words = [(f"p-{part}", PARTS[part][0]) for part in shown]
    if len(known) < len(where.bars):
        words.append(("p-total", "not divided: the plan file holds the total only"))
    remark = "Seconds of the mean GPU. " + ("" if floor == "" else "The line is the floor, the LLM alone. ")
    if len(known) < len(where.bars):
        remark += "With --job all systems are divided."
    missing = [note(f"{name} is not possible: {reason}") for name, reason in where.missing.items()]
    return section(
        "where",
        where_title(summary, where),
        key(words),
        chart,
        note(remark.strip()),
        *missing,
        _figures(where, shown),
    )


def _bar(bar: Bar, longest: float) -> str:
    name = "llm-only (floor)" if bar.name == "llm-only" else bar.name
    label = f"<b>{text(name)} (this plan)</b>" if bar.own else text(name)
    if bar.fits is False:
        label += " <em>does not fit</em>"
    pieces = []
    parts = {part: bar.parts.get(part, 0.0) for part in PARTS} if bar.parts else {"total": bar.step_s}
    for part, value in parts.items():
        if value > 0:
            share = value / longest
            words = PARTS[part][0] if part in PARTS else "step"
            tip = text(f"{name}: {words} {seconds(value)} s, {percent(value / bar.step_s, 1)} of the step")
            inside = percent(value / bar.step_s) if bar.parts and share >= WORDS else ""
            pieces.append(
                f"<i class='p-{text(part)}' style='width:{100 * share:.3f}%' title='{tip}'>{inside}</i>"
            )
    ordered = "".join(pieces)
    how = f" title='{text(bar.how)}'" if bar.how else ""
    step = f"<span class='step'>{seconds(bar.step_s)} s</span>"
    return (
        f"<div class='bar{' own' if bar.own else ''}'><div class='name'{how}>{label} {step}</div>"
        f"<div class='line'>{ordered}</div></div>"
    )


def _figures(where: Where, shown: list[str]) -> str:
    """The bars again, for who reads figures or sees no colours."""
    header = ["system", "step s", "over floor", *(f"{PARTS[part][0]} %" for part in shown)]
    rows = []
    for bar in where.bars:
        over = "-" if where.floor_s is None else f"{bar.step_s / where.floor_s:.3f}"
        parts = bar.parts
        shares = [f"{100 * parts.get(part, 0.0) / bar.step_s:.1f}" if parts else "" for part in shown]
        rows.append([bar.name, seconds(bar.step_s), over, *shares])
    return table(header, rows)
