"""Cuts the timelines of a system's devices into boxes wide enough to be drawn.

A box that is wide enough is one op of one microbatch; narrower ones share a box, which knows the share of
its time that each fill takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from optimus.ir.op import Floats, Ints, Lane, OpKind, Schedule
from optimus.schedule.bubbles import CAUSES, Idle, find_idle
from optimus.schedule.simulate import Timeline


@dataclass(frozen=True)
class Fill:
    """What an interval of a compute lane is spent on: its words and its colour."""

    label: str
    colour: str


# Okabe and Ito's colours, which colour-blind readers tell apart; within a module dark is late.
ENCODER = {
    OpKind.FORWARD: Fill("encoder forward", "#e69f00"),
    OpKind.RECOMPUTE: Fill("encoder recompute", "#f7d68a"),
    OpKind.BACKWARD: Fill("encoder backward", "#c2500a"),
    OpKind.INPUT_GRAD: Fill("encoder backward", "#c2500a"),
    OpKind.WEIGHT_GRAD: Fill("encoder weight gradient", "#7a2f04"),
}
LLM = {
    OpKind.FORWARD: Fill("LLM forward", "#56b4e9"),
    OpKind.RECOMPUTE: Fill("LLM recompute", "#b5dcf5"),
    OpKind.BACKWARD: Fill("LLM backward", "#0072b2"),
    OpKind.INPUT_GRAD: Fill("LLM backward", "#0072b2"),
    OpKind.WEIGHT_GRAD: Fill("LLM weight gradient", "#00395c"),
}
OPTIMIZER = Fill("optimizer", "#4d4d4d")
IDLE_TP = Fill("idle: waits for TP", "#e8bcd4")
IDLE_DP = Fill("idle: waits for DP", "#93d3bd")
IDLE_PP = Fill("idle: waits for the pipeline", "#e3e3e3")
# From the bottom of a box to its top.
STACK = tuple(dict.fromkeys([*ENCODER.values(), *LLM.values(), OPTIMIZER, IDLE_TP, IDLE_DP, IDLE_PP]))
TRAFFIC = {
    OpKind.UNSHARD: Fill("DP all-gather", "#00b383"),
    OpKind.REDUCE_GRAD: Fill("DP reduce-scatter", "#00543d"),
}
IDLE_FILLS = np.array(
    [STACK.index({"dp": IDLE_DP, "tp": IDLE_TP, "pp": IDLE_PP}[cause.partition("_")[0]]) for cause in CAUSES]
)
GAP = -1  # `owner` of an interval between ops


@dataclass(frozen=True, eq=False)
class Intervals:
    """A device's whole step as consecutive intervals; equal `owner` is one op."""

    begin_s: Floats
    end_s: Floats
    fill: Ints  # place in STACK
    owner: Ints


@dataclass(frozen=True, eq=False)
class Row:
    """One device, before it is drawn."""

    label: str
    intervals: Intervals
    traffic: dict[OpKind, list[tuple[float, float]]]


@dataclass(frozen=True)
class Box:
    """A part of a row, with the share of its time that each fill takes."""

    begin_s: float
    end_s: float
    shares: tuple[float, ...]  # by place in STACK
    is_op: bool


class Played(Protocol):
    """A schedule and when its ops ran: a system, or a plan played again."""

    @property
    def schedule(self) -> Schedule: ...

    @property
    def timeline(self) -> Timeline: ...


def device_rows(system: Played) -> list[Row]:
    """Every device of a system."""
    idle = find_idle(system.schedule, system.timeline)
    return [
        Row(
            label=system.schedule.device_name(device),
            intervals=_intervals(system, device, idle),
            traffic={kind: _traffic(system, device, kind) for kind in TRAFFIC},
        )
        for device in range(system.schedule.num_devices)
    ]


def _intervals(system: Played, device: int, idle: Idle) -> Intervals:
    """Work and idle time of one device, from 0 to the end of the step, in order."""
    schedule, timeline = system.schedule, system.timeline
    ops = np.flatnonzero((schedule.device == device) & (schedule.lane == Lane.COMPUTE))
    gaps = np.flatnonzero(idle.device == device)
    begin = np.concatenate([timeline.start_s[ops], idle.begin_s[gaps]])
    end = np.concatenate([timeline.finish_s[ops], idle.end_s[gaps]])
    owner = _owners(system, ops)
    # A gap inside an op is the op's: it lies before an op's row that does not begin the op.
    inside = np.full(len(schedule) + 1, GAP)
    inside[ops[1:]] = np.where(owner[1:] == owner[:-1], owner[1:], GAP)
    fill = np.concatenate([_fills(system, ops), IDLE_FILLS[idle.cause[gaps]]])
    owners = np.concatenate([owner, inside[idle.op[gaps]]])
    order = np.lexsort((end, begin))
    some = order[(end > begin)[order]]
    return Intervals(begin_s=begin[some], end_s=end[some], fill=fill[some], owner=owners[some])


def _fills(system: Played, ops: Ints) -> Ints:
    """Places in STACK of what ops do."""
    schedule = system.schedule
    by_module = [LLM if name == "llm" else ENCODER for name in schedule.modules]
    table = [[STACK.index(fills.get(kind, OPTIMIZER)) for kind in OpKind] for fills in by_module]
    return np.array(table, np.int64)[schedule.module[ops], schedule.kind[ops]]


def _owners(system: Played, ops: Ints) -> Ints:
    """A number that changes wherever another op begins: F, backward or W of a chunk and microbatch."""
    schedule = system.schedule
    part = np.array(
        [{OpKind.FORWARD: 0, OpKind.WEIGHT_GRAD: 2, OpKind.OPTIMIZER: 3}.get(kind, 1) for kind in OpKind]
    )
    columns = part[schedule.kind], schedule.module, schedule.chunk, schedule.microbatch
    keys = np.stack([column[ops] for column in columns])
    changes = np.any(keys[:, 1:] != keys[:, :-1], axis=0)
    return np.concatenate([[0], np.cumsum(changes)])[: len(ops)]


def _traffic(system: Played, device: int, kind: OpKind) -> list[tuple[float, float]]:
    """When a device gathers parameters or reduces gradients, in order."""
    schedule, timeline = system.schedule, system.timeline
    ops = np.flatnonzero((schedule.device == device) & (schedule.kind == kind))
    times = zip(timeline.start_s[ops].tolist(), timeline.finish_s[ops].tolist(), strict=True)
    return sorted(times)


def boxes_of(intervals: Intervals, own_s: float, joined_s: float) -> Iterator[Box]:
    """Ops and gaps of `own_s` or more as boxes of their own, what is shorter joined up to `joined_s`."""
    changes = np.flatnonzero(np.diff(intervals.owner)) + 1
    starts = np.concatenate([[0], changes, [len(intervals.owner)]])
    gap_pieces = np.flatnonzero(intervals.owner == GAP)
    starts = np.unique(np.concatenate([starts, gap_pieces, gap_pieces + 1]))  # each cause by itself
    seconds = np.zeros((len(intervals.fill), len(STACK)))
    seconds[np.arange(len(intervals.fill)), intervals.fill] = intervals.end_s - intervals.begin_s
    totals = np.add.reduceat(seconds, starts[:-1], axis=0)
    begin, end = intervals.begin_s[starts[:-1]], intervals.end_s[starts[1:] - 1]
    wide = end - begin >= own_s
    place, count = 0, len(begin)
    while place < count:
        stop = place + 1
        if not wide[place]:
            while stop < count and not wide[stop] and end[stop - 1] - begin[place] < joined_s:
                stop += 1
        parts = totals[place:stop].sum(axis=0)
        is_op = bool(wide[place]) and intervals.owner[starts[place]] != GAP
        yield Box(float(begin[place]), float(end[stop - 1]), tuple((parts / parts.sum()).tolist()), is_op)
        place = stop
