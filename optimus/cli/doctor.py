"""`optimus doctor`: says what this machine has, and packs a bug report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from optimus.cli.console import check_writable, print_result
from optimus.cli.flags import OK, JsonFlag, describe_option
from optimus.cli.text import wrap_closing_line, wrap_text
from optimus.cli.train import RUN_DIR

SCHEMA = "optimus.doctor/1"


@dataclass(frozen=True)
class DoctorCommand:
    """Say what this machine has, and pack a bug report (--bundle)."""

    bundle: Annotated[
        Path | None,
        describe_option(
            metavar="FILE.zip",
            help="write versions, job, plan, last metrics and last ops of --run-dir, without secrets",
        ),
    ] = None
    run_dir: Annotated[
        Path, describe_option(metavar="FOLDER", help="the folder of the run that the report is about")
    ] = RUN_DIR
    job: Annotated[
        Path | None, describe_option(metavar="FILE", help="the job file that the report is about")
    ] = None
    json: JsonFlag = False

    def __call__(self) -> int:
        from optimus.cli.bug_report import collect_files, list_facts, list_problems, write_bundle

        facts, problems = list_facts(), list_problems()
        lines = [line for name, value in facts.items() for line in wrap_text(name, value)]
        lines += [line for problem in problems for line in wrap_closing_line("note", problem)]
        result: dict[str, Any] = {"schema": SCHEMA, **facts, "notes": problems, "bundle": None}
        if self.bundle is not None:
            check_writable("--bundle", self.bundle, ".zip")
            files = collect_files(self.run_dir, self.job, lines)
            write_bundle(self.bundle, files)
            result["bundle"] = {name: len(content) for name, content in files.items()}
            lines += [f"  {len(content):>10,} bytes  {name}" for name, content in files.items()]
            lines += wrap_closing_line("wrote", f"{self.bundle}: read it before you send it")
        print_result(result, lines, as_json=self.json)
        return OK
