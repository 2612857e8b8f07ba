"""Slack: an op may take that much longer and the step stays as it is, and not a bit more."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from tiny_plans import tiny_plan

from optimus.planner.plan_replay import replay_plan
from optimus.schedule.bubbles import find_op_slack
from optimus.schedule.simulator import simulate_schedule


@pytest.mark.parametrize("seed", range(6))
def test_an_op_may_take_as_much_longer_as_its_slack_and_no_more(seed: int) -> None:
    rng = Random(seed)
    schedule = replay_plan(tiny_plan(rng)).schedule
    timeline = simulate_schedule(schedule)  # without slow-down and launches, which durations would change
    slack = find_op_slack(schedule, timeline)
    assert slack.min() == 0.0 and slack.max() <= timeline.step_s
    ops = np.flatnonzero(~schedule.is_recv).tolist()
    more = timeline.step_s / 100
    for op in rng.sample(ops, min(20, len(ops))):
        longer = schedule.duration_s.copy()
        longer[op] += slack[op]
        assert simulate_schedule(replace(schedule, duration_s=longer)).step_s == pytest.approx(
            timeline.step_s
        )
        longer[op] += more
        expected = pytest.approx(timeline.step_s + more)
        assert simulate_schedule(replace(schedule, duration_s=longer)).step_s == expected


def test_slow_down_and_launches_are_part_of_what_was_played() -> None:
    replayed = replay_plan(tiny_plan(Random(1)))
    slack = find_op_slack(replayed.schedule, replayed.timeline)
    assert slack.min() >= 0.0 and (slack == 0.0).any()
