"""What every command shows while it works: progress on a terminal, and files it could not write."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optimus.errors import UserError

Progress = Callable[[str, int, int], None]


def show(found: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    """One object, or lines for people."""
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        print("\n".join(lines))


def check_writable(field: str, path: Path, *endings: str) -> None:
    """Says before the work, not after it, that a file cannot be written or has the wrong name."""
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
def progress_bar() -> Iterator[Progress]:
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
