"""Processes of a bench: started together, heard on their way, ended together."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

Tell = Callable[[Any], None]

_TOLD, _DONE, _FAILED = "told", "done", "failed"


def run_processes(
    context: BaseContext,
    rank_main: Callable[..., Any],
    world: int,
    *args: Any,
    timeout_s: float,
    hear: Tell = lambda told: None,
) -> list[Any]:
    """What `rank_main(rank, world, store, tell, *args)` returns on every rank.

    Function, arguments and what it returns are pickled. `store` is a file by which ranks may find each other;
    what a rank tells is heard here. The first failure ends all ranks and is raised, also that of a rank which
    died without a word; what others told before is heard. No two answers are further apart than `timeout_s`.
    """
    started: dict[Connection, tuple[int, BaseProcess]] = {}
    with tempfile.TemporaryDirectory(prefix="optimus-bench-") as folder:
        store = str(Path(folder, "store"))
        try:
            for rank in range(world):
                ours, theirs = context.Pipe(duplex=False)
                given = (theirs, rank_main, rank, world, store, args)
                process = context.Process(target=_run, args=given, daemon=True)  # type: ignore[attr-defined]
                process.start()
                theirs.close()
                started[ours] = rank, process
            found = _collect({ours: rank for ours, (rank, _) in started.items()}, timeout_s, hear)
            for _, finished in started.values():
                finished.join(5)
            return [found[rank] for rank in range(world)]
        finally:
            for ours, (_, left) in started.items():
                ours.close()
                if left.is_alive():
                    left.kill()
                    left.join()


def _collect(ranks: dict[Connection, int], timeout_s: float, hear: Tell) -> dict[int, Any]:
    found: dict[int, Any] = {}
    while len(found) < len(ranks):
        silent = [ours for ours, rank in ranks.items() if rank not in found]
        ready = wait(silent, timeout_s)
        if not ready:
            late = ", ".join(str(ranks[ours]) for ours in silent)
            raise TimeoutError(f"no answer after {timeout_s:g} s from rank {late}")
        for ours in ready:
            assert isinstance(ours, Connection)
            try:
                word, answer = ours.recv()
            except EOFError:
                word, answer = _FAILED, "ended without an answer"
            if word == _FAILED:
                _hear_all([other for other in silent if other is not ours], hear)
                raise RuntimeError(f"rank {ranks[ours]}: {answer}")
            if word == _TOLD:
                hear(answer)
            else:
                found[ranks[ours]] = answer
    return found


def _hear_all(connections: list[Connection], hear: Tell) -> None:
    """What was told and not read yet."""
    for ours in connections:
        try:
            while ours.poll():
                word, answer = ours.recv()
                if word == _TOLD:
                    hear(answer)
        except (EOFError, OSError):
            pass


def _run(
    theirs: Connection,
    rank_main: Callable[..., Any],
    rank: int,
    world: int,
    store: str,
    args: tuple[Any, ...],
) -> None:
    try:
        found = rank_main(rank, world, store, lambda told: theirs.send((_TOLD, told)), *args)
    except BaseException:
        theirs.send((_FAILED, traceback.format_exc()))
        raise SystemExit(1) from None
    theirs.send((_DONE, found))
