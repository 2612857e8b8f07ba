"""Says how much later every op could end without making the step longer."""

from __future__ import annotations

import numpy as np

from optimus.ir.op import NUM_LANES, Floats, Ints, Schedule
from optimus.schedule.simulate import Timeline


def find_slack(schedule: Schedule, timeline: Timeline) -> Floats:
    """Seconds by op, with all others as long as they were played; 0 where the step cannot wait.

    An op must end before those that wait for it, and the next on its lane, begin at the latest.
    """
    group, count = _starts(schedule)
    sources, targets = _edges(schedule)
    order = np.argsort(group[targets], kind="stable")
    before = sources[order].tolist()
    first = np.searchsorted(group[targets][order], np.arange(count + 1)).tolist()
    left = np.bincount(group[sources], minlength=count).tolist()  # followers that are not settled
    spent = np.where(schedule.is_recv, 0.0, timeline.finish_s - timeline.start_s).tolist()
    group_of, ends = group.tolist(), [timeline.step_s] * len(schedule)  # at the latest
    begins = [timeline.step_s] * count
    for op, seconds in enumerate(spent):
        begins[group_of[op]] = min(begins[group_of[op]], timeline.step_s - seconds)
    ready = [here for here in range(count) if left[here] == 0]
    while ready:
        here = ready.pop()
        for place in range(first[here], first[here + 1]):
            op = before[place]
            there = group_of[op]
            ends[op] = min(ends[op], begins[here])
            begins[there] = min(begins[there], begins[here] - spent[op])
            left[there] -= 1
            if left[there] == 0:
                ready.append(there)
    found: Floats = np.maximum(np.array(ends) - timeline.finish_s, 0.0)
    return found


def _starts(schedule: Schedule) -> tuple[Ints, int]:
    """The group of every op that begins when it does: its meeting, or itself; and how many there are."""
    alone = np.arange(len(schedule))
    if schedule.meeting is None:
        return alone, len(schedule)
    key = np.where(schedule.meeting >= 0, len(schedule) + schedule.meeting, alone)
    names, group = np.unique(key, return_inverse=True)
    return group, len(names)


def _edges(schedule: Schedule) -> tuple[Ints, Ints]:
    """Every op, and one that begins after it: what waits for it, and what comes next on its lane."""
    waits = np.repeat(np.arange(len(schedule)), np.diff(schedule.dep_offset))
    lane = schedule.device.astype(np.int64) * NUM_LANES + schedule.lane
    queued = np.flatnonzero(~schedule.is_recv)
    queued = queued[np.argsort(lane[queued], kind="stable")]
    same = lane[queued][1:] == lane[queued][:-1]
    sources = np.concatenate([schedule.deps.astype(np.int64), queued[:-1][same]])
    return sources, np.concatenate([waits, queued[1:][same]])
