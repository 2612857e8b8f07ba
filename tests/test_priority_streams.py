"""Two streams on random plans: nothing starts too early, streams keep their order, the LLM goes first."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from random_jobs import random_job, random_setting
from random_plans import random_plan
from tiny_plans import tiny_plan

from optimus.ir.op import NUM_LANES, Bools, Floats, Ints, Lane, OpKind, Schedule
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.schedule.noisy_replay import (
    JITTER_STRAGGLERS_HICCUPS,
    ModulePlacement,
    NoisyDurations,
    PriorityStreamReplay,
)
from optimus.schedule.plan_schedule import build_plan_schedule
from optimus.schedule.schedule_builder import ScheduleBuilder, make_single_kernel_graph
from optimus.schedule.simulator import Timeline, simulate_schedule

LATE = 1e-9


def played(plan: Plan, seed: int, *, launch_s: float = 0.0) -> tuple[Schedule, Floats, Timeline]:
    """A plan under noise, in two streams; compute is not slowed down, so that durations can be seen."""
    schedule = build_plan_schedule(plan, plan.programs, ordered=False)
    duration_s = NoisyDurations(schedule, ModulePlacement.of_plan(plan)).draw_seconds(
        JITTER_STRAGGLERS_HICCUPS, seed
    )
    return schedule, duration_s, PriorityStreamReplay(schedule, launch_s=launch_s).simulate(duration_s)


def ready_s(schedule: Schedule, timeline: Timeline) -> Floats:
    """When all that each op waits for has ended."""
    found = np.zeros(len(schedule))
    waits = np.repeat(np.arange(len(schedule)), np.diff(schedule.dep_offset))
    np.maximum.at(found, waits, timeline.finish_s[schedule.deps])
    return found


def streams(schedule: Schedule) -> list[tuple[Ints, Ints]]:
    """Compute and waits of every device: the LLM's (with the optimizer) and encoders', in program order."""
    of_llm = schedule.module >= schedule.modules.index(LLM)
    lane = schedule.lane == Lane.COMPUTE
    return [
        (np.flatnonzero(lane & of_llm & here), np.flatnonzero(lane & ~of_llm & here))
        for here in (schedule.device == device for device in range(schedule.num_devices))
    ]


def check(schedule: Schedule, duration_s: Floats, timeline: Timeline) -> None:
    start, finish, ready = timeline.start_s, timeline.finish_s, ready_s(schedule, timeline)
    takes = ~schedule.is_recv  # which occupies nothing: it is over with its send
    np.testing.assert_allclose((finish - start)[takes], duration_s[takes], atol=LATE)
    assert (start[takes] >= ready[takes] - LATE).all(), "an op starts before what it waits for has ended"
    _check_lanes(schedule, timeline, takes)
    for llm, encoders in streams(schedule):
        for stream in (llm, encoders):
            assert (start[stream[1:]] >= finish[stream[:-1]] - LATE).all(), "a stream keeps its order"
            ready[stream[1:]] = np.maximum(ready[stream[1:]], finish[stream[:-1]])
        both = np.concatenate([llm, encoders])
        both = both[(schedule.kind[both] != OpKind.WAIT) & (schedule.kind[both] != OpKind.OPTIMIZER)]
        busy = sorted((start[row], finish[row]) for row in both.tolist())
        for row in both.tolist():
            assert _is_busy(busy, ready[row], start[row]), "a kernel waits while its lane is idle"
        works = llm[(schedule.kind[llm] != OpKind.WAIT) & (schedule.kind[llm] != OpKind.OPTIMIZER)]
        finishes = llm[schedule.kind[llm] == OpKind.OPTIMIZER]
        assert start[finishes].min() >= finish[both].max(initial=0.0) - LATE, "the optimizer comes last"
        for row in encoders[(schedule.kind[encoders] != OpKind.WAIT) & (duration_s[encoders] > 0)].tolist():
            behind = works[start[works] > start[row] + LATE]
            assert (ready[behind] >= start[row] - LATE).all(), "an encoder kernel goes before the LLM's"


def _check_lanes(schedule: Schedule, timeline: Timeline, takes: Bools) -> None:
    rows = np.flatnonzero(takes & (timeline.finish_s > timeline.start_s))
    lane = schedule.device[rows].astype(np.int64) * NUM_LANES + schedule.lane[rows]
    rows = rows[np.lexsort((timeline.start_s[rows], lane))]
    lane = np.sort(lane)
    same = lane[1:] == lane[:-1]
    gap = timeline.start_s[rows[1:]] - timeline.finish_s[rows[:-1]]
    assert (gap[same] >= -LATE).all(), "two ops on one lane at a time"


def _is_busy(busy: list[tuple[float, float]], begin: float, end: float) -> bool:
    """Whether intervals leave no gap between two moments."""
    for first, last in busy:
        if first <= begin + LATE and last > begin:
            begin = last
    return begin >= end - LATE


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_small_plans_keep_all_rules(seed: int) -> None:
    check(*played(tiny_plan(Random(seed)), seed))


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_plans_of_random_jobs_keep_all_rules(seed: int) -> None:
    rng = Random(seed)
    check(*played(random_plan(rng, random_setting(rng, random_job(rng))), seed))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_the_llm_s_compute_is_not_issued_early(seed: int) -> None:
    schedule, _, timeline = played(tiny_plan(Random(seed)), seed, launch_s=0.3)
    for llm, _ in streams(schedule):
        launches = np.flatnonzero(schedule.device == schedule.device[llm[0]])
        launches = launches[schedule.kind[launches] != OpKind.WAIT]
        works = llm[schedule.kind[llm] != OpKind.WAIT]
        assert (timeline.start_s[works] >= 0.3 * np.searchsorted(launches, works) - LATE).all()


def late_llm(encoder_s: float) -> Timeline:
    """In the plan: an LLM kernel, an encoder kernel, an LLM kernel that becomes ready at 3 s."""
    builder = ScheduleBuilder(["vit", LLM], 2)
    other = builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 3.0), device=1)
    for seconds, after in ((1.0, []), (encoder_s, []), (1.0, [other])):
        builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, seconds), device=0, after=after)
    schedule = builder.build()
    schedule.module[:] = [1, 0, 1, 1] if schedule.device[0] == 0 else [1, 1, 0, 1]
    return PriorityStreamReplay(schedule).simulate(schedule.duration_s)


def test_a_running_encoder_kernel_is_not_interrupted() -> None:
    """Ready at 3 s, the LLM waits until 6 s for a kernel that began at 1 s."""
    assert sorted(late_llm(5.0).start_s.tolist()) == [0.0, 0.0, 1.0, 6.0]


def test_the_llm_overtakes_encoder_work_that_is_late() -> None:
    """In the plan's order it would wait for an encoder kernel until 5 s."""
    builder = ScheduleBuilder(["vit", LLM], 2)
    other = builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 4.0), device=1)
    builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 1.0), device=0, after=[other])
    builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 2.0), device=0)
    schedule = builder.build()
    here = np.flatnonzero(schedule.device == 0)
    schedule.module[:] = 1
    schedule.module[here[0]] = 0
    assert simulate_schedule(schedule).start_s[here].tolist() == [4.0, 5.0]
    assert PriorityStreamReplay(schedule).simulate(schedule.duration_s).start_s[here].tolist() == [4.0, 0.0]
