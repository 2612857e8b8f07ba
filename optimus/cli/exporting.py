"""The command that writes a plan for other trainers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from optimus.cli.flags import OK, Json, PlanFile
from optimus.console import check_writable, show
from optimus.errors import UserError


@dataclass(frozen=True)
class Export:
    """Write a plan as the arguments of another trainer, and say what that trainer cannot run."""

    plan: Annotated[PlanFile, tyro.conf.arg(metavar="PLAN", help="a plan file")]
    to: Annotated[str, tyro.conf.arg(metavar="TARGET", help="megatron or torchtitan")]
    output: Annotated[
        Path | None,
        tyro.conf.arg(
            aliases=["-o"], metavar="FOLDER", help="where to write; named after plan and target if left out"
        ),
    ] = None
    json: Json = False

    def __call__(self) -> int:
        from optimus.exporters.registry import check_target, export_plan
        from optimus.ir.files import write_whole
        from optimus.ir.planfile import ENDING, load_plan
        from optimus.render.exporting import export_json, export_text

        check_target(self.to)
        export = export_plan(load_plan(self.plan), self.to, file=str(self.plan))
        name = self.plan.name.removesuffix(ENDING).removesuffix(".json")
        folder = self.output or Path(f"{name}-{self.to}")
        _make_folder(folder)
        files = [folder / each for each in export.files]
        for path in files:
            check_writable("--output", path)
        for path, text in zip(files, export.files.values(), strict=True):
            write_whole(path, text)
        show(export_json(export, files), export_text(export, files), as_json=self.json)
        return OK


def _make_folder(folder: Path) -> None:
    """The folder to write to, made if only it is missing."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(
            field="--output",
            value=str(folder),
            problem=f"cannot be a folder: {error.strerror}",
            hint="name a folder of yours, in one that exists",
        ) from None
