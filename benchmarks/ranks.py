"""Starts the ranks of a benchmark as processes, receives their reports, and ends them together."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from optimus.environment import end_with_parent, keep_freed_memory, keep_gloo_on_loopback

Progress = Callable[[str, int, int], None]  # name of the phase, done, total
Report = Callable[[Any], None]  # sends a picklable message from a rank to the process that started it

PINNED_TIMEOUT_S = 120.0  # of a collective of pinned ranks
GROUP_TIMEOUT_S = 300.0  # of a communicator: longer than any benchmark waits for a rank
GLOO_THREADS = ("gloo_tcp_loop", "pt_gloo_runloop")  # by name
_REPORT, _DONE, _FAILED = "report", "done", "failed"


# ---------------------------------------------------------------------------- processes


def run_processes(
    context: BaseContext,
    rank_main: Callable[..., Any],
    world: int,
    *args: Any,
    timeout_s: float,
    on_report: Report = lambda message: None,
) -> list[Any]:
    """Returns what `rank_main(rank, world, store, report, *args)` returns on every rank.

    The function, its arguments and its result are pickled. `store` is the path of a `FileStore` for the
    ranks; messages that a rank passes to `report` reach `on_report` in this process. The first failure ends
    all ranks and is raised, also that of a rank that died without a traceback; reports sent before are
    delivered. `timeout_s` bounds the time between two messages.
    """
    started: dict[Connection, tuple[int, BaseProcess]] = {}
    with tempfile.TemporaryDirectory(prefix="optimus-bench-") as folder:
        store = str(Path(folder, "store"))
        try:
            for rank in range(world):
                receiver, sender = context.Pipe(duplex=False)
                parent = None if context.get_start_method() == "forkserver" else os.getpid()
                rank_args = (parent, sender, rank_main, rank, world, store, args)
                process = context.Process(target=_run, args=rank_args, daemon=True)  # type: ignore[attr-defined]
                process.start()
                sender.close()
                started[receiver] = rank, process
            results = _collect({each: rank for each, (rank, _) in started.items()}, timeout_s, on_report)
            for _, process in started.values():
                process.join(5)
            return [results[rank] for rank in range(world)]
        finally:
            for receiver, (_, process) in started.items():
                receiver.close()
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(ranks: dict[Connection, int], timeout_s: float, on_report: Report) -> dict[int, Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        running = [receiver for receiver, rank in ranks.items() if rank not in results]
        ready = wait(running, timeout_s)
        if not ready:
            late = ", ".join(str(ranks[receiver]) for receiver in running)
            raise TimeoutError(f"no answer after {timeout_s:g} s from rank {late}")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            try:
                kind, message = receiver.recv()
            except EOFError:
                kind, message = _FAILED, "ended without an answer"
            if kind == _FAILED:
                _drain([each for each in running if each is not receiver], on_report)
                raise RuntimeError(f"rank {ranks[receiver]}: {message}")
            if kind == _REPORT:
                on_report(message)
            else:
                results[ranks[receiver]] = message
    return results


def _drain(receivers: list[Connection], on_report: Report) -> None:
    """Delivers reports that were sent and not read yet."""
    for receiver in receivers:
        try:
            while receiver.poll():
                kind, message = receiver.recv()
                if kind == _REPORT:
                    on_report(message)
        except (EOFError, OSError):
            pass


def _run(
    parent: int | None,
    sender: Connection,
    rank_main: Callable[..., Any],
    rank: int,
    world: int,
    store: str,
    args: tuple[Any, ...],
) -> None:
    end_with_parent(parent or os.getppid())  # a server that forks ranks ends with the process it serves
    try:
        result = rank_main(rank, world, store, lambda message: sender.send((_REPORT, message)), *args)
    except BaseException:
        sender.send((_FAILED, traceback.format_exc()))
        raise SystemExit(1) from None
    sender.send((_DONE, result))


# ---------------------------------------------------------------------------- ranks on pinned cores


def run_pinned_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    on_report: Report = lambda message: None,
    before: Callable[[int], None] | None = None,
) -> list[Any]:
    """Returns what `function(rank, *args, report)` returns on every rank, each pinned to a core.

    Only rank 0 reports. Ranks talk over loopback, or over the interface that `before(rank)` selects: it is
    called before the process group is made.
    """
    keep_freed_memory()
    context = multiprocessing.get_context("spawn")
    rank_args = function, args, before
    timeout_s = 10 * PINNED_TIMEOUT_S
    return run_processes(context, _pinned_main, world, *rank_args, timeout_s=timeout_s, on_report=on_report)


def _pinned_main(
    rank: int,
    world: int,
    store: str,
    report: Report,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    before: Callable[[int], None] | None,
) -> Any:
    pin_to_core(rank)
    if before is None:
        keep_gloo_on_loopback()
    else:
        before(rank)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PINNED_TIMEOUT_S),
    )
    result = function(rank, *args, report if rank == 0 else drop_report)
    dist.barrier()
    dist.destroy_process_group()
    return result


def pin_to_core(rank: int) -> None:
    """Restricts this process to one thread and, where the system can, to one core."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def drop_report(message: Any) -> None:
    """Ignores the reports of ranks other than 0."""


def prioritize_gloo_threads() -> None:
    """Gives gloo's threads real-time priority, which needs root; they have names after their first work.

    Otherwise they wait for the end of compute's time slice, 3 ms on Linux, at every step of every message. A
    network card of a GPU node does not wait for compute.
    """
    tasks = [task for task in Path("/proc/self/task").iterdir() if _name_of(task) in GLOO_THREADS]
    assert tasks, f"no thread is called {' or '.join(GLOO_THREADS)}: torch has other names for gloo's now"
    for task in tasks:
        os.sched_setscheduler(int(task.name), os.SCHED_FIFO, os.sched_param(1))


def _name_of(task: Path) -> str:
    return (task / "comm").read_text().strip()


# ---------------------------------------------------------------------------- groups


def new_subgroup(parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Returns a communicator of this rank's part; every rank is in one part and passes the same parts."""
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    if dist.get_backend() == "nccl":
        return dist.split_group(split_ranks=[list(part) for part in parts], timeout=timeout)
    members = next(part for part in parts if dist.get_rank() in part)
    return dist.new_group(list(members), timeout=timeout, use_local_synchronization=True)


def host_barrier(group: dist.ProcessGroup | None) -> None:
    """Waits until all ranks are here. `dist.barrier` would need a GPU in a gloo group next to NCCL's."""
    dist.all_reduce(torch.zeros(1), group=group)
