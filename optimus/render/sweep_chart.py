"""Draws a sweep as an SVG of tokens per second and GPU, or as an HTML page with its table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from optimus.ir.files import write_file_atomically
from optimus.planner.planning import MIN_SPEEDUP_WORTH_FILLING
from optimus.render.format_numbers import format_gigabytes, format_seconds, format_three_digits
from optimus.render.markup import (
    FAINT,
    INK,
    choose_tick_spacing,
    escape_markup,
    render_content_policy,
    render_svg_text,
    render_table,
    render_titled_svg,
)
from optimus.sensitivity.job_sweep import JobSweep, SweepFigures, SweepPoint

WIDTH, HEIGHT = 1000, 440
LEFT, RIGHT, TOP, BOTTOM = 84, 220, 64, 58  # around the plot; names of lines stand at its right
NAMES = {"gpus": "GPUs", "batch": "sequences per step", "pp": "pp of the LLM", "tp": "tp of the LLM"}
WORDS = {"gpus": "{} GPUs", "batch": "{} sequences per step", "pp": "LLM pp {}", "tp": "LLM tp {}"}
FLOOR, OURS, SIMPLER = "#5f6368", "#0072b2", "#e69f00"
COLUMN = {"gpus": "GPUs", "batch": "sequences", "pp": "LLM pp", "tp": "LLM tp"}  # of the table
APART_PX = 17  # of names at the right
INSIDE_PX = 36  # from the plot's edges to the first and last point
PAGE = """<!doctype html>
<html lang='en'><meta charset='utf-8'>{policy}<meta name='viewport' content='width=device-width'>
<title>{title}</title>
<style>
body {{ font: 15px/1.5 Helvetica, Arial, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em }}
svg {{ max-width: 100%; height: auto }} table {{ border-collapse: collapse; margin: 1em 0 }}
td, th {{ padding: .25em .8em; text-align: right; border-bottom: 1px solid #ddd }} .w {{ text-align: left }}
</style>
{picture}
{table}
<p>{notes}</p>
</html>
"""


@dataclass(frozen=True)
class _Series:
    """One line of the chart; points without a value are left out."""

    name: str
    colour: str
    values: tuple[float | None, ...]
    dashed: bool = False


@dataclass(frozen=True)
class _LogPlot:
    """Plot area: values of the range on a logarithmic axis to the right, figures upwards from 0."""

    values: tuple[int, ...]
    highest: float

    def x(self, place: int) -> float:
        first, last = math.log(self.values[0]), math.log(self.values[-1])
        share = 0.5 if last == first else (math.log(self.values[place]) - first) / (last - first)
        return LEFT + INSIDE_PX + share * (WIDTH - LEFT - RIGHT - 2 * INSIDE_PX)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.highest * (HEIGHT - TOP - BOTTOM)


def summarize_sweep(sweep: JobSweep) -> str:
    """Says how tokens per second and GPU change over the range, and what filling gains."""
    possible = sweep.possible
    if not possible:
        return f"{sweep.job}: possible at none of {len(sweep.points)} values of {NAMES[sweep.axis]}"
    (first, first_plan), (last, last_plan) = possible[0], possible[-1]
    best, best_plan = max(possible, key=lambda pair: _rate(*pair))
    where = WORDS[sweep.axis].format(best.value)
    words = f"{sweep.job}: {format_three_digits(_rate(best, best_plan))} tokens/s/GPU at {where}"
    if len(possible) > 1:
        away = last if best is first else first
        rate = _rate(away, last_plan if away is last else first_plan) / _rate(best, best_plan)
        words += f", {rate:.0%} of that at {away.value}".replace("%", " %")
    speedups = [plan.speedup for _, plan in possible if plan.speedup is not None]
    if not speedups:
        return words
    low, high = f"{min(speedups):.3f}", f"{max(speedups):.3f}"
    span = low if low == high else f"{low} to {high}"
    return f"{words}; {sweep.strategy} {span} times as fast as the best simpler system"


def render_sweep_svg(sweep: JobSweep) -> str:
    """Returns the chart; the same bytes for the same sweep."""
    lines = _lines(sweep)
    highest = max((value for line in lines for value in line.values if value is not None), default=1.0)
    plot = _LogPlot(tuple(point.value for point in sweep.points), 1.06 * highest)
    body = [
        *_axes(sweep, plot),
        *(part for line in lines for part in _line(line, plot)),
        *_names(lines, plot),
        *_impossible(sweep, plot),
    ]
    return render_titled_svg(summarize_sweep(sweep), body, width=WIDTH, height=HEIGHT)


def _rate(point: SweepPoint, plan: SweepFigures) -> float:
    return point.tokens_per_s_per_gpu(plan.step_s)


def _lines(sweep: JobSweep) -> list[_Series]:
    def series(name: str, colour: str, field: str, *, dashed: bool = False) -> _Series:
        steps_s = [None if point.plan is None else getattr(point.plan, field) for point in sweep.points]
        rates = [
            None if step_s is None else point.tokens_per_s_per_gpu(step_s)
            for point, step_s in zip(sweep.points, steps_s, strict=True)
        ]
        return _Series(name, colour, tuple(rates), dashed)

    lines = [
        series("LLM alone (floor)", FLOOR, "floor_s", dashed=True),
        series("best simpler system", SIMPLER, "simpler_s"),
        series(sweep.strategy, OURS, "step_s"),
    ]
    return [line for line in lines if any(value is not None for value in line.values)]


def _axes(sweep: JobSweep, plot: _LogPlot) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    tick = choose_tick_spacing(plot.highest)
    for place in range(int(plot.highest / tick) + 1):
        y = plot.y(place * tick)
        faint = "" if place == 0 else " stroke-opacity='0.2'"
        yield f"<path stroke='{FAINT}'{faint} d='M{LEFT} {y:.1f}H{right}'/>"
        yield render_svg_text(LEFT - 8, y + 4, f"{place * tick:,.10g}", size=12, anchor="end")
    yield render_svg_text(LEFT, TOP, "tokens per second and GPU", size=12, colour=FAINT)
    for place, value in enumerate(plot.values):
        x = plot.x(place)
        yield f"<path stroke='{FAINT}' d='M{x:.1f} {bottom}v5'/>"
        yield render_svg_text(x, bottom + 20, f"{value:,}", size=13, anchor="middle")
    words = f"{NAMES[sweep.axis]}; preset {sweep.preset}, {sweep.gpu}, simulated"
    yield render_svg_text(LEFT, HEIGHT - 12, words, size=12, colour=FAINT)


def _line(line: _Series, plot: _LogPlot) -> Iterator[str]:
    """Draws a polyline through the points that have a value, and a dot at each."""
    places = [(plot.x(at), plot.y(value)) for at, value in enumerate(line.values) if value is not None]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dash = " stroke-dasharray='6 4'" if line.dashed else ""
    yield f"<path fill='none' stroke='{line.colour}' stroke-width='2'{dash} d='M{path}'/>"
    for x, y in places:
        yield f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{line.colour}'/>"


def _names(lines: list[_Series], plot: _LogPlot) -> Iterator[str]:
    """Writes names at the right ends of lines, pushed apart where these meet."""
    ends = sorted(
        (plot.y([value for value in line.values if value is not None][-1]), line.name, line.colour)
        for line in lines
    )
    lowest = -math.inf
    for y, name, colour in ends:
        lowest = max(y, lowest + APART_PX)
        yield render_svg_text(WIDTH - RIGHT + 12, lowest + 4, name, size=13, colour=colour, weight="bold")


def _impossible(sweep: JobSweep, plot: _LogPlot) -> Iterator[str]:
    """Draws a cross on the axis, with the reason as its tooltip."""
    for place, point in enumerate(sweep.points):
        if point.plan is None:
            x, y = plot.x(place), HEIGHT - BOTTOM - 14
            cross = f"M{x - 5:.1f} {y - 5}l10 10m0 -10l-10 10"
            why = f"<title>{escape_markup(point.reason)}</title>"
            yield f"<path fill='none' stroke='{INK}' stroke-width='2' d='{cross}'>{why}</path>"
            yield render_svg_text(x, y - 12, "not possible", size=12, anchor="middle")


def write_sweep(sweep: JobSweep, path: Path) -> None:
    """Writes the picture as .svg, or a page with the table as .html."""
    write_file_atomically(
        path, render_sweep_page(sweep) if path.suffix == ".html" else render_sweep_svg(sweep)
    )


def render_sweep_page(sweep: JobSweep) -> str:
    """Returns picture, table and reasons as one self-contained HTML file."""
    reasons = [f"{point.value}: not possible: {point.reason}." for point in sweep.points if point.reason]
    return PAGE.format(
        title=escape_markup(summarize_sweep(sweep)),
        policy=render_content_policy(),
        picture=render_sweep_svg(sweep),
        table=render_table(*build_sweep_table(sweep), left=2),
        notes=escape_markup(" ".join([*reasons, explain_sweep_columns(sweep)])),
    )


def build_sweep_table(sweep: JobSweep) -> tuple[list[str], list[list[str]]]:
    """Returns the header and a row per point."""
    header = [COLUMN[sweep.axis], "LLM layout", "step s", "over floor", "tok/s/GPU", "peak GB"]
    header += ["best simpler system", "its step s", "speed-up", "worth"]
    rows = [_table_row(point, point.plan, len(header)) for point in sweep.points]
    return header, rows


def _table_row(point: SweepPoint, plan: SweepFigures | None, width: int) -> list[str]:
    if plan is None:
        return [str(point.value), "not possible", *[""] * (width - 2)]
    worth = is_worth_filling(plan)
    return [
        str(point.value),
        str(plan.layouts["llm"]),
        format_seconds(plan.step_s),
        f"{plan.over_floor:.3f}",
        f"{point.tokens_per_s_per_gpu(plan.step_s):.0f}",
        format_gigabytes(plan.peak_bytes),
        plan.simpler or "-",
        "-" if plan.simpler_s is None else format_seconds(plan.simpler_s),
        "-" if plan.speedup is None else f"{plan.speedup:.3f}",
        "-" if worth is None else "yes" if worth else "no",
    ]


def explain_sweep_columns(sweep: JobSweep) -> str:
    """Returns what the columns mean and what stays the same over the range."""
    same = {"gpus": "the batch stays the same", "batch": "the GPUs stay the same"}
    parts = [
        f"strategy {sweep.strategy}, preset {sweep.preset}, {sweep.gpu}",
        same.get(sweep.axis, "GPUs and batch stay the same, dp follows"),
        "floor: the LLM alone at the plan's layout, which a system at another may beat",
        f"worth: at least {MIN_SPEEDUP_WORTH_FILLING:g} times the speed of the best simpler system",
    ]
    return "; ".join(parts)


def is_worth_filling(plan: SweepFigures) -> bool | None:
    """Tells whether the plan is worth more than the best simpler system; None if none was compared."""
    return None if plan.speedup is None else plan.speedup >= MIN_SPEEDUP_WORTH_FILLING
