"""The command line: parse, call, print."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import tyro

from optimus import __version__
from optimus.cli.catalog import CatalogCommand
from optimus.cli.check import CheckCommand
from optimus.cli.console import show
from optimus.cli.diff import DiffCommand
from optimus.cli.export import ExportCommand
from optimus.cli.flags import INTERRUPTED, NO, OK, OUR_BUG, USER_ERROR
from optimus.cli.init import InitCommand
from optimus.cli.plan import PlanCommand
from optimus.cli.profile import ProfileCommand
from optimus.cli.report import ReportCommand
from optimus.cli.simulate import SimulateCommand
from optimus.cli.sweep import SweepCommand
from optimus.cli.train import TrainCommand
from optimus.cli.why import WhyCommand
from optimus.errors import DoesNotFit, OptimusError, UserError, nearest

COMMANDS: dict[str, type[Any]] = {
    "catalog": CatalogCommand,
    "init": InitCommand,
    "simulate": SimulateCommand,
    "plan": PlanCommand,
    "why": WhyCommand,
    "sweep": SweepCommand,
    "check": CheckCommand,
    "diff": DiffCommand,
    "export": ExportCommand,
    "report": ReportCommand,
    "profile": ProfileCommand,
    "train": TrainCommand,
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `optimus` and `optimus-mllm`."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Runs one command and returns its exit code."""
    if arguments in (["--version"], ["-V"]):
        print(__version__)
        return OK

    def command() -> int:
        _check_words(arguments)
        parsed = tyro.extras.subcommand_cli_from_dict(
            {**COMMANDS},
            prog="optimus",
            args=arguments or ["--help"],
            description="Plans multimodal LLM training: where its time and memory go, and how encoder work "
            "fits the LLM's idle time (--version: prints it).",
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes),
        )
        return int(parsed())

    return exit_code_of(command, as_json="--json" in arguments)


def exit_code_of(command: Callable[[], int], *, as_json: bool) -> int:
    """Runs a command, prints its error if it raises one, and returns the exit code."""
    try:
        return command()
    except DoesNotFit as no:
        print(no, file=sys.stderr)
        if as_json:
            show(
                {"schema": "optimus.no/1", "ok": False, "problem": no.problem, "hint": no.hint},
                [],
                as_json=True,
            )
        return NO
    except OptimusError as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        print(
            f"This is a bug in Optimus {__version__}, not a mistake of yours. "
            "Please report it with the lines above.",
            file=sys.stderr,
        )
        return OUR_BUG


def _check_words(arguments: list[str]) -> None:
    """Raises on mistakes that the parser would misread, or answer at length."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        raise UserError(
            field="command",
            value=arguments[0],
            problem="is not a command",
            hint=nearest(arguments[0], COMMANDS),
        )
    for flag in ("--system", "--layout"):
        if arguments.count(flag) > 1:
            raise UserError(
                field=flag, problem="is given twice", hint=f"name all after one {flag}, with spaces"
            )
