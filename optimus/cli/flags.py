"""Exit codes, flags and checks that several commands share, and imports of modules that need torch."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from optimus.errors import UserError

if TYPE_CHECKING:
    from optimus.cost.measured_profile import Profile

OK, NO, USER_ERROR, OUR_BUG, INTERRUPTED = 0, 1, 2, 70, 130


def describe_option(
    *, help: str, name: str | None = None, metavar: str | None = None, aliases: list[str] | None = None
) -> Any:
    """Describes an argument for the help text, which shows a default only if it is a value."""

    def default_hint(default: str) -> str:
        return "" if default in ("None", "False", "") else f"(default: {default})"

    return tyro.conf.arg(
        name=name, help=help, metavar=metavar, aliases=aliases, help_behavior_hint=default_hint
    )


JobArgument = Annotated[
    tyro.conf.Positional[str],
    describe_option(
        metavar="JOB",
        help="a job.yaml, a catalog job (paper/strong-3072), or with --on a catalog model or a config.json",
    ),
]
PlanArgument = Annotated[tyro.conf.Positional[Path], describe_option(metavar="PLAN", help="a plan file")]
OnFlag = Annotated[str | None, describe_option(metavar="GPU:COUNT", help="cluster to run on, e.g. h100:512")]
LayoutFlag = Annotated[
    tuple[str, ...],
    describe_option(metavar="MODULE=AXES ...", help="fix layouts, e.g. llm=pp8,tp4,chunks2"),
]
TraceFlag = Annotated[
    Path | None,
    describe_option(metavar="FILE.json.gz", help="write every op as a trace for Perfetto"),
]
ProfileFlag = Annotated[
    Path | None,
    describe_option(metavar="FILE.yaml", help="use durations measured by `optimus profile`"),
]
JsonFlag = Annotated[bool, describe_option(help="print one JSON object instead of text")]
StrategyFlag = Annotated[
    str,
    describe_option(
        metavar="NAME",
        help="the system to plan: fsdp, stage0, balanced, balanced-best, three-phase, paper (the paper's "
        "algorithm) or optimus",
    ),
]
SystemsFlag = Annotated[
    tuple[str, ...],
    describe_option(metavar="NAME ...", help="compare with these systems only; default: all that apply"),
]
PresetFlag = Annotated[
    str,
    describe_option(
        metavar="NAME",
        aliases=["--stack"],
        help="assumptions of a stack: megatron (default), torchtitan (compiled), eager or ours; also paper, "
        "paper-first-chunk, clean or clean-slack; or a FILE.yaml that `optimus calibrate` wrote",
    ),
]
TargetFlag = Annotated[
    str | None,
    describe_option(
        name="for", metavar="TRAINER", help="plan only what this runs: engine, megatron, bridge or torchtitan"
    ),
]
EffortFlag = Annotated[
    float,
    describe_option(
        metavar="TIMES", help="search so many times as much: 0.3 for a quick answer, 4 for a thorough one"
    ),
]
MAX_EFFORT = 100.0
TRACE_ENDINGS = (".json.gz", ".json")


def refuse_without_job(job: str | None, **flags: object) -> None:
    """Raises if a flag that describes the job is given without --job."""
    for flag, value in flags.items():
        if job is None and value is not None:
            hint = f"name the job, or leave --{flag} out"
            raise UserError(field=f"--{flag}", problem="needs --job", hint=hint)


def check_effort(effort: float) -> None:
    """Raises unless --effort is a sensible factor."""
    if not 0 < effort <= MAX_EFFORT:
        raise UserError(
            field="--effort",
            value=effort,
            problem=f"must be above 0 and at most {MAX_EFFORT:g}",
            hint="1 searches as much as by default",
        )


def load_optional_profile(path: Path | None) -> Profile | None:
    """Loads a profile file, or returns None if no file is named."""
    if path is None:
        return None
    from optimus.cost.profile_file import load_profile

    return load_profile(path)


def import_trainer(name: str) -> Any:
    """Imports a module that needs torch, or says how to install it."""
    return import_extra(name, "train")


def import_extra(name: str, extra: str) -> Any:
    """Imports a module that needs the packages of an extra, or says how to install them."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("optimus"):
            raise
        raise UserError(
            field=error.name, problem="is not installed", hint=f"pip install 'optimus-mllm[{extra}]'"
        ) from None


def split_names(names: tuple[str, ...]) -> list[str]:
    """Splits names at commas: `a b` and `a,b` are the same list."""
    return [part for name in names for part in name.split(",") if part]
