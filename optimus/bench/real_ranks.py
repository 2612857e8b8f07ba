"""Ranks on cores of their own, one thread each, for work that is timed."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from optimus.environment import keep_freed_memory, keep_gloo_on_loopback

TIMEOUT_S = 120.0


def run_ranks(function: Callable[..., Any], world: int, *args: Any, tell: Callable[[int], None]) -> Any:
    """What `function(rank, *args, tell)` returns on rank 0; the first failure ends all ranks and is raised.

    `tell` is called here with what rank 0 tells.
    """
    keep_freed_memory()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="optimus-bench-") as folder:
        answers, store = context.Queue(), str(Path(folder, "store"))
        ranks = [
            context.Process(target=_run, args=(function, rank, world, store, answers, args), daemon=True)
            for rank in range(world)
        ]
        try:
            for process in ranks:
                process.start()
            while True:
                word, value = answers.get(timeout=10 * TIMEOUT_S)
                if word == "told":
                    tell(value)
                elif word == "failed":
                    raise RuntimeError(value)
                else:
                    return value
        finally:
            for process in ranks:
                process.join(5.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _run(
    function: Callable[..., Any], rank: int, world: int, store: str, answers: Any, args: tuple[Any, ...]
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    keep_gloo_on_loopback()
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=TIMEOUT_S),
        )

        def tell(value: int) -> None:
            if rank == 0:
                answers.put(("told", value))

        found = function(rank, *args, tell)
        dist.barrier()
        if rank == 0:
            answers.put(("done", found))
        dist.destroy_process_group()
    except BaseException:
        answers.put(("failed", f"rank {rank}\n{traceback.format_exc()}"))
        raise
