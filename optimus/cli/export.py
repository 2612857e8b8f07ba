"""`optimus export`: writes a plan as the arguments of another trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from optimus.cli.console import check_writable, print_result
from optimus.cli.flags import OK, JsonFlag, PlanArgument, describe_option
from optimus.cli.text import format_plan_title, wrap_text
from optimus.errors import UserError

if TYPE_CHECKING:
    from optimus.exporters.exported_plan import ExportedPlan, TargetStepTime

SCHEMA = "optimus.export/1"


@dataclass(frozen=True)
class ExportCommand:
    """Write a plan as the arguments of Megatron, Megatron Bridge or torchtitan."""

    plan: PlanArgument
    to: Annotated[str, describe_option(metavar="TARGET", help="megatron, bridge or torchtitan")]
    output: Annotated[
        Path | None,
        describe_option(
            aliases=["-o"],
            metavar="FOLDER",
            help="the folder to write to; default: named after plan and target",
        ),
    ] = None
    json: JsonFlag = False

    def __call__(self) -> int:
        from optimus.exporters.targets import export_plan, require_known_target
        from optimus.ir.files import write_file_atomically
        from optimus.ir.planfile import PLAN_FILE_ENDING, load_plan

        require_known_target(self.to)
        export = export_plan(load_plan(self.plan), self.to, file=str(self.plan))
        stem = self.plan.name.removesuffix(PLAN_FILE_ENDING).removesuffix(".json")
        folder = self.output or Path(f"{stem}-{self.to}")
        _make_folder(folder)
        files = [folder / name for name in export.files]
        for path in files:
            check_writable("--output", path)
        for path, text in zip(files, export.files.values(), strict=True):
            write_file_atomically(path, text)
        print_result(_export_json(export, files), _export_text(export, files), as_json=self.json)
        return OK


def _make_folder(folder: Path) -> None:
    """Creates the folder; its parent must exist."""
    try:
        folder.mkdir(exist_ok=True)
    except (OSError, ValueError) as error:
        raise UserError(
            field="--output",
            value=str(folder),
            problem=f"cannot be a folder: {getattr(error, 'strerror', error)}",
            hint="name a folder of yours, in one that exists",
        ) from None


def _export_json(export: ExportedPlan, files: Sequence[Path]) -> dict[str, object]:
    """Returns the object of `optimus export --json`."""
    return {
        "schema": SCHEMA,
        "plan": export.plan.name,
        "target": export.target,
        "checked_against": export.version,
        "files": [str(path) for path in files],
        "step_s": export.plan.claims.step_s,
        "not_supported": [asdict(feature) for feature in export.not_supported],
        "as_written": _price_json(export.as_written),
        "best_there": _price_json(export.best_there),
    }


def _export_text(export: ExportedPlan, files: Sequence[Path]) -> list[str]:
    """Returns the files written, what the target cannot run, and the steps it takes."""
    from optimus.exporters.exported_plan import describe_step_time, written_system
    from optimus.exporters.targets import SYSTEMS

    plan, written = export.plan, written_system(export.plan)
    lines = format_plan_title(plan, f"for {export.version}")
    lines += wrap_text("wrote", " ".join(map(str, files)))
    for feature in export.not_supported:
        lines += wrap_text("cannot run", f"{feature.what}: {feature.why}")
    lines += wrap_text("as written", describe_step_time(plan, export.as_written, written, about=True))
    best = describe_step_time(plan, export.best_there, SYSTEMS[export.target])
    if export.best_there is not None and export.best_there.system not in written:
        best += f" (not these files; plan with --strategy {export.best_there.system})"
    return [*lines, *wrap_text("best there", best)]


def _price_json(price: TargetStepTime | None) -> dict[str, object] | None:
    return None if price is None else asdict(price)
