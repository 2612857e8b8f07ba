"""Replays schedules with random kernel durations, in program order or with priority streams."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from optimus.ir.op import NUM_LANES, Bools, Floats, Ints, Lane, OpKind, Schedule
from optimus.ir.plan import ALL, Plan
from optimus.ir.ranks import LLM
from optimus.schedule.schedule_builder import edges_to_csr
from optimus.schedule.simulator import Timeline, count_launches_before, list_schedule

Hashes = NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class DurationNoise:
    """Random deviation of kernels on compute lanes; collectives and messages keep their durations."""

    name: str
    jitter: float = 0.0  # standard deviation over mean of a log-normal factor of mean 1, kernel by kernel
    slow_share: float = 0.0  # of the stages, at least one: a large job waits for its slowest GPUs
    slow_factor: float = 1.0  # on every kernel of a slow stage
    hiccups_per_s: float = 0.0  # of compute
    hiccup_s: float = 0.0  # added to the kernel's duration


OPTIMIZER_KEY = 11  # in draws, so that new numbers of OpKind do not change them

NO_NOISE = DurationNoise(name="none")
JITTER = DurationNoise(name="10 % jitter", jitter=0.1)
JITTER_STRAGGLERS_HICCUPS = DurationNoise(
    name="10 % jitter, stragglers, 3 ms hiccups",
    jitter=0.1,
    slow_share=0.05,
    slow_factor=1.2,
    hiccups_per_s=1.0,
    hiccup_s=3e-3,
)
NOISE_LEVELS = (NO_NOISE, JITTER, JITTER_STRAGGLERS_HICCUPS)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModulePlacement:
    """Stage of every module on every device, and the device's index among those with the same work.

    Devices that run the same work of a module (classes of one TP group) are twins.
    """

    stage: Ints
    twin: Ints

    @staticmethod
    def of_pipeline(schedule: Schedule) -> ModulePlacement:
        """Places stage r of every module on device r."""
        shape = len(schedule.modules), schedule.num_devices
        return ModulePlacement(
            stage=np.tile(np.arange(shape[1]), (shape[0], 1)), twin=np.zeros(shape, np.int64)
        )

    @staticmethod
    def of_plan(plan: Plan) -> ModulePlacement:
        """Places modules on device classes; what belongs to all modules is placed with the LLM."""
        ranks = plan.ranks
        devices = range(ranks.num_classes)
        stage, twin = [], []
        for name in (*plan.modules, LLM):
            places = [
                (ranks.stage_of(name, d), 0 if name == LLM else ranks.pipeline_of(name, d)) for d in devices
            ]
            stage.append([place for place, _ in places])
            twin.append([places[:d].count(places[d]) for d in devices])
        return ModulePlacement(stage=np.array(stage, np.int64), twin=np.array(twin, np.int64))


class NoisyDurations:
    """Schedule whose durations are drawn anew for every seed.

    A kernel is identified by its module, kind and microbatch, and by its index among the kernels of that
    microbatch over all stages of the module. So its noise does not depend on how the module is split into
    stages or on what else runs: two systems that run the same kernels get the same noise.
    """

    def __init__(self, schedule: Schedule, places: ModulePlacement) -> None:
        self.schedule = schedule
        self._rows = np.flatnonzero((schedule.lane == Lane.COMPUTE) & (schedule.duration_s > 0))
        self._stage = places.stage[-1][schedule.device[self._rows]]
        self._stages = 1 + int(places.stage[-1].max())
        self._key = _keys(schedule, self._rows, places)

    def draw_seconds(self, noise: DurationNoise, seed: int) -> Floats:
        """Returns the durations of all ops for a seed."""
        seconds = self.schedule.duration_s.copy()
        seconds[self._rows] = self._drawn(seconds[self._rows], noise, seed)
        return seconds

    def draw_schedule(self, noise: DurationNoise, seed: int) -> Schedule:
        """Returns the schedule with durations for a seed."""
        return replace(self.schedule, duration_s=self.draw_seconds(noise, seed))

    def _drawn(self, seconds: Floats, noise: DurationNoise, seed: int) -> Floats:
        factor = np.ones(len(seconds))
        if noise.jitter:
            spread = np.sqrt(np.log1p(noise.jitter**2))
            radius = np.sqrt(-2 * np.log1p(-self._uniform(seed, 0)))  # Box and Muller
            normal = radius * np.cos(2 * np.pi * self._uniform(seed, 1))
            factor = np.exp(spread * normal - spread**2 / 2)
        slow = _slow_stages(self._stages, noise, seed)
        factor = np.where(np.isin(self._stage, slow), noise.slow_factor * factor, factor)
        pauses = self._uniform(seed, 2) < -np.expm1(-noise.hiccups_per_s * seconds)
        return seconds * factor + noise.hiccup_s * pauses

    def _uniform(self, seed: int, which: int) -> Floats:
        """Returns numbers in [0, 1)."""
        return _unit(_mixed(self._key ^ _hash(seed, which)))


def _slow_stages(stages: int, noise: DurationNoise, seed: int) -> Ints:
    """Returns the stages that come first in a random order."""
    if not noise.slow_share:
        return np.zeros(0, np.int64)
    shuffled = np.argsort(_mixed(np.arange(stages, dtype=np.uint64) ^ _hash(seed, 3)), kind="stable")
    return shuffled[: max(1, round(noise.slow_share * stages))]


def _keys(schedule: Schedule, rows: Ints, places: ModulePlacement) -> Hashes:
    """Returns a distinct number for every kernel in `rows`, which are ascending."""
    module, device = schedule.module[rows], schedule.device[rows]
    kind, microbatch = schedule.kind[rows], schedule.microbatch[rows]
    stages = 1 + int(places.stage.max())
    virtual = schedule.chunk[rows] * stages + places.stage[module, device]
    virtual = np.where(kind == OpKind.FORWARD, virtual, -virtual)  # backward, the last layers come first
    twin = places.twin[module, device]
    order = np.lexsort((rows, virtual, twin, microbatch, kind, module))
    begins = np.zeros(len(rows), np.bool_)
    for column in (module, kind, microbatch, twin):
        begins[1:] |= np.diff(column[order]) != 0
    begins[:1] = True
    at = np.arange(len(rows))
    number = np.empty(len(rows), np.int64)
    number[order] = at - np.maximum.accumulate(np.where(begins, at, 0))
    names = np.array([_hash(*name.encode()) for name in schedule.modules], np.uint64)
    key: Hashes = names[module]
    kind = np.where(kind == OpKind.OPTIMIZER, OPTIMIZER_KEY, kind)
    for column in (kind, microbatch, number):
        key = _mixed(key ^ column.astype(np.uint64))
    return key


# Mixing of bits as in splitmix64: the same on every machine, and any number at once.


def _mixed(bits: Hashes) -> Hashes:
    """Mixes bits so that each depends on all others."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _hash(*numbers: int) -> np.uint64:
    bits: Hashes = np.zeros(1, np.uint64)
    for number in numbers:
        bits = _mixed(bits ^ np.uint64(number))
    return np.uint64(bits[0])


def _unit(bits: Hashes) -> Floats:
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


# ---------------------------------------------------------------------------- priority streams

IN_PROGRAM_ORDER = -1.0  # the rank of an op that keeps its place on its lane


class PriorityStreamReplay:
    """Simulation of a plan whose encoder work is on a stream of lower priority, for any durations.

    Each stream keeps the order that its kernels have in the plan, and a running kernel is not interrupted.
    On a free compute lane, the LLM's next kernel starts if all that it waits for is done; else the encoders'
    next kernel does. The host issues the LLM's compute in program order, one op per `launch_s`, and
    everything else in time.

    A WAIT occupies no lane and blocks its own stream only. On a link, each stream keeps its order, and of
    two ops that are ready the first in the plan starts. Links on which several device classes meet keep the
    plan's order: otherwise two classes could each hold a link and wait for the other forever.
    """

    def __init__(self, schedule: Schedule, *, slowdown: float = 0.0, launch_s: float = 0.0) -> None:
        self._slowdown = slowdown
        filler = np.isin(
            schedule.module, [n for n, name in enumerate(schedule.modules) if name not in (LLM, ALL)]
        )
        self._rank = _ranks(schedule, filler)
        self._schedule = _with_streams(schedule, filler, self._rank)
        launches = schedule.kind != OpKind.WAIT
        self._held_s = launch_s * count_launches_before(schedule.device, launches, schedule.num_devices)

    def simulate(self, duration_s: Floats) -> Timeline:
        """Simulates the schedule with these durations."""
        count = len(self._schedule)
        timeline, _ = list_schedule(
            replace(self._schedule, duration_s=duration_s),
            rank=self._rank,
            due_s=np.full(count, np.inf),  # no op is waited for: ready ops start
            held_s=self._held_s,
            patience_s=0.0,
            slowdown=self._slowdown,
        )
        return timeline


def _ranks(schedule: Schedule, filler: Bools) -> Floats:
    """Returns positions in the plan for ops that may leave its order, else IN_PROGRAM_ORDER."""
    lane = schedule.device.astype(np.int64) * NUM_LANES + schedule.lane
    compute = schedule.lane == Lane.COMPUTE
    shared = np.zeros(schedule.num_devices * NUM_LANES, np.bool_)
    if schedule.meeting is not None:
        shared[lane[(schedule.meeting >= 0) & ~compute]] = True
    fixed = np.where(compute, ~filler & (schedule.kind != OpKind.WAIT), shared[lane])
    fixed |= schedule.is_recv
    return np.where(fixed, IN_PROGRAM_ORDER, np.arange(len(schedule), dtype=np.float64))


def _with_streams(schedule: Schedule, filler: Bools, rank: Floats) -> Schedule:
    """Moves waits to a lane of their own and puts every op of a stream after the one before it."""
    waits = np.repeat(np.arange(len(schedule)), np.diff(schedule.dep_offset))
    edges = [
        np.stack([waits, schedule.deps], axis=1),
        _chains(schedule, filler, rank),
        _ends(schedule, filler),
    ]
    dep_offset, deps = edges_to_csr(np.concatenate(edges), len(schedule))
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
    """Returns pairs of an op and the one before it of its lane and stream, if the lane keeps no order.

    Messages are in no chain: each edge between stages has a communicator of its own.
    """
    rows = np.flatnonzero(schedule.lane != Lane.P2P)
    stream = (schedule.device[rows].astype(np.int64) * NUM_LANES + schedule.lane[rows]) * 2 + filler[rows]
    rows = rows[np.argsort(stream, kind="stable")]
    stream = np.sort(stream, kind="stable")
    after, before = rows[1:], rows[:-1]
    kept = (stream[1:] == stream[:-1]) & (
        (rank[after] != IN_PROGRAM_ORDER) | (rank[before] != IN_PROGRAM_ORDER)
    )
    return np.stack([after[kept], before[kept]], axis=1)


def _ends(schedule: Schedule, filler: Bools) -> Ints:
    """Returns pairs of every device's optimizer and the last op of its encoder stream."""
    finish = np.flatnonzero(schedule.kind == OpKind.OPTIMIZER)
    last = np.full(schedule.num_devices, -1, np.int64)
    rows = np.flatnonzero(filler & (schedule.lane == Lane.COMPUTE))
    last[schedule.device[rows]] = rows  # ascending: the last one stays
    last_filler = last[schedule.device[finish]]
    return np.stack([finish[last_filler >= 0], last_filler[last_filler >= 0]], axis=1)
