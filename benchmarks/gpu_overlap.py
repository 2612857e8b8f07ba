"""Measures work in the slots of collectives: how soon it runs, how much slower, and how much it hides."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.gpu_ranks import NOT_MEASURED, Worker
from benchmarks.gpu_streams import (
    KernelSeries,
    RepeatedCollective,
    StreamTimer,
    collective_s,
    elementwise,
    gemm,
    probe,
    sizes_of,
    spread,
    timer_of,
)
from optimus.cost.assumptions import get_preset
from optimus.cost.network import Collective

FILLER_PARTS = 8  # of a GEMM: one part is much shorter than the collective
MAX_LAUNCHES = 64  # of collectives in sequence, over one series of kernels
LATE_BYTES = 2**16
COVER = 2.0  # duration of collectives over that of the kernels under them: both slow each other down
COMPUTE_OVER_REDUCE = 2.0  # duration of compute over that of the reduce-scatter alone
TRACED_REPETITIONS = 3
Interval = tuple[float, float]  # in seconds


# ---------------------------------------------------------------------------- delays of a slot


def slot_entry_delay(worker: Worker) -> dict[str, Any]:
    """Measures how much later a kernel runs behind a launch, and a waiter after the end of the collective.

    Both are beyond the time that they take without a collective. A filler of half the collective's length
    runs between them.
    """
    timer, scale = timer_of(worker), sizes_of(worker)
    message_bytes = scale.rows * scale.hiddens[-1] * scale.dtype.itemsize
    traffic = RepeatedCollective(Collective.ALL_GATHER, message_bytes, worker, dtype=scale.dtype)
    series = gemm(worker, timer, parts=FILLER_PARTS)
    alone_s = collective_s(traffic, worker, timer)
    turns = [_slot(worker, timer, traffic, series, alone_s) for _ in range(scale.repetitions + 1)][1:]
    every = {key: _concatenated(worker, [turn[key] for turn in turns]) for key in turns[0]}
    return {
        "size_bytes": traffic.size_bytes,
        "collective_s": alone_s,
        "entry_delay": spread(every["entry_s"]),
        "waiter_delay": spread(every["waiter_s"]),
        "collective_in_slot": spread(every["collective_s"]),
        "filled_share": fmean(every["filled"]),  # of repetitions whose filler ended before the collective
    }


def _slot(
    worker: Worker, timer: StreamTimer, traffic: RepeatedCollective, series: KernelSeries, alone_s: float
) -> dict[str, float]:
    kernel = probe(worker)
    worker.barrier()
    series.run_for(sizes_of(worker).series_s)  # the host enqueues the rest while this runs
    plain = timer.record()
    kernel()
    launch = timer.record()
    work = traffic.launch()
    end = timer.record_end(work)
    kernel()
    entered = timer.record()
    series.run_for(alone_s / 2)
    filled = timer.record()
    work.wait()
    kernel()
    waited = timer.record()
    worker.synchronize()
    kernel_s = timer.elapsed_s(plain, launch)
    in_time = timer.elapsed_s(filled, end) > 0
    return {
        "entry_s": timer.elapsed_s(launch, entered) - kernel_s,
        "waiter_s": timer.elapsed_s(end if in_time else filled, waited) - kernel_s,
        "collective_s": timer.elapsed_s(launch, end),
        "filled": float(in_time),
    }


# ---------------------------------------------------------------------------- slow-down


def compute_slowdown(worker: Worker) -> dict[str, Any]:
    """Measures how much longer kernels take under a resident collective; plans assume one figure for all."""
    timer, scale = timer_of(worker), sizes_of(worker)
    kernels = {"gemm": gemm(worker, timer), "elementwise": elementwise(worker, timer)}
    rows = []
    for hidden in scale.hiddens:
        size_bytes = scale.rows * hidden * scale.dtype.itemsize
        for collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
            traffic = RepeatedCollective(collective, size_bytes, worker, dtype=scale.dtype)
            one_s = collective_s(traffic, worker, timer)
            for name, series in kernels.items():
                rows.append(_slowdown(worker, timer, traffic, one_s, name, series))
                worker.report((len(rows), 4 * len(scale.hiddens) + 1))
    late = RepeatedCollective(Collective.ALL_GATHER, LATE_BYTES, worker, dtype=scale.dtype)
    waiting = _slowdown(worker, timer, late, 0.0, "gemm", kernels["gemm"])
    medians = {
        name: median(row["slowdown"]["median"] for row in rows if row["kernel"] == name) for name in kernels
    }
    return {
        "assumed": get_preset("default").residence_slowdown,
        **medians,
        "gemm_beside_a_waiting_collective": waiting["slowdown"]["median"],
        "rows": [*rows, waiting],
    }


def _slowdown(
    worker: Worker,
    timer: StreamTimer,
    traffic: RepeatedCollective,
    one_s: float,
    name: str,
    series: KernelSeries,
) -> dict[str, Any]:
    """Times kernels alone and under collectives; without `one_s`, under one that waits for a late rank."""
    scale, times = sizes_of(worker), series.times_for(sizes_of(worker).series_s / 2)
    launches = min(MAX_LAUNCHES, math.ceil(COVER * times * series.kernel_s / one_s) + 1) if one_s else 1
    waits = not one_s
    alone, under, covered = [], [], []
    for turn in range(scale.repetitions + 1):
        alone_s, _ = _kernels_under(worker, timer, traffic, series, times, 0, waits=False)
        under_s, left_s = _kernels_under(worker, timer, traffic, series, times, launches, waits=waits)
        if turn:
            alone.append(alone_s)
            under.append(under_s)
            covered.append(left_s >= 0)
    counts = not waits or worker.rank < worker.world - 1
    ratios = [under_s / median(alone) - 1 for under_s in under] if counts else []
    return {
        "kernel": name,
        "collective": str(traffic.collective),
        "size_bytes": traffic.size_bytes,
        "waits_for_a_late_rank": waits,
        "alone": spread(alone),
        "under": spread(under),
        "slowdown": spread(_concatenated(worker, ratios), ""),
        "covered_share": fmean(_concatenated(worker, covered if counts else [])),  # resident to the end
    }


def _kernels_under(
    worker: Worker,
    timer: StreamTimer,
    traffic: RepeatedCollective,
    series: KernelSeries,
    times: int,
    launches: int,
    *,
    waits: bool,
) -> tuple[float, float]:
    """Returns the seconds of the kernels, and how long after them the last collective was still resident."""
    worker.barrier()
    series.run_for(sizes_of(worker).series_s)  # the host enqueues the rest while this runs
    if waits and worker.rank == worker.world - 1:
        series.run(4 * times)
    works = [traffic.launch() for _ in range(launches)]
    last_end = timer.record_end(works[-1]) if works else None
    begin = timer.record()
    series.run(times)
    end = timer.record()
    for work in works:
        work.wait()
    worker.synchronize()
    return timer.elapsed_s(begin, end), 0.0 if last_end is None else timer.elapsed_s(end, last_end)


def _concatenated(worker: Worker, values: list[Any]) -> list[Any]:
    return [value for part in worker.all_gather(values) for value in part]


# ---------------------------------------------------------------------------- hidden communication


def reduce_scatter_under_compute(worker: Worker) -> dict[str, Any]:
    """Measures how much of a float32 reduce-scatter a long series of GEMMs hides.

    `hidden_share_by_time` is 1 less the added duration of the series over the duration of the reduce-scatter
    alone; `hidden_share` is the share of NCCL's kernels, as Kineto records them, with another kernel running.
    """
    timer, scale = timer_of(worker), sizes_of(worker)
    traffic = RepeatedCollective(Collective.REDUCE_SCATTER, scale.reduced_bytes, worker, dtype=torch.float32)
    series, alone_s = gemm(worker, timer), collective_s(traffic, worker, timer)
    times = series.times_for(COMPUTE_OVER_REDUCE * alone_s)
    compute, both = [], []
    for turn in range(scale.repetitions + 1):
        compute_s = _timed(worker, timer, series, times, None)
        both_s = _timed(worker, timer, series, times, traffic)
        if turn:
            compute.append(compute_s)
            both.append(both_s)
    longer_s = median(worker.all_gather(median(both) - median(compute)))
    return {
        "size_bytes": traffic.size_bytes,
        "reduce_scatter_s": alone_s,
        "compute_s": median(compute),
        "both_s": median(both),
        "hidden_share_by_time": 1 - longer_s / alone_s,
        **_traced(worker, timer, series, times, traffic),
    }


def _timed(
    worker: Worker, timer: StreamTimer, series: KernelSeries, times: int, traffic: RepeatedCollective | None
) -> float:
    worker.barrier()
    series.run_for(sizes_of(worker).series_s)
    begin = timer.record()
    work = None if traffic is None else traffic.launch()
    series.run(times)
    if work is not None:
        work.wait()
    end = timer.record()
    worker.synchronize()
    return timer.elapsed_s(begin, end)


def _traced(
    worker: Worker, timer: StreamTimer, series: KernelSeries, times: int, traffic: RepeatedCollective
) -> dict[str, Any]:
    """Returns the figures of a trace; without a working profiler, the reason."""
    if not worker.on_gpu:
        return {"hidden_share": None, "kernels": NOT_MEASURED}
    try:
        figures = hidden_in(_trace(worker, timer, series, times, traffic))
    except Exception as error:  # a profiler fails in many ways
        return {"hidden_share": None, "kernels": f"no trace: {error}"}
    return figures or {"hidden_share": None, "kernels": "no kernels of NCCL in the trace"}


def _trace(
    worker: Worker, timer: StreamTimer, series: KernelSeries, times: int, traffic: RepeatedCollective
) -> dict[str, Any]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):  # the first one takes a second to start
        _timed(worker, timer, series, 1, traffic)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(TRACED_REPETITIONS):
            _timed(worker, timer, series, times, traffic)
    with tempfile.TemporaryDirectory(prefix="optimus-trace-") as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text())
    return trace


# ---------------------------------------------------------------------------- traces


def hidden_in(trace: Mapping[str, Any]) -> dict[str, float] | None:
    """Returns seconds of NCCL's kernels, of others, and of both at once; None without kernels of NCCL."""
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    nccl = union(_interval(event) for event in kernels if _is_nccl(event))
    others = union(_interval(event) for event in kernels if not _is_nccl(event))
    if not nccl:
        return None
    nccl_s, both_s = _length(nccl), overlap(nccl, others)
    return {
        "hidden_share": both_s / nccl_s,
        "nccl_s": nccl_s,
        "kernels_s": _length(others),
        "at_once_s": both_s,
    }


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merges intervals that touch, and sorts them."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def overlap(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """Returns the length of the intersection of two results of `union`."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return total


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _interval(event: Mapping[str, Any]) -> Interval:
    """Converts microseconds of a trace to seconds."""
    begin, length = float(event["ts"]), float(event["dur"])
    return begin * 1e-6, (begin + length) * 1e-6


def _is_nccl(event: Mapping[str, Any]) -> bool:
    return "nccl" in str(event["name"]).lower()
