"""`optimus init`: writes a job file from a released config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from optimus.cli.console import check_writable, print_result
from optimus.cli.flags import OK, JsonFlag, describe_option
from optimus.cli.text import format_next_commands, wrap_closing_line
from optimus.errors import UserError


@dataclass(frozen=True)
class InitCommand:
    """Write a commented job file from a model's config.json."""

    hf: Annotated[
        str,
        describe_option(
            metavar="CONFIG.json", help="the model: its config.json, its folder, or a catalog name"
        ),
    ]
    on: Annotated[str, describe_option(metavar="GPU:COUNT", help="cluster to run on, e.g. h100:512")]
    output: Annotated[Path, describe_option(aliases=["-o"], metavar="JOB.yaml", help="the file to write")] = (
        Path("job.yaml")
    )
    json: JsonFlag = False

    def __call__(self) -> int:
        from optimus.ir.files import write_file_atomically
        from optimus.job.write import format_job_yaml

        text = format_job_yaml(self.hf, self.on, folder=self.output.parent)
        check_writable("--output", self.output)
        if self.output.exists():
            raise UserError(
                field="--output", value=str(self.output), problem="exists", hint="name another file with -o"
            )
        write_file_atomically(self.output, text)
        result = {"schema": "optimus.init/1", "job": text, "file": str(self.output)}
        lines = [
            *wrap_closing_line("wrote", str(self.output)),
            *format_next_commands(f"optimus simulate {self.output}"),
        ]
        print_result(result, lines, as_json=self.json)
        return OK
