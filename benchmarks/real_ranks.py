"""Ranks on cores of their own, one thread each, for work that is timed."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.ranks import Tell, run_processes
from optimus.environment import keep_freed_memory, keep_gloo_on_loopback

TIMEOUT_S = 120.0
GLOO_THREADS = ("gloo_tcp_loop", "pt_gloo_runloop")  # by name


def run_pinned_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    hear: Tell = lambda told: None,
    before: Callable[[int], None] | None = None,
) -> list[Any]:
    """What `function(rank, *args, tell)` returns on every rank; what rank 0 tells is heard here.

    Ranks talk over loopback, or over what `before(rank)` chooses: it is called before they join.
    """
    keep_freed_memory()
    context = multiprocessing.get_context("spawn")
    given = function, args, before
    return run_processes(context, _rank_main, world, *given, timeout_s=10 * TIMEOUT_S, hear=hear)


def put_communication_first() -> None:
    """Gloo's threads, which get their names with their first work, run as soon as they have more of it.

    Otherwise they wait for the end of compute's time slice, 3 ms on Linux, at every step of every message;
    a GPU's network card waits for nobody. It takes root's rights.
    """
    tasks = [task for task in Path("/proc/self/task").iterdir() if _name_of(task) in GLOO_THREADS]
    assert tasks, f"no thread is called {' or '.join(GLOO_THREADS)}: torch has other names for gloo's now"
    for task in tasks:
        os.sched_setscheduler(int(task.name), os.SCHED_FIFO, os.sched_param(1))


def _name_of(task: Path) -> str:
    return (task / "comm").read_text().strip()


def _rank_main(
    rank: int,
    world: int,
    store: str,
    tell: Tell,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    before: Callable[[int], None] | None,
) -> Any:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    if before is None:
        keep_gloo_on_loopback()
    else:
        before(rank)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    found = function(rank, *args, tell if rank == 0 else _quiet)
    dist.barrier()
    dist.destroy_process_group()
    return found


def _quiet(told: Any) -> None:
    """Rank 0 speaks for all."""
