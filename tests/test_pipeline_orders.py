"""Every pipeline is complete, runs without deadlock, and idles exactly as its closed form says."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import allowed_s
from reference_replay import Deadlock, idle_per_busy, makespan, replay

from optimus.errors import UserError
from optimus.ir.op import KIND_OF_WORD, OpKind
from optimus.schedule.pipeline_orders import (
    PipelineOp,
    PipelineOrder,
    build_1f1b_order,
    build_interleaved_1f1b_order,
    build_zero_bubble_order,
    megatron_warmup_counts,
    minimal_warmup_counts,
)

UNIFORM = {OpKind.FORWARD: 1, OpKind.BACKWARD: 2, OpKind.INPUT_GRAD: 1, OpKind.WEIGHT_GRAD: 1}

ONE_F_ONE_B = [(p, m) for p in range(1, 9) for m in range(1, 21)]  # m < p included
INTERLEAVED = [(p, v, p * g) for p in range(1, 8) for v in range(1, 5) for g in range(1, 5)]
ZERO_BUBBLE = INTERLEAVED + [(p, 1, m) for p in range(1, 8) for m in range(p, 2 * p)]
FEW_MICROBATCHES = [(p, m) for p in range(2, 9) for m in range(1, p)]


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, int]:
    stages, chunks = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    groups = st.integers(1, 4).map(lambda groups: groups * stages)
    return {
        "stages": stages,
        "chunks": chunks,
        "microbatches": draw(groups if chunks > 1 else st.integers(1, 16)),
    }


@st.composite
def warmups(draw: st.DrawFn, stages: int, chunks: int) -> tuple[int, ...]:
    """Any counts the contract allows: from the last stage back they never fall, nor climb too far."""
    counts = [(chunks - 1) * stages + draw(st.integers(0, 2 * stages))]
    ceiling = counts[0] + 2 * stages
    for _ in range(stages - 1):
        counts.append(draw(st.integers(counts[-1], ceiling)))
    return tuple(reversed(counts))


def assert_complete(
    pipeline: PipelineOrder, kinds: str, *, stages: int, chunks: int, microbatches: int
) -> None:
    """Every chunk and microbatch exactly once per kind, and backwards after what they need."""
    wanted = {
        PipelineOp(KIND_OF_WORD[k], c, m) for k in kinds for c in range(chunks) for m in range(microbatches)
    }
    assert len(pipeline) == stages
    for order in pipeline:
        assert Counter(order) == Counter(wanted)
        at = {op: index for index, op in enumerate(order)}
        for op in order:
            if op.kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD):
                assert at[op] > at[op._replace(kind=OpKind.FORWARD)]
            if op.kind is OpKind.WEIGHT_GRAD:
                assert at[op] > at[op._replace(kind=OpKind.INPUT_GRAD)]


@given(shape=shapes(), data=st.data())
@settings(deadline=None)
def test_interleaved_is_complete_and_runs(shape: dict[str, int], data: st.DataObject) -> None:
    warmup = data.draw(st.none() | warmups(shape["stages"], shape["chunks"]))
    pipeline = build_interleaved_1f1b_order(**shape, warmup=warmup)
    assert_complete(pipeline, "FB", **shape)
    replay(pipeline, UNIFORM)


@given(shape=shapes())
@settings(deadline=None)
def test_zero_bubble_is_complete_and_runs(shape: dict[str, int]) -> None:
    pipeline = build_zero_bubble_order(**shape)
    assert_complete(pipeline, "FIW", **shape)
    replay(pipeline, UNIFORM)


@given(stages=st.integers(1, 8), microbatches=st.integers(1, 20))
@settings(deadline=None)
def test_one_f_one_b_is_complete_and_holds_few_activations(stages: int, microbatches: int) -> None:
    pipeline = build_1f1b_order(stages=stages, microbatches=microbatches)
    assert_complete(pipeline, "FB", stages=stages, chunks=1, microbatches=microbatches)
    replay(pipeline, UNIFORM)
    for stage, order in enumerate(pipeline):
        assert peak_in_flight(order) == min(stages - stage, microbatches)


def peak_in_flight(order: tuple[PipelineOp, ...]) -> int:
    alive, peak = 0, 0
    for op in order:
        alive += 1 if op.kind is OpKind.FORWARD else -1
        peak = max(peak, alive)
    return peak


def test_one_f_one_b_by_hand() -> None:
    first, last = build_1f1b_order(stages=2, microbatches=3)
    assert [f"{op.kind.word}{op.microbatch}" for op in first] == ["F0", "F1", "B0", "F2", "B1", "B2"]
    assert [f"{op.kind.word}{op.microbatch}" for op in last] == ["F0", "B0", "F1", "B1", "F2", "B2"]


def test_closed_forms_cover_enough_cases() -> None:
    assert min(len(ONE_F_ONE_B), len(INTERLEAVED), len(ZERO_BUBBLE)) >= 96


@pytest.mark.parametrize(("p", "m"), ONE_F_ONE_B)
def test_one_f_one_b_idles_as_its_closed_form(p: int, m: int) -> None:
    done = replay(build_1f1b_order(stages=p, microbatches=m), UNIFORM)
    assert idle_per_busy(done) == Fraction(p - 1, m)


@pytest.mark.parametrize("warmup", [megatron_warmup_counts, minimal_warmup_counts])
@pytest.mark.parametrize(("p", "v", "m"), INTERLEAVED)
def test_interleaved_idles_as_its_closed_form(
    p: int, v: int, m: int, warmup: Callable[[int, int], tuple[int, ...]]
) -> None:
    done = replay(
        build_interleaved_1f1b_order(stages=p, chunks=v, microbatches=m, warmup=warmup(p, v)), UNIFORM
    )
    assert idle_per_busy(done) == Fraction(p - 1, v * m)


@pytest.mark.parametrize(("p", "v", "m"), ZERO_BUBBLE)
def test_zero_bubble_idles_as_its_closed_form(p: int, v: int, m: int) -> None:
    done = replay(build_zero_bubble_order(stages=p, chunks=v, microbatches=m), UNIFORM)
    assert idle_per_busy(done) == Fraction(p - 1, 3 * v * m)


@pytest.mark.parametrize(("p", "m"), FEW_MICROBATCHES)
def test_zero_bubble_with_fewer_microbatches_than_stages_takes_the_critical_path(p: int, m: int) -> None:
    """No order reaches the closed form here: p - 1 forwards to the last stage, m forwards and m
    input gradients there, p - 1 input gradients back, and the last weight gradient on stage 0."""
    done = replay(build_zero_bubble_order(stages=p, chunks=1, microbatches=m), UNIFORM)
    assert makespan(done) == (p - 1) + 2 * m + (p - 1) + 1 > 3 * m + (p - 1)


@pytest.mark.parametrize(("p", "v", "m"), [case for case in INTERLEAVED if case[0] > 1])
def test_one_forward_less_than_the_least_warmup_costs_time(p: int, v: int, m: int) -> None:
    best = makespan(replay(build_interleaved_1f1b_order(stages=p, chunks=v, microbatches=m), UNIFORM))
    for stage in range(p - 1):
        fewer = [count - (at == stage) for at, count in enumerate(minimal_warmup_counts(p, v))]
        done = replay(build_interleaved_1f1b_order(stages=p, chunks=v, microbatches=m, warmup=fewer), UNIFORM)
        assert makespan(done) > best


@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 4), (2, 2, 6), (2, 3, 4), (3, 1, 4), (3, 2, 6)])
def test_no_accepted_warmup_deadlocks(p: int, v: int, m: int) -> None:
    """All counts there are: what the contract accepts runs, and it accepts something to compare."""
    accepted = 0
    for warmup in product(range(v * m + 1), repeat=p):
        try:
            pipeline = build_interleaved_1f1b_order(stages=p, chunks=v, microbatches=m, warmup=warmup)
        except ValueError:
            continue
        replay(pipeline, UNIFORM)
        accepted += 1
    assert accepted > p


@pytest.mark.parametrize(
    ("warmup", "why"),
    [((3,), "1 counts for 2"), ((4, 1), "at least 2"), ((3, 4), "not rise"), ((8, 2), "fall by at most 4")],
)
def test_a_warmup_that_could_deadlock_is_refused(warmup: tuple[int, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        build_interleaved_1f1b_order(stages=2, chunks=2, microbatches=8, warmup=warmup)


def test_the_replay_sees_a_deadlock() -> None:
    crossed = ((PipelineOp(OpKind.BACKWARD, 0, 0), PipelineOp(OpKind.FORWARD, 0, 0)),)
    with pytest.raises(Deadlock):
        replay(crossed, UNIFORM)


@pytest.mark.parametrize("schedule", [build_interleaved_1f1b_order, build_zero_bubble_order])
@pytest.mark.parametrize(("microbatches", "choices"), [(20, "16 or 24"), (3, "8")])
def test_refusal_names_both_numbers_and_the_nearest_choice(
    schedule: Callable[..., PipelineOrder], microbatches: int, choices: str
) -> None:
    with pytest.raises(UserError) as refusal:
        schedule(stages=8, chunks=3, microbatches=microbatches)
    first, second = str(refusal.value).splitlines()
    assert first.startswith(f"error: workload.microbatches = {microbatches} ")
    assert "8 pipeline stages" in first and "3 chunks" in first
    assert second == f"hint: use {choices} microbatches, or chunks 1"


@pytest.mark.parametrize("schedule", [build_interleaved_1f1b_order, build_zero_bubble_order])
def test_a_large_pipeline_is_written_quickly(schedule: Callable[..., PipelineOrder]) -> None:
    times_s = []
    for _ in range(3):
        start = time.perf_counter()
        schedule(stages=8, chunks=12, microbatches=128)
        times_s.append(time.perf_counter() - start)
    assert min(times_s) < allowed_s(0.15)
