"""The paper's scheduler on the paper's own small examples, and on bubbles drawn at random."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_replay import makespan, replay

from optimus.ir.op import OpKind
from optimus.planner.systems.paper_candidate import (
    MAX_SPLITS,
    candidate_microbatch_splits,
    enumerate_microbatch_splits,
    uniform_microbatch_split,
)
from optimus.schedule.fill_paper import (
    COMPUTE,
    LAUNCH,
    WAIT,
    Bubble,
    DeviceBubbles,
    EncoderPipeline,
    TimedKernel,
    assign_microbatches_by_end_time,
    fill_bubbles,
    latest_delay_as_assigned,
    latest_delay_in_any_order,
    pack_kernels_into_bubbles,
    subtract_kernels_from_bubbles,
)
from optimus.schedule.pipeline_orders import build_interleaved_1f1b_order, minimal_warmup_counts

DURATIONS = {OpKind.FORWARD: 1, OpKind.BACKWARD: 2}


# ---------------------------------------------------------------- the paper's examples


def test_eight_microbatches_over_two_pipelines_give_seven_splits() -> None:
    assert list(enumerate_microbatch_splits(8, 2)) == [(n, 8 - n) for n in range(1, 8)]


@pytest.mark.parametrize(("microbatches", "pipelines"), [(8, 1), (8, 3), (16, 4), (6, 6)])
def test_splits_are_all_that_there_are(microbatches: int, pipelines: int) -> None:
    splits = list(enumerate_microbatch_splits(microbatches, pipelines))
    assert len(set(splits)) == len(splits) == math.comb(microbatches - 1, pipelines - 1)
    assert all(sum(split) == microbatches and min(split) >= 1 for split in splits)


def test_alike_pipelines_need_one_of_their_permutations() -> None:
    splits, whole = candidate_microbatch_splits(8, 2, groups=[0, 0])
    assert whole and splits == [(7, 1), (6, 2), (5, 3), (4, 4)]
    assert len(candidate_microbatch_splits(8, 2, groups=[0, 4])[0]) == 7


def test_too_many_splits_leave_the_uniform_one_and_its_neighbours() -> None:
    splits, whole = candidate_microbatch_splits(64, 8, groups=range(8))
    assert not whole and len(splits) <= MAX_SPLITS
    assert uniform_microbatch_split(64, 8) == (8,) * 8 == splits[0]
    assert len(splits) == 1 + 8 * 7
    assert all(sum(split) == 64 and max(split) - min(split) <= 2 for split in splits)


def test_later_forwards_are_deferred_at_no_cost() -> None:
    """4 devices, 2 chunks, 8 microbatches: adjusted, F5 to F8 start later and all end as before."""
    usual = build_interleaved_1f1b_order(stages=4, chunks=2, microbatches=8)
    adjusted = build_interleaved_1f1b_order(
        stages=4, chunks=2, microbatches=8, warmup=minimal_warmup_counts(4, 2)
    )
    before, after = replay(usual, DURATIONS), replay(adjusted, DURATIONS)
    assert makespan(before) == makespan(after)
    starts = [
        [done[0, op].start for op in order[0] if op.kind == OpKind.FORWARD and op.chunk == 0]
        for order, done in ((usual, before), (adjusted, after))
    ]
    assert starts[0][:4] == starts[1][:4]
    assert all(late > soon for soon, late in zip(starts[0][4:], starts[1][4:], strict=True)), starts


def test_the_ith_forward_to_end_becomes_microbatch_i() -> None:
    """EF and F with two pipelines: any pipeline may be the i-th."""
    ends = [[1.0, 4.0], [2.0, 3.0]]
    assert assign_microbatches_by_end_time(ends) == (0, 1, 1, 0)
    assert latest_delay_in_any_order([1.0, 2.0, 3.0, 4.0], ends) == 0.0
    assert latest_delay_in_any_order([1.0, 2.0, 2.5, 4.0], ends) == 0.5
    assert latest_delay_in_any_order([1.5, 2.5, 3.5, 4.5], ends) == -0.5


def test_a_backward_waits_for_the_microbatch_that_its_forward_became() -> None:
    """EB and B with two pipelines, in the mirror: microbatches 4 and 1 are of pipeline 0, 3 and 2 of 1."""
    points = [10.0 - b for b in (9.0, 8.0, 7.0, 6.0)]  # B_4, B_3, B_2, B_1 in the mirror
    own = partial(latest_delay_as_assigned, [[points[0], points[3]], [points[1], points[2]]])
    assert own([[1.0, 4.0], [2.0, 3.0]]) == 0.0
    # Sorted over all pipelines these come in time; but pipeline 1 would begin before its gradients exist.
    ends = [[1.0, 2.0], [3.0, 4.0]]
    assert latest_delay_in_any_order(points, ends) == 0.0 < own(ends)


# ---------------------------------------------------------------- packing

LAYER: list[TimedKernel] = [(COMPUTE, 2.0), (LAUNCH, 1.0), (WAIT, 0.0), (COMPUTE, 1.0)]


def a_device(*bubbles: tuple[float, float, bool], free: float = 0.0) -> DeviceBubbles:
    """LLM compute wherever no bubble is."""
    found = [Bubble(begin_s=b, end_s=e, tp=tp) for b, e, tp in bubbles]
    return DeviceBubbles(
        free_s=free, bubbles=found, carriers=[(a.end_s, b.begin_s) for a, b in pairwise(found)]
    )


def test_as_many_kernels_as_fit_go_into_a_bubble() -> None:
    device = a_device((0, 3, True), (5, 8, True))
    kernels: list[TimedKernel] = [(COMPUTE, 1.0), (COMPUTE, 1.5), (COMPUTE, 1.0), (COMPUTE, 2.0)]
    assert pack_kernels_into_bubbles(device, kernels, 0.0) == ((0.0, 1.0, 5.0, 6.0), 8.0)
    assert pack_kernels_into_bubbles(device, [*kernels, (COMPUTE, 0.1)], 0.0) is None


def test_communication_runs_under_compute_and_never_in_a_tp_bubble() -> None:
    # A launch after the first kernel has room in the TP bubble, and yet waits for LLM compute.
    found = pack_kernels_into_bubbles(a_device((0, 4, True), (6, 9, True)), LAYER, 0.0)
    assert found == ((0.0, 4.0, 5.0, 6.0), 7.0)
    # In a bubble of the pipeline it may run at once.
    assert pack_kernels_into_bubbles(a_device((0, 4, False), (6, 9, False)), LAYER, 0.0) == (
        (0.0, 2.0, 3.0, 3.0),
        4.0,
    )
    # Compute that is too short does not carry it.
    found = pack_kernels_into_bubbles(a_device((0, 2, True), (2.5, 4, True), (6, 9, True)), LAYER, 0.0)
    assert found == ((0.0, 4.0, 5.0, 6.0), 7.0)


def test_collectives_share_the_links_one_after_another() -> None:
    device = a_device((0, 1, True), (20, 21, True))
    kernels: list[TimedKernel] = [(LAUNCH, 5.0), (LAUNCH, 1.0), (WAIT, 0.0), (WAIT, 0.0)]
    assert pack_kernels_into_bubbles(device, kernels, 0.0) == ((1.0, 6.0, 7.0, 7.0), 7.0)


def test_communication_takes_the_first_place_it_finds() -> None:
    """A bubble of the pipeline that begins later, too: waiting longer never brings it forward."""
    device = a_device((0, 1, True), (2, 10, False), (12, 13, True), (20, 21, True))
    assert device.carry(1.5, 0.5) == 2.0 == device.carry(1.5, 2.0)
    assert device.carry(9.0, 0.5) is None


def a_pipeline(free: float = 4.0, *, room: int = 20, stages: int = 1) -> EncoderPipeline:
    device = a_device(*((free + 4 + 5 * n, free + 7 + 5 * n, False) for n in range(room)), free=free)
    return EncoderPipeline(
        devices=[device] * stages, kernels=[[(COMPUTE, 3.0)]] * stages, seconds=[3.0] * stages
    )


def test_coarse_keeps_what_fits_and_delays_by_the_rest() -> None:
    coarse = a_pipeline(free=7.0).coarse(3)
    assert coarse.ends_s == (3.0, 6.0, 9.0) and coarse.overflow_s == 2.0 and coarse.inside_s == 7.0


def test_fine_moves_the_critical_pipeline_until_nothing_delays() -> None:
    short, long = a_pipeline(free=3.0), a_pipeline(free=9.0)
    filled = fill_bubbles([short, long], partial(latest_delay_in_any_order, [100.0] * 6), (3, 3))
    assert filled.coarse_delay_s == 6.0 and filled.delay_s == 0.0
    assert filled.moved == (2, 0)  # the other fits
    assert filled.inside_s(coarse=False) == filled.work_s == 18.0
    assert filled.inside_s(coarse=True) == 12.0


def test_fine_stops_at_the_first_failure() -> None:
    pipeline = a_pipeline(free=3.0)  # moved microbatches end at 10, 15, 20
    filled = fill_bubbles([pipeline], partial(latest_delay_in_any_order, [3.0, 10.0, 14.0]), (3,))
    assert filled.moved == (1,) and filled.delay_s == 3.0
    full = fill_bubbles([a_pipeline(free=3.0, room=1)], partial(latest_delay_in_any_order, [100.0] * 3), (3,))
    assert full.moved == (1,) and full.delay_s == 3.0


def test_what_is_late_delays_but_does_not_end_the_search() -> None:
    """Moved microbatches end at 10 and 15; with both moved the first is 2 late, which is less than 6."""
    filled = fill_bubbles([a_pipeline(free=3.0)], partial(latest_delay_in_any_order, [1.0, 10.0, 15.0]), (3,))
    assert filled.coarse_delay_s == 6.0
    assert filled.moved == (2,) and filled.delay_s == 2.0


def test_a_pipeline_s_stages_follow_one_another() -> None:
    move = a_pipeline(stages=2).move(0)
    assert move is not None
    assert move.begins_s == ((8.0,), (13.0,)) and move.end_s == 16.0


@st.composite
def devices(draw: st.DrawFn) -> DeviceBubbles:
    lengths = draw(
        st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.booleans()), min_size=1, max_size=12)
    )
    now, bubbles = 0, []
    for gap, length, tp in lengths:
        bubbles.append((float(now + gap), float(now + gap + length), tp))
        now += gap + length
    return a_device(*bubbles)


KERNELS = st.lists(
    st.one_of(
        st.tuples(st.just(COMPUTE), st.integers(0, 4).map(float)),
        st.tuples(st.just(LAUNCH), st.integers(1, 3).map(float)),
        st.just((WAIT, 0.0)),
    ),
    max_size=8,
)


@pytest.mark.ci
@given(device=devices(), kernels=KERNELS)
@settings(max_examples=300, deadline=None)
def test_packed_kernels_lie_in_bubbles_in_order_and_do_not_overlap(
    device: DeviceBubbles, kernels: list[TimedKernel]
) -> None:
    found = pack_kernels_into_bubbles(device, kernels, 0.0)
    if found is None:
        return
    begins, end = found
    assert list(begins) == sorted(begins)
    busy, arrived = 0.0, 0.0
    for (what, seconds), begin in zip(kernels, begins, strict=True):
        inside = [b for b in device.bubbles if b.begin_s <= begin and begin + seconds <= b.end_s]
        carried = any(b <= begin and begin + seconds <= e for b, e in device.carriers)
        if what == COMPUTE:
            assert inside and begin >= busy
            busy = begin + seconds
        elif what == LAUNCH:
            assert carried or any(not bubble.tp for bubble in inside)
            arrived = begin + seconds
        else:
            assert begin >= min(arrived, end)
    assert end >= max(busy, arrived)


@given(device=devices(), kernels=KERNELS)
@settings(max_examples=200, deadline=None)
def test_what_is_taken_is_gone(device: DeviceBubbles, kernels: list[TimedKernel]) -> None:
    found = pack_kernels_into_bubbles(device, kernels, 0.0)
    if found is None:
        return
    left = subtract_kernels_from_bubbles(device, kernels, found[0])
    total = sum(bubble.end_s - bubble.begin_s for bubble in device.bubbles)
    taken = sum(seconds for what, seconds in kernels if what == COMPUTE)
    assert sum(bubble.end_s - bubble.begin_s for bubble in left.bubbles) == pytest.approx(total - taken)


@given(
    frees=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    points=st.lists(st.integers(0, 60), min_size=6, max_size=6),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_fine_never_delays_more_than_coarse_and_keeps_all_in_time(
    frees: list[int], points: list[int], data: st.DataObject
) -> None:
    pipelines = [a_pipeline(free=float(free)) for free in frees]
    split = data.draw(st.sampled_from(list(enumerate_microbatch_splits(6, len(frees)))))
    ready = partial(latest_delay_in_any_order, sorted(map(float, points)))
    filled = fill_bubbles(pipelines, ready, split)
    assert 0.0 <= filled.delay_s <= filled.coarse_delay_s
    assert all(0 <= moved <= count for moved, count in zip(filled.moved, split, strict=True))
    assert ready(filled.ends_s) <= 1e-9
    assert filled.inside_s(coarse=True) <= filled.inside_s(coarse=False) + 1e-9 <= filled.work_s + 2e-9
