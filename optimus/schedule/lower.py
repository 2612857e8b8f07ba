"""Lowers an arrangement of phases to programs that ranks can play as they stand.

A strategy decides the order in which every device class computes. Lowering adds all communication: messages
between stages and over the seam, gathers, reduces, the optimizer. Everything is placed by the time at which
it happens when the arrangement is played without parameter traffic, the same clock on every class: no class
then waits for something that stands, on another, behind something that waits for it. Times alone would not
do, because phases that take no time have the same: lines are also counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from optimus.ir.op import Communicator, Floats, Ints, Lane, OpKind, Schedule
from optimus.ir.plan import WHOLE_STAGE, Plan, Program
from optimus.schedule.plan_schedule import build_plan_schedule, build_schedule_of_table
from optimus.schedule.program_table import HeaderArrays, Messages, ProgramTable, find_messages
from optimus.schedule.simulator import Timeline, simulate_schedule


@dataclass(frozen=True, kw_only=True, eq=False)
class LoweredPlan:
    """Programs, the schedule they make up, and when everything happens."""

    programs: tuple[Program, ...]
    schedule: Schedule
    timeline: Timeline


def lower_to_programs(plan: Plan, orders: Sequence[Program]) -> LoweredPlan:
    """`orders` holds the phases that every device class plays; `plan` is a header without programs.

    There must be one order of all phases, each after what it waits for, of which every class plays its part;
    else `Deadlock` is raised.
    """
    header = HeaderArrays(plan)
    lines = ProgramTable.of(header, orders)
    transfers = find_messages(lines)
    clock = _Clock(plan, header, lines, transfers)
    programs = _merge(header, lines, list(_place_communication(clock)))
    schedule = build_plan_schedule(plan, programs, header)
    return LoweredPlan(programs=programs, schedule=schedule, timeline=simulate_plan(plan, schedule))


def build_unordered_schedule(
    plan: Plan, orders: Sequence[Program], traffic: Mapping[TrafficKey, float]
) -> Unplaced:
    """All lines of an arrangement, messages and traffic among them, before anyone has looked when they fall.

    For whoever gives ops an order of their own: only lanes that he leaves alone are in a good one. Gathers
    come first and reduces last, by what `traffic` says of each.
    """
    header = HeaderArrays(plan)
    lines = ProgramTable.of(header, orders)
    transfers = find_messages(lines)
    first: Ints = np.searchsorted(lines.device, np.arange(header.devices + 1))
    count = len(transfers)
    extras = [_sends(transfers, np.zeros(count), np.arange(count)), _finish(header, first)]
    for (module, kind, stage, place), turn in traffic.items():
        devices = np.flatnonzero(header.stage[module] == stage)
        chunk = max(plan.modules[header.names[module]].buckets[stage][place].chunk, 0)
        extras.append(
            _InsertedLines(
                device=devices,
                before=first[devices if kind == OpKind.UNSHARD else devices + 1],
                time_s=np.full(len(devices), turn),
                number=np.zeros(len(devices), np.int64),
                rows=np.tile([module, kind, chunk, 0, place], (len(devices), 1)),
            )
        )
    programs = _merge(header, lines, extras)
    merged = ProgramTable.of(header, programs)
    return Unplaced(lines=merged, schedule=build_schedule_of_table(merged, ordered=False))


def simulate_plan(plan: Plan, schedule: Schedule) -> Timeline:
    """The replay whose makespan is the claim."""
    return simulate_schedule(schedule, slowdown=plan.slowdown, launch_s=plan.launch_s)


TrafficKey = tuple[int, OpKind, int, int]  # module, GATHER or REDUCE, stage, place of the bucket in it


@dataclass(frozen=True, kw_only=True, eq=False)
class Unplaced:
    """Lines of all classes, and the schedule they make up."""

    lines: ProgramTable
    schedule: Schedule


@dataclass(frozen=True, kw_only=True, eq=False)
class _InsertedLines:
    """Lines to insert: before the phase line `before` of the class, in order of time, then of number.

    Gathers come first, in the order of their own times.
    """

    device: Ints
    before: Ints  # counted over the phase lines of all classes
    time_s: Floats
    number: Ints
    rows: Ints  # (module, kind, chunk, microbatch, place)


class _Clock:
    """When every phase runs, played with messages but without parameter traffic.

    `time_s` never falls along a program or from a phase to what waits for it, and is the same for all that
    meet; where it stands still, `turn` rises. The two together are one order of all phases of all classes.
    """

    def __init__(self, plan: Plan, header: HeaderArrays, lines: ProgramTable, transfers: Messages) -> None:
        self.header, self.lines, self.transfers = header, lines, transfers
        # The phase line with which every class begins, and where the last one ends.
        self.first: Ints = np.searchsorted(lines.device, np.arange(header.devices + 1))
        count = len(transfers)
        programs = _merge(header, lines, [_sends(transfers, np.zeros(count), np.arange(count))])
        schedule = build_plan_schedule(plan, programs, header)
        timeline = simulate_plan(plan, schedule)
        phases = np.concatenate([program.kind for program in programs]) <= OpKind.WEIGHT_GRAD
        self.start_s = timeline.start_s[phases]
        self.time_s, self.turn = _times(schedule, timeline)[phases], _turns(schedule)[phases]
        self.end_s: Floats = np.maximum(timeline.finish_s[phases], self.time_s)
        self._computes = schedule.lane[phases] == Lane.COMPUTE

    def before_message(self, devices: Ints, produced: Ints) -> Ints:
        """The phase line of each class before which a message falls that is sent behind `produced`."""
        rank = _ranks(np.append(self.time_s, self.end_s[produced]), np.append(self.turn, self.turn[produced]))
        keys, wanted = np.split(rank, [len(self.time_s)])
        return self._position(keys, devices, wanted)

    def running(self, devices: Ints, times_s: Floats) -> Ints:
        """The first phase line of each class whose compute has not ended by then, or that begins later."""
        return self._position(self._done_s, devices, times_s)

    @cached_property
    def _done_s(self) -> Floats:
        """When all compute of a class up to a phase line has ended, and all launches have begun."""
        done_s = np.where(self._computes, self.end_s, self.time_s)
        for first, end in pairwise(self.first):
            done_s[first:end] = np.maximum.accumulate(done_s[first:end])
        return done_s

    def _position(self, keys: Ints | Floats, devices: Ints, wanted: Ints | Floats) -> Ints:
        found = np.empty(len(devices), np.int64)
        for device in np.unique(devices).tolist():
            first, end = self.first[device], self.first[device + 1]
            some = devices == device
            found[some] = first + np.searchsorted(keys[first:end], wanted[some], side="right")
        return found


def _ranks(first: Floats, second: Floats) -> Ints:
    """Places of pairs in their order; equal pairs have the same."""
    order = np.lexsort((second, first))
    rises = (np.diff(first[order], prepend=-1.0) > 0) | (np.diff(second[order], prepend=-1.0) != 0)
    found = np.empty(len(order), np.int64)
    found[order] = np.cumsum(rises)
    return found


def _times(schedule: Schedule, timeline: Timeline) -> Floats:
    """When every line begins, or later: not before the compute that stands before it has ended.

    Launches overtake compute on their lane; sends may stand in a queue, and count from when they could go.
    """
    assert schedule.meeting is not None
    ends = np.flatnonzero(np.diff(schedule.device, prepend=-1, append=-1))
    compute_s = np.where(schedule.lane == Lane.COMPUTE, timeline.finish_s, 0.0)
    found = np.where(schedule.is_send, 0.0, timeline.start_s)
    for first, end in pairwise(ends):
        found[first + 1 : end] = np.maximum(found[first + 1 : end], compute_s[first : end - 1])
    waits = np.repeat(np.arange(len(schedule)), np.diff(schedule.dep_offset))
    meets = np.flatnonzero(schedule.meeting >= 0)
    meeting = schedule.meeting[meets]
    latest = np.zeros(1 + int(meeting.max(initial=0)))
    before = np.zeros(0)
    while not np.array_equal(before, found):
        before = found.copy()
        for first, end in pairwise(ends):
            found[first:end] = np.maximum.accumulate(found[first:end])
        np.maximum.at(found, waits, found[schedule.deps])
        np.maximum.at(latest, meeting, found[meets])
        found[meets] = latest[meeting]
    return found


def _turns(schedule: Schedule) -> Floats:
    """How many lines must be played before each, if every class plays one line after another."""
    lane, duration_s = np.full_like(schedule.lane, Lane.COMPUTE), np.ones(len(schedule))
    return simulate_schedule(replace(schedule, lane=lane, duration_s=duration_s)).start_s


def _place_communication(clock: _Clock) -> Iterator[_InsertedLines]:
    """Everything that is not a phase."""
    produced = clock.transfers.produced
    ready_s, number = clock.end_s[produced], np.argsort(np.argsort(clock.turn[produced], kind="stable"))
    yield _sends(clock.transfers, ready_s, number)
    yield _receives(clock, ready_s, number)
    yield from _traffic(clock)
    yield _finish(clock.header, clock.first)


def _finish(header: HeaderArrays, first: Ints) -> _InsertedLines:
    """The last line of every class; `first` holds the phase line with which each begins, and the end."""
    devices = np.arange(len(first) - 1)
    return _InsertedLines(
        device=devices,
        before=first[1:],
        time_s=np.full(len(devices), np.inf),
        number=devices,
        rows=np.tile([len(header.names), OpKind.OPTIMIZER, 0, 0, 0], (len(devices), 1)),
    )


def _sends(transfers: Messages, ready_s: Floats, number: Ints) -> _InsertedLines:
    """Right behind what makes their data, before any filler."""
    zeros = np.zeros(len(transfers), np.int64)
    rows = [transfers.module, transfers.kind, transfers.sender_chunk, transfers.microbatch, zeros]
    return _InsertedLines(
        device=transfers.sender,
        before=transfers.produced + 1,
        time_s=ready_s,
        number=number,
        rows=np.stack(rows, axis=1),
    )


def _receives(clock: _Clock, ready_s: Floats, number: Ints) -> _InsertedLines:
    """Posted when the message is ready on the other side; the LLM's not behind filler."""
    transfers, lines, header = clock.transfers, clock.lines, clock.header
    before = clock.before_message(transfers.receiver, transfers.produced)
    rows_of_llm = np.flatnonzero(lines.module == header.llm)
    behind = np.searchsorted(rows_of_llm, before) - 1  # the last LLM phase before
    last = np.where(behind >= 0, rows_of_llm[np.maximum(behind, 0)] + 1 if len(rows_of_llm) else 0, 0)
    first = clock.first[transfers.receiver]
    for_llm = (transfers.module == header.llm) | (transfers.kind == OpKind.SEND_SEAM)
    zeros = np.zeros(len(transfers), np.int64)
    rows = [transfers.module, transfers.kind + 1, transfers.receiver_chunk, transfers.microbatch, zeros]
    return _InsertedLines(
        device=transfers.receiver,
        before=np.where(for_llm, np.maximum(last, first), before),
        time_s=ready_s,
        number=number,
        rows=np.stack(rows, axis=1),
    )


def _traffic(clock: _Clock) -> Iterator[_InsertedLines]:
    """Gathers first, what is needed first first; reduces when all who meet in them have their gradients."""
    lines, header = clock.lines, clock.header
    stage = header.stage[lines.module, lines.device]
    number = 0
    for module, name in enumerate(header.names):
        for at, buckets in enumerate(header.plan.modules[name].buckets):
            devices = np.flatnonzero(header.stage[module] == at)
            here = np.flatnonzero((lines.module == module) & (stage == at))
            chunk, layer = lines.chunk[here], header.layer[lines.phase[here]]
            for place, bucket in enumerate(buckets):
                mine = here
                if bucket.chunk != WHOLE_STAGE:
                    inside = (layer >= bucket.first_layer) & (layer < bucket.end_layer)
                    mine = here[inside & (chunk == bucket.chunk)]
                forward = lines.kind[mine] == OpKind.FORWARD
                number += 1
                yield _InsertedLines(
                    device=devices,
                    before=clock.first[devices],
                    time_s=np.full(len(devices), clock.start_s[mine[forward]].min(initial=np.inf)),
                    number=np.full(len(devices), number),
                    rows=np.tile([module, OpKind.UNSHARD, max(bucket.chunk, 0), 0, place], (len(devices), 1)),
                )
                row = [module, OpKind.REDUCE_GRAD, max(bucket.chunk, 0), 0, place]
                yield _reduce(clock, devices, mine[~forward], number, row)


def _reduce(clock: _Clock, devices: Ints, made: Ints, number: int, row: list[int]) -> _InsertedLines:
    """After the lines `made`: right behind them, or when the last class of the group has its own.

    Not behind compute that runs by then, for which it would wait.
    """
    lines, header = clock.lines, clock.header
    own = [made[lines.device[made] == device] for device in devices.tolist()]
    firsts = clock.first[devices].tolist()
    last = np.array([rows.max(initial=first - 1) for rows, first in zip(own, firsts, strict=True)], np.int64)
    finish = np.array([clock.end_s[rows].max(initial=0.0) for rows in own])
    group = header.group[row[0], Communicator.DP, devices]
    done = np.array([finish[group == g].max() for g in group.tolist()])
    alone = header.group_size[row[0], Communicator.DP, devices] == 1
    when = clock.running(devices, done)
    return _InsertedLines(
        device=devices,
        before=np.where(alone, last + 1, np.maximum(when, last + 1)),
        time_s=done,
        number=np.full(len(devices), number),
        rows=np.tile(row, (len(devices), 1)),
    )


def _merge(header: HeaderArrays, lines: ProgramTable, extras: list[_InsertedLines]) -> tuple[Program, ...]:
    """Phase lines with everything inserted, class by class."""
    phases = np.stack([lines.module, lines.kind, lines.chunk, lines.microbatch, lines.place], axis=1)
    rows = np.concatenate([phases, *(extra.rows for extra in extras)])
    device = np.concatenate([lines.device, *(extra.device for extra in extras)])
    own = np.arange(len(phases))
    before = np.concatenate([own, *(extra.before for extra in extras)])
    last = np.where(np.arange(len(rows)) < len(phases), 2, rows[:, 1] != OpKind.UNSHARD)
    time_s = np.concatenate([np.zeros(len(phases)), *(extra.time_s for extra in extras)])
    number = np.concatenate([own, *(extra.number for extra in extras)])
    order = np.lexsort((number, time_s, last, before, device))
    sorted_rows, sorted_device = rows[order], device[order]
    ends = np.searchsorted(sorted_device, np.arange(header.devices + 1))
    return tuple(Program.of(sorted_rows[a:b]) for a, b in pairwise(ends))
