"""Plays a plan with encoder work on a low-priority stream: the LLM's next kernel goes first if it is ready.

Each stream keeps the order that its kernels have in the plan, and a kernel that runs is not interrupted. On a
compute lane that is free, the LLM's next kernel starts if all that it waits for is done; else the encoders'
next does, if it can; no kernel overtakes another of its own stream.

Waits cost no lane: each holds up its own stream only. Collectives and messages follow their producers: on a
link, the traffic of a stream keeps its order, and of two that are ready the one that the plan has first goes
first. Links on which several device classes meet keep the plan's order, or two of them could hold a link each
and wait for the other for ever.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optimus.ir.op import NUM_LANES, Floats, Ints, Lane, OpKind, Schedule
from optimus.ir.plan import ALL
from optimus.ir.ranks import LLM
from optimus.schedule.build import group_by_first
from optimus.schedule.program_table import Bools
from optimus.schedule.simulate import Timeline, issues_before, list_schedule

IN_ORDER = -1.0  # the rank of an op that keeps its place on its lane


class TwoStreams:
    """A schedule of a plan, ready to be played with any durations.

    The host issues the LLM's compute in program order, one op per `launch_s`; for all else it is in time.
    """

    def __init__(self, schedule: Schedule, *, slowdown: float = 0.0, launch_s: float = 0.0) -> None:
        self._slowdown = slowdown
        filler = np.isin(
            schedule.module, [n for n, name in enumerate(schedule.modules) if name not in (LLM, ALL)]
        )
        self._rank = _ranks(schedule, filler)
        self._schedule = _with_streams(schedule, filler, self._rank)
        launches = schedule.kind != OpKind.WAIT
        self._held_s = launch_s * issues_before(schedule.device, launches, schedule.num_devices)

    def play(self, duration_s: Floats) -> Timeline:
        """When everything happens if ops take so long."""
        count = len(self._schedule)
        timeline, _ = list_schedule(
            replace(self._schedule, duration_s=duration_s),
            rank=self._rank,
            due_s=np.full(count, np.inf),  # nobody is expected: what is ready starts
            held_s=self._held_s,
            patience_s=0.0,
            slowdown=self._slowdown,
        )
        return timeline


def _ranks(schedule: Schedule, filler: Bools) -> Floats:
    """Places in the plan, where ops are free to be played out of its order."""
    lane = schedule.device.astype(np.int64) * NUM_LANES + schedule.lane
    compute = schedule.lane == Lane.COMPUTE
    shared = np.zeros(schedule.num_devices * NUM_LANES, np.bool_)
    if schedule.meeting is not None:
        shared[lane[(schedule.meeting >= 0) & ~compute]] = True
    fixed = np.where(compute, ~filler & (schedule.kind != OpKind.WAIT), shared[lane])
    fixed |= schedule.is_recv
    return np.where(fixed, IN_ORDER, np.arange(len(schedule), dtype=np.float64))


def _with_streams(schedule: Schedule, filler: Bools, rank: Floats) -> Schedule:
    """The schedule with waits on a lane of their own, and every op of a stream behind the one before it."""
    waits = np.repeat(np.arange(len(schedule)), np.diff(schedule.dep_offset))
    edges = [
        np.stack([waits, schedule.deps], axis=1),
        _chains(schedule, filler, rank),
        _ends(schedule, filler),
    ]
    dep_offset, deps = group_by_first(np.concatenate(edges), len(schedule))
    wait = schedule.kind == OpKind.WAIT
    return replace(
        schedule,
        num_devices=2 * schedule.num_devices,
        device=np.where(wait, schedule.device + schedule.num_devices, schedule.device),
        lane=np.where(wait, Lane.HOST, schedule.lane),
        dep_offset=dep_offset,
        deps=deps,
        device_names=(),
    )


def _chains(schedule: Schedule, filler: Bools, rank: Floats) -> Ints:
    """Pairs of an op and the one before it on its lane and of its stream, if the lane itself keeps no order.

    Messages are in no chain: each edge between stages has a communicator of its own.
    """
    rows = np.flatnonzero(schedule.lane != Lane.P2P)
    stream = (schedule.device[rows].astype(np.int64) * NUM_LANES + schedule.lane[rows]) * 2 + filler[rows]
    rows = rows[np.argsort(stream, kind="stable")]
    stream = np.sort(stream, kind="stable")
    after, before = rows[1:], rows[:-1]
    kept = (stream[1:] == stream[:-1]) & ((rank[after] != IN_ORDER) | (rank[before] != IN_ORDER))
    return np.stack([after[kept], before[kept]], axis=1)


def _ends(schedule: Schedule, filler: Bools) -> Ints:
    """The optimizer of every device behind the last op of the encoders' stream."""
    finish = np.flatnonzero(schedule.kind == OpKind.OPTIMIZER)
    last = np.full(schedule.num_devices, -1, np.int64)
    rows = np.flatnonzero(filler & (schedule.lane == Lane.COMPUTE))
    last[schedule.device[rows]] = rows  # ascending: the last one stays
    found = last[schedule.device[finish]]
    return np.stack([finish[found >= 0], found[found >= 0]], axis=1)
