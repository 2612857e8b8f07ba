"""Measures how fast two processes of this host reach each other over gloo, and what compute pays for it."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from optimus.cost.measured_profile import LinkMeasurement, MessageTime
from optimus.environment import end_with_parent, keep_gloo_on_loopback
from optimus.errors import OptimusError

MESSAGE_BYTES = (64, 4096, 65_536, 1_048_576, 8_388_608)
RANKS = 2
WARM_UP_REPETITIONS = 3
ALL_REDUCE_BYTES = 64 * 1_048_576  # lasts many time slices of the operating system
MIN_TIME_DIFFERENCE_S = 1e-5  # if a larger message was not slower, its bandwidth is only a lower bound


class LinkMeasurementError(OptimusError):
    """Error of the processes that measure links: one failed, or the time is over."""

    def __str__(self) -> str:
        return f"error: links {self.args[0]}\nhint: try again on a quieter machine, or raise the timeout"


def measure_links(
    *, sizes: Sequence[int] = MESSAGE_BYTES, repetitions: int = 15, timeout_s: float = 60.0
) -> tuple[LinkMeasurement, ...]:
    """Measures one-way sends and all-reduces between two processes, each with one thread on its own core."""
    times = _on_two_ranks(partial(_link_times, tuple(sizes), repetitions), timeout_s)
    return tuple(
        fit_latency_and_bandwidth(operation, times[operation]) for operation in ("send", "all_reduce")
    )


def measure_slowdown_under_all_reduce(*, repetitions: int = 15, timeout_s: float = 60.0) -> float:
    """Measures how much longer matrix products take under an all-reduce, as a share of their time alone."""
    slowdown: float = _on_two_ranks(partial(_slowdown, repetitions), timeout_s)
    return slowdown


def _measure_slowdown_under(
    compute: Callable[[], Any],
    launch: Callable[[], dist.Work],
    repetitions: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Times `compute` as often as it fits under a launched collective, and as often alone, in turn."""
    shares = []
    for turn in range(WARM_UP_REPETITIONS + repetitions):
        work, count, begin = launch(), 0, clock()
        while not work.is_completed():
            compute()
            count += 1
        under_s = clock() - begin
        work.wait()
        begin = clock()
        for _ in range(count):
            compute()
        if turn >= WARM_UP_REPETITIONS and count:
            shares.append(under_s / (clock() - begin) - 1.0)
    return max(0.0, statistics.median(shares)) if shares else 0.0


def _on_two_ranks(measure: Callable[[int], Any], timeout_s: float) -> Any:
    """Runs `measure(rank)` on two ranks and returns rank 0's result."""
    spawning = multiprocessing.get_context("spawn")
    answers = spawning.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="optimus-links-") as folder:
        arguments = (os.getpid(), str(Path(folder, "store")), measure, timeout_s, answers)
        ranks = [
            spawning.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(RANKS)
        ]
        try:
            for process in ranks:
                process.start()
            return _await(ranks, answers, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.join(1)
                    process.kill()
                    process.join()
            answers.close()


def fit_latency_and_bandwidth(
    operation: Literal["send", "all_reduce"], times: Sequence[MessageTime]
) -> LinkMeasurement:
    """Fits latency to the smallest message, and bandwidth to what the largest takes beyond it."""
    small, large = min(times, key=lambda t: t.size_bytes), max(times, key=lambda t: t.size_bytes)
    gap = max(large.median_s - small.median_s, MIN_TIME_DIFFERENCE_S)
    return LinkMeasurement(
        operation=operation,
        backend="gloo",
        ranks=RANKS,
        latency_s=small.median_s,
        bandwidth_bytes_per_s=max(large.size_bytes - small.size_bytes, 1) / gap,
        sizes=tuple(times),
    )


def summarize_repetitions(size_bytes: int, seconds: Sequence[float]) -> MessageTime:
    """Returns median and quartiles of repetitions."""
    p25, median, p75 = statistics.quantiles(seconds, n=4, method="inclusive")
    return MessageTime(size_bytes=size_bytes, median_s=median, p25_s=p25, p75_s=p75, repetitions=len(seconds))


def _await(ranks: Sequence[Any], answers: Any, deadline_s: float) -> Any:
    """Returns rank 0's result; raises as soon as a rank has failed or the time is over."""
    while answers.empty():
        failed = next((process for process in ranks if process.exitcode not in (None, 0)), None)
        if failed is not None:
            raise LinkMeasurementError(f"could not be measured: a process ended with {failed.exitcode}")
        if time.monotonic() > deadline_s:
            raise LinkMeasurementError("were not measured in time")
        time.sleep(0.01)
    return answers.get()


# ---------------------------------------------------------------------------- in the processes


def _rank(
    rank: int, parent: int, store: str, measure: Callable[[int], Any], timeout_s: float, answers: Any
) -> None:
    end_with_parent(parent)
    torch.set_num_threads(1)
    _take_core(rank)
    keep_gloo_on_loopback()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        result = measure(rank)
        if rank == 0:
            answers.put(result)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _link_times(sizes: tuple[int, ...], repetitions: int, rank: int) -> dict[str, list[MessageTime]]:
    return {
        "send": [_timed(size, repetitions, _send_and_reply(rank), share=0.5) for size in sizes],
        "all_reduce": [_timed(size, repetitions, dist.all_reduce, share=1.0) for size in sizes],
    }


def _slowdown(repetitions: int, rank: int) -> float:
    message, rows, weight = torch.zeros(ALL_REDUCE_BYTES // 4), torch.randn(64, 256), torch.randn(256, 256)

    def launch() -> dist.Work:
        dist.barrier()
        work: dist.Work = dist.all_reduce(message, async_op=True)
        return work

    return _measure_slowdown_under(lambda: rows @ weight, launch, repetitions)


def _timed(size: int, repetitions: int, communicate: Callable[[Tensor], Any], *, share: float) -> MessageTime:
    """Times `share` of every repetition after the warm-up."""
    message = torch.zeros(max(1, size // 4))
    seconds = []
    for turn in range(WARM_UP_REPETITIONS + repetitions):
        dist.barrier()
        begin = time.perf_counter()
        communicate(message)
        if turn >= WARM_UP_REPETITIONS:
            seconds.append(share * (time.perf_counter() - begin))
    return summarize_repetitions(message.numel() * 4, seconds)


def _send_and_reply(rank: int) -> Callable[[Tensor], None]:
    """Returns a send and its reply: half of their time is one send, without comparing two clocks."""

    def exchange(message: Tensor) -> None:
        first, second = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
        first(message, 1 - rank)
        second(message, 1 - rank)

    return exchange


def _take_core(rank: int) -> None:
    """Pins the process to its own core, if there are enough and the system allows it."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= RANKS:
        os.sched_setaffinity(0, {cores[rank]})
