"""Sections of `benchmarks gpu` that fail in several ways, or do not."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.gpu_ranks import Worker


def works(worker: Worker) -> dict[str, Any]:
    worker.report((1, 1))
    return {"ranks": worker.all_gather(worker.rank)}


def fails(worker: Worker) -> dict[str, Any]:
    """Fails on one rank while the others wait for it."""
    if worker.rank == 1:
        raise ZeroDivisionError("no such kernel")
    worker.barrier()
    return {}


def dies(worker: Worker) -> dict[str, Any]:
    """Ends one rank without a traceback, as an abort of NCCL does."""
    if worker.rank == 1:
        os._exit(3)
    worker.barrier()
    return {}


def hangs(worker: Worker) -> dict[str, Any]:
    time.sleep(600)
    return {}


def returns_nan(worker: Worker) -> dict[str, Any]:
    """Returns a value that JSON cannot hold."""
    return {"share": float("nan")}
