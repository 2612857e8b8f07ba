"""The verb `report`: gathers, draws and writes a plan's page, and its trace if one is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from optimus.cost.assumptions import PRESETS
from optimus.cost.measured import Profile
from optimus.ir.binding import bound_parts, check_binding
from optimus.ir.files import write_whole
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.job.layout import LayoutChoice
from optimus.planner.compare import Comparison, compare_systems
from optimus.planner.planning import PlanningResult
from optimus.planner.replaying import replay_plan
from optimus.planner.systems.registry import SYSTEMS
from optimus.render.gather_report import gather_report
from optimus.render.report_page import report_html
from optimus.render.trace import write_trace
from optimus.sensitivity.tornado import Tornado

Progress = Callable[[str, int, int], None]


def write_report(
    plan: Plan | PlanningResult,
    path: str | Path,
    *,
    job: Job | None = None,
    profile: Profile | None = None,
    trace: str | Path | None = None,
    digest: str | None = None,
    sure: Tornado | None = None,
    progress: Progress = lambda name, done, total: None,
) -> Path:
    """Writes a plan as one HTML file, and every op to `trace`.

    Systems and rejected layouts come from what `make_plan` returned, or from simulating `job` again, which
    must be the one that the plan was made for. `digest` is of the plan's file, `sure` a finer analysis than
    our own.
    """
    if isinstance(plan, PlanningResult):
        comparison: Comparison | None = plan.comparison
        plan = plan.plan
    else:
        comparison = None if job is None else compare_again(plan, job, profile, progress=progress)
    progress("drawing", 0, 1)
    data = gather_report(plan, digest=digest, comparison=comparison, sure=sure)
    write_whole(Path(path), report_html(data))
    if trace is not None:
        played = replay_plan(plan)
        write_trace({plan.strategy: (played.schedule, played.timeline)}, Path(trace))
    return Path(path)


def compare_again(
    plan: Plan,
    job: Job,
    profile: Profile | None = None,
    *,
    progress: Progress = lambda name, done, total: None,
) -> Comparison:
    """The systems that the plan was compared with, at its layout of the LLM and with its assumptions."""
    check_binding(plan, bound_parts(job, profile))
    layout, choice = plan.modules[LLM].layout, job.layout.modules.get(LLM, LayoutChoice())
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
