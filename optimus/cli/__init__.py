"""Command line of Optimus: parses arguments, runs a command and prints its errors."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import tyro

from optimus import __version__
from optimus.cli.accuracy import AccuracyCommand
from optimus.cli.calibrate import CalibrateCommand
from optimus.cli.catalog import CatalogCommand
from optimus.cli.check import CheckCommand
from optimus.cli.checkpoint import CheckpointCommand
from optimus.cli.console import print_lines, print_result
from optimus.cli.data import DataCommand
from optimus.cli.deal import DealCommand
from optimus.cli.diff import DiffCommand
from optimus.cli.doctor import DoctorCommand
from optimus.cli.export import ExportCommand
from optimus.cli.flags import INTERRUPTED, NO, OK, OUR_BUG, USER_ERROR
from optimus.cli.init import InitCommand
from optimus.cli.launch import LaunchCommand
from optimus.cli.plan import PlanCommand
from optimus.cli.profile import ProfileCommand
from optimus.cli.report import ReportCommand
from optimus.cli.simulate import SimulateCommand
from optimus.cli.sweep import SweepCommand
from optimus.cli.text import wrap_text, wrap_usage
from optimus.cli.trace import TraceCommand
from optimus.cli.train import TrainCommand
from optimus.cli.why import WhyCommand
from optimus.errors import DoesNotFit, OptimusError, UserError, nearest

DESCRIPTION = (
    "Plans the training of multimodal LLMs: where time and memory go, and how encoder work fits into the "
    "LLM's idle time."
)
COMMANDS: dict[str, type[Any]] = {
    "catalog": CatalogCommand,
    "init": InitCommand,
    "simulate": SimulateCommand,
    "plan": PlanCommand,
    "why": WhyCommand,
    "sweep": SweepCommand,
    "accuracy": AccuracyCommand,
    "calibrate": CalibrateCommand,
    "check": CheckCommand,
    "diff": DiffCommand,
    "deal": DealCommand,
    "export": ExportCommand,
    "report": ReportCommand,
    "profile": ProfileCommand,
    "trace": TraceCommand,
    "data": DataCommand,
    "train": TrainCommand,
    "checkpoint": CheckpointCommand,
    "launch": LaunchCommand,
    "doctor": DoctorCommand,
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `optimus` and `optimus-mllm`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # of a terminal that is not UTF-8
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Runs one command and returns its exit code."""
    if arguments in ([], ["--help"], ["-h"]):
        print_lines(_help_text())
        return OK
    if arguments in (["--version"], ["-V"]):
        print_lines([__version__])
        return OK

    def command() -> int:
        name, *flags = arguments
        _check_words(name, flags)
        with _plain_help():
            parsed = tyro.cli(
                COMMANDS[name], prog=f"optimus {name}", args=flags, config=(tyro.conf.FlagCreatePairsOff,)
            )
        return int(parsed())

    return run_and_report_errors(command, as_json="--json" in arguments)


@contextmanager
def _plain_help() -> Iterator[None]:
    """Prints a help text without boxes, breaks its usage line, and escapes what the parser quotes."""
    printed, refused = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(refused):
            yield
    finally:
        if refused.getvalue():
            print_lines((line.rstrip() for line in refused.getvalue().splitlines()), to_stderr=True)
        for line in printed.getvalue().splitlines():
            print_lines(wrap_usage(line) if line.startswith("usage:") else [line.rstrip()])


def _help_text() -> list[str]:
    """Returns the help of `optimus` itself: every command with its description."""
    lines = ["usage: optimus COMMAND [OPTIONS]", "", *wrap_text("", DESCRIPTION, indent=0), "", "commands:"]
    for name, command in COMMANDS.items():
        lines += wrap_text(f"  {name}", command.__doc__ or "", indent=13)
    return [*lines, "", "optimus COMMAND --help lists options; optimus --version prints the version."]


def run_and_report_errors(command: Callable[[], int], *, as_json: bool) -> int:
    """Runs a command, prints its error if it raises one, and returns the exit code."""
    try:
        return command()
    except DoesNotFit as no:
        _print_error(no)
        if as_json:
            print_result(
                {"schema": "optimus.no/1", "ok": False, "problem": no.problem, "hint": no.hint},
                [],
                as_json=True,
            )
        return NO
    except OptimusError as error:
        _print_error(error)
        return USER_ERROR
    except BrokenPipeError:
        return OK
    except OSError as error:
        if error.filename is None:
            return _report_bug()
        hint = "check the path, its permissions and the space on its disk"
        problem = f"cannot be used: {error.strerror}"
        _print_error(UserError(field=str(error.filename), problem=problem, hint=hint))
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:
        return _report_bug()


def _report_bug() -> int:
    """Prints the traceback of the exception that is being handled, and returns the exit code."""
    print_lines(traceback.format_exc().splitlines(), to_stderr=True)
    words = f"This is a bug in Optimus {__version__}, not a mistake of yours."
    _print_error(f"{words} Please report it with the lines above.")
    return OUR_BUG


def _print_error(error: object) -> None:
    """Prints an error and its hint on standard error, broken between words."""
    for line in str(error).splitlines():
        label = next((label for label in ("error:", "hint:", "no:") if line.startswith(f"{label} ")), "")
        wrapped = wrap_text(label, line.removeprefix(label), indent=len(label) + 1 if label else 0)
        print_lines(wrapped, to_stderr=True)


def _check_words(name: str, flags: list[str]) -> None:
    """Raises on mistakes that the parser would misread, or answer at length."""
    if name not in COMMANDS:
        raise UserError(field="command", value=name, problem="is not a command", hint=nearest(name, COMMANDS))
    for flag in ("--system", "--layout"):
        if flags.count(flag) > 1:
            raise UserError(
                field=flag, problem="is given twice", hint=f"name all after one {flag}, with spaces"
            )
