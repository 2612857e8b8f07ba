"""`optimus report`: draws a plan as one HTML page, and writes its trace."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from optimus.cli.console import announce_compilation, check_writable, print_result, progress_bar
from optimus.cli.flags import (
    OK,
    TRACE_ENDINGS,
    JsonFlag,
    OnFlag,
    PlanArgument,
    TraceFlag,
    describe_option,
    load_optional_profile,
    refuse_without_job,
)
from optimus.cli.text import format_next_commands, wrap_closing_line

SCHEMA = "optimus.report/1"
ENDINGS = (".plan.json", ".json")


@dataclass(frozen=True)
class ReportCommand:
    """Draw a plan as one HTML page: time, memory, sensitivity and alternatives."""

    plan: PlanArgument
    job: Annotated[
        str | None,
        describe_option(
            metavar="JOB",
            help="simulate the plan's job again, to show the parts of all systems and all layouts tried",
        ),
    ] = None
    on: OnFlag = None
    profile: Annotated[
        Path | None,
        describe_option(metavar="FILE.yaml", help="with --job: the profile that the plan was made with"),
    ] = None
    output: Annotated[
        Path | None,
        describe_option(
            aliases=["-o"], metavar="FILE.html", help="the file to write; default: the plan's name and .html"
        ),
    ] = None
    trace: TraceFlag = None
    json: JsonFlag = False

    def __call__(self) -> int:
        from optimus.ir.planfile import load_plan

        output = self.output or self._default_output()
        check_writable("--output", output, ".html")
        if self.trace is not None:
            check_writable("--trace", self.trace, *TRACE_ENDINGS)
        refuse_without_job(self.job, on=self.on, profile=self.profile)
        plan = load_plan(self.plan)
        digest = hashlib.sha256(self.plan.read_bytes()).hexdigest()
        job, profile = None, load_optional_profile(self.profile)
        if self.job is not None:
            from optimus.job.read import find_job

            job = find_job(self.job, self.on)
        with progress_bar("planning") as progress, announce_compilation():
            from optimus.render.html_report import write_report

            write_report(
                plan,
                output,
                job=job,
                profile=profile,
                trace=self.trace,
                digest=digest,
                file=str(self.plan),
                progress=progress,
            )
        lines = wrap_closing_line(
            "wrote", f"{output} ({output.stat().st_size / 1e6:.1f} MB, open it in a browser)"
        )
        if self.trace is not None:
            lines += wrap_closing_line("wrote", f"{self.trace} (open it at ui.perfetto.dev)")
        if job is None:
            lines += format_next_commands(
                f"optimus report {self.plan} --job JOB  # shows the parts of all systems"
            )
        result = {
            "schema": SCHEMA,
            "html": str(output),
            "trace": None if self.trace is None else str(self.trace),
        }
        print_result(result, lines, as_json=self.json)
        return OK

    def _default_output(self) -> Path:
        """Returns the plan's path with the ending .html."""
        ending = next((end for end in ENDINGS if self.plan.name.endswith(end)), "")
        return self.plan.with_name(self.plan.name.removesuffix(ending) + ".html")
