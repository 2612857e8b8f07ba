"""Times kernels and collectives on streams, and fits latency and bandwidth of collectives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from threading import Thread
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.gpu_ranks import Worker
from optimus.cost.network import Collective
from optimus.cost.network import collective_s as assumed_s
from optimus.job.cluster import Cluster
from optimus.models.collectives import all_gather_single, reduce_scatter_single
from optimus.profiler.links import summarize_repetitions

WARM_UP_CALLS = 3
CALIBRATION_RUNS = 5  # to find the seconds of one kernel


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes and durations of the measured kernels and collectives."""

    dtype: torch.dtype
    rows: int  # tokens of a TP group
    hiddens: tuple[int, ...]  # widths of their rows, the widest last
    product: tuple[int, int, int]  # rows, inputs and outputs of one GEMM
    elements: int  # of an elementwise kernel
    reduced_bytes: int  # of a data-parallel reduce-scatter
    sizes_bytes: tuple[int, ...]  # of collectives of the curve
    chain: int  # collectives of one size between two events, at most
    compute_s: float  # much longer than a message, a launch, and the skew of ranks
    series_s: float  # of kernels in sequence, much longer than the host takes to launch them
    repetitions: int


GPU = Sizes(
    dtype=torch.bfloat16,
    rows=8192,
    hiddens=(4096, 8192),
    product=(8192, 8192, 3584),
    elements=2**27,
    reduced_bytes=2**29,
    sizes_bytes=(2**16, 2**18, 2**21, 2**24, 2**26, 2**28),
    chain=20,
    compute_s=0.020,
    series_s=0.010,
    repetitions=15,
)
CPU = Sizes(
    dtype=torch.float32,
    rows=64,
    hiddens=(64,),
    product=(64, 64, 64),
    elements=2**14,
    reduced_bytes=2**16,
    sizes_bytes=(2**10, 2**11, 2**12, 2**13, 2**14, 2**16),
    chain=2,
    compute_s=0.050,
    series_s=0.002,
    repetitions=3,
)


def sizes_of(worker: Worker) -> Sizes:
    """Returns sizes for a measurement on GPUs, or for a smoke test on CPUs."""
    return GPU if worker.on_gpu else CPU


# ---------------------------------------------------------------------------- timers


class StreamTimer(Protocol):
    """Records events: on a GPU in stream order, on a CPU at the time of the call."""

    def record(self) -> Any:
        """Records the end of all work enqueued on the current stream."""

    def record_end(self, work: dist.Work) -> Any:
        """Records the end of a collective or receive, whatever else runs."""

    def side_stream(self) -> AbstractContextManager[Any]:
        """Enters a stream without work."""

    def elapsed_s(self, begin: Any, end: Any) -> float:
        """Returns the seconds between two events; the device must be idle."""


class CudaTimer:
    """Timer by CUDA events. Its observer has high priority: NCCL draws its streams from another pool."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)
        self._observer = torch.cuda.Stream(device, priority=-1)

    def record(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def record_end(self, work: dist.Work) -> Any:
        with torch.cuda.stream(self._observer):
            work.wait()  # blocks this stream, not the host
            return self.record()

    def side_stream(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(self._side)
        return context

    def elapsed_s(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1000


class HostTimer:
    """Timer by the host's clock; a thread waits for the end of a collective."""

    def record(self) -> float:
        return time.perf_counter()

    def record_end(self, work: dist.Work) -> Future[float]:
        end: Future[float] = Future()
        Thread(target=_wait_for_end, args=(work, end), daemon=True).start()
        return end

    def side_stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def elapsed_s(self, begin: Any, end: Any) -> float:
        return _time_of(end) - _time_of(begin)


def _wait_for_end(work: dist.Work, end: Future[float]) -> None:
    work.wait()
    del work  # first: a Work that outlives its group crashes the process
    end.set_result(time.perf_counter())


def _time_of(event: float | Future[float]) -> float:
    return event.result() if isinstance(event, Future) else event


def timer_of(worker: Worker) -> StreamTimer:
    """Returns the timer of this rank's device."""
    return CudaTimer(worker.device) if worker.on_gpu else HostTimer()


# ---------------------------------------------------------------------------- kernels


class KernelSeries:
    """One kernel on its own tensors, repeated a number of times or for a number of seconds."""

    def __init__(self, kernel: Callable[[], object], worker: Worker, timer: StreamTimer) -> None:
        self._kernel, self._watch = kernel, timer
        for _ in range(WARM_UP_CALLS):
            kernel()
        seconds = []
        for _ in range(CALIBRATION_RUNS):
            worker.synchronize()
            begin = timer.record()
            self.run(8)
            end = timer.record()
            worker.synchronize()
            seconds.append(timer.elapsed_s(begin, end) / 8)
        self.kernel_s: float = max(median(worker.all_gather(median(seconds))), 1e-7)  # the same on all ranks

    def run(self, times: int) -> None:
        for _ in range(times):
            self._kernel()

    def times_for(self, seconds: float) -> int:
        return max(1, math.ceil(seconds / self.kernel_s))

    def run_for(self, seconds: float) -> None:
        self.run(self.times_for(seconds))


def gemm(worker: Worker, timer: StreamTimer, *, parts: int = 1) -> KernelSeries:
    """Returns the GEMM of one tensor-parallel rank, or of a part of its rows."""
    scale = sizes_of(worker)
    rows, inputs, outputs = scale.product[0] // parts, *scale.product[1:]
    options: dict[str, Any] = {"dtype": scale.dtype, "device": worker.device}
    left, right = torch.randn(rows, inputs, **options), torch.randn(inputs, outputs, **options)
    out = torch.empty(rows, outputs, **options)
    return KernelSeries(lambda: torch.mm(left, right, out=out), worker, timer)


def elementwise(worker: Worker, timer: StreamTimer) -> KernelSeries:
    """Returns a memory-bound addition."""
    scale = sizes_of(worker)
    a, b, out = (torch.zeros(scale.elements, dtype=scale.dtype, device=worker.device) for _ in range(3))
    return KernelSeries(lambda: torch.add(a, b, out=out), worker, timer)


def probe(worker: Worker) -> Callable[[], Tensor]:
    """Returns a kernel of negligible duration."""
    one = torch.zeros(1, device=worker.device)
    return lambda: one.add_(1.0)


# ---------------------------------------------------------------------------- collectives


class RepeatedCollective:
    """One collective of all ranks, repeated on the same tensors; `size_bytes` is that of the full tensor."""

    def __init__(
        self,
        collective: Collective,
        size_bytes: int,
        worker: Worker,
        *,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.collective, self._group = collective, group
        count = max(1, size_bytes // dtype.itemsize // worker.world)
        self._shard = torch.zeros(count, dtype=dtype, device=worker.device)
        self._full = torch.zeros(count * worker.world, dtype=dtype, device=worker.device)
        self.size_bytes = self._full.numel() * dtype.itemsize

    def launch(self) -> dist.Work:
        """Launches it on the communicator's stream, behind work enqueued on the current stream."""
        return self._issue(async_op=True)

    def run(self) -> None:
        """Runs it in order with the work of the current stream."""
        self._issue(async_op=False)

    def _issue(self, *, async_op: bool) -> Any:
        if self.collective is Collective.ALL_GATHER:
            return all_gather_single(self._full, self._shard, self._group, async_op=async_op)
        return reduce_scatter_single(
            self._shard, self._full, dist.ReduceOp.SUM, self._group, async_op=async_op
        )


def collective_s(traffic: RepeatedCollective, worker: Worker, timer: StreamTimer, *, times: int = 5) -> float:
    """Returns the seconds of one of several in sequence; an untimed one before them aligns ranks."""
    worker.barrier()
    traffic.run()
    begin = timer.record()
    for _ in range(times):
        traffic.run()
    end = timer.record()
    worker.synchronize()
    return float(median(worker.all_gather(timer.elapsed_s(begin, end) / times)))


def spread(values: Sequence[float], unit: str = "_s") -> dict[str, float]:
    """Returns median and quartiles."""
    p25, middle, p75 = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {f"median{unit}": middle, f"p25{unit}": p25, f"p75{unit}": p75}


CHAIN_BYTES = 2**28  # of collectives between two events


def collectives(worker: Worker, cluster: Cluster | None) -> dict[str, Any]:
    """Returns curves of all-gather and reduce-scatter over all ranks, and what plans for `cluster` assume."""
    timer = timer_of(worker)
    return {
        str(collective): _curve(worker, timer, collective, cluster)
        for collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    }


def _curve(
    worker: Worker, timer: StreamTimer, collective: Collective, cluster: Cluster | None
) -> dict[str, Any]:
    scale = sizes_of(worker)
    dtype = scale.dtype if collective is Collective.ALL_GATHER else torch.float32
    lead, rows = gemm(worker, timer), []
    for size_bytes in scale.sizes_bytes:
        traffic = RepeatedCollective(collective, size_bytes, worker, dtype=dtype)
        seconds = []
        for turn in range(scale.repetitions + 1):
            worker.barrier()
            lead.run_for(scale.series_s / 2)  # the host enqueues the rest while this runs
            traffic.run()  # aligns ranks
            times = max(2, min(scale.chain, CHAIN_BYTES // traffic.size_bytes))
            begin = timer.record()
            for _ in range(times):
                traffic.run()
            end = timer.record()
            worker.synchronize()
            if turn:
                seconds.append(timer.elapsed_s(begin, end) / times)
        row: dict[str, Any] = asdict(summarize_repetitions(traffic.size_bytes, seconds))
        if cluster is not None:
            row["assumed_s"] = assumed_s(
                cluster, collective, traffic.size_bytes, ranks=worker.world, stride=1
            )
        rows.append(row)
    latency_s, bandwidth = fit_line([(row["size_bytes"], row["median_s"]) for row in rows])
    return {
        "latency_s": latency_s,
        "bandwidth_bytes_per_s": bandwidth,  # of the full tensor
        "link": ring_link(latency_s, bandwidth, worker.world),
        "sizes": rows,
    }


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float | None]:
    """Fits `seconds = latency + bytes / bandwidth` by least squares of relative errors.

    Small messages then weigh as much as large ones. The bandwidth is None where larger ones are not slower.
    """
    weights = [seconds**-2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    moved = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    joint = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    slope = joint / moved
    if slope <= 0:
        return mean_y, None
    latency = mean_y - slope * mean_x
    if latency < 0:  # no message has negative latency: the best line through 0
        squares = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
        slope = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / squares
        latency = 0.0
    return latency, 1 / slope


def ring_link(latency_s: float, bandwidth: float | None, ranks: int) -> dict[str, float | None]:
    """Returns the link, as a cluster file states it, over which a ring of `ranks - 1` steps takes so long."""
    return {
        "latency_s": latency_s / (ranks - 1),
        "bandwidth_bytes_per_s": None if bandwidth is None else bandwidth * (ranks - 1) / ranks,
    }
