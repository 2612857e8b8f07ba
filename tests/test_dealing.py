"""Dealt items make the load of every encoder pipeline the mean, whatever the data."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optimus.cli.deal import format_ways
from optimus.data import dealing
from optimus.data.compare_dealing import WAYS, DealingResult, compare_dealing, count_batches
from optimus.data.dealing import DealtItems, deal_items, deal_sequences

BATCHES = 20
Lengths = list[list[float]]


def draw(
    rng: np.random.Generator,
    count: int,
    *,
    p50: float,
    p95: float,
    text_only: float,
    longest: float,
    image: float,
) -> Lengths:
    """Tokens of the images of sequences: log-normal totals, cut into images of one size and a rest."""
    totals = np.minimum(rng.lognormal(np.log(p50), np.log(p95 / p50) / 1.645, count), longest)
    totals[rng.random(count) < text_only] = 0
    return [
        [float(image)] * int(total // image) + ([total % image] if total % image > 16 else [])
        for total in totals
    ]


TAIL = {"p50": 2600.0, "p95": 7800.0, "text_only": 0.12, "longest": 8192, "image": 1024}
DATA = {
    "tail, images of 1,024": TAIL,
    "tail, images of 256": {**TAIL, "image": 256},
    "narrow": {**TAIL, "p50": 3277.0, "p95": 4915.0, "text_only": 0.0},
    "videos, 30 % text only": {**TAIL, "p50": 3000.0, "p95": 12000.0, "text_only": 0.3, "longest": 16000},
    "half text only": {**TAIL, "text_only": 0.5},
}


def deal(sequences: Lengths, replicas: int, microbatches: int, pieces: int = 2) -> DealtItems:
    columns = deal_sequences([sum(items) for items in sequences], microbatches)
    costs = [[cost for number in column for cost in sequences[number]] for column in columns]
    return deal_items(costs, [range(replicas * pieces)] * microbatches)


@pytest.mark.parametrize("replicas", [8, 32])
@pytest.mark.parametrize("name", DATA)
def test_every_pipeline_has_the_mean_load(name: str, replicas: int) -> None:
    """Over 20 batches, with 32 microbatches of one sequence: at most 1 % more, and an image of lag."""
    rng = np.random.default_rng(0)
    dealt = [deal(draw(rng, replicas * 32, **DATA[name]), replicas, 32) for _ in range(BATCHES)]
    assert np.mean([each.fullest_over_mean for each in dealt]) <= 1.01
    assert max(each.lag_bins * each.mean_bin for each in dealt) <= 1.5 * DATA[name]["image"]


def test_without_dealing_the_fullest_pipeline_has_a_third_more() -> None:
    """The measure itself: the same data with images left where they are."""
    sequences = draw(np.random.default_rng(0), 32 * 32, **TAIL)
    of_replica = [sum(sum(items) for items in sequences[at * 32 : at * 32 + 32]) for at in range(32)]
    assert max(of_replica) / np.mean(of_replica) > 1.2


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.lists(st.integers(1, 50).map(float), max_size=12), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_items_are_dealt_once_and_pipelines_stay_together(costs: Lengths, pipelines: int, bins: int) -> None:
    columns = [[at % pipelines for at in range(pipelines * bins)]] * len(costs)
    dealt = deal_items(costs, columns)
    items = iter(dealt.bins)
    for of_column, loads in zip(costs, dealt.loads, strict=True):
        summed = Counter[int]()
        for cost in of_column:
            summed[next(items)] += cost  # type: ignore[assignment]
        assert [summed[at] for at in range(len(loads))] == loads.tolist()
    assert next(items, None) is None
    largest = max((cost for of_column in costs for cost in of_column), default=0.0)
    totals = np.zeros(pipelines)
    for loads in dealt.loads:
        np.add.at(totals, columns[0], loads)
        assert totals.max() - totals.min() <= 2 * largest + 1e-9
    assert totals.max() - totals.min() <= largest + 1e-9


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 9).map(float), min_size=1, max_size=7), st.integers(1, 3))
def test_one_column_is_within_four_thirds_of_the_best(costs: list[float], pipelines: int) -> None:
    """Longest first is, by Graham's bound; the best is found by trying all."""
    places = product(range(pipelines), repeat=len(costs))
    best = min(max(np.bincount(place, costs, pipelines)) for place in places)
    fullest = max(deal_items([costs], [range(pipelines)]).loads[0])
    assert fullest <= best * (4 / 3 - 1 / (3 * pipelines)) + 1e-9


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.lists(st.integers(1, 9).map(float), max_size=12), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.booleans(),
)
def test_few_items_are_dealt_as_many_are(costs: Lengths, own: list[int], locked: bool) -> None:
    """Both run the same loops, compiled for many items; costs have ties."""
    few, many = dealing.COMPILE_FROM_ITEMS, 0
    dealt = []
    for dealing.COMPILE_FROM_ITEMS in (10**9, many):
        dealt.append(deal_items(costs, [own] * len(costs), locked=locked))
    dealing.COMPILE_FROM_ITEMS = few
    plain, compiled = dealt
    assert plain.bins == compiled.bins
    assert [loads.tolist() for loads in plain.loads] == [loads.tolist() for loads in compiled.loads]


def test_columns_that_all_wait_for_are_dealt_by_themselves() -> None:
    """What a pipeline got more in one column does not make it get less in the next."""
    costs, pipelines = [[4.0, 1.0, 1.0], [4.0, 4.0], [], [3.0, 2.0, 2.0]], [[0, 1], [0, 1], [0, 1], [0, 1]]
    locked = deal_items(costs, pipelines, locked=True)
    alone = [deal_items([items], [own]) for items, own in zip(costs, pipelines, strict=True)]
    assert [loads.tolist() for loads in locked.loads] == [each.loads[0].tolist() for each in alone]
    assert list(locked.bins) == [place for each in alone for place in each.bins]
    fullest = sum(max(loads) for loads in locked.loads)
    assert fullest == 4.0 + 4.0 + 0.0 + 4.0 <= sum(max(loads) for loads in deal_items(costs, pipelines).loads)


def test_pipelines_that_have_no_bin_in_a_column_catch_up_later() -> None:
    """Two pipelines take turns: each gets what its columns hold."""
    dealt = deal_items([[4.0, 2.0], [5.0, 1.0], [6.0], [3.0, 3.0]], [[0], [1], [0], [1]])
    assert dealt.fullest_over_mean == pytest.approx(1.0)
    assert dealt.lag_bins == pytest.approx(0.0)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 100).map(float), min_size=1, max_size=40), st.integers(1, 8))
def test_columns_have_equally_many_sequences(loads: list[float], columns: int) -> None:
    loads = loads[: len(loads) // columns * columns]
    dealt = deal_sequences(loads, columns)
    assert sorted(number for column in dealt for number in column) == list(range(len(loads)))
    assert len({len(column) for column in dealt}) == 1


def test_a_step_without_items_has_no_load() -> None:
    dealt = deal_items([[], []], [[0, 1], [0, 1]])
    assert (dealt.bins, dealt.fullest_over_mean, dealt.lag_bins) == ((), 1.0, 0.0)


def test_ways_are_measured_as_their_definitions_say() -> None:
    """Two replicas, two microbatches, one batch: the four sequences can be computed by hand."""
    costs = [[8.0], [4.0, 4.0]]
    ways = compare_dealing(costs, replicas=2, microbatches=2, pieces=2, batches=1)
    assert list(ways) == list(WAYS)
    rng = np.random.default_rng(0)
    drawn = [costs[number] for number in rng.integers(2, size=4)]
    fullest = [8.0 if len(items) == 1 else 4.0 for items in drawn]  # of two bins
    assert ways["drawn"].fullest_pipeline == max(sum(fullest[:2]), sum(fullest[2:])) / 8
    assert ways["drawn"].fullest_rank == ways["sequences"].fullest_rank == 1.0  # all have 8
    assert ways["drawn"].padding == max(fullest) * 2 / 8


@pytest.mark.parametrize("name", DATA)
def test_dealing_more_is_never_worse(name: str) -> None:
    costs = draw(np.random.default_rng(0), 1000, **DATA[name])
    ways = compare_dealing(costs, replicas=16, microbatches=4, pieces=2, batches=5)
    for measure in ("fullest_pipeline", "fullest_rank", "padding"):
        drawn, sequences, items, both = (getattr(ways[way], measure) for way in WAYS)
        assert 1.0 <= both <= min(sequences, items) + 0.02 and max(sequences, items) <= drawn + 0.02, measure
    assert ways["items"].fullest_pipeline - 1 < (ways["drawn"].fullest_pipeline - 1) / 3


def test_large_batches_are_drawn_less_often() -> None:
    assert [count_batches(size) for size in (1, 512, 1 << 14, 1 << 23)] == [20, 20, 4, 2]


@pytest.mark.parametrize(
    ("fullest", "advice"),
    [
        ((2.0, 1.5, 1.2, 1.1), "both, 45% less encoder time"),
        ((2.0, 1.11, 1.2, 1.1), "sequences as they come (1.110 of the mean, 1.100 at best)"),
        ((1.01, 1.0, 1.0, 1.0), "sequences as they come are as good"),
    ],
)  # fmt: skip
def test_the_simplest_of_equally_good_ways_is_advised(fullest: tuple[float, ...], advice: str) -> None:
    ways = {
        way: DealingResult(fullest_pipeline=1.0, fullest_rank=value, padding=1.0)
        for way, value in zip(WAYS, fullest, strict=True)
    }
    assert advice in " ".join(" ".join(format_ways(ways, "", has_items=True)).split())
    assert "nothing to deal" in " ".join(format_ways(ways, "", has_items=False))


def test_data_without_items_has_nothing_to_deal() -> None:
    (drawn, *_) = compare_dealing([[], []], replicas=2, microbatches=2).values()
    assert (drawn.fullest_pipeline, drawn.fullest_rank, drawn.padding) == (1.0, 1.0, 1.0)
