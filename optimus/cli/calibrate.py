"""`optimus calibrate`: fits the factors of a user's own stack and cluster to a few measured steps."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from optimus.cli.console import announce_compilation, print_result, progress_bar
from optimus.cli.flags import OK, JobArgument, JsonFlag, OnFlag, PresetFlag, describe_option
from optimus.cli.text import align_columns, wrap_remark, wrap_text
from optimus.environment import usable_cores
from optimus.errors import UserError
from optimus.render.format_numbers import format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optimus.job.measured_runs import OwnStep
    from optimus.sensitivity.calibrate import CalibratedStack

SCHEMA = "optimus.calibration/1"
DISAGREE_ABOVE = 0.10  # median error of steps predicted from the others
MAX_FACTOR = 2.5  # or its inverse


@dataclass(frozen=True)
class CalibrateCommand:
    """Fit factors of your own stack to steps that you measured."""

    job: JobArgument
    run: Annotated[
        Path,
        describe_option(
            metavar="RESULTS.csv",
            help="measured steps, a row each: step_s, and what of placement, gpus, tp, pp, cp, ep, chunks, "
            "microbatch_sequences, sequences_per_step, schedule, reshard_after_forward, recompute, "
            "tp_overlapped, ep_overlapped and token_dispatcher was not as the job and the planner have it",
        ),
    ]
    output: Annotated[
        Path, tyro.conf.arg(aliases=["-o"]), describe_option(metavar="FILE.yaml", help="file of the factors")
    ] = Path("stack.yaml")
    on: OnFlag = None
    preset: PresetFlag = "default"
    json: JsonFlag = False

    def __call__(self) -> int:
        from optimus.cost.assumptions import STACK_ENDINGS, get_preset
        from optimus.ir.files import write_file_atomically
        from optimus.job.measured_runs import load_own_steps
        from optimus.job.read import find_job
        from optimus.sensitivity.calibrate import calibrate_stack

        if self.output.suffix not in STACK_ENDINGS:
            raise UserError(
                field="--output",
                value=str(self.output),
                problem="is not a .yaml file",
                hint="end its name in .yaml",
            )
        if self.preset.endswith(STACK_ENDINGS):
            problem, hint = "is a file of factors", "name a preset: factors are fitted anew"
            raise UserError(field="--preset", value=self.preset, problem=problem, hint=hint)
        measured = load_own_steps(self.run, find_job(self.job, self.on))
        steps = [step for step, _ in measured]
        base = get_preset(self.preset)
        with progress_bar("calibrating") as progress, announce_compilation():
            fitted = calibrate_stack(
                [job for _, job in measured],
                [step.step_s for step in steps],
                base,
                cores=usable_cores(),
                progress=progress,
            )
        text = format_stack(fitted, self.output.stem, self.preset, self.run.name)
        write_file_atomically(self.output, text)
        held_out, after = fitted.accuracy("left_out_s"), fitted.accuracy("after_s")
        result = {
            "schema": SCHEMA,
            "file": str(self.output),
            "points": len(steps),
            "efficiency": fitted.assumptions.efficiency,
            "traffic_scale": fitted.assumptions.traffic_scale,
            "median_error": after.median,
            "p90_error": after.p90,
            "bias": after.bias,
            "held_out": {"median_error": held_out.median, "bias": held_out.bias},
            "before": {"median_error": (before := fitted.accuracy("before_s")).median, "bias": before.bias},
            "steps": [
                {"name": step.label, **asdict(each)} for step, each in zip(steps, fitted.steps, strict=True)
            ],
        }
        lines = format_calibration(fitted, steps)
        lines += ["", f"wrote {self.output}"]
        on = f" --on {self.on}" if self.on else ""
        lines += wrap_text("next", f"optimus plan {self.job}{on} --preset {self.output}")
        print_result(result, lines, as_json=self.json)
        return OK


def format_calibration(fitted: CalibratedStack, steps: Sequence[OwnStep]) -> list[str]:
    """Formats the factors, every step before and after, and what is left unexplained."""
    assumed, counted = fitted.assumptions, f"{len(steps)} measured step{'s' * (len(steps) > 1)}"
    lines = wrap_text(
        "factors",
        f"compute runs at {assumed.efficiency:.3g} times the rates of the preset, collectives and sends "
        f"take {assumed.traffic_scale:.3g} times the seconds; fitted to {counted}",
    )
    rows = [
        [step.label, format_seconds(each.measured_s)]
        + [f"{100 * (s / each.measured_s - 1):+.1f}" for s in (each.before_s, each.after_s, each.left_out_s)]
        for step, each in zip(steps, fitted.steps, strict=True)
    ]
    header = ["step", "measured s", "before %", "fitted %", "left out %"]
    lines += ["", *align_columns(header, rows)]
    lines += wrap_remark(
        "Predicted over measured step, less 1: by the preset, with the factors, and with factors fitted to "
        "the other steps."
    )
    lines.append("")
    held_out, factors = fitted.accuracy("left_out_s"), (assumed.efficiency, assumed.traffic_scale)
    if len(steps) == 1:
        lines += wrap_text("unexplained", "unknown: one step cannot test another; add a second")
    else:
        most = max(abs(each.left_out_s / each.measured_s - 1) for each in fitted.steps)
        words = f"{held_out.median:.1%} in the median, {most:.1%} at most"
        lines += wrap_text("unexplained", f"{words}, of steps that factors of the others predict")
    doubts = ["the steps do not agree with one another"] * (
        len(steps) > 1 and held_out.median > DISAGREE_ABOVE
    )
    doubts += ["a factor is beyond what stacks differ by"] * any(
        not 1 / MAX_FACTOR < each < MAX_FACTOR for each in factors
    )
    for doubt in doubts:
        check = "check what ran (layout, microbatch, recompute, data), and that nothing but GPUs limits it"
        lines += wrap_text("", f"{doubt}: {check}, before trusting the factors")
    return lines


def format_stack(fitted: CalibratedStack, name: str, base: str, source: str) -> str:
    """Returns the file of the factors."""
    count, held_out = len(fitted.steps), fitted.accuracy("left_out_s")
    left = (
        "" if count == 1 else f", each predicted from the others within {held_out.median:.1%} in the median"
    )
    evidence = f"{count} step{'s' * (count > 1)} of {source}{left}"
    return (
        "# Factors that `optimus calibrate` fitted, for --preset of plan, simulate, sweep and train: times\n"
        "# the rates of compute, and times the seconds of collectives and sends.\n"
        "format: optimus.stack/1\n"
        f"name: {json.dumps(name)}\n"
        f"base: {json.dumps(base)}\n"
        f"efficiency: {fitted.assumptions.efficiency:.6g}\n"
        f"traffic_scale: {fitted.assumptions.traffic_scale:.6g}\n"
        f"source: {json.dumps(evidence)}\n"
    )
