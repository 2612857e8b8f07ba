"""Busy time of compute lanes, summed op by op: what bubbles must add up to the step with."""

from __future__ import annotations

import numpy as np

from optimus.ir.op import Floats, Lane, Schedule
from optimus.schedule.simulator import Timeline


def busy_s(schedule: Schedule, timeline: Timeline) -> Floats:
    """Returns the seconds in which each device's compute lane works."""
    compute = schedule.lane == Lane.COMPUTE
    spent: Floats = (timeline.finish_s - timeline.start_s)[compute]
    devices = schedule.device[compute].astype(np.int64)
    return np.bincount(devices, weights=spent, minlength=schedule.num_devices).astype(np.float64)
