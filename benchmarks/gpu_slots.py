"""What a slot is worth: how soon work runs in it, how much slower, and how late its waiter is."""

from __future__ import annotations

import math
from statistics import fmean, median
from typing import Any

from benchmarks.gpu_ranks import Place
from benchmarks.gpu_streams import (
    Series,
    Traffic,
    Watch,
    collective_s,
    elementwise,
    gemm,
    probe,
    scale_of,
    spread,
    watch_of,
)
from optimus.cost.assumptions import preset
from optimus.cost.network import Collective

FILLER_PARTS = 8  # of a GEMM: one part is short beside the collective
MOST_LAUNCHES = 64  # of collectives one after another, under one series of kernels
LATE_BYTES = 2**16
MARGIN = 2.0  # collectives last so much longer than the kernels above them: both slow each other down


# ---------------------------------------------------------------------------- entering and leaving


def slot_entry_delay(place: Place) -> dict[str, Any]:
    """How long after a launch the kernel enqueued behind it has run, beyond what it takes without a launch.

    And how long after the end of the collective its waiter has. A filler of half the collective's length runs
    between them.
    """
    watch, scale = watch_of(place), scale_of(place)
    message_bytes = scale.rows * scale.hiddens[-1] * scale.dtype.itemsize
    traffic = Traffic(Collective.ALL_GATHER, message_bytes, place, dtype=scale.dtype)
    series = gemm(place, watch, parts=FILLER_PARTS)
    alone_s = collective_s(traffic, place, watch)
    turns = [_slot(place, watch, traffic, series, alone_s) for _ in range(scale.repetitions + 1)][1:]
    found = {key: [turn[key] for turn in turns] for key in turns[0]}
    every = {
        key: [value for part in place.gathered(values) for value in part] for key, values in found.items()
    }
    return {
        "size_bytes": traffic.size_bytes,
        "collective_s": alone_s,
        "entry_delay": spread(every["entry_s"]),
        "waiter_delay": spread(every["waiter_s"]),
        "collective_in_slot": spread(every["collective_s"]),
        "filled_share": fmean(every["filled"]),  # of repetitions whose filler was over before the collective
    }


def _slot(place: Place, watch: Watch, traffic: Traffic, series: Series, alone_s: float) -> dict[str, float]:
    kernel = probe(place)
    place.settle()
    series.run_for(scale_of(place).series_s)  # the host enqueues all that follows while this runs
    plain = watch.mark()
    kernel()
    launch = watch.mark()
    work = traffic.launch()
    over = watch.over(work)
    kernel()
    entered = watch.mark()
    series.run_for(alone_s / 2)
    filled = watch.mark()
    work.wait()
    kernel()
    waited = watch.mark()
    place.idle()
    kernel_s = watch.seconds(plain, launch)
    in_time = watch.seconds(filled, over) > 0
    return {
        "entry_s": watch.seconds(launch, entered) - kernel_s,
        "waiter_s": watch.seconds(over if in_time else filled, waited) - kernel_s,
        "collective_s": watch.seconds(launch, over),
        "filled": float(in_time),
    }


# ---------------------------------------------------------------------------- slower inside


def compute_slowdown(place: Place) -> dict[str, Any]:
    """How much longer kernels take while a collective is resident; plans assume one number for all."""
    watch, scale = watch_of(place), scale_of(place)
    kernels = {"gemm": gemm(place, watch), "elementwise": elementwise(place, watch)}
    rows = []
    for hidden in scale.hiddens:
        size_bytes = scale.rows * hidden * scale.dtype.itemsize
        for collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
            traffic = Traffic(collective, size_bytes, place, dtype=scale.dtype)
            one_s = collective_s(traffic, place, watch)
            for name, series in kernels.items():
                rows.append(_slowdown(place, watch, traffic, one_s, name, series))
                place.tell((len(rows), 4 * len(scale.hiddens) + 1))
    late = Traffic(Collective.ALL_GATHER, LATE_BYTES, place, dtype=scale.dtype)
    waiting = _slowdown(place, watch, late, 0.0, "gemm", kernels["gemm"])
    medians = {
        name: median(row["slowdown"]["median"] for row in rows if row["kernel"] == name) for name in kernels
    }
    return {
        "assumed": preset("default").residence_slowdown,
        **medians,
        "gemm_beside_a_waiting_collective": waiting["slowdown"]["median"],
        "rows": [*rows, waiting],
    }


def _slowdown(
    place: Place, watch: Watch, traffic: Traffic, one_s: float, name: str, series: Series
) -> dict[str, Any]:
    """Alone and under collectives in turn. Without `one_s` it is a single one, for which a rank is late."""
    scale, times = scale_of(place), series.times_for(scale_of(place).series_s / 2)
    launches = min(MOST_LAUNCHES, math.ceil(MARGIN * times * series.kernel_s / one_s) + 1) if one_s else 1
    waits = not one_s
    alone, under, covered = [], [], []
    for turn in range(scale.repetitions + 1):
        alone_s, _ = _kernels_under(place, watch, traffic, series, times, 0, waits=False)
        under_s, left_s = _kernels_under(place, watch, traffic, series, times, launches, waits=waits)
        if turn:
            alone.append(alone_s)
            under.append(under_s)
            covered.append(left_s >= 0)
    counts = not waits or place.rank < place.world - 1
    ratios = [each / median(alone) - 1 for each in under] if counts else []
    every = [ratio for part in place.gathered(ratios) for ratio in part]
    held = [share for part in place.gathered(covered if counts else []) for share in part]
    return {
        "kernel": name,
        "collective": str(traffic.collective),
        "size_bytes": traffic.size_bytes,
        "waits_for_a_late_rank": waits,
        "alone": spread(alone),
        "under": spread(under),
        "slowdown": spread(every, ""),
        "covered_share": fmean(held),  # of repetitions in which it was resident to the end
    }


def _kernels_under(
    place: Place, watch: Watch, traffic: Traffic, series: Series, times: int, launches: int, *, waits: bool
) -> tuple[float, float]:
    """Seconds of the kernels, and for how long after them the last collective was still resident."""
    place.settle()
    series.run_for(scale_of(place).series_s)  # the host enqueues all that follows while this runs
    if waits and place.rank == place.world - 1:
        series.run(4 * times)
    works = [traffic.launch() for _ in range(launches)]
    over = watch.over(works[-1]) if works else None
    begin = watch.mark()
    series.run(times)
    end = watch.mark()
    for work in works:
        work.wait()
    place.idle()
    return watch.seconds(begin, end), 0.0 if over is None else watch.seconds(end, over)
