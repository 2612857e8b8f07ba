"""Every item goes to one encoder microbatch of one replica, and every rank hears of it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_dealing import DATA, draw

from optimus.data.step_samples import WINDOW, StepSamples, carry_over
from optimus.engine.batch_plan import (
    COLUMNS,
    BatchPlan,
    BatchPlanBroadcast,
    BinItem,
    SampleSizes,
    count_padded_tokens,
    plan_batch,
)
from optimus.engine.rank_batch import list_needed_samples
from optimus.errors import UserError
from optimus.ir.plan import EncoderBlocks, Plan, Seconds
from optimus.planner.user_modules import plan_modules

ONE = Seconds(forward_s=1.0, backward_s=2.0)
MICROBATCHES, PIECES, ROOM = 3, {"vision": 2, "audio": 1}, {"vision": 100, "audio": 80}
REPLICAS = 4


def make_plan(replicas: int = 1, dealing: int = 1) -> Plan:
    made = plan_modules(
        stages=[ONE],
        encoders={name: EncoderBlocks(blocks=[ONE], pieces=pieces) for name, pieces in PIECES.items()},
        microbatches=MICROBATCHES,
        ranks=replicas,
        pp=1,
    )
    modules = {name: replace(module, bin_tokens=ROOM.get(name, 0)) for name, module in made.modules.items()}
    return replace(made, modules=modules, dealing_replicas=dealing)


PLAN = make_plan()
PLANS = {dealing: make_plan(REPLICAS, dealing) for dealing in (1, 2, 4)}
items = st.fixed_dictionaries(
    {
        "vision": st.lists(st.integers(1, 20), max_size=4).map(tuple),
        "audio": st.lists(st.integers(1, 10), max_size=3).map(tuple),
    }
)


@st.composite
def steps(draw: st.DrawFn, replicas: int = REPLICAS) -> list[SampleSizes]:
    count = MICROBATCHES * replicas * draw(st.integers(1, 2))
    first = draw(st.integers(0, 10**9))
    return [SampleSizes(number=first + at, items=draw(items)) for at in range(count)]


@given(steps(), st.sampled_from(sorted(PLANS)))
def test_every_item_is_in_one_bin_that_feeds_its_microbatch(samples: list[SampleSizes], dealing: int) -> None:
    plan = PLANS[dealing]
    tables = [plan_batch(plan, samples, group) for group in range(REPLICAS // dealing)]
    microbatches = list(chain.from_iterable(chain.from_iterable(table.samples for table in tables)))
    assert sorted(chain.from_iterable(microbatches)) == [sample.number for sample in samples]
    assert len({len(part) for part in microbatches}) == 1
    for table in tables:
        assert len(table.samples) == dealing
        for name, pieces in PIECES.items():
            for microbatch in range(MICROBATCHES):
                numbers = {n for replica in table.samples for n in replica[microbatch]}
                places = range(microbatch * pieces, (microbatch + 1) * pieces)
                found = [item for replica in table.bins[name] for at in places for item in replica[at]]
                there = [
                    BinItem(s.number, at, tokens)
                    for s in samples
                    if s.number in numbers
                    for at, tokens in enumerate(s.items[name])
                ]
                assert sorted(found) == there
            for own in chain.from_iterable(table.bins[name]):
                assert list(own) == sorted(own)  # in the order of the samples


@given(steps(), st.sampled_from(sorted(PLANS)))
def test_ranks_need_their_own_samples_and_encode_every_item_once(
    samples: list[SampleSizes], dealing: int
) -> None:
    plan, encoded, read = PLANS[dealing], Counter[tuple[int, str, int]](), Counter[int]()
    for rank in range(REPLICAS):
        table = plan_batch(plan, samples, rank // dealing)
        needed = list_needed_samples(plan, rank, table)
        own = set(chain.from_iterable(table.samples[rank % dealing]))
        assert own <= needed.keys() and all(needed[number] for number in needed.keys() - own)
        encoded.update((number, *key) for number, keys in needed.items() for key in keys)
        read.update(own)
    assert encoded == {
        (sample.number, name, index): 1
        for sample in samples
        for name, sizes in sample.items.items()
        for index in range(len(sizes))
    }
    assert read == {sample.number: 1 for sample in samples}


@given(steps(), st.sampled_from(sorted(PLANS)), st.integers(0, 5), st.integers(0, 10**6))
def test_a_table_comes_back_from_whole_numbers(
    samples: list[SampleSizes], dealing: int, carried: int, labels: int
) -> None:
    plan = PLANS[dealing]
    table = plan_batch(plan, samples, labels=labels, carried=carried)
    count = sum(map(len, chain.from_iterable(chain.from_iterable(table.bins.values()))))
    given_ = table.to_tensor()
    assert given_.shape == (3 + len(samples) * dealing // REPLICAS + count * COLUMNS,)
    assert BatchPlan.from_tensor(given_, plan) == table


@given(steps(), st.sampled_from(sorted(PLANS)))
def test_loads_differ_by_no_more_than_an_item_of_each_kind(samples: list[SampleSizes], dealing: int) -> None:
    """Pipelines of a group, which items are dealt over; groups, which whole sequences are dealt to."""
    plan = PLANS[dealing]
    groups = []
    for group in range(REPLICAS // dealing):
        table = plan_batch(plan, samples, group)
        for name in PIECES:
            sizes = [item.tokens for item in chain.from_iterable(chain.from_iterable(table.bins[name]))]
            loads = [sum(item.tokens for own in replica for item in own) for replica in table.bins[name]]
            assert max(loads) - min(loads) <= max(sizes, default=0)
        groups.append(sum(i.tokens for of in table.bins.values() for r in of for own in r for i in own))
    largest = max(sum(map(sum, sample.items.values())) for sample in samples)
    assert max(groups) - min(groups) <= largest


@pytest.mark.ci("data")
@pytest.mark.parametrize("name", DATA)
def test_bins_run_hardly_more_tokens_than_there_are(name: str) -> None:
    """Eight replicas, 32 microbatches in two pieces on tp 8, with groups of 4 tokens merged: 20 batches."""
    plan = plan_modules(
        stages=[ONE],
        encoders={"vision": EncoderBlocks(blocks=[ONE], pieces=2)},
        microbatches=32,
        ranks=8,
        pp=1,
    )
    wide = replace(plan.modules["vision"], bin_tokens=10**6)
    plan = replace(plan, modules={**plan.modules, "vision": wide}, dealing_replicas=8)
    module, rng = replace(wide, layout=wide.layout.with_(tp=8)), np.random.default_rng(0)
    padding, fullest = [], []
    for _ in range(20):
        drawn = draw(rng, 8 * 32, **DATA[name])
        samples = [
            SampleSizes(number=n, items={"vision": tuple(round(tokens / 4) * 4 for tokens in own)})
            for n, own in enumerate(drawn)
        ]
        bins = plan_batch(plan, samples).bins["vision"]
        loads = np.array([[sum(item.tokens for item in own) for own in replica] for replica in bins])
        run = sum(count_padded_tokens(module, 4, own) for replica in bins for own in replica)
        padding.append(run / loads.sum())
        fullest.append(loads.sum(axis=1).max() / loads.sum(axis=1).mean())
    assert max(padding) <= 1.03
    assert np.mean(fullest) <= 1.01


def test_an_item_larger_than_memory_was_planned_for_is_named() -> None:
    samples = [SampleSizes(number=7 + n, items={"vision": (101,) if n == 1 else ()}) for n in range(3)]
    with pytest.raises(UserError) as error:
        plan_batch(PLAN, samples)
    assert error.value.field == "items of vision in sample 8"
    assert re.search(r"\b101\b.*\b100\b", error.value.problem)
    assert "workload.lengths" in error.value.hint


def test_items_are_dealt_by_cost_and_not_by_tokens() -> None:
    """One image of 8 costs as much as four of 4 where attention is all."""
    squares = {name: replace(module, item_cost=(0.0, 1.0)) for name, module in PLAN.modules.items()}
    sizes = (8, 4, 4, 4, 4)
    samples = [SampleSizes(number=n, items={"vision": sizes}) for n in range(MICROBATCHES)]
    table = plan_batch(replace(PLAN, modules=squares), samples)
    found = sorted(sorted(item.tokens for item in own) for own in table.bins["vision"][0])
    assert found == [[4, 4, 4, 4]] * MICROBATCHES + [[8]] * MICROBATCHES


def test_bins_hold_what_they_hold() -> None:
    module = replace(PLAN.modules["vision"], layout=PLAN.modules["vision"].layout.with_(tp=2))
    sizes = {(): 8, (8,): 8, (9,): 16, (3, 4): 8, (12, 20): 32}
    for tokens, padded in sizes.items():
        bin_items = [BinItem(0, at, each) for at, each in enumerate(tokens)]
        assert count_padded_tokens(module, 4, bin_items) == padded


def test_samples_that_do_not_fill_all_microbatches_are_an_error_of_the_program() -> None:
    with pytest.raises(AssertionError, match="4 sequences in 3 columns"):
        plan_batch(PLAN, [SampleSizes(number=n, items={}) for n in range(4)])


def test_alone_a_reader_tells_itself() -> None:
    samples = [SampleSizes(number=n, items={"vision": (2,)}) for n in range(3)]
    table = plan_batch(PLAN, samples)
    exchange = BatchPlanBroadcast(PLAN, None, reader=0)
    exchange.start(table)
    assert exchange.wait() == table
    with pytest.raises(AssertionError, match="start"):
        exchange.wait()


# ---------------------------------------------------------------------------- samples of a step

tokens = st.fixed_dictionaries({"vision": st.integers(0, 50), "audio": st.integers(0, 9)})


@given(st.data(), st.integers(1, 5), st.integers(1, 6), st.integers(10, 120))
def test_what_a_step_has_no_room_for_is_carried(data: st.DataObject, per: int, count: int, most: int) -> None:
    loads = data.draw(st.lists(tokens, min_size=per * count, max_size=per * count))
    capacity = {"vision": most, "audio": 9 * per}
    found = carry_over(loads, per, capacity)
    assert [len(step) for step in found] == [per] * count
    assert sorted(chain.from_iterable(found)) == list(range(per * count))
    for step, places in enumerate(found):
        over = [name for name, room in capacity.items() if sum(loads[at][name] for at in places) > room]
        if over:  # then nothing that comes later is lighter than the heaviest of it
            heaviest = max(loads[at][over[0]] for at in places)
            worst = [loads[at] for at in places if loads[at][over[0]] == heaviest]
            for at in chain.from_iterable(found[step + 1 :]):
                assert any(
                    loads[at] == load or any(loads[at][name] > load[name] for name in load) for load in worst
                )


def test_steps_with_room_are_as_drawn_and_windows_do_not_mix() -> None:
    heavy = {3, 4, 5, 40}
    drawn = Counter[int]()

    def tokens_of(number: int) -> dict[str, int]:
        drawn[number] += 1
        return {"vision": 9 if number in heavy else 1}

    samples = StepSamples(tokens_of, 4, {"vision": 20})
    assert samples.numbers(0) == [0, 1, 2, 3] and samples.count_carried(0) == 0
    assert samples.numbers(1) == [4, 5, 6, 7]  # 9 + 9 + 1 + 1 just fit
    seen = list(chain.from_iterable(samples.numbers(step) for step in range(3 * WINDOW)))
    assert sorted(seen) == list(range(3 * WINDOW * 4))
    assert all(n // (WINDOW * 4) == step // WINDOW for step in range(WINDOW) for n in samples.numbers(step))
    narrow = StepSamples(tokens_of, 4, {"vision": 19})
    assert [narrow.numbers(1), narrow.numbers(2)] == [[4, 6, 7, 8], [5, 9, 10, 11]]
    assert [narrow.count_carried(step) for step in range(4)] == [0, 0, 1, 0]


def test_batches_that_are_left_out_are_trained_by_no_step() -> None:
    def tokens_of(number: int) -> dict[str, int]:
        return {"vision": 9 if number in {3, 4, 5, 40} else 1}

    everything = StepSamples(tokens_of, 4, {"vision": 19})
    batches = [everything.numbers(step) for step in range(30)]
    carried = [everything.count_carried(step) for step in range(30)]
    for left_out in ((0,), (2,), (9, 2), (2, 3, 4), (0, 1, 29), (5, 5)):
        samples = StepSamples(tokens_of, 4, {"vision": 19}, left_out)
        kept = [number for number in range(30) if number not in left_out]
        for step, number in enumerate(kept):
            assert samples.numbers(step) == batches[number]
            assert samples.count_carried(step) == carried[number]


def test_an_encoder_that_is_left_out_has_no_tokens() -> None:
    """Else each of two such samples would count as lighter than the other, without end."""
    loads = [{"vision": 10, "audio": 0}, {"vision": 10}] * 2
    assert carry_over(loads, 1, {"vision": 5, "audio": 5}) == [[0], [1], [2], [3]]


def test_a_run_that_begins_anywhere_reads_the_same_samples() -> None:
    def tokens_of(number: int) -> dict[str, int]:
        return {"vision": number * 7919 % 101}

    capacity = {"vision": 240}
    whole = StepSamples(tokens_of, 4, capacity)
    expected = [whole.numbers(step) for step in range(100)]
    assert sum(whole.count_carried(step) for step in range(100)) > 10
    for begin in (1, 7, 8, 50, 99):
        resumed = StepSamples(tokens_of, 4, capacity)
        assert [resumed.numbers(step) for step in range(begin, 100)] == expected[begin:]
