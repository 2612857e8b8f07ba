"""The command line: parse, call, print."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from optimus import __version__
from optimus.errors import DoesNotFit, OptimusError, UserError

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

    hf: Annotated[str, tyro.conf.arg(metavar="CONFIG.json", help="config.json of the model, or its folder")]
    on: Annotated[str, tyro.conf.arg(metavar="GPU:COUNT", help="cluster to run on, e.g. h100:512")]
    output: Annotated[
        Path, tyro.conf.arg(aliases=["-o"], metavar="JOB.yaml", help="where to write the job")
    ] = Path("job.yaml")
    json: Json = False

    def __call__(self) -> int:
        from optimus.job.write import write_job_yaml

        if self.output.exists():
            raise UserError(
                field="--output", value=str(self.output), problem="exists", hint="name another file with -o"
            )
        text = write_job_yaml(self.hf, self.on, folder=self.output.parent)
        try:
            self.output.write_text(text)
        except OSError as error:
            raise UserError(
                field="--output", value=str(self.output), problem=f"cannot be written: {error.strerror}",
                hint="name a file in a folder that exists and is yours",
            ) from None  # fmt: skip
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
        tyro.conf.arg(metavar="NAME ...", help="only these systems (see the table of a run without it)"),
    ] = ()
    layout: Annotated[
        tuple[str, ...],
        tyro.conf.arg(metavar="MODULE=AXES ...", help="state layouts, e.g. llm=pp8,tp4,chunks2"),
    ] = ()
    preset: Preset = "default"
    picture: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE.svg", help="draw the stages of the last system over time")
    ] = None
    json: Json = False

    def __call__(self) -> int:
        from optimus.cost.assumptions import preset
        from optimus.job.read import find_job, with_layouts
        from optimus.render.simulation import simulation_json, simulation_text

        assumptions = preset(self.preset)
        job = with_layouts(find_job(self.job, self.on), self.layout)
        with _progress() as progress, _announced_compilation():
            from optimus.search.compare import compare_systems

            comparison = compare_systems(
                job, names=self.system or None, assumptions=assumptions, progress=progress
            )
        lines = simulation_text(comparison)
        if self.picture is not None:
            from optimus.render.picture import write_picture

            write_picture(comparison, self.picture)
            lines += ["", f"wrote {self.picture}"]
        _print(simulation_json(comparison), lines, as_json=self.json)
        return OK


Command = Catalog | Init | Simulate


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `optimus` and `optimus-mllm`."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Runs one command and returns its exit code."""
    if arguments in (["--version"], ["-V"]):
        print(__version__)
        return OK
    try:
        command = tyro.cli(
            Command,
            prog="optimus",
            args=arguments or ["--help"],
            description="Plans multimodal LLM training: where time and memory go, and how to run it better.",
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
        print(f"compiling the timeline, about 10 s, once per installation ({where})", file=sys.stderr)

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
