"""Many ranks on one host that mostly sleep: forked from a process that has imported torch once for all."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.paced_backend import PacedNetwork
from benchmarks.pacing import Link, PacedClock
from benchmarks.ranks import Report, run_processes

_PRELOADED = ["torch.distributed.pipelining", "torch.distributed.tensor", "benchmarks.paced"]


def run_paced_ranks(
    function: Callable[..., Any],
    world: int,
    link: Link,
    *args: Any,
    slow: float = 1.0,
    timeout_s: float = 60.0,
    on_report: Report = lambda message: None,
) -> list[Any]:
    """What `function(rank, network, *args)` returns on every rank; its default group is a paced one.

    What a rank says on its way by `network.tell` is heard here. In slow motion a second of theirs takes
    `slow` of the host's.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    given = (function, link, slow, timeout_s, args)
    return run_processes(context, _rank_main, world, *given, timeout_s=timeout_s, on_report=on_report)


def _rank_main(
    rank: int,
    world: int,
    store: str,
    tell: Report,
    function: Callable[..., Any],
    link: Link,
    slow: float,
    timeout_s: float,
    args: tuple[Any, ...],
) -> Any:
    torch.set_num_threads(1)
    network = PacedNetwork(PacedClock(slow=slow), link, tell=tell)
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
    return found
