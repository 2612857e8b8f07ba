"""Which items go to which encoder microbatch, and how every rank hears of it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus.engine.batch_plan import (
    COLUMNS,
    BatchPlan,
    BatchPlanBroadcast,
    SampleSizes,
    plan_batch,
)
from optimus.errors import UserError
from optimus.ir.plan import EncoderBlocks, Plan, Seconds
from optimus.planner.user_modules import plan_modules

ONE = Seconds(forward_s=1.0, backward_s=2.0)
MICROBATCHES, PIECES, ROOM = 3, {"vision": 2, "audio": 1}, {"vision": 100, "audio": 80}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan()


def make_plan() -> Plan:
    made = plan_modules(
        stages=[ONE],
        encoders={name: EncoderBlocks(blocks=[ONE], pieces=pieces) for name, pieces in PIECES.items()},
        microbatches=MICROBATCHES,
        ranks=1,
        pp=1,
    )
    modules = {name: replace(module, bin_tokens=ROOM.get(name, 0)) for name, module in made.modules.items()}
    return replace(made, modules=modules)


PLAN = make_plan()
items = st.fixed_dictionaries(
    {
        "vision": st.lists(st.integers(1, 20), max_size=4).map(tuple),
        "audio": st.lists(st.integers(1, 10), max_size=3).map(tuple),
    }
)


@st.composite
def steps(draw: st.DrawFn) -> list[SampleSizes]:
    count = MICROBATCHES * draw(st.integers(1, 2))
    first = draw(st.integers(0, 10**9))
    return [SampleSizes(number=first + at, items=draw(items)) for at in range(count)]


@given(steps())
def test_every_item_is_in_one_bin_of_its_own_microbatch(samples: list[SampleSizes]) -> None:
    table = plan_batch(PLAN, samples)
    assert [number for part in table.samples for number in part] == [sample.number for sample in samples]
    assert len({len(part) for part in table.samples}) == 1
    for name, pieces in PIECES.items():
        bins = table.bins[name]
        assert len(bins) == MICROBATCHES * pieces
        for microbatch, part in enumerate(table.samples):
            found = [item for own in bins[microbatch * pieces : (microbatch + 1) * pieces] for item in own]
            there = [(s.number, at) for s in samples if s.number in part for at in range(len(s.items[name]))]
            assert sorted(found) == there
        sizes = {(s.number, at): tokens for s in samples for at, tokens in enumerate(s.items[name])}
        assert all(sum(sizes[item] for item in own) <= ROOM[name] for own in bins)
        assert all(list(own) == sorted(own) for own in bins)  # in the order of the samples


@given(steps(), st.integers(0, 5))
def test_a_table_comes_back_from_whole_numbers(samples: list[SampleSizes], more: int) -> None:
    items = sum(len(lengths) for sample in samples for lengths in sample.items.values())
    table, rows = plan_batch(PLAN, samples), items + more
    given_ = table.to_tensor(rows)
    assert given_.shape == (1 + len(samples) + rows * COLUMNS,)
    assert BatchPlan.from_tensor(given_, PLAN, rows) == table


def test_items_go_to_the_piece_that_has_least(plan: Plan) -> None:
    samples = [SampleSizes(number=n, items={"vision": (8, 3, 3, 6)}) for n in range(MICROBATCHES)]
    table = plan_batch(plan, samples)
    sizes = (8, 3, 3, 6)
    filled = sorted(sum(sizes[item] for _, item in own) for own in table.bins["vision"][:2])
    assert filled[1] - filled[0] <= 4 and sum(filled) == 20
    assert table.bins["audio"] == ((),) * MICROBATCHES


def test_too_many_tokens_name_both_numbers_and_the_samples(plan: Plan) -> None:
    samples = [SampleSizes(number=7 + n, items={"audio": (40, 30, 13) if n == 1 else ()}) for n in range(3)]
    with pytest.raises(UserError) as error:
        plan_batch(plan, samples)
    assert error.value.field == "items of audio in samples 8 to 8"
    assert re.search(r"\b83\b.*\b80\b", error.value.problem)
    assert "workload.lengths" in error.value.hint


def test_an_item_larger_than_a_piece_is_refused_though_all_pieces_together_have_room(plan: Plan) -> None:
    samples = [SampleSizes(number=n, items={"vision": (101,)}) for n in range(3)]
    with pytest.raises(UserError, match="101"):
        plan_batch(plan, samples)


def test_samples_that_do_not_fill_all_microbatches_are_an_error_of_the_program(plan: Plan) -> None:
    with pytest.raises(AssertionError, match="4 samples in 3 microbatches"):
        plan_batch(plan, [SampleSizes(number=n, items={}) for n in range(4)])


def test_more_items_than_rows_are_an_error_of_the_program(plan: Plan) -> None:
    table = plan_batch(plan, [SampleSizes(number=n, items={"audio": (1, 1)}) for n in range(3)])
    with pytest.raises(AssertionError, match="6 items in a batch plan for 5"):
        table.to_tensor(5)


def test_alone_a_reader_tells_itself(plan: Plan) -> None:
    samples = [SampleSizes(number=n, items={"vision": (2,)}) for n in range(3)]
    table = plan_batch(plan, samples)
    exchange = BatchPlanBroadcast(plan, None, reader=0, max_items=8)
    exchange.start(table, len(samples))
    assert exchange.wait() == table
    with pytest.raises(AssertionError, match="start"):
        exchange.wait()
