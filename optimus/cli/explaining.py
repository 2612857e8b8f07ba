"""Commands that explain: why a plan is not laid out otherwise, and how plans change over a range."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from optimus.cli.flags import (
    NO,
    OK,
    ComparedWith,
    Job,
    Json,
    LayoutWords,
    Measured,
    On,
    PlanFile,
    Preset,
    Strategy,
    load_profile_of,
    split_names,
)
from optimus.console import announced_compilation, check_writable, progress_bar, show
from optimus.errors import UserError

ENDINGS = (".svg", ".html")
MAX_DIGITS = 9


@dataclass(frozen=True)
class Why:
    """Say what speaks against a layout: the rule it breaks, the memory it lacks, or the seconds it costs."""

    plan: Annotated[PlanFile, tyro.conf.arg(metavar="PLAN", help="a plan file")]
    layouts: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(
            metavar="MODULE=AXES ...",
            help="the layout asked about, e.g. llm=pp8,tp4 vision=pp2; what is left out is searched",
        ),
    ]
    job: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="JOB", help="the plan's job, for its limits, or if the file does not hold all of its data"
        ),
    ] = None
    on: On = None
    profile: Annotated[
        Path | None,
        tyro.conf.arg(metavar="FILE.yaml", help="the profile that the plan was made with, if it was"),
    ] = None
    json: Json = False

    def __call__(self) -> int:
        from optimus.render.reasons import reason_json, reason_text

        if self.on is not None and self.job is None:
            raise UserError(field="--on", problem="needs --job", hint="name the job, or leave --on out")
        job = None
        if self.job is not None:
            from optimus.job.read import find_job

            job = find_job(self.job, self.on)
        profile = load_profile_of(self.profile)
        with progress_bar() as progress, announced_compilation():
            from optimus.sensitivity.why_not import explain_layout

            reason = explain_layout(self.plan, *self.layouts, job=job, profile=profile, progress=progress)
        show(reason_json(reason), reason_text(reason), as_json=self.json)
        return OK


@dataclass(frozen=True)
class Sweep:
    """Plan a job at every value of one range: a table, and a picture of tokens per second and GPU."""

    job: Job
    on: On = None
    gpus: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="N,N,...", help="numbers of GPUs, at the same batch")
    ] = ()
    batch: Annotated[tuple[str, ...], tyro.conf.arg(metavar="N,N,...", help="sequences per step")] = ()
    pp: Annotated[tuple[str, ...], tyro.conf.arg(metavar="N,N,...", help="pipeline stages of the LLM")] = ()
    tp: Annotated[tuple[str, ...], tyro.conf.arg(metavar="N,N,...", help="widths of the LLM's TP")] = ()
    output: Annotated[
        Path | None,
        tyro.conf.arg(aliases=["-o"], metavar="FILE.svg|.html", help="write the picture, or page with table"),
    ] = None
    strategy: Strategy = "optimus"
    system: ComparedWith = ()
    layout: LayoutWords = ()
    preset: Preset = "default"
    profile: Measured = None
    json: Json = False

    def __call__(self) -> int:
        from optimus.cost.assumptions import preset
        from optimus.job.read import find_job

        assumptions = preset(self.preset)
        ranges = {axis: _numbers(axis, getattr(self, axis)) for axis in ("gpus", "batch", "pp", "tp")}
        if self.output is not None:
            check_writable("--output", self.output, *ENDINGS)
        job, profile = find_job(self.job, self.on, self.layout), load_profile_of(self.profile)
        with progress_bar() as progress, announced_compilation():
            from optimus.render.sweeping import sweep_json, sweep_text, write_sweep
            from optimus.sensitivity.sweep import sweep_job

            sweep = sweep_job(
                job,
                strategy=self.strategy,
                assumptions=assumptions,
                profile=profile,
                systems=split_names(self.system) or None,
                progress=progress,
                **ranges,
            )
        lines = sweep_text(sweep)
        if self.output is not None:
            write_sweep(sweep, self.output)
            lines += ["", f"wrote {self.output}"]
        file = None if self.output is None else str(self.output)
        show(sweep_json(sweep, file=file), lines, as_json=self.json)
        return OK if sweep.possible else NO


def _numbers(axis: str, words: tuple[str, ...]) -> list[int]:
    """`256,512 1024` as numbers."""
    found = split_names(words)
    for word in found:
        if not (word.isascii() and word.isdigit() and len(word) <= MAX_DIGITS):
            hint = f"write for example --{axis} 2,4,8"
            raise UserError(field=f"--{axis}", value=word, problem="is not a whole number", hint=hint)
    return [int(word) for word in found]
