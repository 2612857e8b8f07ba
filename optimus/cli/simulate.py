"""`optimus simulate`: compares the systems of a job, or replays a plan file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from optimus.cli.console import announce_compilation, check_writable, print_result, progress_bar
from optimus.cli.flags import (
    NO,
    OK,
    TRACE_ENDINGS,
    JsonFlag,
    LayoutFlag,
    OnFlag,
    PresetFlag,
    ProfileFlag,
    TraceFlag,
    describe_option,
    load_optional_profile,
    split_names,
)
from optimus.cli.text import align_columns, format_plan_title, wrap_closing_line, wrap_remark
from optimus.environment import usable_cores
from optimus.errors import UserError
from optimus.render.format_numbers import format_gigabytes, format_seconds

if TYPE_CHECKING:
    from optimus.planner.plan_replay import ReplayedPlan

SCHEMA = "optimus.simulate/1"
SHORT_CAUSES = {
    "dp_all_gather": "DP ag",
    "dp_reduce_scatter": "DP rs",
    "pp_warmup": "warm",
    "pp_cooldown": "cool",
    "pp_other": "other",
    "tp": "TP",
}
CAUSES_REMARK = "The six % columns from DP ag to TP are idle time of the mean GPU, by cause."


@dataclass(frozen=True)
class SimulateCommand:
    """Compare the step and memory of all systems for a job, or replay a plan."""

    job: Annotated[
        tyro.conf.Positional[str],
        describe_option(
            metavar="JOB|PLAN",
            help="a job.yaml, a catalog job (paper/strong-3072), with --on a catalog model or a config.json; "
            "or a plan file",
        ),
    ]
    on: OnFlag = None
    system: Annotated[
        tuple[str, ...],
        describe_option(
            metavar="NAME ...",
            help="only these systems, e.g. stage0 fsdp; default: all that apply",
        ),
    ] = ()
    layout: LayoutFlag = ()
    preset: PresetFlag = "default"
    profile: ProfileFlag = None
    picture: Annotated[
        Path | None, describe_option(metavar="FILE.svg", help="draw every stage of the systems over time")
    ] = None
    trace: TraceFlag = None
    json: JsonFlag = False

    def __call__(self) -> int:
        from optimus.cost.assumptions import get_preset
        from optimus.ir.planfile import is_plan_file
        from optimus.job.read import find_job

        if self.picture is not None:
            check_writable("--picture", self.picture, ".svg")
        if self.trace is not None:
            check_writable("--trace", self.trace, *TRACE_ENDINGS)
        if is_plan_file(self.job):
            return self._replay()
        assumptions = get_preset(self.preset)
        job = find_job(self.job, self.on, self.layout)
        profile = load_optional_profile(self.profile)
        with progress_bar("simulating") as progress, announce_compilation():
            from optimus.cli.comparison import build_comparison_json, format_comparison
            from optimus.planner.compare import compare_systems

            comparison = compare_systems(
                job,
                names=split_names(self.system) or None,
                assumptions=assumptions,
                profile=profile,
                cores=usable_cores(),
                progress=progress,
            )
        lines = format_comparison(comparison)
        if self.picture is not None:
            from optimus.render.timeline_svg import write_timeline_svg

            write_timeline_svg(comparison, self.picture)
            lines += ["", *wrap_closing_line("wrote", str(self.picture))]
        if self.trace is not None and comparison.systems:
            from optimus.render.trace import write_trace

            timelines = {
                name: (system.schedule, system.timeline) for name, system in comparison.systems.items()
            }
            write_trace(timelines, self.trace)
            lines += ["", *wrap_closing_line("wrote", f"{self.trace} (open it at ui.perfetto.dev)")]
        print_result(build_comparison_json(comparison), lines, as_json=self.json)
        return OK if comparison.systems else NO

    def _replay(self) -> int:
        """Replays a plan file, which leaves nothing to choose."""
        from optimus.ir.planfile import load_plan
        from optimus.verify.validator import require_proven_plan

        for flag in ("on", "system", "layout", "picture", "preset", "profile"):
            if getattr(self, flag) not in (None, (), "default"):
                problem = "does not apply to a plan file, which is already decided"
                raise UserError(field=f"--{flag}", problem=problem, hint="leave it out, or name the job")
        plan = load_plan(Path(self.job))
        require_proven_plan(plan, file=self.job)
        with announce_compilation():
            from optimus.planner.plan_replay import replay_plan

            replayed = replay_plan(plan)
        lines = _replay_text(replayed)
        if self.trace is not None:
            from optimus.render.trace import write_trace

            write_trace({plan.strategy: (replayed.schedule, replayed.timeline)}, self.trace)
            lines += ["", *wrap_closing_line("wrote", f"{self.trace} (open it at ui.perfetto.dev)")]
        print_result(_replay_json(replayed), lines, as_json=self.json)
        return OK


def _replay_json(replayed: ReplayedPlan) -> dict[str, object]:
    """Returns the object of `optimus simulate PLAN --json`."""
    plan, floor = replayed.plan, replayed.floor_s
    step = replayed.timeline.step_s
    return {
        "schema": SCHEMA,
        "job": plan.name,
        "gpus": plan.ranks.world,
        "layout": {name: asdict(module.layout) for name, module in plan.modules.items()},
        "floor_s": floor,
        "systems": {
            plan.strategy: {
                "step_s": step,
                "claimed_step_s": plan.claims.step_s,
                "step_over_floor": step / floor if floor else None,
                "peak_memory_bytes": max(held.peak for held in plan.memory),
                "mfu": plan.notes.get("mfu"),
                "bubbles_s": asdict(replayed.bubbles),
                "tasks": len(replayed.schedule),
            }
        },
    }


def _replay_text(replayed: ReplayedPlan) -> list[str]:
    """Returns step, memory and bubbles of the plan."""
    plan, step, floor = replayed.plan, replayed.timeline.step_s, replayed.floor_s
    lines = [*format_plan_title(plan), ""]
    bubbles_s = asdict(replayed.bubbles)
    header = ["system", "step s", "over floor", "peak GB"]
    header += [f"{SHORT_CAUSES[cause]} %" for cause in bubbles_s]
    row = [
        plan.strategy,
        format_seconds(step),
        f"{step / floor:.3f}" if floor else "-",
        format_gigabytes(max(held.peak for held in plan.memory)),
        *(f"{100 * idle_s / step:.1f}" for idle_s in bubbles_s.values()),
    ]
    lines += align_columns(header, [row], breaks=[header.index("peak GB") + 1])
    lines += wrap_remark(CAUSES_REMARK)
    return [*lines, "", *wrap_remark(f"claimed {plan.claims.step_s:.9f} s, replayed {step:.9f} s")]
