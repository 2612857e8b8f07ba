"""Many ranks on one host that mostly sleep: forked from a process that has imported torch once for all."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from optimus.bench.paced_backend import PacedNetwork
from optimus.bench.pacing import Link, PacedClock

_PRELOADED = ["torch.distributed.pipelining", "torch.distributed.tensor", "optimus.bench.paced"]
_TOLD, _DONE, _FAILED = "told", "done", "failed"


def run_paced_ranks(
    function: Callable[..., Any],
    world: int,
    link: Link,
    *args: Any,
    timeout_s: float = 60.0,
    hear: Callable[[Any], None] = lambda told: None,
) -> list[Any]:
    """What `function(rank, network, *args)` returns on every rank; its default group is a paced one.

    Function, arguments and what it returns are pickled. The first failure ends all ranks and is raised. What
    a rank says on its way by `network.tell` is heard here. No two answers are further apart than `timeout_s`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    started: dict[Connection, tuple[int, BaseProcess]] = {}
    with tempfile.TemporaryDirectory(prefix="optimus-paced-") as folder:
        store = str(Path(folder, "store"))
        try:
            for rank in range(world):
                ours, theirs = context.Pipe(duplex=False)
                given = (theirs, function, rank, world, store, link, timeout_s, args)
                process = context.Process(target=_run, args=given, daemon=True)
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


def _collect(ranks: dict[Connection, int], timeout_s: float, hear: Callable[[Any], None]) -> dict[int, Any]:
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
                raise RuntimeError(f"rank {ranks[ours]}: {answer}")
            if word == _TOLD:
                hear(answer)
            else:
                found[ranks[ours]] = answer
    return found


def _run(
    theirs: Connection,
    function: Callable[..., Any],
    rank: int,
    world: int,
    store: str,
    link: Link,
    timeout_s: float,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        network = PacedNetwork(PacedClock(), link, tell=lambda told: theirs.send((_TOLD, told)))
        network.register()
        dist.init_process_group(
            "paced",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        found = function(rank, network, *args)
        dist.barrier()
        network.close()
        dist.destroy_process_group()
    except BaseException:
        theirs.send((_FAILED, traceback.format_exc()))
        raise SystemExit(1) from None
    theirs.send((_DONE, found))
