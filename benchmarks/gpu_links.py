"""Latency and bandwidth of collectives, as a cluster's link has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.gpu_ranks import Place
from benchmarks.gpu_streams import Traffic, Watch, gemm, scale_of, watch_of
from optimus.cost.network import Collective
from optimus.cost.network import collective_s as assumed_s
from optimus.job.cluster import Cluster
from optimus.profiler.links import summarize

CHAIN_BYTES = 2**28  # of messages between two marks


def collectives(place: Place, cluster: Cluster | None) -> dict[str, Any]:
    """Curves of all-gather and reduce-scatter over all ranks, beside what plans for `cluster` assume."""
    watch = watch_of(place)
    return {
        str(collective): _curve(place, watch, collective, cluster)
        for collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    }


def _curve(place: Place, watch: Watch, collective: Collective, cluster: Cluster | None) -> dict[str, Any]:
    dtype = scale_of(place).dtype if collective is Collective.ALL_GATHER else torch.float32
    lead, rows = gemm(place, watch), []
    for size_bytes in scale_of(place).sizes_bytes:
        traffic = Traffic(collective, size_bytes, place, dtype=dtype)
        seconds = []
        for turn in range(scale_of(place).repetitions + 1):
            place.settle()
            lead.run_for(scale_of(place).series_s / 2)  # the host enqueues what follows while this runs
            traffic.run()  # and makes ranks equally late
            times = max(2, min(scale_of(place).chain, CHAIN_BYTES // traffic.size_bytes))
            begin = watch.mark()
            for _ in range(times):
                traffic.run()
            end = watch.mark()
            place.idle()
            if turn:
                seconds.append(watch.seconds(begin, end) / times)
        row: dict[str, Any] = asdict(summarize(traffic.size_bytes, seconds))
        if cluster is not None:
            row["assumed_s"] = assumed_s(cluster, collective, traffic.size_bytes, ranks=place.world, stride=1)
        rows.append(row)
    latency_s, bandwidth = fit_line([(row["size_bytes"], row["median_s"]) for row in rows])
    return {
        "latency_s": latency_s,
        "bandwidth_bytes_per_s": bandwidth,  # of the whole tensor
        "link": ring_link(latency_s, bandwidth, place.world),
        "sizes": rows,
    }


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float | None]:
    """Latency and bandwidth of `seconds = latency + bytes / bandwidth`, by least squares of relative errors.

    Small messages then count as much as large ones. Without a bandwidth where larger ones are not slower.
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
    if latency < 0:  # no message is faster than none: the best line through 0
        squares = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
        slope = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / squares
        latency = 0.0
    return latency, 1 / slope


def ring_link(latency_s: float, bandwidth: float | None, ranks: int) -> dict[str, float | None]:
    """What a cluster file says of a link over which a ring of `ranks - 1` steps takes so long."""
    return {
        "latency_s": latency_s / (ranks - 1),
        "bandwidth_bytes_per_s": None if bandwidth is None else bandwidth * (ranks - 1) / ranks,
    }
