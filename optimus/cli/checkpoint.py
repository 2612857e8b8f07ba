"""`optimus checkpoint`: verifies the checkpoints of a run, and writes one as a model folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from optimus.cli.console import print_result, progress_bar
from optimus.cli.flags import NO, OK, JsonFlag, describe_option, import_extra
from optimus.cli.text import align_columns, wrap_closing_line
from optimus.errors import OptimusError, UserError

if TYPE_CHECKING:
    from optimus.engine.checkpoint_folder import Manifest

GB = 1e9


@dataclass(frozen=True)
class CheckpointCommand:
    """Verify the checkpoints of a run, or write one as a model folder."""

    run: Annotated[
        Path, tyro.conf.Positional, describe_option(metavar="RUN_DIR", help="the --run-dir of the run")
    ]
    step: Annotated[
        int | None, describe_option(metavar="N", help="only the checkpoint after N steps; default: all")
    ] = None
    export: Annotated[
        Path | None,
        describe_option(
            metavar="FOLDER",
            help="write the weights of the newest one as a folder of transformers; needs --model",
        ),
    ] = None
    model: Annotated[
        Path | None,
        describe_option(
            metavar="FOLDER", help="the model folder whose names, dtypes and files --export writes"
        ),
    ] = None
    json: JsonFlag = False

    def __call__(self) -> int:
        if (self.export is None) != (self.model is None):
            given, missing = ("--export", "--model") if self.model is None else ("--model", "--export")
            raise UserError(field=given, problem=f"needs {missing}", hint=f"add {missing} FOLDER")
        checked = [self._verify(path) for path in self._list()]
        whole = [(path, manifest) for path, manifest, _ in checked if manifest is not None]
        exported = []
        if self.export is not None and whole:
            self._export(whole[0][0])
            weights = f"{self.export}, the weights after step {whole[0][1].step}"
            exported = wrap_closing_line("saved", weights)
        print_result(
            {"schema": "optimus.checkpoint/1", "checkpoints": [_build_json(*each) for each in checked]},
            [*_format(checked), *exported],
            as_json=self.json,
        )
        return OK if len(whole) == len(checked) else NO

    def _list(self) -> list[Path]:
        from optimus.engine.checkpoint_folder import CHECKPOINTS, list_checkpoints, name_checkpoint

        paths = list_checkpoints(self.run / CHECKPOINTS) or list_checkpoints(self.run)
        if self.step is not None:
            paths = [path for path in paths if path.name == name_checkpoint(self.step)]
        if not paths:
            raise UserError(
                field=str(self.run),
                problem="has no checkpoint" + ("" if self.step is None else f" of step {self.step}"),
                hint="name the --run-dir of a run with --checkpoint-every",
            )
        return paths

    def _verify(self, path: Path) -> tuple[Path, Manifest | None, str]:
        """Returns the manifest of a checkpoint that is whole, or what is wrong with it."""
        from optimus.engine.checkpoint_folder import Manifest, verify_files

        try:
            manifest = Manifest.load(path)
            count = len(manifest.files)
            with progress_bar("verifying") as progress:
                for part in range(count):
                    progress(path.name, part, count)
                    verify_files(path, manifest, part=part, parts=count)
        except OptimusError as error:
            return path, None, str(error).splitlines()[0].removeprefix(f"error: {path} ")
        return path, manifest, ""

    def _export(self, path: Path) -> None:
        assert self.export is not None and self.model is not None
        if self.export.resolve() == self.model.resolve():
            raise UserError(
                field="--export",
                value=str(self.export),
                problem="is the folder of --model",
                hint="name another folder",
            )
        import_extra("optimus.hf.export_checkpoint", "hf").export_checkpoint(path, self.model, self.export)


def _count_bytes(manifest: Manifest) -> int:
    return sum(size for size, _ in manifest.files.values())


def _build_json(path: Path, manifest: Manifest | None, problem: str) -> dict[str, Any]:
    if manifest is None:
        return {"path": str(path), "ok": False, "problem": problem}
    facts = {name: manifest.facts.get(name) for name in ("optimus", "torch", "ranks", "plan", "left_out")}
    return {
        "path": str(path),
        "ok": True,
        "step": manifest.step,
        "bytes": _count_bytes(manifest),
        **facts,
    }


def _format(checked: list[tuple[Path, Manifest | None, str]]) -> list[str]:
    rows = []
    for path, manifest, problem in checked:
        if manifest is None:
            rows.append([path.name, problem, "", "", ""])
        else:
            size = f"{_count_bytes(manifest) / GB:.3g}"
            ranks = str(manifest.facts.get("ranks", ""))
            rows.append([path.name, "whole", str(manifest.step), ranks, size])
    return align_columns(["checkpoint", "state", "step", "ranks", "GB"], rows, left=2)
