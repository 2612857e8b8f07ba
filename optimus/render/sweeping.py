"""A sweep as text for people, as an object for tools, and as one page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from optimus.ir.files import write_whole
from optimus.render.markup import table
from optimus.render.markup import text as page_text
from optimus.render.planning import WORTH_IT
from optimus.render.sweep_picture import headline, sweep_svg
from optimus.render.text import columns, gigabytes, seconds, wrap
from optimus.sensitivity.sweep import Plans, Point, Sweep

SCHEMA = "optimus.sweep/1"
NAMES = {"gpus": "GPUs", "batch": "sequences", "pp": "LLM pp", "tp": "LLM tp"}
PAGE = """<!doctype html>
<html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>
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


def sweep_json(sweep: Sweep, *, file: str | None) -> dict[str, object]:
    """The object of `optimus sweep --json`."""
    return {
        "schema": SCHEMA,
        "job": sweep.job,
        "over": sweep.axis,
        "strategy": sweep.strategy,
        "preset": sweep.preset,
        "conclusion": headline(sweep),
        "points": [_point_json(point) for point in sweep.points],
        "picture": file,
    }


def _point_json(point: Point) -> dict[str, object]:
    plan = point.plan
    found: dict[str, object] = {"value": point.value, "gpus": point.gpus, "possible": plan is not None}
    if plan is None:
        return {**found, "reason": point.reason}
    return {
        **found,
        "step_s": plan.step_s,
        "floor_s": plan.floor_s,
        "step_over_floor": plan.over_floor,
        "simpler_system": plan.simpler,
        "simpler_s": plan.simpler_s,
        "speedup_over_simpler": plan.speedup,
        "tokens_per_s_per_gpu": point.tokens_per_s_per_gpu(plan.step_s),
        "peak_memory_bytes": plan.peak_bytes,
        "worth": is_worth(plan),
        "layouts": {name: asdict(layout) for name, layout in plan.layouts.items()},
    }


def is_worth(plan: Plans) -> bool | None:
    """Whether filling bubbles is worth more than the simpler system; unknown if none was compared."""
    return None if plan.speedup is None else plan.speedup >= WORTH_IT


def sweep_text(sweep: Sweep) -> list[str]:
    """The conclusion, a row per point, and why the impossible ones are."""
    lines = [headline(sweep), "", *columns(*_table(sweep), left=2)]
    for point in sweep.points:
        if point.plan is None:
            lines += wrap(f"  {point.value}", f"not possible: {point.reason}", indent=10)
    return [*lines, "", *wrap("read", _notes(sweep))]


def write_sweep(sweep: Sweep, path: Path) -> None:
    """The picture as .svg, or a page with the table as .html."""
    write_whole(path, sweep_page(sweep) if path.suffix == ".html" else sweep_svg(sweep))


def sweep_page(sweep: Sweep) -> str:
    """Picture, table and reasons as one HTML file that needs nothing else."""
    reasons = [f"{point.value}: not possible: {point.reason}." for point in sweep.points if point.reason]
    return PAGE.format(
        title=page_text(headline(sweep)),
        picture=sweep_svg(sweep),
        table=table(*_table(sweep), left=2),
        notes=page_text(" ".join([*reasons, _notes(sweep)])),
    )


def _table(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    header = [NAMES[sweep.axis], "LLM layout", "step s", "over floor", "best simpler system", "its step s"]
    header += ["speed-up", "tok/s/GPU", "peak GB", "worth"]
    rows = [_row(point, point.plan, len(header)) for point in sweep.points]
    return header, rows


def _row(point: Point, plan: Plans | None, width: int) -> list[str]:
    if plan is None:
        return [str(point.value), "not possible", *[""] * (width - 2)]
    worth = is_worth(plan)
    return [
        str(point.value),
        str(plan.layouts["llm"]),
        seconds(plan.step_s),
        f"{plan.over_floor:.3f}",
        plan.simpler or "-",
        "-" if plan.simpler_s is None else seconds(plan.simpler_s),
        "-" if plan.speedup is None else f"{plan.speedup:.3f}",
        f"{point.tokens_per_s_per_gpu(plan.step_s):.0f}",
        gigabytes(plan.peak_bytes),
        "-" if worth is None else "yes" if worth else "no",
    ]


def _notes(sweep: Sweep) -> str:
    same = {"gpus": "the batch stays the same", "batch": "the GPUs stay the same"}
    parts = [
        f"strategy {sweep.strategy}, preset {sweep.preset}, {sweep.gpu}",
        same.get(sweep.axis, "GPUs and batch stay the same, dp follows"),
        "floor: the LLM alone at the plan's layout, which a system at another may beat",
        f"worth: at least {WORTH_IT:g} times the speed of the best system that fills no bubbles",
    ]
    return "; ".join(parts)
