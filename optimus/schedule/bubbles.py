"""Finds the idle time of every device's compute lane and says why it is idle."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from optimus.program.op import Floats, Ints, Kind, Lane, Schedule
from optimus.schedule.timeline import Timeline

Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Bubbles:
    """Seconds of idle compute lane per step by cause (the six of the paper's Table 1).

    dp_all_gather: waits for parameters. dp_reduce_scatter: waits for the own gradients'
    reduction after the last compute op. tp: waits for a collective inside a layer (cp and
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


CAUSES = tuple(asdict(Bubbles()))


def busy_s(schedule: Schedule, timeline: Timeline) -> Floats:
    """Seconds in which each device's compute lane works."""
    compute = schedule.lane == Lane.COMPUTE
    spent: Floats = (timeline.finish_s - timeline.start_s)[compute]
    devices = schedule.device[compute].astype(np.int64)
    return np.bincount(devices, weights=spent, minlength=schedule.num_devices).astype(np.float64)


def find_bubbles(schedule: Schedule, timeline: Timeline) -> tuple[Bubbles, ...]:
    """Idle seconds by cause, per device; they sum to the step minus the busy time."""
    collective = _last_wait(schedule, timeline, _is_layer_collective(schedule))
    gather = _last_wait(schedule, timeline, schedule.kind == Kind.GATHER)
    begin, end = np.append(timeline.start_s, 0.0), np.append(timeline.finish_s, 0.0)  # [-1]: no wait
    # What a collective waited for, the op behind it waited for too.
    gathered = np.maximum(end[gather], end[np.append(gather, -1)[collective]])
    return tuple(
        _of_device(schedule, timeline, device, begin[collective], end[collective], gathered)
        for device in range(schedule.num_devices)
    )


def mean_bubbles(bubbles: tuple[Bubbles, ...], weights: Floats | None = None) -> Bubbles:
    """The mean over devices (weighted by how many GPUs each stands for)."""
    values = {
        cause: float(np.average([getattr(b, cause) for b in bubbles], weights=weights)) for cause in CAUSES
    }
    return Bubbles(**values)


def _is_layer_collective(schedule: Schedule) -> Bools:
    moves_parameters = (schedule.kind == Kind.GATHER) | (schedule.kind == Kind.REDUCE)
    found: Bools = ((schedule.lane == Lane.TP) | (schedule.lane == Lane.DP)) & ~moves_parameters
    return found


def _last_wait(schedule: Schedule, timeline: Timeline, wanted: Bools) -> Ints:
    """For each op, the last to end among its dependencies of the wanted sort (-1: none)."""
    rows = np.repeat(np.arange(len(schedule)), np.diff(schedule.dep_offset))
    edges = np.flatnonzero(wanted[schedule.deps])
    rows, deps = rows[edges], schedule.deps[edges]
    order = np.argsort(timeline.finish_s[deps], kind="stable")
    last = np.full(len(schedule), -1, np.int64)
    last[rows[order]] = deps[order]
    return last


def _of_device(
    schedule: Schedule,
    timeline: Timeline,
    device: int,
    collective_begin: Floats,
    collective_end: Floats,
    gather_end: Floats,
) -> Bubbles:
    here = (schedule.device == device) & (schedule.lane == Lane.COMPUTE)
    work = np.flatnonzero(here & (schedule.kind != Kind.FINISH))
    finishes = np.flatnonzero(here & (schedule.kind == Kind.FINISH))
    if len(work) == 0:
        return Bubbles(pp_other=timeline.step_s - float(busy_s(schedule, timeline)[device]))
    begin, end = timeline.start_s[work], timeline.finish_s[work]
    left = np.concatenate([[0.0], end[:-1]])  # each gap is [left, begin)
    in_gather = np.clip(np.minimum(begin, gather_end[work]) - left, 0.0, None)
    since = np.maximum(left + in_gather, collective_begin[work])
    in_tp = np.clip(np.minimum(begin, collective_end[work]) - since, 0.0, None)
    rest = begin - left - in_gather - in_tp
    reduce_s, cooldown_s, other_s = _tail(schedule, timeline, device, float(end[-1]), finishes)
    return Bubbles(
        dp_all_gather=float(in_gather.sum()),
        dp_reduce_scatter=reduce_s,
        pp_warmup=float(rest[0]),
        pp_cooldown=cooldown_s,
        pp_other=float(rest[1:].sum()) + other_s,
        tp=float(in_tp.sum()),
    )


def _tail(
    schedule: Schedule, timeline: Timeline, device: int, end: float, finishes: Ints
) -> tuple[float, float, float]:
    """Idle time after the last compute op: own reduction, cool-down, and waits around the optimizer."""
    reduces = (schedule.device == device) & (schedule.kind == Kind.REDUCE)
    reduced = float(timeline.finish_s[reduces].max(initial=end))
    if len(finishes) == 0:
        in_reduce = max(0.0, reduced - end)
        return in_reduce, timeline.step_s - end - in_reduce, 0.0
    begin, done = timeline.start_s[finishes], timeline.finish_s[finishes]
    in_reduce = max(0.0, min(reduced, float(begin[0])) - end)
    between = float((begin[1:] - done[:-1]).sum())
    return in_reduce, float(begin[0]) - end - in_reduce, between + timeline.step_s - float(done[-1])
