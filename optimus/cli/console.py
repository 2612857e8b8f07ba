"""Prints results and progress, and checks that files can be written."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optimus.cli.text import wrap_text
from optimus.errors import UserError, show_line, show_value

FIRST_LINE_S = 1.0  # work below a second prints no progress
BETWEEN_LINES_S = 5.0
MINUTE_S = 60.0

Progress = Callable[[str, int, int], None]  # name of the work, parts done, parts in total
StepReport = Callable[[Mapping[str, Any]], None]  # takes a line of the metrics file


def print_lines(lines: Iterable[str], *, to_stderr: bool = False) -> None:
    """Prints lines at once; codes that others put into names and values never reach the terminal."""
    text = "\n".join(map(show_line, lines))
    print(text, file=sys.stderr if to_stderr else sys.stdout, flush=True)


def print_result(result: dict[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    """Prints the result as one JSON object, or as lines of text."""
    if as_json:
        print(json.dumps(result, indent=2, allow_nan=False).replace("\x7f", "\\u007f"))
    else:
        print_lines(lines)


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
    folder, reason = path.parent, ""
    try:
        path.lstat()
        cannot = path.is_dir() or not os.access(path, os.W_OK)
    except FileNotFoundError:
        cannot = not os.access(folder, os.W_OK)
    except (OSError, ValueError) as error:  # such as a name that is too long
        cannot, reason = True, f": {getattr(error, 'strerror', error)}"
    if cannot:
        raise UserError(
            field=field,
            value=str(path),
            problem=f"cannot be written{reason}",
            hint="name a file in a folder that exists and is yours",
        )


@contextmanager
def exceptions_from_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise `SystemExit` as SIGINT raises `KeyboardInterrupt`.

    What a command made outside its files is then removed as after any error; further signals do not
    interrupt that.
    """

    def end(number: int, _: object) -> None:
        for each in handlers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    handlers = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


@contextmanager
def announce_compilation() -> Iterator[None]:
    """Prints a line on standard error when the timeline's loop is compiled, once per installation."""
    from optimus.compiled import announce_first_compilation

    def say(kept_in: Path | None) -> None:
        where = (
            f"cached in {kept_in}" if kept_in else "not cached: set OPTIMUS_CACHE_DIR to a folder of yours"
        )
        words = f"compiling the simulator, about 5 s, once per installation ({where})"
        announce(words)

    with announce_first_compilation(say):
        yield


class _LineTimer:
    """Spaces the lines of progress that are printed when standard error is piped."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._last_s = -math.inf

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def is_due(self) -> bool:
        """Tells whether a line may be printed now; if so, the next one waits."""
        now_s = self.elapsed_s
        if now_s < FIRST_LINE_S or now_s - self._last_s < BETWEEN_LINES_S:
            return False
        self._last_s = now_s
        return True


@contextmanager
def progress_bar(activity: str) -> Iterator[Progress]:
    """Shows a progress bar on a terminal, or a line every few seconds when standard error is piped."""
    if not sys.stderr.isatty():
        timer = _LineTimer()

        def say(name: str, done: int, total: int) -> None:
            if timer.is_due():
                words = f"{activity}: {name}, {done} of {total}, {timer.elapsed_s:.0f} s"
                print_lines([words], to_stderr=True)

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description:<16}", markup=False), BarColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
        redirect_stdout=sys.stdout.isatty(),  # else what a command prints meanwhile would go to the terminal
    )  # fmt: skip
    with bar:
        task = bar.add_task(activity)

        def report(name: str, done: int, total: int) -> None:
            bar.update(task, description=show_value(name), completed=done, total=total)

        yield report


def announce(words: str) -> None:
    """Prints what is done next on standard error, if that takes over a second by itself."""
    print_lines(wrap_text("", words, indent=0), to_stderr=True)


@contextmanager
def training_progress(steps: int, *, saves: bool = False) -> Iterator[StepReport]:
    """Shows loss, step time and tokens per second: a bar, or lines every few seconds when piped."""
    if not sys.stderr.isatty():
        timer, first = _LineTimer(), list[tuple[int, float]]()

        def say(metrics: Mapping[str, Any]) -> None:
            done = metrics["step"] + 1
            if not first:
                first.append((done, timer.elapsed_s))
            if timer.is_due() or done == steps:
                begin, begin_s = first[0]
                left_s = (timer.elapsed_s - begin_s) / max(1, done - begin) * (steps - done)
                left = f", {_format_left(left_s)} left" if left_s >= MINUTE_S else ""
                announce(f"step {done} of {steps}, {_step_words(metrics)}{left}")
            if saves and done == steps:
                announce("saving weights")

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
        TimeRemainingColumn(), console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task, is_first = bar.add_task("starting ranks", total=steps), True

        def update(metrics: Mapping[str, Any]) -> None:
            nonlocal is_first
            done = metrics["step"] + 1
            words = "saving weights" if saves and done == steps else _step_words(metrics)
            if is_first:  # of a run that goes on: earlier steps took no time
                bar.reset(task, completed=done, total=steps)
            bar.update(task, description=words, completed=done)
            is_first = False

        yield update


def _step_words(metrics: Mapping[str, Any]) -> str:
    """Describes a step; a loss that is not finite is null in the metrics file."""
    loss, mfu = metrics["loss"], metrics.get("mfu")
    value = "not finite" if loss is None or not math.isfinite(loss) else f"{loss:.4f}"
    used = "" if mfu is None else f", MFU {100 * mfu:.1f} %"
    return f"loss {value}, {metrics['step_s']:.3f} s, {metrics['tokens_per_s']:,.0f} tokens/s{used}"


def _format_left(seconds: float) -> str:
    minutes = round(seconds / MINUTE_S)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.0f} h"


@contextmanager
def follow_metrics(path: Path, steps: int, *, saves: bool) -> Iterator[None]:
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
                            report(json.loads(line))
            if is_last:
                return

    if not sys.stderr.isatty():
        announce("starting ranks")
    with training_progress(steps, saves=saves) as report:
        thread = threading.Thread(target=follow, args=(report,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join(5.0)
