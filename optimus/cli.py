"""The command line: parse, call, print."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from optimus import __version__
from optimus.errors import DoesNotFit, OptimusError, UserError, nearest

OK, NO, USER_ERROR, OUR_BUG = 0, 1, 2, 70

Job = Annotated[
    tyro.conf.Positional[str],
    tyro.conf.arg(
        metavar="JOB",
        help="a job.yaml, a catalog job (paper/strong-3072), or with --on a catalog model or a config.json",
    ),
]
On = Annotated[str | None, tyro.conf.arg(metavar="GPU:COUNT", help="cluster to run on, e.g. h100:512")]
Json = Annotated[bool, tyro.conf.arg(help="print one JSON object and nothing else")]
Preset = Annotated[
    str,
    tyro.conf.arg(help="set of assumptions: default, paper, paper-first-chunk, clean or clean-slack"),
]


@dataclass(frozen=True)
class Catalog:
    """List the models, clusters and jobs that come with Optimus."""

    json: Json = False

    def __call__(self) -> int:
        from optimus.render.listing import catalog_json, catalog_text

        _print(catalog_json(), catalog_text(), as_json=self.json)
        return OK


@dataclass(frozen=True)
class Init:
    """Write a commented job file from a released config.json."""

    hf: Annotated[
        str,
        tyro.conf.arg(
            metavar="CONFIG.json", help="the model: its config.json, its folder, or a catalog name"
        ),
    ]
    on: Annotated[str, tyro.conf.arg(metavar="GPU:COUNT", help="cluster to run on, e.g. h100:512")]
    output: Annotated[
        Path, tyro.conf.arg(aliases=["-o"], metavar="JOB.yaml", help="where to write the job")
    ] = Path("job.yaml")
    json: Json = False

    def __call__(self) -> int:
        from optimus.job.write import write_job_yaml

        text = write_job_yaml(self.hf, self.on, folder=self.output.parent)
        if self.output.exists():
            raise UserError(
                field="--output", value=str(self.output), problem="exists", hint="name another file with -o"
            )
        _check_writable("--output", self.output)
        self.output.write_text(text)
        found = {"schema": "optimus.init/1", "job": text, "file": str(self.output)}
        lines = [f"wrote {self.output}", f"next   optimus simulate {self.output}"]
        _print(found, lines, as_json=self.json)
        return OK


@dataclass(frozen=True)
class Simulate:
    """Say where the time and memory of a job go, under each known way to run it."""

    job: Job
    on: On = None
    system: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            metavar="NAME ...",
            help="only these: llm-only, stage0, balanced, balanced-best, three-phase, separate-gpus, fsdp, "
            "today",
        ),
    ] = ()
    layout: Annotated[
        tuple[str, ...],
        tyro.conf.arg(metavar="MODULE=AXES ...", help="state layouts, e.g. llm=pp8,tp4,chunks2"),
    ] = ()
    preset: Preset = "default"
    picture: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE.svg", help="draw every stage of the systems over time")
    ] = None
    json: Json = False

    def __call__(self) -> int:
        from optimus.cost.assumptions import preset
        from optimus.job.read import find_job
        from optimus.render.simulation import simulation_json, simulation_text

        if self.picture is not None and self.picture.suffix != ".svg":
            raise UserError(
                field="--picture",
                value=str(self.picture),
                problem="is not an SVG",
                hint="end its name in .svg",
            )
        if self.picture is not None:
            _check_writable("--picture", self.picture)
        assumptions = preset(self.preset)
        job = find_job(self.job, self.on, self.layout)
        with _progress() as progress, _announced_compilation():
            from optimus.search.compare import compare_systems

            comparison = compare_systems(
                job, names=_split(self.system) or None, assumptions=assumptions, progress=progress
            )
        lines = simulation_text(comparison)
        if self.picture is not None:
            from optimus.render.picture import write_picture

            write_picture(comparison, self.picture)
            lines += ["", f"wrote {self.picture}"]
        _print(simulation_json(comparison), lines, as_json=self.json)
        return OK if comparison.systems else NO


COMMANDS = (Catalog, Init, Simulate)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `optimus` and `optimus-mllm`."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Runs one command and returns its exit code."""
    if arguments in (["--version"], ["-V"]):
        print(__version__)
        return OK
    try:
        _check_words(arguments)
        command = tyro.cli(
            Catalog | Init | Simulate,
            prog="optimus",
            args=arguments or ["--help"],
            description="Plans multimodal LLM training: where its time and memory go (--version: prints it).",
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes),
        )
        return command()
    except DoesNotFit as no:
        print(no, file=sys.stderr)
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


def _split(names: tuple[str, ...]) -> list[str]:
    """`a b` and `a,b` are the same list."""
    return [part for name in names for part in name.split(",") if part]


def _check_writable(field: str, path: Path) -> None:
    """Says before the work, not after it, that a file cannot be written."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(
            field=field,
            value=str(path),
            problem="cannot be written",
            hint="name a file in a folder that exists and is yours",
        )


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


def _print(found: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        print("\n".join(lines))


@contextmanager
def _announced_compilation() -> Iterator[None]:
    """One line on standard error when the timeline's loop is compiled, once per installation."""
    from optimus.schedule.compiled import announcing_compilation

    def announce(kept_in: Path | None) -> None:
        where = (
            f"kept in {kept_in}" if kept_in else "cannot be kept: set OPTIMUS_CACHE_DIR to a folder of yours"
        )
        print(f"compiling the timeline, about 5 s, once per installation ({where})", file=sys.stderr)

    with announcing_compilation(announce):
        yield


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on a terminal; nothing when standard error is piped."""
    if not sys.stderr.isatty():
        yield lambda name, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description:<16}"), BarColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("reading")

        def report(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)

        yield report
