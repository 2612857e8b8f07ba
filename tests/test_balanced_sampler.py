"""Batches of equal load: every sample once an epoch, the same steps under any world size, resumable."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dealing import BATCHES, DATA, draw

from optimus.data import BalancedBatchSampler
from optimus.data.dealing import deal_microbatches, sum_fullest_ranks
from optimus.errors import UserError

LOADS = st.lists(st.integers(0, 50).map(float), min_size=1, max_size=60)
COUNTS = {"ranks": st.integers(1, 4), "microbatches": st.integers(1, 3), "batch_size": st.integers(1, 3)}
Steps = list[list[list[list[int]]]]  # by step, microbatch and rank: samples


def make(loads: Any, rank: int, ranks: int, batch_size: int = 1, **options: Any) -> BalancedBatchSampler:
    return BalancedBatchSampler(loads, batch_size, num_replicas=ranks, rank=rank, **options)


def run_epoch(samplers: list[BalancedBatchSampler]) -> Steps:
    """Iterates all ranks to the end of the epoch."""
    by_rank = [list(sampler) for sampler in samplers]
    microbatches = [list(each) for each in zip(*by_rank, strict=True)]
    size = samplers[0].microbatches
    return [microbatches[at : at + size] for at in range(0, len(microbatches), size)]


def flatten(steps: Steps) -> list[int]:
    return [number for step in steps for number in flatten_step(step)]


def flatten_step(step: list[list[list[int]]]) -> list[int]:
    return list(chain(*chain(*step)))


@settings(deadline=None, max_examples=60)
@given(loads=LOADS, seed=st.integers(0, 3), drop_last=st.booleans(), **COUNTS)
def test_an_epoch_has_every_sample_once(
    loads: list[float], seed: int, drop_last: bool, ranks: int, microbatches: int, batch_size: int
) -> None:
    options: dict[str, Any] = {"microbatches": microbatches, "seed": seed, "drop_last": drop_last}
    size = ranks * microbatches * batch_size
    if drop_last and len(loads) < size:
        with pytest.raises(UserError, match="fewer than"):
            make(loads, 0, ranks, batch_size, **options)
        return
    samplers = [make(loads, rank, ranks, batch_size, **options) for rank in range(ranks)]
    steps = run_epoch(samplers)
    counts = Counter(flatten(steps))
    assert all(len(batch) == batch_size for step in steps for microbatch in step for batch in microbatch)
    assert len(samplers[0]) == len(steps) * microbatches
    whole, rest = divmod(len(loads), size)
    if drop_last:
        assert set(counts.values()) == {1} and counts.total() == whole * size
        return
    repeated = (size - rest) % size
    assert set(counts) == set(range(len(loads))) and counts.total() == len(loads) + repeated
    assert max(counts.values()) - min(counts.values()) <= 1
    first = Counter(flatten_step(steps[0]))
    if repeated <= size <= len(loads):  # it is filled with samples of the first step
        assert {number for number, count in counts.items() if count > 1} <= set(first)


@settings(deadline=None, max_examples=60)
@given(loads=LOADS, seed=st.integers(0, 3), start=st.integers(0, 5), **COUNTS)
def test_steps_have_the_same_samples_under_any_world_size(
    loads: list[float], seed: int, start: int, ranks: int, microbatches: int, batch_size: int
) -> None:
    """One rank with all microbatches is compared from the first step, others from a later one."""
    size = ranks * microbatches * batch_size
    alone = make(loads, 0, 1, microbatches=size, seed=seed)
    expected = [*run_epoch([alone]), *run_epoch([alone])][start % alone.steps_per_epoch :]
    options: dict[str, Any] = {"microbatches": microbatches, "seed": seed}
    start %= alone.steps_per_epoch
    samplers = [make(loads, rank, ranks, batch_size, start_step=start, **options) for rank in range(ranks)]
    steps = [*run_epoch(samplers), *run_epoch(samplers)]
    assert [sorted(flatten_step(step)) for step in steps] == [sorted(flatten_step(s)) for s in expected]


@settings(deadline=None, max_examples=60)
@given(loads=LOADS, seen=st.integers(0, 40), **COUNTS)
def test_a_saved_state_goes_on_behind_the_last_batch(
    loads: list[float], seen: int, ranks: int, microbatches: int, batch_size: int
) -> None:
    samplers = [make(loads, rank, ranks, batch_size, microbatches=microbatches) for rank in range(ranks)]
    seen %= len(samplers[0])
    for sampler in samplers:
        expected = [*sampler, *sampler]
        other, resumed = (
            make(loads, sampler.rank, ranks, batch_size, microbatches=microbatches) for _ in "ab"
        )
        begun = list(islice(other, seen))
        resumed.load_state_dict(json.loads(json.dumps(other.state_dict())))
        assert [*begun, *resumed, *resumed] == expected
        assert list(islice(other, seen)) == begun  # who begins again, begins at the same place


@settings(deadline=None)
@given(loads=LOADS, **COUNTS)
def test_balance_is_never_worse_than_as_drawn(
    loads: list[float], ranks: int, microbatches: int, batch_size: int
) -> None:
    sampler = make(loads, 0, ranks, batch_size, microbatches=microbatches)
    drawn = sampler.draw_step(0, 0).reshape(microbatches, ranks, batch_size).tolist()
    dealt = sampler.deal_step(0, 0)
    assert sorted(flatten_step(dealt)) == sorted(flatten_step(drawn))
    assert sum_fullest_ranks(loads, dealt) <= sum_fullest_ranks(loads, drawn) + 1e-9


@settings(deadline=None)
@given(st.lists(st.integers(0, 50).map(float), min_size=12, max_size=12), st.sampled_from([2, 3, 4, 6]))
def test_batches_of_one_sample_wait_least(loads: list[float], ranks: int) -> None:
    """The k-th fullest microbatch cannot be lighter than the sample behind k - 1 full ones.

    Totals of ranks differ by no more than samples of one microbatch do.
    """
    dealt = deal_microbatches(loads, 12 // ranks, ranks)
    assert sum_fullest_ranks(loads, dealt) == sum(sorted(loads, reverse=True)[::ranks])
    by_rank = np.array([[loads[number] for (number,) in microbatch] for microbatch in dealt])
    assert by_rank[0].max() == max(loads)  # the microbatch that needs the most memory is the first
    assert np.ptp(by_rank.sum(axis=0)) <= np.ptp(by_rank, axis=1).max()


def test_an_order_that_dealing_would_spoil_is_kept() -> None:
    """Longest first finds 7: the third 2 comes to a 3 and a 2."""
    assert deal_microbatches([3.0, 3.0, 0.0, 2.0, 2.0, 2.0], 1, 2) == [[[0, 1, 2], [3, 4, 5]]]


# fullest rank over the mean, 8 ranks: 4 microbatches of 1 and of 4 samples; see docs/balanced-sampler.md
AT_MOST = {
    "tail, images of 1,024": (1.40, 1.02),
    "tail, images of 256": (1.40, 1.02),
    "narrow": (1.14, 1.02),
    "videos, 30 % text only": (1.75, 1.11),
    "half text only": (1.70, 1.10),
}


def measure(name: str, *, ranks: int, microbatches: int, batch_size: int) -> tuple[float, float]:
    """Returns the fullest rank over the mean in 20 steps, as drawn and dealt."""
    count = ranks * microbatches * batch_size
    loads = np.array([sum(items) for items in draw(np.random.default_rng(0), BATCHES * count, **DATA[name])])
    sampler = make(loads, 0, ranks, batch_size, microbatches=microbatches)
    totals = np.zeros(2)
    for step in range(BATCHES):
        drawn = sampler.draw_step(0, step)
        ways = drawn.reshape(microbatches, ranks, batch_size).tolist(), sampler.deal_step(0, step)
        totals += [sum_fullest_ranks(loads.tolist(), way) * ranks / loads[drawn].sum() for way in ways]
    before, after = (totals / BATCHES).tolist()
    return before, after


@pytest.mark.parametrize("name", DATA)
def test_ranks_have_equal_loads(name: str) -> None:
    for batch_size, most in zip((1, 4), AT_MOST[name], strict=True):
        drawn, dealt = measure(name, ranks=8, microbatches=4, batch_size=batch_size)
        assert dealt <= most and dealt - 1 < (drawn - 1) * 0.45, (batch_size, drawn, dealt)


def test_a_file_of_lengths_counts_items_twice(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"text": 5, "vision": [3, 4], "audio": [1]}\n{"text": 2}\n{"vision": [6]}\n', "utf-8")
    assert make(path, 0, 1).loads.tolist() == [21.0, 2.0, 12.0]
    images = make(str(path), 0, 1, cost=lambda sequence: float(sum(sequence.lengths("vision"))))
    assert images.loads.tolist() == [7.0, 0.0, 6.0]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"batch_size": 0}, "batch_size = 0 is not positive"),
        ({"rank": 2}, "rank = 2 is not a rank"),
        ({"start_step": -1}, "start_step = -1 is negative"),
        ({"lengths": []}, "are not loads"),
        ({"lengths": [1.0, float("nan")]}, "are not loads"),
        ({"lengths": [[1.0], [2.0]]}, "are not loads"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        BalancedBatchSampler(
            **{"lengths": [1.0] * 8, "batch_size": 1, "num_replicas": 2, "rank": 0, **change}
        )


def test_states_of_other_steps_are_refused() -> None:
    loads = [float(n) for n in range(24)]
    saved = make(loads, 0, 2, microbatches=2)
    list(islice(saved, 2))
    make(loads, 0, 4).load_state_dict(saved.state_dict())  # between steps of four samples
    for other in (make(loads, 0, 2), make(loads, 0, 2, microbatches=2, seed=1), make(loads[:20], 0, 4)):
        with pytest.raises(UserError, match="when the state was saved"):
            other.load_state_dict(saved.state_dict())
    list(islice(saved, 3))
    with pytest.raises(UserError, match=r"num_replicas = 4 was 2 when the state was saved"):
        make(loads, 0, 4).load_state_dict(saved.state_dict())


def test_the_sampler_needs_no_torch() -> None:
    code = (
        "import sys; from optimus.data import BalancedBatchSampler as B; B([1.0], 1, num_replicas=1, rank=0)"
    )
    done = subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], check=False)
    assert done.returncode == 0
