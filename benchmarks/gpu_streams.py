"""What is timed on a device and how: marks on streams or on the clock, kernels, and collectives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median, quantiles
from threading import Thread
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.gpu_ranks import Place
from optimus.cost.network import Collective
from optimus.models.collectives import all_gather_single, reduce_scatter_single

WARM_UP = 3
CALIBRATION = 5  # times a kernel is timed before it is repeated for as long as is wanted


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes and times of what is measured."""

    dtype: torch.dtype
    rows: int  # tokens of a TP group
    hiddens: tuple[int, ...]  # widths of their rows, the widest last
    product: tuple[int, int, int]  # rows, inputs and outputs of one GEMM
    elements: int  # of an elementwise kernel
    reduced_bytes: int  # of a data-parallel reduce-scatter
    sizes_bytes: tuple[int, ...]  # of the curve of collectives
    chain: int  # messages of one size between two marks, at most
    compute_s: float  # long beside a message, a launch, and how unequally ranks begin
    series_s: float  # of kernels one after another, long beside what the host needs to launch them
    repetitions: int


GPU = Scale(
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
CPU = Scale(
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


def scale_of(place: Place) -> Scale:
    """Large enough to mean something, or small enough for a smoke test."""
    return GPU if place.on_gpu else CPU


# ---------------------------------------------------------------------------- marks


class Watch(Protocol):
    """Marks moments: on a GPU those at which a stream comes to them, on a CPU those of the call."""

    def mark(self) -> Any:
        """The moment at which all is over that the current stream was given before."""

    def over(self, work: dist.Work) -> Any:
        """The moment at which a collective or receive is over, whatever else runs."""

    def side(self) -> AbstractContextManager[Any]:
        """A stream that nothing was given to."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks, once the device is idle."""


class CudaWatch:
    """By CUDA events. Its observer is a stream of high priority: NCCL draws its own from another pool."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)
        self._observer = torch.cuda.Stream(device, priority=-1)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def over(self, work: dist.Work) -> Any:
        with torch.cuda.stream(self._observer):
            work.wait()  # of this stream, not of the host
            return self.mark()

    def side(self) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = torch.cuda.stream(self._side)
        return found

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1000


class HostWatch:
    """By the clock; who waits for a collective is a thread."""

    def mark(self) -> float:
        return time.perf_counter()

    def over(self, work: dist.Work) -> Future[float]:
        moment: Future[float] = Future()
        Thread(target=_note_end, args=(work, moment), daemon=True).start()
        return moment

    def side(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def seconds(self, begin: Any, end: Any) -> float:
        return _at(end) - _at(begin)


def _note_end(work: dist.Work, moment: Future[float]) -> None:
    work.wait()
    del work  # first: one that outlives its group ends the process badly
    moment.set_result(time.perf_counter())


def _at(mark: float | Future[float]) -> float:
    return mark.result() if isinstance(mark, Future) else mark


def watch_of(place: Place) -> Watch:
    """What can be timed here."""
    return CudaWatch(place.device) if place.on_gpu else HostWatch()


# ---------------------------------------------------------------------------- kernels


class Series:
    """One kernel again and again, on tensors of its own; as often as takes the seconds that are asked for."""

    def __init__(self, kernel: Callable[[], object], place: Place, watch: Watch) -> None:
        self._kernel, self._watch = kernel, watch
        for _ in range(WARM_UP):
            kernel()
        found = []
        for _ in range(CALIBRATION):
            place.idle()
            begin = watch.mark()
            self.run(8)
            end = watch.mark()
            place.idle()
            found.append(watch.seconds(begin, end) / 8)
        self.kernel_s: float = max(median(place.gathered(median(found))), 1e-7)  # the same on all ranks

    def run(self, times: int) -> None:
        for _ in range(times):
            self._kernel()

    def times_for(self, seconds: float) -> int:
        return max(1, math.ceil(seconds / self.kernel_s))

    def run_for(self, seconds: float) -> None:
        self.run(self.times_for(seconds))


def gemm(place: Place, watch: Watch, *, parts: int = 1) -> Series:
    """A product as tensor parallelism leaves it to one rank, or of one part of its rows."""
    scale = scale_of(place)
    rows, inputs, outputs = scale.product[0] // parts, *scale.product[1:]
    like: dict[str, Any] = {"dtype": scale.dtype, "device": place.device}
    left, right = torch.randn(rows, inputs, **like), torch.randn(inputs, outputs, **like)
    out = torch.empty(rows, outputs, **like)
    return Series(lambda: torch.mm(left, right, out=out), place, watch)


def elementwise(place: Place, watch: Watch) -> Series:
    """A sum that waits for memory and nothing else."""
    scale = scale_of(place)
    a, b, out = (torch.zeros(scale.elements, dtype=scale.dtype, device=place.device) for _ in range(3))
    return Series(lambda: torch.add(a, b, out=out), place, watch)


def probe(place: Place) -> Callable[[], Tensor]:
    """A kernel that is over as soon as it has begun."""
    one = torch.zeros(1, device=place.device)
    return lambda: one.add_(1.0)


# ---------------------------------------------------------------------------- collectives


class Traffic:
    """One collective of all ranks again and again on the same tensors; `size_bytes` are of the whole."""

    def __init__(
        self,
        collective: Collective,
        size_bytes: int,
        place: Place,
        *,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.collective, self._group = collective, group
        count = max(1, size_bytes // dtype.itemsize // place.world)
        self._part = torch.zeros(count, dtype=dtype, device=place.device)
        self._whole = torch.zeros(count * place.world, dtype=dtype, device=place.device)
        self.size_bytes = self._whole.numel() * dtype.itemsize

    def launch(self) -> dist.Work:
        """On a stream of the communicator's own, behind what the current one was given."""
        return self._play(async_op=True)

    def run(self) -> None:
        """In turn with what else the current stream does."""
        self._play(async_op=False)

    def _play(self, *, async_op: bool) -> Any:
        if self.collective is Collective.ALL_GATHER:
            return all_gather_single(self._whole, self._part, self._group, async_op=async_op)
        return reduce_scatter_single(
            self._part, self._whole, dist.ReduceOp.SUM, self._group, async_op=async_op
        )


def collective_s(traffic: Traffic, place: Place, watch: Watch, *, times: int = 5) -> float:
    """Seconds of one, among several one after another: the first makes ranks equally late."""
    place.settle()
    traffic.run()
    begin = watch.mark()
    for _ in range(times):
        traffic.run()
    end = watch.mark()
    place.idle()
    return float(median(place.gathered(watch.seconds(begin, end) / times)))


def spread(values: Sequence[float], unit: str = "_s") -> dict[str, float]:
    """Median and quartiles."""
    p25, middle, p75 = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {f"median{unit}": middle, f"p25{unit}": p25, f"p75{unit}": p75}
