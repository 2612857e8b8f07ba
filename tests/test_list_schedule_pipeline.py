"""List scheduling and shaking: every order they make can run, keeps its cap and takes what it claims."""

from __future__ import annotations

from dataclasses import asdict
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_replay import dependency

from optimus.ir.op import OpKind
from optimus.planner.systems.op_order_search import sliding_cuts, step_lower_bound_s
from optimus.schedule.local_search import shorten_pipeline_order
from optimus.schedule.op_times import OrderColumns
from optimus.schedule.pipeline_orders import (
    PRIORITIES,
    UNLIMITED_CHUNKS,
    OpTimes,
    PipelineOrder,
    Priority,
    list_schedule_pipeline,
)

SPLIT, WHOLE = (OpKind.FORWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD), (OpKind.FORWARD, OpKind.BACKWARD)


def uniform(stages: int, chunks: int, kinds: tuple[OpKind, ...] = SPLIT) -> OpTimes:
    seconds = {kind: [1.0] * (stages * chunks) for kind in kinds}
    return OpTimes(stages=stages, seconds=seconds, send_s=[0.0] * (stages * chunks))


@st.composite
def op_times(draw: st.DrawFn) -> OpTimes:
    """Some ops take no time: those of frozen layers."""
    stages, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    count = stages * chunks
    durations = st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count)
    kinds = draw(st.sampled_from((SPLIT, WHOLE)))
    seconds = {kind: draw(durations) for kind in kinds}
    return OpTimes(stages=stages, seconds=seconds, send_s=[0.0] * count if stages == 1 else draw(durations))


def replayed_s(order: PipelineOrder, times: OpTimes) -> float:
    """Makespan of an order, or KeyError if some op stands before one that it waits for."""
    ends: dict[object, float] = {}
    clock = [0.0] * times.stages
    chunks = len(times.send_s) // times.stages
    left = [list(ops) for ops in order]
    while any(left):
        before = len(ends)
        for stage, ops in enumerate(left):
            while ops:
                needs = dependency(stage, ops[0], times.stages, chunks)
                if needs is not None and needs not in ends:
                    break
                op = ops.pop(0)
                virtual, ready = op.chunk * times.stages + stage, 0.0
                if needs is not None:
                    crossed = min(virtual, needs[1].chunk * times.stages + needs[0])
                    apart = (needs[0], needs[1].chunk) != (stage, op.chunk)
                    ready = ends[needs] + (times.send_s[crossed] if apart else 0.0)
                clock[stage] = ends[stage, op] = max(clock[stage], ready) + times.seconds[op.kind][virtual]
        if len(ends) == before:
            raise KeyError("deadlock")
    return max(clock)


@settings(deadline=None, max_examples=60)
@given(op_times(), st.integers(1, 6), st.sampled_from((1, 3, UNLIMITED_CHUNKS)), st.sampled_from(PRIORITIES))
def test_orders_run_in_the_time_they_claim(
    times: OpTimes, microbatches: int, cap: int, priority: Priority
) -> None:
    drafts = [list_schedule_pipeline(times, microbatches, cap=cap, priority=priority)]
    drafts.append(
        shorten_pipeline_order(drafts[0], rounds=5, random=Random(0), enough_s=0.0, accept=lambda draft: True)
    )
    for draft in drafts:
        assert sum(map(len, draft.order)) == len(draft.starts)
        assert len(draft.starts) == len(times.send_s) * microbatches * len(times.seconds)
        assert replayed_s(draft.order, times) == pytest.approx(draft.step_s, rel=1e-9, abs=1e-9)
        assert draft.step_s >= step_lower_bound_s(times, microbatches) - 1e-9
    assert drafts[1].step_s <= drafts[0].step_s


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(4, 1, 8), (4, 2, 8), (8, 12, 16), (3, 2, 5)])
def test_without_a_cap_only_the_first_forwards_are_waited_for(
    stages: int, chunks: int, microbatches: int
) -> None:
    """ZB-H2: the last stage starts `stages - 1` forwards late and is never idle again."""
    step_s = list_schedule_pipeline(uniform(stages, chunks), microbatches).step_s
    assert step_s == stages - 1 + 3 * chunks * microbatches


@pytest.mark.parametrize("cap", [1, 2, 4, 8])
@pytest.mark.parametrize("kinds", [SPLIT, WHOLE])
def test_a_cap_limits_what_is_alive(cap: int, kinds: tuple[OpKind, ...]) -> None:
    for ops in list_schedule_pipeline(uniform(4, 1, kinds), 8, cap=cap).order:
        alive = most = 0
        for op in ops:
            alive += (op.kind is OpKind.FORWARD) - (op.kind is kinds[-1])
            most = max(most, alive)
        assert most <= cap


@settings(deadline=None, max_examples=30)
@given(op_times(), st.integers(1, 6))
def test_the_last_order_accepted_is_the_one_returned(times: OpTimes, microbatches: int) -> None:
    accepted: list[OrderColumns] = []

    def accept(order: OrderColumns) -> bool:
        accepted.append(order)
        return True

    draft = list_schedule_pipeline(times, microbatches, cap=1)
    shorter = shorten_pipeline_order(draft, rounds=5, random=Random(0), enough_s=0.0, accept=accept)
    if not accepted:
        assert shorter is draft
        return
    expected = asdict(OrderColumns.of(shorter.order))
    for name, column in asdict(accepted[-1]).items():
        assert np.array_equal(column, expected[name]), name


def test_shaking_accepts_only_what_it_may() -> None:
    times = OpTimes(
        stages=2,
        seconds={OpKind.FORWARD: [3.0, 1.0], OpKind.INPUT_GRAD: [1.0, 4.0], OpKind.WEIGHT_GRAD: [2.0, 2.0]},
        send_s=[0.0, 0.0],
    )
    draft = list_schedule_pipeline(times, 5, cap=1)
    assert (
        shorten_pipeline_order(draft, rounds=20, random=Random(0), enough_s=0.0, accept=lambda other: False)
        is draft
    )


def test_slides_keep_every_virtual_stage_filled() -> None:
    found = list(sliding_cuts((0, 2, 3, 5)))
    assert len(found) == len(set(found)) and (0, 2, 3, 5) not in found
    assert set(found) == {(0, 1, 3, 5), (0, 2, 4, 5), (0, 1, 2, 5), (0, 3, 4, 5)}
