"""Ops timed from columns take as long as the event loop's schedule of the same pipeline."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus.cost.assumptions import get_preset
from optimus.cost.cost_model import ClusterCostModel
from optimus.ir.op import OpKind
from optimus.job.layout import Layout
from optimus.job.read import find_job
from optimus.planner.systems.pipeline import available_op_orders, build_op_order
from optimus.schedule.op_times import OpTimeline, OrderColumns, StageSeconds, time_ops
from optimus.schedule.pipeline_orders import PipelineOp, PipelineOrder
from optimus.schedule.pipeline_schedule import (
    ParameterTraffic,
    PipelineSpec,
    add_pipeline_to_schedule,
    make_optimizer_graph,
)
from optimus.schedule.schedule_builder import CHUNK_OP_KINDS, ChunkPricer, PricedChunk, ScheduleBuilder
from optimus.schedule.simulator import ScheduleDeadlock, Timeline, simulate_schedule

PRESETS = ("default", "paper", "clean", "clean-slack")
COST_MODEL = ClusterCostModel(cluster=find_job("paper/A").cluster, assumptions=get_preset("default"))


def simulate_by_events(
    order: PipelineOrder, seconds: StageSeconds, cost_model: ClusterCostModel
) -> tuple[Timeline, np.ndarray]:
    """Simulates the same pipeline by the event loop; returns its timeline and the rows of ops."""
    virtual = range(len(seconds.sends))
    spec = PipelineSpec(
        order=order,
        chunks=[
            PricedChunk(layers=(), seconds={kind: seconds.ops[kind][v] for kind in CHUNK_OP_KINDS})
            for v in virtual
        ],
        traffic=seconds.traffic,
        layout=Layout(pp=len(order), chunks=len(virtual) // len(order)),
        cost_model=cost_model,
    )
    builder = ScheduleBuilder(["llm"], spec.stages)
    pricer = ChunkPricer(["llm"], 0.0)
    blocks = add_pipeline_to_schedule(builder, spec, pricer, kernels=False)
    if cost_model.assumptions.optimizer_time:
        for stage in range(spec.stages):
            builder.add(make_optimizer_graph(spec.traffic_of(stage)), device=stage, after=blocks.reduces)
    schedule = builder.build()
    duration_s = schedule.duration_s.copy()  # chunks without layers send nothing
    at = schedule.chunk * spec.stages + schedule.device
    for kind, shift in ((OpKind.SEND_F, 0), (OpKind.SEND_B, 1)):
        rows = schedule.kind == kind
        duration_s[rows] = seconds.sends[at[rows] - shift]
    schedule = replace(schedule, duration_s=duration_s)
    timeline = simulate_schedule(schedule, slowdown=cost_model.assumptions.residence_slowdown)
    computes = np.flatnonzero(schedule.kind <= OpKind.WEIGHT_GRAD)
    return timeline, computes[np.argsort(schedule.device[computes], kind="stable")]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[PipelineOrder, StageSeconds]:
    stages, chunks, rounds = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    microbatches = rounds * stages if chunks > 1 else draw(st.integers(1, 8))
    names = available_op_orders(stages=stages, chunks=chunks, microbatches=microbatches)
    name = draw(st.sampled_from(names or ("1f1b",)))
    if not names:  # one stage of several chunks has no named order
        chunks = 1
    order = build_op_order(name, stages=stages, chunks=chunks, microbatches=microbatches)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, scale = stages * chunks, draw(st.sampled_from([0.0, 0.1, 1.0, 10.0]))
    traffic = [
        ParameterTraffic(gather_s=scale * a, reduce_s=scale * b, update_s=c)
        for a, b, c in random.uniform(0, 1, (count, 3)).tolist()
    ]
    ops = {kind: random.uniform(0.1, 1, count) for kind in CHUNK_OP_KINDS}
    return order, StageSeconds(ops=ops, sends=random.uniform(0, 0.5, count), traffic=traffic)


@given(pipelines(), st.sampled_from(PRESETS), st.sampled_from([0.0, 0.1, 0.5]))
@settings(max_examples=300, deadline=None)
def test_ops_take_as_long_as_in_the_event_loop(
    case: tuple[PipelineOrder, StageSeconds], preset: str, slowdown: float
) -> None:
    order, seconds = case
    assumptions = replace(get_preset(preset), residence_slowdown=slowdown)
    timed = time_ops(OrderColumns.of(order), seconds, assumptions)
    simulated, rows = simulate_by_events(order, seconds, replace(COST_MODEL, assumptions=assumptions))
    assert timed.step_s == pytest.approx(simulated.step_s, rel=1e-12)
    assert timed.start_s == pytest.approx(simulated.start_s[rows], rel=1e-12, abs=1e-12)
    assert timed.finish_s == pytest.approx(simulated.finish_s[rows], rel=1e-12)


def test_slower_traffic_is_noticed() -> None:
    """The comparison above can fail: a reduce that takes longer ends the step later."""
    order = build_op_order("1f1b", stages=2, chunks=1, microbatches=2)
    assert step_with_reduce(order, 3.0).step_s == step_with_reduce(order, 2.0).step_s + 1.0


def step_with_reduce(order: PipelineOrder, reduce_s: float) -> OpTimeline:
    ones = {kind: np.ones(2) for kind in CHUNK_OP_KINDS}
    traffic = [ParameterTraffic(reduce_s=reduce_s)] * 2
    seconds = StageSeconds(ops=ones, sends=np.zeros(2), traffic=traffic)
    return time_ops(OrderColumns.of(order), seconds, get_preset("default"))


def test_an_order_that_waits_for_itself_is_refused() -> None:
    forward, backward = PipelineOp(OpKind.FORWARD, 0, 0), PipelineOp(OpKind.BACKWARD, 0, 0)
    with pytest.raises(ScheduleDeadlock):
        step_with_reduce(((backward, forward), (forward, backward)), 0.0)
