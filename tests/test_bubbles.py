"""Idle time by cause: it adds up, and each cause is found where it was put."""

from __future__ import annotations

import numpy as np
import pytest
from busy_time import busy_s
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus.ir.op import Lane, OpKind
from optimus.schedule.bubbles import CAUSES, BubbleSeconds, average_bubbles, sum_bubbles_by_cause
from optimus.schedule.schedule_builder import ScheduleBuilder, make_single_kernel_graph
from optimus.schedule.simulator import simulate_schedule


def compute(seconds: float, kind: OpKind = OpKind.FORWARD):  # type: ignore[no-untyped-def]
    return make_single_kernel_graph(kind, Lane.COMPUTE, seconds)


def of(builder: ScheduleBuilder) -> tuple[BubbleSeconds, ...]:
    schedule = builder.build()
    return sum_bubbles_by_cause(schedule, simulate_schedule(schedule))


def test_a_step_with_every_cause() -> None:
    builder = ScheduleBuilder(["llm"], 2)
    gather = builder.add(make_single_kernel_graph(OpKind.UNSHARD, Lane.DP, 1.0), device=0)
    first = builder.add(compute(2.0), device=0, after=[gather])  # 1..3
    tp = builder.add(
        make_single_kernel_graph(OpKind.FORWARD, Lane.TP, 0.5), device=0, after=[first]
    )  # 3..3.5
    second = builder.add(compute(1.0), device=0, after=[tp])  # 3.5..4.5
    own = builder.add(make_single_kernel_graph(OpKind.UNSHARD, Lane.DP, 0.25), device=1)
    send = builder.add(
        make_single_kernel_graph(OpKind.SEND_F, Lane.P2P, 0.5), device=0, after=[second]
    )  # 4.5..5
    there = builder.add(compute(2.0), device=1, after=[own, send])  # 5..7
    back = builder.add(
        make_single_kernel_graph(OpKind.SEND_B, Lane.P2P, 0.5), device=1, after=[there]
    )  # 7..7.5
    last = builder.add(compute(3.0, OpKind.BACKWARD), device=0, after=[back])  # 7.5..10.5
    builder.add(
        make_single_kernel_graph(OpKind.REDUCE_GRAD, Lane.DP, 1.5), device=0, after=[last]
    )  # 10.5..12
    builder.add(
        make_single_kernel_graph(OpKind.REDUCE_GRAD, Lane.DP, 0.75), device=1, after=[there]
    )  # 7..7.75
    stage0, stage1 = of(builder)
    assert stage0 == BubbleSeconds(dp_all_gather=1.0, tp=0.5, pp_other=3.0, dp_reduce_scatter=1.5)
    assert stage1 == BubbleSeconds(
        dp_all_gather=0.25, pp_warmup=4.75, dp_reduce_scatter=0.75, pp_cooldown=4.25
    )


def test_waiting_for_a_neighbour_behind_a_collective_is_not_a_tp_bubble() -> None:
    """A backward that opens with a gather waits for its gradient first."""
    builder = ScheduleBuilder(["llm"], 2)
    before = builder.add(compute(1.0), device=1)
    slow = builder.add(compute(5.0), device=0)
    gather = builder.add(
        make_single_kernel_graph(OpKind.BACKWARD, Lane.TP, 0.5), device=1, after=[before, slow]
    )
    builder.add(compute(1.0, OpKind.BACKWARD), device=1, after=[gather])
    assert of(builder)[1] == BubbleSeconds(pp_other=4.0, tp=0.5)


def test_waiting_for_parameters_behind_a_collective_is_an_all_gather_bubble() -> None:
    builder = ScheduleBuilder(["llm"], 1)
    gather = builder.add(make_single_kernel_graph(OpKind.UNSHARD, Lane.DP, 2.0), device=0)
    collective = builder.add(make_single_kernel_graph(OpKind.FORWARD, Lane.TP, 0.5), device=0, after=[gather])
    builder.add(compute(1.0), device=0, after=[collective])
    assert of(builder)[0] == BubbleSeconds(dp_all_gather=2.0, tp=0.5)


def test_the_optimizer_waits_for_everybody() -> None:
    builder = ScheduleBuilder(["llm"], 2)
    reduces = []
    for device, seconds in enumerate((4.0, 1.0)):
        done = builder.add(compute(seconds), device=device)
        reduces.append(
            builder.add(
                make_single_kernel_graph(OpKind.REDUCE_GRAD, Lane.DP, 1.0), device=device, after=[done]
            )
        )
    for device in range(2):
        builder.add(compute(0.5 + device, OpKind.OPTIMIZER), device=device, after=reduces)
    first, second = of(builder)
    assert first == BubbleSeconds(dp_reduce_scatter=1.0, pp_other=1.0)  # idle while device 1 still updates
    assert second == BubbleSeconds(dp_reduce_scatter=1.0, pp_cooldown=3.0)


def test_mean_is_weighted_by_gpus() -> None:
    pair = (BubbleSeconds(tp=1.0), BubbleSeconds(tp=4.0))
    assert average_bubbles(pair).tp == 2.5
    assert average_bubbles(pair, np.array([2.0, 1.0])).tp == 2.0


@pytest.mark.ci
@settings(max_examples=100, deadline=None)
@given(data=st.data(), slowdown=st.sampled_from([0.0, 0.1]), launch_s=st.sampled_from([0.0, 0.3]))
def test_causes_sum_to_step_minus_busy(data: st.DataObject, slowdown: float, launch_s: float) -> None:
    devices = data.draw(st.integers(1, 3))
    builder = ScheduleBuilder(["llm"], devices)
    kinds = {
        Lane.COMPUTE: [OpKind.FORWARD, OpKind.BACKWARD, OpKind.WEIGHT_GRAD],
        Lane.TP: [OpKind.FORWARD, OpKind.BACKWARD],
        Lane.DP: [OpKind.UNSHARD, OpKind.REDUCE_GRAD, OpKind.FORWARD],
        Lane.P2P: [OpKind.SEND_F, OpKind.SEND_B],
        Lane.HOST: [OpKind.UNSHARD, OpKind.REDUCE_GRAD],
    }
    for op in range(data.draw(st.integers(1, 30))):
        lane = data.draw(st.sampled_from(list(Lane)))
        kind = data.draw(st.sampled_from(kinds[lane]))
        deps = data.draw(st.lists(st.integers(0, op - 1), max_size=3, unique=True)) if op else []
        seconds = data.draw(st.floats(0, 5))
        builder.add(
            make_single_kernel_graph(kind, lane, seconds),
            device=data.draw(st.integers(0, devices - 1)),
            after=deps,
        )
    for device in range(data.draw(st.integers(0, devices))):
        builder.add(compute(data.draw(st.floats(0, 5)), OpKind.OPTIMIZER), device=device)
    schedule = builder.build()
    timeline = simulate_schedule(schedule, slowdown=slowdown, launch_s=launch_s)
    busy = busy_s(schedule, timeline)
    for device, bubbles in enumerate(sum_bubbles_by_cause(schedule, timeline)):
        assert bubbles.total == pytest.approx(timeline.step_s - busy[device], abs=1e-9)
        assert all(getattr(bubbles, cause) >= -1e-9 for cause in CAUSES)
