"""Lowers an order of phases to programs that ranks run line by line.

A strategy decides the order in which every device class computes. Lowering adds all communication: messages
between stages and over the seam, gathers, reduces, the optimizer. Every line is placed by the time at which
it runs in a simulation without parameter traffic, with one clock for all classes: so no class waits for a
line that is, on another class, behind one that waits for it. Times alone are not enough, because phases of
no duration share a time: lines are also counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from optimus.ir.op import Communicator, Floats, Ints, Lane, OpKind, Schedule
from optimus.ir.plan import WHOLE_STAGE, Plan, Program, Span
from optimus.schedule.plan_schedule import build_plan_schedule, build_schedule_from_table
from optimus.schedule.program_table import MessageTable, PlanHeaderArrays, ProgramTable, find_messages
from optimus.schedule.simulator import Timeline, simulate_schedule


@dataclass(frozen=True, kw_only=True, eq=False)
class LoweredPlan:
    """Programs, their schedule, and its timeline."""

    programs: tuple[Program, ...]
    schedule: Schedule
    timeline: Timeline


def lower_to_programs(plan: Plan, orders: Sequence[Program]) -> LoweredPlan:
    """Adds communication to `orders`, the phases of every device class; `plan` is a header without programs.

    Raises `ScheduleDeadlock` if no order of all phases has each after what it waits for and keeps `orders`.
    """
    header = PlanHeaderArrays(plan)
    lines = ProgramTable.of(header, orders)
    messages = find_messages(lines)
    clock = _Clock(plan, header, lines, messages)
    programs = _merge(header, lines, list(_place_communication(clock)))
    schedule = build_plan_schedule(plan, programs, header)
    return LoweredPlan(programs=programs, schedule=schedule, timeline=simulate_plan(plan, schedule))


def build_unordered_schedule(
    plan: Plan, orders: Sequence[Program], traffic: Mapping[TrafficKey, float]
) -> tuple[ProgramTable, Schedule]:
    """Returns all lines of `orders` with messages and traffic, and their schedule, before lines are placed.

    For callers that reorder ops: only lanes they do not touch are guaranteed deadlock-free. Gathers come
    first and reduces last, each ordered by its value in `traffic`.
    """
    header = PlanHeaderArrays(plan)
    lines = ProgramTable.of(header, orders)
    messages = find_messages(lines)
    first: Ints = np.searchsorted(lines.device, np.arange(header.devices + 1))
    count = len(messages)
    extras = [_sends(messages, np.zeros(count), np.arange(count)), _finish(header, first)]
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
    return merged, build_schedule_from_table(merged, ordered=False)


def simulate_plan(plan: Plan, schedule: Schedule) -> Timeline:
    """Simulates a plan's schedule; the makespan is the step that the plan claims."""
    return simulate_schedule(schedule, slowdown=plan.slowdown, launch_s=plan.launch_s)


TrafficKey = tuple[int, OpKind, int, int]  # module, GATHER or REDUCE, stage, place of the bucket in it


@dataclass(frozen=True, kw_only=True, eq=False)
class _InsertedLines:
    """Lines to insert before the phase line `before` of a class, ordered by time, then by number.

    Gathers come first, ordered by time.
    """

    device: Ints
    before: Ints  # counted over the phase lines of all classes
    time_s: Floats
    number: Ints
    rows: Ints  # (module, kind, chunk, microbatch, place)


class _Clock:
    """Times of all phases, simulated with messages but without parameter traffic.

    `time_s` never decreases along a program or from a phase to one that waits for it, and is the same for all
    phases that meet; where it is equal, `turn` increases. Together they order all phases of all classes.
    """

    def __init__(
        self, plan: Plan, header: PlanHeaderArrays, lines: ProgramTable, messages: MessageTable
    ) -> None:
        self.header, self.lines, self.messages = header, lines, messages
        # The first phase line of every class, and the end of the last class.
        self.first: Ints = np.searchsorted(lines.device, np.arange(header.devices + 1))
        count = len(messages)
        programs = _merge(header, lines, [_sends(messages, np.zeros(count), np.arange(count))])
        schedule = build_plan_schedule(plan, programs, header)
        with ThreadPoolExecutor(1) as beside:  # compiled loops release the GIL
            turns = beside.submit(_turns, schedule)
            timeline = simulate_plan(plan, schedule)
        phases = np.concatenate([program.kind for program in programs]) <= OpKind.WEIGHT_GRAD
        self.start_s = timeline.start_s[phases]
        self.time_s, self.turn = _times(schedule, timeline)[phases], turns.result()[phases]
        self.end_s: Floats = np.maximum(timeline.finish_s[phases], self.time_s)
        self._computes = schedule.lane[phases] == Lane.COMPUTE

    def before_message(self, devices: Ints, produced: Ints) -> Ints:
        """Returns the phase line of each class before which a message sent after `produced` is received."""
        rank = _ranks(np.append(self.time_s, self.end_s[produced]), np.append(self.turn, self.turn[produced]))
        keys, wanted = np.split(rank, [len(self.time_s)])
        return self._position(keys, devices, wanted)

    def running(self, devices: Ints, times_s: Floats) -> Ints:
        """Returns the first phase line of each class whose compute ends, or that starts, after `times_s`."""
        return self._position(self._done_s, devices, times_s)

    @cached_property
    def _done_s(self) -> Floats:
        """Time by which all compute of a class up to a phase line has ended and all launches have started."""
        done_s = np.where(self._computes, self.end_s, self.time_s)
        for first, end in pairwise(self.first):
            done_s[first:end] = np.maximum.accumulate(done_s[first:end])
        return done_s

    def _position(self, keys: Ints | Floats, devices: Ints, wanted: Ints | Floats) -> Ints:
        positions = np.empty(len(devices), np.int64)
        for device in np.unique(devices).tolist():
            first, end = self.first[device], self.first[device + 1]
            here = devices == device
            positions[here] = first + np.searchsorted(keys[first:end], wanted[here], side="right")
        return positions


def _ranks(first: Floats, second: Floats) -> Ints:
    """Returns the rank of every pair; equal pairs have equal ranks."""
    order = np.lexsort((second, first))
    rises = (np.diff(first[order], prepend=-1.0) > 0) | (np.diff(second[order], prepend=-1.0) != 0)
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.cumsum(rises)
    return ranks


def _times(schedule: Schedule, timeline: Timeline) -> Floats:
    """Returns when every line starts, or later: not before the compute line before it has ended.

    Launches overtake compute on their lane; sends may be queued, and count from when they could start.
    """
    assert schedule.meeting is not None
    ends = np.flatnonzero(np.diff(schedule.device, prepend=-1, append=-1))
    compute_s = np.where(schedule.lane == Lane.COMPUTE, timeline.finish_s, 0.0)
    times_s = np.where(schedule.is_send, 0.0, timeline.start_s)
    for first, end in pairwise(ends):
        times_s[first + 1 : end] = np.maximum(times_s[first + 1 : end], compute_s[first : end - 1])
    waits = np.repeat(np.arange(len(schedule)), np.diff(schedule.dep_offset))
    meets = np.flatnonzero(schedule.meeting >= 0)
    meeting = schedule.meeting[meets]
    latest = np.zeros(1 + int(meeting.max(initial=0)))
    before = np.zeros(0)
    while not np.array_equal(before, times_s):
        before = times_s.copy()
        for first, end in pairwise(ends):
            times_s[first:end] = np.maximum.accumulate(times_s[first:end])
        np.maximum.at(times_s, waits, times_s[schedule.deps])
        np.maximum.at(latest, meeting, times_s[meets])
        times_s[meets] = latest[meeting]
    return times_s


def _turns(schedule: Schedule) -> Floats:
    """Returns how many lines run before each if every class runs one line after another."""
    lane, duration_s = np.full_like(schedule.lane, Lane.COMPUTE), np.ones(len(schedule))
    return simulate_schedule(replace(schedule, lane=lane, duration_s=duration_s)).start_s


def _place_communication(clock: _Clock) -> Iterator[_InsertedLines]:
    """Yields every line that is not a phase."""
    produced = clock.messages.produced
    ready_s, number = clock.end_s[produced], np.argsort(np.argsort(clock.turn[produced], kind="stable"))
    yield _sends(clock.messages, ready_s, number)
    yield _receives(clock, ready_s, number)
    yield from _traffic(clock)
    yield _finish(clock.header, clock.first)


def _finish(header: PlanHeaderArrays, first: Ints) -> _InsertedLines:
    """Returns the last line of every class; `first` holds the first phase line of each class, and the end."""
    devices = np.arange(len(first) - 1)
    return _InsertedLines(
        device=devices,
        before=first[1:],
        time_s=np.full(len(devices), np.inf),
        number=devices,
        rows=np.tile([len(header.names), OpKind.OPTIMIZER, 0, 0, 0], (len(devices), 1)),
    )


def _sends(messages: MessageTable, ready_s: Floats, number: Ints) -> _InsertedLines:
    """Places sends right after the op that produces their data, before any encoder work."""
    zeros = np.zeros(len(messages), np.int64)
    rows = [messages.module, messages.kind, messages.sender_chunk, messages.microbatch, zeros]
    return _InsertedLines(
        device=messages.sender,
        before=messages.produced + 1,
        time_s=ready_s,
        number=number,
        rows=np.stack(rows, axis=1),
    )


def _receives(clock: _Clock, ready_s: Floats, number: Ints) -> _InsertedLines:
    """Places receives when the message is ready on the other side; the LLM's not after encoder work."""
    messages, lines, header = clock.messages, clock.lines, clock.header
    before = clock.before_message(messages.receiver, messages.produced)
    rows_of_llm = np.flatnonzero(lines.module == header.llm)
    behind = np.searchsorted(rows_of_llm, before) - 1  # the last LLM phase before
    last = np.where(behind >= 0, rows_of_llm[np.maximum(behind, 0)] + 1 if len(rows_of_llm) else 0, 0)
    first = clock.first[messages.receiver]
    for_llm = (messages.module == header.llm) | (messages.kind == OpKind.SEND_SEAM)
    zeros = np.zeros(len(messages), np.int64)
    rows = [messages.module, messages.kind + 1, messages.receiver_chunk, messages.microbatch, zeros]
    return _InsertedLines(
        device=messages.receiver,
        before=np.where(for_llm, np.maximum(last, first), before),
        time_s=ready_s,
        number=number,
        rows=np.stack(rows, axis=1),
    )


def _traffic(clock: _Clock) -> Iterator[_InsertedLines]:
    """Yields gathers, in the order of first use, and reduces, once all members have their gradients."""
    lines, header = clock.lines, clock.header
    stage, end_s = header.stage[lines.module, lines.device], clock.end_s.max()
    number, uses = 0, list[_Use]()
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
                row = [module, OpKind.UNSHARD, max(bucket.chunk, 0), 0, place]
                if bucket.gathered_per > Span.STEP:
                    uses += _list_uses(lines, mine, row, gathered_per=bucket.gathered_per)
                else:
                    yield _InsertedLines(
                        device=devices,
                        before=clock.first[devices],
                        time_s=np.full(len(devices), clock.start_s[mine[forward]].min(initial=end_s)),
                        number=np.full(len(devices), number),
                        rows=np.tile(row, (len(devices), 1)),
                    )
                row[1], producers = OpKind.REDUCE_GRAD, mine[~forward]
                if bucket.reduced_per == Span.STEP:
                    yield _reduce(clock, devices, producers, number, row)
                elif bucket.reduced_per == Span.MICROBATCH:
                    turn = header.turn[module, lines.microbatch[producers]]
                    for row[3] in np.unique(turn).tolist():
                        ours = producers[turn == row[3]]
                        yield _reduce(clock, np.unique(lines.device[ours]), ours, number, row)
    if uses:
        yield _prefetch(clock, uses, number + 1)


class _Use(NamedTuple):
    """Phases of one op that read a bucket."""

    first: int  # line
    last: int
    row: tuple[int, ...]  # of the gather
    gathers: bool  # if not, the parameters are still gathered for the forward


def _list_uses(
    lines: ProgramTable, readers: Ints, row: Sequence[int], *, gathered_per: Span
) -> Iterator[_Use]:
    """Yields the uses of one bucket on every class; weight gradients are computed without parameters."""
    readers = readers[lines.kind[readers] != OpKind.WEIGHT_GRAD]
    backward = lines.kind[readers] != OpKind.FORWARD
    turn = lines.header.turn[row[0], lines.microbatch[readers]]
    keys = np.stack([lines.device[readers], turn, backward], axis=1)
    distinct, use = np.unique(keys, axis=0, return_inverse=True)
    first, last = np.full(len(distinct), len(lines), np.int64), np.zeros(len(distinct), np.int64)
    np.minimum.at(first, use.ravel(), readers)
    np.maximum.at(last, use.ravel(), readers)
    for (_, number, again), begin, end in zip(distinct.tolist(), first, last, strict=True):
        kind = OpKind.UNSHARD_B if again else OpKind.UNSHARD
        gathers = not again or gathered_per == Span.OP
        yield _Use(int(begin), int(end), (row[0], kind, row[2], number, row[4]), gathers)


def _prefetch(clock: _Clock, uses: list[_Use], number: int) -> _InsertedLines:
    """Places each gather before the use that precedes its own, so that it runs beside that use.

    But not before the bucket's own last use has ended: that frees the parameters; and behind what is gathered
    for the step, which has smaller numbers: classes that gather it together have it in one order.
    """
    lines = clock.lines
    uses = sorted(uses)
    before, freed = list[int](), dict[tuple[int, ...], int]()
    for place, use in enumerate(uses):
        device = int(lines.device[use.first])
        earlier = uses[place - 1] if place else use
        same_class = lines.device[earlier.first] == device
        bucket = device, use.row[0], use.row[2], use.row[4]
        start = earlier.first if same_class else int(clock.first[device])
        before.append(max(start, freed.get(bucket, 0)))
        freed[bucket] = use.last + 1
    gathers = np.array([use.gathers for use in uses], np.bool_)
    firsts = np.array([use.first for use in uses], np.int64)[gathers]
    return _InsertedLines(
        device=lines.device[firsts],
        before=np.array(before, np.int64)[gathers],
        time_s=clock.end_s.max() + clock.start_s[firsts],
        number=number + np.arange(len(firsts)),
        rows=np.array([use.row for use in uses], np.int64)[gathers],
    )


def _reduce(clock: _Clock, devices: Ints, producers: Ints, number: int, row: list[int]) -> _InsertedLines:
    """Places a reduce after the lines `producers`, or when the last class of its group has its gradients.

    Not after compute that runs at that time: the reduce would wait for it.
    """
    lines, header = clock.lines, clock.header
    producers_by_class = [producers[lines.device[producers] == device] for device in devices.tolist()]
    firsts = clock.first[devices].tolist()
    last = np.array(
        [rows.max(initial=first - 1) for rows, first in zip(producers_by_class, firsts, strict=True)],
        np.int64,
    )
    finish = np.array([clock.end_s[rows].max(initial=-1.0) for rows in producers_by_class])
    group = header.group[row[0], Communicator.DP, devices]
    done = np.array([finish[group == g].max() for g in group.tolist()])
    done[done < 0] = clock.end_s.max()  # no class computes the gradient: last, in one order everywhere
    alone = header.group_size[row[0], Communicator.DP, devices] == 1
    when = clock.running(devices, done)
    return _InsertedLines(
        device=devices,
        before=np.where(alone, last + 1, np.maximum(when, last + 1)),
        time_s=done,
        number=np.full(len(devices), number),
        rows=np.tile(row, (len(devices), 1)),
    )


def _merge(
    header: PlanHeaderArrays, lines: ProgramTable, extras: list[_InsertedLines]
) -> tuple[Program, ...]:
    """Returns phase lines with all insertions, class by class."""
    phases = np.stack([lines.module, lines.kind, lines.chunk, lines.microbatch, lines.place], axis=1)
    rows = np.concatenate([phases, *(extra.rows for extra in extras)])
    device = np.concatenate([lines.device, *(extra.device for extra in extras)])
    positions = np.arange(len(phases))
    before = np.concatenate([positions, *(extra.before for extra in extras)])
    gathers = (rows[:, 1] == OpKind.UNSHARD) | (rows[:, 1] == OpKind.UNSHARD_B)
    last = np.where(np.arange(len(rows)) < len(phases), 2, ~gathers)
    time_s = np.concatenate([np.zeros(len(phases)), *(extra.time_s for extra in extras)])
    number = np.concatenate([positions, *(extra.number for extra in extras)])
    order = np.lexsort((number, time_s, last, before, device))
    sorted_rows, sorted_device = rows[order], device[order]
    ends = np.searchsorted(sorted_device, np.arange(header.devices + 1))
    return tuple(Program.of(sorted_rows[a:b]) for a, b in pairwise(ends))
