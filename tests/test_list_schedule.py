"""The event loop with free ops: no lane idles without need, the LLM is not kept waiting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus.ir.op import Floats, Lane, OpKind, Schedule
from optimus.schedule.schedule_builder import ScheduleBuilder, make_single_kernel_graph
from optimus.schedule.simulator import Timeline, list_schedule, simulate_schedule

PATIENCE_S = 0.01


def listed(schedule: Schedule, rank: list[float], due_s: list[float] | None = None) -> Timeline:
    due = np.full(len(schedule), np.inf) if due_s is None else np.array(due_s)
    held = np.zeros(len(schedule))
    ranks = np.array(rank, np.float64)
    return list_schedule(schedule, rank=ranks, due_s=due, held_s=held, patience_s=PATIENCE_S)[0]


def drawn(data: st.DataObject) -> Schedule:
    """Any lanes, any earlier dependencies."""
    count, devices = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 3))
    builder = ScheduleBuilder(["llm"], devices)
    for op in range(count):
        lane = data.draw(st.sampled_from([Lane.COMPUTE, Lane.TP, Lane.P2P]))
        deps = data.draw(st.lists(st.integers(0, op - 1), max_size=3, unique=True)) if op else []
        seconds = float(data.draw(st.integers(0, 5)))
        builder.add(
            make_single_kernel_graph(OpKind.FORWARD, lane, seconds),
            device=data.draw(st.integers(0, devices - 1)),
            after=deps,
        )
    return builder.build()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_without_free_ops_it_is_the_plain_loop(data: st.DataObject) -> None:
    schedule = drawn(data)
    found = listed(schedule, [-1.0] * len(schedule), [float(n) for n in range(len(schedule))])
    np.testing.assert_array_equal(found.start_s, simulate_schedule(schedule).start_s)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_free_ops_wait_for_what_they_need_and_no_lane_idles_while_one_is_ready(data: st.DataObject) -> None:
    schedule = drawn(data)
    rank = [float(data.draw(st.integers(0, 3))) for _ in range(len(schedule))]
    found = listed(schedule, rank)
    ready = np.array(
        [
            max((found.finish_s[dep] for dep in schedule.deps_of(op)), default=0.0)
            for op in range(len(schedule))
        ]
    )
    assert (found.start_s >= ready).all()
    lane = schedule.device * len(Lane) + schedule.lane
    for op in range(len(schedule)):
        others = np.flatnonzero(lane == lane[op])
        busy = [(found.start_s[o], found.finish_s[o]) for o in others.tolist() if o != op]
        assert all(end <= found.start_s[op] or begin >= found.finish_s[op] for begin, end in busy)
        assert _covered(ready[op], found.start_s[op], busy), f"op {op} waited while its lane was idle"


def _covered(begin: float, end: float, busy: list[tuple[float, float]]) -> bool:
    """Whether intervals leave no gap between two moments."""
    for start, finish in sorted(busy):
        if start <= begin < finish:
            begin = finish
    return begin >= end


def gap(filler_s: float) -> Timeline:
    """An LLM op that ends at 1 s, one that can start at 3 s as it is due, and a filler ready at 1 s."""
    builder = ScheduleBuilder(["llm"], 2)
    first = builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 1.0), device=0)
    other = builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 3.0), device=1)
    builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 1.0), device=0, after=[other])
    builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, filler_s), device=0, after=[first])
    return listed(builder.build(), [-1.0, -1.0, -1.0, 0.0], [0.0, 0.0, 3.0, np.inf])


@pytest.mark.parametrize("filler_s", [0.5, 2.0])
def test_a_filler_that_fits_goes_into_the_gap(filler_s: float) -> None:
    assert gap(filler_s).start_s.tolist() == [0.0, 0.0, 3.0, 1.0]


def test_a_filler_that_does_not_fit_stays_behind() -> None:
    assert gap(2.5).start_s.tolist() == [0.0, 0.0, 3.0, 4.0]


def test_who_is_overdue_is_expected_after_as_long_again() -> None:
    """Due at 1 s and ready at 9 s: at 3 s two more seconds are given, so that a filler of 2 s starts then."""
    builder = ScheduleBuilder(["llm"], 2)
    other = builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 9.0), device=1)
    builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 1.0), device=0, after=[other])
    builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 2.0), device=0)
    found = listed(builder.build(), [-1.0, -1.0, 0.0], [0.0, 1.0, np.inf])
    assert found.start_s[1] == 9.0
    assert 3.0 <= found.start_s[2] <= 6.0  # it looks at times that double


def test_the_least_rank_goes_first_and_a_held_op_lets_others_pass() -> None:
    builder = ScheduleBuilder(["llm"], 1)
    for _ in range(3):
        builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 1.0), device=0)
    schedule = builder.build()
    held: Floats = np.array([2.5, 0.0, 0.0])
    due: Floats = np.array([2.5, np.inf, np.inf])
    timeline, turn = list_schedule(
        schedule, rank=np.array([-1.0, 2.0, 1.0]), due_s=due, held_s=held, patience_s=PATIENCE_S
    )
    assert timeline.start_s.tolist() == [2.5, 1.0, 0.0]
    assert turn.tolist() == [2, 1, 0]
