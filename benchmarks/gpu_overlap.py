"""How much of a data-parallel reduce-scatter compute hides: by the clock, and in a trace of kernels."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_ranks import NOT_MEASURED, Place
from benchmarks.gpu_streams import Series, Traffic, Watch, collective_s, gemm, scale_of, watch_of
from optimus.cost.network import Collective

LONGER = 2.0  # compute lasts so many times as long as the reduce-scatter alone
TRACED = 3  # repetitions
Interval = tuple[float, float]


def reduce_scatter_under_compute(place: Place) -> dict[str, Any]:
    """Gradients in float32 are reduced while a long series of products runs.

    `hidden_share_by_time` is what the series does not get longer by, of what the reduction takes alone;
    `hidden_share` the part of NCCL's kernels during which another kernel runs, as Kineto saw them.
    """
    watch, scale = watch_of(place), scale_of(place)
    traffic = Traffic(Collective.REDUCE_SCATTER, scale.reduced_bytes, place, dtype=torch.float32)
    series, alone_s = gemm(place, watch), collective_s(traffic, place, watch)
    times = series.times_for(LONGER * alone_s)
    compute, both = [], []
    for turn in range(scale.repetitions + 1):
        compute_s = _timed(place, watch, series, times, None)
        both_s = _timed(place, watch, series, times, traffic)
        if turn:
            compute.append(compute_s)
            both.append(both_s)
    longer_s = median(place.gathered(median(both) - median(compute)))
    return {
        "size_bytes": traffic.size_bytes,
        "reduce_scatter_s": alone_s,
        "compute_s": median(compute),
        "both_s": median(both),
        "hidden_share_by_time": 1 - longer_s / alone_s,
        **_traced(place, watch, series, times, traffic),
    }


def _timed(place: Place, watch: Watch, series: Series, times: int, traffic: Traffic | None) -> float:
    place.settle()
    series.run_for(scale_of(place).series_s)
    begin = watch.mark()
    work = None if traffic is None else traffic.launch()
    series.run(times)
    if work is not None:
        work.wait()
    end = watch.mark()
    place.idle()
    return watch.seconds(begin, end)


def _traced(place: Place, watch: Watch, series: Series, times: int, traffic: Traffic) -> dict[str, Any]:
    """A profiler that does not work here costs its figures, not those of the clock."""
    if not place.on_gpu:
        return {"hidden_share": None, "kernels": NOT_MEASURED}
    try:
        found = hidden_in(_trace(place, watch, series, times, traffic))
    except Exception as error:  # it is loaded, and may refuse, in many ways
        return {"hidden_share": None, "kernels": f"no trace: {error}"}
    return found or {"hidden_share": None, "kernels": "no kernels of NCCL in the trace"}


def _trace(place: Place, watch: Watch, series: Series, times: int, traffic: Traffic) -> dict[str, Any]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):  # the first one takes a second to begin
        _timed(place, watch, series, 1, traffic)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(TRACED):
            _timed(place, watch, series, times, traffic)
    with tempfile.TemporaryDirectory(prefix="optimus-trace-") as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        found: dict[str, Any] = json.loads(path.read_text())
    return found


# ---------------------------------------------------------------------------- traces, without a GPU


def hidden_in(trace: Mapping[str, Any]) -> dict[str, float] | None:
    """Of a Kineto trace: seconds of NCCL's kernels, of others, and of both at once; None without NCCL's."""
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
    """The same moments as intervals that do not touch, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def overlap(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """Length of what is in both; each as `union` makes them."""
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
    """Microseconds of a trace as seconds."""
    begin, length = float(event["ts"]), float(event["dur"])
    return begin * 1e-6, (begin + length) * 1e-6


def _is_nccl(event: Mapping[str, Any]) -> bool:
    return "nccl" in str(event["name"]).lower()
