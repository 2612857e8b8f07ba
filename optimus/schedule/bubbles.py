"""Finds when compute lanes are idle and why, and how much later every op could end."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from optimus.ir.op import NUM_LANES, PARAMETER_TRAFFIC, Bools, Floats, Ints, Lane, OpKind, Schedule
from optimus.schedule.simulator import Timeline


@dataclass(frozen=True, kw_only=True)
class BubbleSeconds:
    """Idle seconds of a compute lane per step by cause (the six of the paper's Table 1).

    dp_all_gather: waits for parameters. dp_reduce_scatter: waits for the reduction of the
    device's gradients after the last compute op. tp: waits for a collective inside a layer (cp and
    ep too). pp_warmup: before the first compute op; pp_cooldown: after the last one; pp_other:
    everything in between, with waits for host, seam and optimizer.
    """

    dp_all_gather: float = 0.0
    dp_reduce_scatter: float = 0.0
    pp_warmup: float = 0.0
    pp_cooldown: float = 0.0
    pp_other: float = 0.0
    tp: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))


CAUSES = tuple(asdict(BubbleSeconds()))
_GATHER, _REDUCE, _WARMUP, _COOLDOWN, _OTHER, _TP = range(len(CAUSES))


@dataclass(frozen=True, kw_only=True, eq=False)
class IdleIntervals:
    """Idle intervals of compute lanes as columns, by device and time."""

    device: Ints
    begin_s: Floats
    end_s: Floats
    cause: Ints  # place in CAUSES
    op: Ints  # the op that waits, -1 at the end of the step


def find_idle_intervals(schedule: Schedule, timeline: Timeline) -> IdleIntervals:
    """Finds every idle interval and its cause.

    An op that waits for a collective also waits for what the collective waited for.
    """
    collective = _last_wait(schedule, timeline, _is_layer_collective(schedule))
    gathers = (schedule.kind == OpKind.UNSHARD) | (schedule.kind == OpKind.UNSHARD_B)
    gather = _last_wait(schedule, timeline, gathers)
    begin, end = np.append(timeline.start_s, 0.0), np.append(timeline.finish_s, 0.0)  # [-1]: no wait
    gathered = np.maximum(end[gather], end[np.append(gather, -1)[collective]])
    waits = gathered, begin[collective], end[collective]
    parts = [_idle_of(schedule, timeline, device, *waits) for device in range(schedule.num_devices)]
    return IdleIntervals(
        device=np.repeat(np.arange(len(parts)), [len(part[0]) for part in parts]),
        begin_s=np.concatenate([part[0] for part in parts]),
        end_s=np.concatenate([part[1] for part in parts]),
        cause=np.concatenate([part[2] for part in parts]),
        op=np.concatenate([part[3] for part in parts]),
    )


def sum_bubbles_by_cause(schedule: Schedule, timeline: Timeline) -> tuple[BubbleSeconds, ...]:
    """Returns idle seconds by cause for every device; they sum to the step minus the busy time."""
    idle = find_idle_intervals(schedule, timeline)
    shape = (schedule.num_devices, len(CAUSES))
    place = idle.device * len(CAUSES) + idle.cause
    sums = np.bincount(place, weights=idle.end_s - idle.begin_s, minlength=shape[0] * shape[1])
    return tuple(BubbleSeconds(**dict(zip(CAUSES, row, strict=True))) for row in sums.reshape(shape).tolist())


def average_bubbles(bubbles: tuple[BubbleSeconds, ...], weights: Floats | None = None) -> BubbleSeconds:
    """Averages over devices, weighted by the number of GPUs that each represents."""
    values = {
        cause: float(np.average([getattr(b, cause) for b in bubbles], weights=weights)) for cause in CAUSES
    }
    return BubbleSeconds(**values)


def _is_layer_collective(schedule: Schedule) -> Bools:
    moves_parameters = np.isin(schedule.kind, PARAMETER_TRAFFIC)
    collectives: Bools = ((schedule.lane == Lane.TP) | (schedule.lane == Lane.DP)) & ~moves_parameters
    return collectives


def _last_wait(schedule: Schedule, timeline: Timeline, wanted: Bools) -> Ints:
    """Returns, per op, the last to end among its dependencies in `wanted` (-1: none)."""
    rows = np.repeat(np.arange(len(schedule)), np.diff(schedule.dep_offset))
    edges = np.flatnonzero(wanted[schedule.deps])
    rows, deps = rows[edges], schedule.deps[edges]
    order = np.argsort(timeline.finish_s[deps], kind="stable")
    last = np.full(len(schedule), -1, np.int64)
    last[rows[order]] = deps[order]
    return last


def _idle_of(
    schedule: Schedule,
    timeline: Timeline,
    device: int,
    gathered_s: Floats,
    collective_begin_s: Floats,
    collective_end_s: Floats,
) -> tuple[Floats, Floats, Ints, Ints]:
    """Returns begin, end, cause and op of a device's idle intervals: up to four per op, two at the end."""
    here = schedule.device == device
    ops = np.flatnonzero(here & (schedule.lane == Lane.COMPUTE))
    finishes = schedule.kind[ops] == OpKind.OPTIMIZER
    begin, end = timeline.start_s[ops], timeline.finish_s[ops]
    left = np.concatenate([[0.0], end[:-1]])[: len(ops)]
    last_work_s = float(end[~finishes].max(initial=0.0))
    reduces = here & (schedule.kind == OpKind.REDUCE_GRAD)
    reduced_s = float(timeline.finish_s[reduces].max(initial=last_work_s))
    # Before an op: parameters (or, for the optimizer, gradients), the pipeline, a collective, the pipeline.
    first = np.clip(np.where(finishes, reduced_s, gathered_s[ops]), left, begin)
    second = np.clip(collective_begin_s[ops], first, begin)
    third = np.clip(collective_end_s[ops], second, begin)
    edges = np.stack([left, first, second, third, begin], axis=1)
    causes = np.empty((len(ops), 4), np.int64)
    causes[:, 0] = np.where(finishes, _REDUCE, _GATHER)
    causes[:, 1] = causes[:, 3] = _OTHER
    causes[:, 2] = _TP
    worked = len(ops) > int(finishes.sum())
    if worked:
        causes[0, [1, 3]] = _WARMUP
        causes[np.flatnonzero(finishes)[:1], 1:] = _COOLDOWN
    tail = [float(end[-1]) if len(ops) else 0.0, 0.0, timeline.step_s]
    tail[1] = tail[0] if finishes.any() else float(np.clip(reduced_s, tail[0], tail[2]))
    after = _OTHER if finishes.any() or not worked else _COOLDOWN
    begins, ends = np.append(edges[:, :-1], tail[:2]), np.append(edges[:, 1:], tail[1:])
    not_empty = ends > begins
    return (
        begins[not_empty],
        ends[not_empty],
        np.append(causes, [_REDUCE, after])[not_empty],
        np.append(np.repeat(ops, 4), [-1, -1])[not_empty],
    )


# ---------------------------------------------------------------------------- slack


def find_op_slack(schedule: Schedule, timeline: Timeline) -> Floats:
    """Returns by how many seconds each op could end later without a longer step, all others unchanged.

    An op must end before the latest start of those that wait for it and of the next on its lane.
    """
    group, count = _starts(schedule)
    sources, targets = _edges(schedule)
    order = np.argsort(group[targets], kind="stable")
    before = sources[order].tolist()
    first = np.searchsorted(group[targets][order], np.arange(count + 1)).tolist()
    left = np.bincount(
        group[sources], minlength=count
    ).tolist()  # followers whose latest start is not known yet
    spent = np.where(schedule.is_recv, 0.0, timeline.finish_s - timeline.start_s).tolist()
    group_of, ends = group.tolist(), [timeline.step_s] * len(schedule)  # latest
    begins = [timeline.step_s] * count
    for op, seconds in enumerate(spent):
        begins[group_of[op]] = min(begins[group_of[op]], timeline.step_s - seconds)
    ready = [here for here in range(count) if left[here] == 0]
    while ready:
        here = ready.pop()
        for place in range(first[here], first[here + 1]):
            op = before[place]
            group_before = group_of[op]
            ends[op] = min(ends[op], begins[here])
            begins[group_before] = min(begins[group_before], begins[here] - spent[op])
            left[group_before] -= 1
            if left[group_before] == 0:
                ready.append(group_before)
    slack_s: Floats = np.maximum(np.array(ends) - timeline.finish_s, 0.0)
    return slack_s


def _starts(schedule: Schedule) -> tuple[Ints, int]:
    """Returns the group of ops that every op starts with, its meeting or itself, and the number of groups."""
    alone = np.arange(len(schedule))
    if schedule.meeting is None:
        return alone, len(schedule)
    key = np.where(schedule.meeting >= 0, len(schedule) + schedule.meeting, alone)
    names, group = np.unique(key, return_inverse=True)
    return group, len(names)


def _edges(schedule: Schedule) -> tuple[Ints, Ints]:
    """Returns pairs of an op and one that starts after it: what waits for it, and the next on its lane."""
    waits = np.repeat(np.arange(len(schedule)), np.diff(schedule.dep_offset))
    lane = schedule.device.astype(np.int64) * NUM_LANES + schedule.lane
    queued = np.flatnonzero(~schedule.is_recv)
    queued = queued[np.argsort(lane[queued], kind="stable")]
    same = lane[queued][1:] == lane[queued][:-1]
    sources = np.concatenate([schedule.deps.astype(np.int64), queued[:-1][same]])
    return sources, np.concatenate([waits, queued[1:][same]])
