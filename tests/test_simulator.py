"""The compiled loop against an independent replay, closed forms and hand-made cases."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_replay import replay

from optimus.ir.op import Communicator, Lane, OpKind, Schedule
from optimus.schedule.pipeline_orders import (
    PipelineOrder,
    build_1f1b_order,
    build_interleaved_1f1b_order,
    build_zero_bubble_order,
)
from optimus.schedule.schedule_builder import (
    ScheduleBuilder,
    edges_to_csr,
    make_single_kernel_graph,
    repeat_for_replicas,
)
from optimus.schedule.simulator import ScheduleDeadlock, simulate_schedule

UNIT = {OpKind.FORWARD: 1.0, OpKind.BACKWARD: 2.0, OpKind.INPUT_GRAD: 1.0, OpKind.WEIGHT_GRAD: 1.0}


def pipeline_schedule(order: PipelineOrder, durations: dict[OpKind, float]) -> Schedule:
    """Free communication: every op one row, waits only for data and its stage."""
    stages = len(order)
    builder = ScheduleBuilder(["llm"], stages)
    templates = {
        kind: make_single_kernel_graph(kind, Lane.COMPUTE, float(seconds))
        for kind, seconds in durations.items()
    }
    blocks: dict[tuple[str, int, int], int] = {}
    last = max(op.chunk for op in order[0]) * stages + stages - 1
    for stage, ops in enumerate(order):
        for op in ops:
            virtual = op.chunk * stages + stage
            name = {OpKind.FORWARD: "F", OpKind.WEIGHT_GRAD: "W"}.get(op.kind, "B")
            blocks[name, virtual, op.microbatch] = builder.add(
                templates[op.kind], device=stage, chunk=op.chunk, microbatch=op.microbatch
            )
    for (name, virtual, microbatch), block in blocks.items():
        if name == "F" and virtual > 0:
            builder.wait([block], [blocks["F", virtual - 1, microbatch]])
        if name == "B":
            source = ("F", virtual) if virtual == last else ("B", virtual + 1)
            builder.wait([block], [blocks[source[0], source[1], microbatch]])
        if name == "W":
            builder.wait([block], [blocks["B", virtual, microbatch]])
    return builder.build()


def idle_per_busy(order: PipelineOrder) -> Fraction:
    """Exact: whole seconds stay whole in floating point."""
    schedule = pipeline_schedule(order, UNIT)
    busy = Fraction(schedule.duration_s.sum())
    return Fraction(simulate_schedule(schedule).step_s) * len(order) / busy - 1


# ------------------------------------------------------------------------ closed forms


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 7, 8, 11, 12, 16, 23, 24, 31, 32])
def test_1f1b_idles_p_minus_1_over_m(stages: int, microbatches: int) -> None:
    order = build_1f1b_order(stages=stages, microbatches=microbatches)
    assert idle_per_busy(order) == Fraction(stages - 1, microbatches)


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("chunks", range(2, 6))
@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_interleaved_idles_p_minus_1_over_v_m(stages: int, chunks: int, rounds: int) -> None:
    order = build_interleaved_1f1b_order(stages=stages, chunks=chunks, microbatches=stages * rounds)
    assert idle_per_busy(order) == Fraction(stages - 1, chunks * stages * rounds)


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("chunks", range(1, 5))
@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_zero_bubble_idles_p_minus_1_over_3_v_m(stages: int, chunks: int, rounds: int) -> None:
    order = build_zero_bubble_order(stages=stages, chunks=chunks, microbatches=stages * rounds)
    assert idle_per_busy(order) == Fraction(stages - 1, 3 * chunks * stages * rounds)


# ------------------------------------------------------------------------ independent replay


@settings(max_examples=60, deadline=None)
@given(
    stages=st.integers(1, 6),
    chunks=st.integers(1, 3),
    rounds=st.integers(1, 3),
    durations=st.tuples(*[st.integers(1, 9)] * 3),
    split=st.booleans(),
)
def test_equals_the_reference_replay(
    stages: int, chunks: int, rounds: int, durations: tuple[int, int, int], split: bool
) -> None:
    kinds = (
        (OpKind.FORWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD)
        if split
        else (OpKind.FORWARD, OpKind.BACKWARD)
    )
    make = build_zero_bubble_order if split else build_interleaved_1f1b_order
    order = make(stages=stages, chunks=chunks, microbatches=stages * rounds)
    seconds = dict(zip(kinds, durations, strict=False))
    schedule = pipeline_schedule(order, {kind: float(value) for kind, value in seconds.items()})
    timeline = simulate_schedule(schedule)
    expected = replay(order, seconds)
    rows = iter(range(len(schedule)))
    for stage, ops in enumerate(order):
        for op in ops:
            row = next(rows)
            assert (timeline.start_s[row], timeline.finish_s[row]) == expected[stage, op]


# ------------------------------------------------------------------------ slow-down, launch, deadlock


def test_compute_slows_down_only_while_a_collective_runs() -> None:
    builder = ScheduleBuilder(["llm"], 1)
    builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 10.0), device=0)
    builder.add(make_single_kernel_graph(OpKind.UNSHARD, Lane.DP, 2.2), device=0)
    timeline = simulate_schedule(builder.build(), slowdown=0.1)
    # 2.2 s at 1/1.1 of the speed do 2.0 s of work; 8.0 s are left.
    assert timeline.finish_s[0] == pytest.approx(10.2)
    assert timeline.finish_s[1] == pytest.approx(2.2)


def test_two_collectives_at_once_slow_down_like_one() -> None:
    builder = ScheduleBuilder(["llm"], 1)
    builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 10.0), device=0)
    builder.add(make_single_kernel_graph(OpKind.UNSHARD, Lane.DP, 1.1), device=0)
    builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.TP, 2.2), device=0)
    assert simulate_schedule(builder.build(), slowdown=0.1).finish_s[0] == pytest.approx(10.2)


def test_a_collective_on_another_device_does_not_slow_down() -> None:
    builder = ScheduleBuilder(["llm"], 2)
    builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 10.0), device=0)
    builder.add(make_single_kernel_graph(OpKind.UNSHARD, Lane.DP, 5.0), device=1)
    assert simulate_schedule(builder.build(), slowdown=0.1).finish_s[0] == 10.0


def test_an_op_starts_no_earlier_than_the_host_has_issued_it() -> None:
    builder = ScheduleBuilder(["llm"], 1)
    for _ in range(4):
        builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 0.1), device=0)
    assert simulate_schedule(builder.build(), launch_s=1.0).start_s.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_lanes_run_side_by_side_and_each_in_program_order() -> None:
    builder = ScheduleBuilder(["llm"], 1)
    first = builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 3.0), device=0)
    builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.TP, 1.0), device=0, after=[first])
    builder.add(
        make_single_kernel_graph(OpKind.FORWARD, Lane.TP, 1.0), device=0
    )  # behind it in its lane, though it waits for nothing
    assert simulate_schedule(builder.build()).start_s.tolist() == [0.0, 3.0, 4.0]


def test_a_schedule_that_cannot_end_is_a_deadlock() -> None:
    builder = ScheduleBuilder(["llm"], 1)
    first = builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 1.0), device=0)
    second = builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.COMPUTE, 1.0), device=0)
    builder.wait([first], [second])
    with pytest.raises(ScheduleDeadlock, match="2 ops never start"):
        simulate_schedule(builder.build())


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_random_graphs_equal_a_longest_path(data: st.DataObject) -> None:
    """Any lanes, any earlier dependencies: start = max(lane free, dependencies done)."""
    count = data.draw(st.integers(1, 40))
    devices = data.draw(st.integers(1, 3))
    builder = ScheduleBuilder(["llm"], devices)
    free: dict[tuple[int, Lane], float] = {}
    finish: list[float] = []
    for op in range(count):
        device, lane = data.draw(st.integers(0, devices - 1)), data.draw(st.sampled_from(list(Lane)))
        seconds = data.draw(st.integers(0, 5))
        deps = data.draw(st.lists(st.integers(0, op - 1), max_size=3, unique=True)) if op else []
        builder.add(make_single_kernel_graph(OpKind.FORWARD, lane, float(seconds)), device=device, after=deps)
        start = max([free.get((device, lane), 0.0), *(finish[dep] for dep in deps)])
        finish.append(start + seconds)
        free[device, lane] = finish[-1]
    np.testing.assert_array_equal(simulate_schedule(builder.build()).finish_s, finish)


@settings(deadline=None)
@given(loads=st.lists(st.lists(st.floats(0.1, 10), min_size=3, max_size=3), min_size=1, max_size=4))
def test_replicas_wait_for_each_other_where_they_exchange_rows(loads: list[list[float]]) -> None:
    """In every microbatch an encoder computes, rows are exchanged, the LLM computes: the fullest counts."""
    kinds = [OpKind.FORWARD, OpKind.LAUNCH, OpKind.FORWARD] * 3
    count, exchanges = len(kinds), [kind == OpKind.LAUNCH for kind in kinds]
    dep_offset, deps = edges_to_csr(np.array([(row, row - 1) for row in range(1, count)]), count)
    zeros, seconds = np.zeros(count, np.int64), np.array([1.0, 0.5, 4.0] * 3)
    schedule = Schedule(
        modules=("vision", "llm", "all"),
        num_devices=1,
        kind=np.array(kinds),
        module=np.array([0, 1, 1] * 3),
        chunk=zeros,
        segment=zeros,
        microbatch=np.repeat(np.arange(3), 3),
        device=zeros,
        lane=np.where(exchanges, Lane.TP, Lane.COMPUTE),
        communicator=np.where(exchanges, Communicator.DEAL, Communicator.NONE),
        bytes=zeros,
        duration_s=seconds,
        dep_offset=dep_offset,
        deps=deps,
    )
    repeated = repeat_for_replicas(schedule, len(loads))
    assert len(repeated) == len(loads) * count and repeated.num_devices == len(loads)
    of_encoder = schedule.module == 0
    of_replicas = [np.where(of_encoder, np.array(load)[schedule.microbatch], seconds) for load in loads]
    step_s = simulate_schedule(replace(repeated, duration_s=np.concatenate(of_replicas))).step_s
    assert step_s == pytest.approx(sum(np.max(loads, axis=0)) + 3 * 4.5)
