"""Writes a plan as one self-contained HTML page, readable without its script and on paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from optimus.cost.assumptions import PRESETS
from optimus.cost.measured_profile import Profile
from optimus.ir.binding import list_bound_parts, require_plan_of_job
from optimus.ir.files import write_file_atomically
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.job.layout import PartialLayout
from optimus.planner.compare import Comparison, compare_systems
from optimus.planner.plan_replay import replay_plan
from optimus.planner.planning import PlanningResult
from optimus.planner.systems.registry import SYSTEMS
from optimus.render.candidates_chart import render_candidates_section
from optimus.render.format_numbers import format_gigabytes, format_percent, format_seconds
from optimus.render.markup import escape_markup, render_content_policy, render_note, render_table
from optimus.render.palette import build_colour_css
from optimus.render.report_charts import (
    render_memory_section,
    render_sensitivity_section,
    render_step_time_section,
)
from optimus.render.report_data import PlanSummary, Provenance, ReportData, StepBreakdown, gather_report_data
from optimus.render.timeline_chart import render_timeline_section
from optimus.render.trace import write_trace
from optimus.sensitivity.tornado import Tornado
from optimus.verify.validator import require_proven_plan

Progress = Callable[[str, int, int], None]


def write_report(
    plan: Plan | PlanningResult,
    path: str | Path,
    *,
    job: Job | None = None,
    profile: Profile | None = None,
    trace: str | Path | None = None,
    digest: str | None = None,
    file: str | None = None,
    sure: Tornado | None = None,
    progress: Progress = lambda name, done, total: None,
) -> Path:
    """Writes a plan that every rule proves as one HTML file, and every op to `trace`.

    Systems and rejected layouts come from what `make_plan` returned, or from simulating `job` again, which
    must be the one that the plan was made for. `digest` is the hash of the plan's file, which errors call
    `file`; `sure` replaces the report's own sensitivity analysis.
    """
    if isinstance(plan, PlanningResult):
        comparison: Comparison | None = plan.comparison
        plan = plan.plan
    else:
        require_proven_plan(plan, file=file)
        comparison = None if job is None else rerun_comparison(plan, job, profile, progress=progress)
    progress("drawing", 0, 1)
    data = gather_report_data(plan, digest=digest, comparison=comparison, tornado=sure)
    write_file_atomically(Path(path), render_report_page(data))
    if trace is not None:
        replay = replay_plan(plan)
        write_trace({plan.strategy: (replay.schedule, replay.timeline)}, Path(trace))
    return Path(path)


def rerun_comparison(
    plan: Plan,
    job: Job,
    profile: Profile | None = None,
    *,
    progress: Progress = lambda name, done, total: None,
) -> Comparison:
    """Simulates the systems that the plan was compared with, at its LLM layout and with its assumptions."""
    require_plan_of_job(plan, list_bound_parts(job, profile))
    layout, choice = plan.modules[LLM].layout, job.layout.modules.get(LLM, PartialLayout())
    stated = replace(choice, pp=layout.pp, cp=layout.cp, ep=layout.ep, tp=layout.tp)
    at_layout = replace(job.layout, modules={**job.layout.modules, LLM: stated})
    preset, noted = plan.notes.get("preset"), plan.notes.get("systems_s")
    name = preset.get("name") if isinstance(preset, dict) else None
    names = [known for known in (noted if isinstance(noted, dict) else SYSTEMS) if known in SYSTEMS]
    if job.today is None:
        names = [known for known in names if known != "today"]
    return compare_systems(
        replace(job, layout=at_layout),
        names=dict.fromkeys(["llm-only", *names, plan.strategy]),
        assumptions=name if name in PRESETS else "default",
        profile=profile,
        progress=progress,
    )


# ---------------------------------------------------------------------------- the page


def render_report_page(data: ReportData) -> str:
    """Returns the whole page; the same bytes for the same data."""
    style, script = build_colour_css() + _file("style.css"), f"\n{_file('script.js')}"
    title = f"{data.summary.job}: {format_seconds(data.summary.step_s)} s a step"
    parts = [
        "<!doctype html>",
        "<html lang='en'><head><meta charset='utf-8'>",
        render_content_policy(script),
        "<meta name='viewport' content='width=device-width,initial-scale=1'>",
        "<meta name='color-scheme' content='light dark'>",
        f"<title>{escape_markup(title)}</title>",
        f"<style>\n{style}</style></head><body><main>",
        _head(data.summary, data.breakdown),
        render_step_time_section(data.summary, data.breakdown),
        render_timeline_section(data.timelines),
        render_memory_section(data.memory),
        render_sensitivity_section(data.tornado),
        render_candidates_section(data.candidates),
        _foot(data.provenance),
        f"</main><script>{script}</script></body></html>",
        "",
    ]
    return "\n".join(parts)


def _file(name: str) -> str:
    return (files("optimus.render") / name).read_text(encoding="utf-8")


def _head(summary: PlanSummary, breakdown: StepBreakdown) -> str:
    """Returns the conclusion, the figures of the plan, and the chosen layouts."""
    figures = "".join(
        f"<div><dt>{escape_markup(name)}</dt><dd>{escape_markup(value)}<small>{escape_markup(more)}</small></dd></div>"
        for name, value, more in _figures(summary)
    )
    chosen = render_table(["chosen", "layout", "", "", "", ""], summary.chosen, left=6, name="chosen")
    headline = escape_markup(_headline(summary, breakdown))
    advice = render_note(f"Recommended: {summary.recommendation}.") if summary.recommendation else ""
    return (
        f"<header><p class='job'>{escape_markup(summary.job)}</p><h1>{headline}</h1>\n{advice}"
        f"<dl>{figures}</dl>\n{chosen}</header>"
    )


def _headline(summary: PlanSummary, breakdown: StepBreakdown) -> str:
    """Says `2.444 s a step on 3072 GPUs, 1.155 times the floor; balanced-best takes 2.382 s`.

    Of a plan with a recommendation, which compares the systems, only the first part, with its system.
    """
    words = f"{format_seconds(summary.step_s)} s a step on {summary.gpus} GPUs"
    if summary.floor_s:
        words += f", {summary.step_s / summary.floor_s:.3f} times the floor"
    if summary.recommendation:
        return f"{summary.strategy}: {words}"
    alternatives = [
        bar
        for bar in breakdown.bars
        if not bar.is_reported and bar.name != "llm-only" and bar.fits is not False
    ]
    if not alternatives:
        return words
    best = min(alternatives, key=lambda bar: bar.step_s)
    ratio = best.step_s / summary.step_s
    fits = "" if best.fits else " (if it fits)"
    if ratio < 1:
        return f"{words}; {best.name} takes {format_seconds(best.step_s)} s{fits}, and is simpler"
    return f"{words}, {ratio:.3f} times the speed of {best.name}, the best of the others{fits}"


def _figures(summary: PlanSummary) -> list[tuple[str, str, str]]:
    """Returns name, figure, and a remark in small print for each."""
    step = format_seconds(summary.step_s)
    estimate = f"estimate {format_seconds(summary.estimate_s)} s" if summary.estimate_s else ""
    figures = [("step", f"{step} s", estimate)]
    if summary.floor_s:
        over = f"{summary.step_s / summary.floor_s:.3f}"
        figures.append(("over floor", over, f"floor {format_seconds(summary.floor_s)} s"))
    if summary.hidden_strict is not None:
        placed = "" if summary.hidden_placed is None else f"placed {format_percent(summary.hidden_placed)}"
        figures.append(("hidden, strict", format_percent(summary.hidden_strict), placed))
    of = f"of {format_gigabytes(summary.capacity_bytes)} GB"
    figures.append(("peak memory", f"{format_gigabytes(summary.peak_bytes)} GB", of))
    if summary.mfu is not None:
        figures.append(("MFU", format_percent(summary.mfu, 1), ""))
    if summary.bound_s:
        over = f"{summary.step_s / summary.bound_s:.3f} times the bound"
        figures.append(("bound", f"{format_seconds(summary.bound_s)} s", f"{summary.bound} binds; {over}"))
    return figures


def _foot(provenance: Provenance) -> str:
    preset = f", preset {provenance.preset}" if provenance.preset else ""
    lines = [
        f"Seconds are simulated, not measured. Cost model: {provenance.cost_model}{preset}.",
        f"Not modelled: {'; '.join(provenance.not_modelled)}.",
        f"Optimus {provenance.version}; plan made by {provenance.tool}, sha256 {provenance.digest}.",
    ]
    return f"<footer>{''.join(render_note(line) for line in lines)}</footer>"
