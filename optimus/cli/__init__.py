"""The command line: parse, call, print."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any

import tyro

from optimus import __version__
from optimus.cli.explaining import Sweep, Why
from optimus.cli.exporting import Export
from optimus.cli.flags import NO, OK, OUR_BUG, USER_ERROR
from optimus.cli.planning import Catalog, Check, Diff, Init, Plan, Simulate
from optimus.cli.reporting import Report
from optimus.cli.running import Profile, Train
from optimus.console import show
from optimus.errors import DoesNotFit, OptimusError, UserError, nearest

COMMANDS: tuple[Any, ...] = (
    Catalog, Init, Simulate, Plan, Why, Sweep, Check, Diff, Export, Report, Profile, Train,
)  # fmt: skip


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
        parsed = tyro.cli(
            reduce(or_, COMMANDS),
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
        return 130
    except Exception:
        traceback.print_exc()
        print(
            f"This is a bug in Optimus {__version__}, not a mistake of yours. "
            "Please report it with the lines above.",
            file=sys.stderr,
        )
        return OUR_BUG


def _check_words(arguments: list[str]) -> None:
    """Mistakes that the parser would take for something else, or answer at length."""
    commands = [command.__name__.lower() for command in COMMANDS]
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        raise UserError(
            field="command",
            value=arguments[0],
            problem="is not a command",
            hint=nearest(arguments[0], commands),
        )
    for flag in ("--system", "--layout"):
        if arguments.count(flag) > 1:
            raise UserError(
                field=flag, problem="is given twice", hint=f"name all after one {flag}, with spaces"
            )
