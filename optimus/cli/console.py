"""Prints results and progress, and checks that files can be written."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optimus.errors import UserError

Progress = Callable[[str, int, int], None]


def show(result: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    """Prints the result as one JSON object, or as lines of text."""
    if as_json:
        print(json.dumps(result, indent=2, allow_nan=False))
    else:
        print("\n".join(lines))


def check_writable(field: str, path: Path, *endings: str) -> None:
    """Raises, before any work is done, if a file cannot be written or has the wrong ending."""
    if endings and not path.name.endswith(endings):
        wanted = " or ".join(endings)
        raise UserError(
            field=field,
            value=str(path),
            problem=f"is not a {wanted} file",
            hint=f"end its name in {wanted}",
        )
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(
            field=field,
            value=str(path),
            problem="cannot be written",
            hint="name a file in a folder that exists and is yours",
        )


@contextmanager
def announced_compilation() -> Iterator[None]:
    """Prints a line on standard error when the timeline's loop is compiled, once per installation."""
    from optimus.schedule._numba import announcing_compilation

    def announce(kept_in: Path | None) -> None:
        where = (
            f"kept in {kept_in}" if kept_in else "cannot be kept: set OPTIMUS_CACHE_DIR to a folder of yours"
        )
        print(f"compiling the timeline, about 5 s, once per installation ({where})", file=sys.stderr)

    with announcing_compilation(announce):
        yield


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Shows a progress bar on a terminal, and nothing when standard error is piped."""
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


StepReport = Callable[[int, float, float, float], None]  # step, loss, seconds, tokens per second
MAX_PROGRESS_LINES = 20  # of a training run whose standard error is piped


@contextmanager
def training_progress(steps: int) -> Iterator[StepReport]:
    """Shows a bar with step time, tokens per second and loss, or a line now and then when piped."""
    if not sys.stderr.isatty():

        def say(step: int, loss: float, step_s: float, tokens_per_s: float) -> None:
            if step % max(1, steps // MAX_PROGRESS_LINES) == 0 or step == steps - 1:
                words = f"step {step:>6}  loss {loss:.4f}  {step_s:.3f} s  {tokens_per_s:,.0f} tokens/s"
                print(words, file=sys.stderr, flush=True)

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
        TimeRemainingColumn(), console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("starting ranks", total=steps)

        def update(step: int, loss: float, step_s: float, tokens_per_s: float) -> None:
            words = f"loss {loss:.4f}  {step_s:.3f} s  {tokens_per_s:,.0f} tokens/s"
            bar.update(task, description=words, completed=step + 1)

        yield update


@contextmanager
def follow_metrics(path: Path, steps: int) -> Iterator[None]:
    """Shows the progress that another process appends to a metrics file."""
    begin, finished = path.stat().st_size if path.exists() else 0, threading.Event()

    def follow(report: StepReport) -> None:
        offset = begin
        while True:
            is_last = finished.wait(0.1)
            if path.exists():
                with path.open() as file:
                    file.seek(offset)
                    for line in file:
                        if line.endswith("\n"):
                            offset += len(line.encode())
                            step = json.loads(line)
                            report(step["step"], step["loss"], step["step_s"], step["tokens_per_s"])
            if is_last:
                return

    with training_progress(steps) as report:
        thread = threading.Thread(target=follow, args=(report,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join(5.0)
