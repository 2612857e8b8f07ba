"""`optimus sweep`: plans a job at every value of a range."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from optimus.cli.console import announce_compilation, check_writable, print_result, progress_bar
from optimus.cli.flags import (
    NO,
    OK,
    JobArgument,
    JsonFlag,
    LayoutFlag,
    OnFlag,
    PresetFlag,
    ProfileFlag,
    StrategyFlag,
    SystemsFlag,
    describe_option,
    load_optional_profile,
    split_names,
)
from optimus.cli.text import align_columns, wrap_closing_line, wrap_text
from optimus.errors import UserError

if TYPE_CHECKING:
    from optimus.sensitivity.job_sweep import JobSweep, SweepPoint

SCHEMA = "optimus.sweep/1"
ENDINGS = (".svg", ".html")
MAX_DIGITS = 9


@dataclass(frozen=True)
class SweepCommand:
    """Plan a job at every value of a range of GPUs, batch sizes, pp or tp."""

    job: JobArgument
    on: OnFlag = None
    gpus: Annotated[
        tuple[str, ...], describe_option(metavar="N,N,...", help="numbers of GPUs, at the same batch")
    ] = ()
    batch: Annotated[tuple[str, ...], describe_option(metavar="N,N,...", help="sequences per step")] = ()
    pp: Annotated[tuple[str, ...], describe_option(metavar="N,N,...", help="pipeline stages of the LLM")] = ()
    tp: Annotated[tuple[str, ...], describe_option(metavar="N,N,...", help="widths of the LLM's TP")] = ()
    output: Annotated[
        Path | None,
        describe_option(
            aliases=["-o"], metavar="FILE.svg|.html", help="write the picture, or a page with the table"
        ),
    ] = None
    strategy: StrategyFlag = "optimus"
    system: SystemsFlag = ()
    layout: LayoutFlag = ()
    preset: PresetFlag = "default"
    profile: ProfileFlag = None
    json: JsonFlag = False

    def __call__(self) -> int:
        from optimus.cost.assumptions import get_preset
        from optimus.job.read import find_job

        assumptions = get_preset(self.preset)
        ranges = {axis: _integers(axis, getattr(self, axis)) for axis in ("gpus", "batch", "pp", "tp")}
        if self.output is not None:
            check_writable("--output", self.output, *ENDINGS)
        job, profile = find_job(self.job, self.on, self.layout), load_optional_profile(self.profile)
        with progress_bar("planning") as progress, announce_compilation():
            from optimus.render.sweep_chart import write_sweep
            from optimus.sensitivity.job_sweep import sweep_job

            sweep = sweep_job(
                job,
                strategy=self.strategy,
                assumptions=assumptions,
                profile=profile,
                systems=split_names(self.system) or None,
                progress=progress,
                **ranges,
            )
        lines = format_sweep(sweep)
        if self.output is not None:
            write_sweep(sweep, self.output)
            lines += ["", *wrap_closing_line("wrote", str(self.output))]
        file = None if self.output is None else str(self.output)
        print_result(build_sweep_json(sweep, file=file), lines, as_json=self.json)
        return OK if sweep.possible else NO


def _integers(axis: str, words: tuple[str, ...]) -> list[int]:
    """Parses `256,512 1024`."""
    values = split_names(words)
    for word in values:
        if not (word.isascii() and word.isdigit() and len(word) <= MAX_DIGITS):
            hint = f"write for example --{axis} 2,4,8"
            raise UserError(field=f"--{axis}", value=word, problem="is not a whole number", hint=hint)
    return [int(word) for word in values]


def build_sweep_json(sweep: JobSweep, *, file: str | None) -> dict[str, object]:
    """Returns the object of `optimus sweep --json`."""
    from optimus.render.sweep_chart import summarize_sweep

    return {
        "schema": SCHEMA,
        "job": sweep.job,
        "over": sweep.axis,
        "strategy": sweep.strategy,
        "preset": sweep.preset,
        "conclusion": summarize_sweep(sweep),
        "points": [_point_json(point) for point in sweep.points],
        "picture": file,
    }


def _point_json(point: SweepPoint) -> dict[str, object]:
    from optimus.render.sweep_chart import is_worth_filling

    plan = point.plan
    at: dict[str, object] = {"value": point.value, "gpus": point.gpus, "possible": plan is not None}
    if plan is None:
        return {**at, "reason": point.reason}
    return {
        **at,
        "step_s": plan.step_s,
        "floor_s": plan.floor_s,
        "step_over_floor": plan.over_floor,
        "simpler_system": plan.simpler,
        "simpler_s": plan.simpler_s,
        "speedup_over_simpler": plan.speedup,
        "tokens_per_s_per_gpu": point.tokens_per_s_per_gpu(plan.step_s),
        "peak_memory_bytes": plan.peak_bytes,
        "worth": is_worth_filling(plan),
        "layouts": {name: asdict(layout) for name, layout in plan.layouts.items()},
    }


def format_sweep(sweep: JobSweep) -> list[str]:
    """Returns the conclusion, a row per point, and the reasons of points that are not possible."""
    from optimus.render.sweep_chart import build_sweep_table, explain_sweep_columns, summarize_sweep

    header, rows = build_sweep_table(sweep)
    breaks = [header.index("best simpler system")]
    lines = [
        *wrap_text("", summarize_sweep(sweep), indent=0),
        "",
        *align_columns(header, rows, left=2, breaks=breaks),
    ]
    impossible = [point for point in sweep.points if point.plan is None]
    lines += [""] if impossible else []
    for point in impossible:
        lines += wrap_text(f"  {point.value}", f"not possible: {point.reason}", indent=10)
    return [*lines, "", *wrap_text("note", explain_sweep_columns(sweep))]
