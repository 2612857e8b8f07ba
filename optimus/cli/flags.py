"""What commands have in common: exit codes, flags, and how parts that need torch are reached."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from optimus.errors import UserError

if TYPE_CHECKING:
    from optimus.cost.measured import Profile

OK, NO, USER_ERROR, OUR_BUG = 0, 1, 2, 70

Job = Annotated[
    tyro.conf.Positional[str],
    tyro.conf.arg(
        metavar="JOB",
        help="a job.yaml, a catalog job (paper/strong-3072), or with --on a catalog model or a config.json",
    ),
]
On = Annotated[str | None, tyro.conf.arg(metavar="GPU:COUNT", help="cluster to run on, e.g. h100:512")]
LayoutWords = Annotated[
    tuple[str, ...],
    tyro.conf.arg(metavar="MODULE=AXES ...", help="state layouts, e.g. llm=pp8,tp4,chunks2"),
]
Trace = Annotated[
    Path | None,
    tyro.conf.arg(metavar="FILE.json.gz", help="write every op as a trace for Perfetto"),
]
Measured = Annotated[
    Path | None,
    tyro.conf.arg(metavar="FILE.yaml", help="price by what `optimus profile` measured, not by the formula"),
]
TRACE_ENDINGS = (".json.gz", ".json")
PlanFile = tyro.conf.Positional[Path]
Json = Annotated[bool, tyro.conf.arg(help="print one JSON object and nothing else")]
Strategy = Annotated[str, tyro.conf.arg(help="scheduler: paper (the paper's algorithm) or optimus (ours)")]
ComparedWith = Annotated[
    tuple[str, ...],
    tyro.conf.arg(metavar="NAME ...", help="compare with these only; all that apply if left out"),
]
Preset = Annotated[
    str,
    tyro.conf.arg(help="set of assumptions: default, paper, paper-first-chunk, clean or clean-slack"),
]


def load_profile_of(path: Path | None) -> Profile | None:
    """The profile in a file; none if no file is named."""
    if path is None:
        return None
    from optimus.cost.profile_file import load_profile

    return load_profile(path)


def trainer_part(name: str) -> Any:
    """A module that needs torch, which planning does without."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        raise UserError(
            field="torch", problem="is not installed", hint="pip install 'optimus-mllm[train]'"
        ) from None


def split_names(names: tuple[str, ...]) -> list[str]:
    """`a b` and `a,b` are the same list."""
    return [part for name in names for part in name.split(",") if part]
