"""Cuts for torch's schedules are as good as the best of all, where all can be tried."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

pytest.importorskip("torch")

from benchmarks.paced_torch import balanced_cuts
from benchmarks.paced_tp_job import TpJob
from benchmarks.paced_tp_torch import torch_variants

pytestmark = pytest.mark.heavy  # checks the benchmark, no promise of the product

JOB = TpJob(ranks=8, dp=1)  # four stages
HALVES = 2 * (JOB.encoder_layers + JOB.pp)
SCHEDULES = ("balanced 1F1B", "balanced Interleaved", "balanced ZBV")


@pytest.mark.parametrize(
    "name",
    ["balanced 1F1B", *(pytest.param(name, marks=pytest.mark.heavy) for name in SCHEDULES[1:])],
)
def test_no_other_cut_is_faster(name: str) -> None:
    search = torch_variants(JOB)[name]
    best = search.best(JOB.pp)
    parts = len(best.layers)
    best_s = min(
        search.make((0, *inner, HALVES), best.programs).replayed_s()
        for inner in combinations(range(1, HALVES), parts - 1)
        if max(b - a for a, b in zip((0, *inner), (*inner, HALVES), strict=True)) <= 2 * HALVES // parts
    )
    assert best.replayed_s() == pytest.approx(best_s)


def test_the_search_improves_what_it_begins_with() -> None:
    search = torch_variants(JOB)["balanced ZBV"]
    start = replace(search, is_fixed=True).best(JOB.pp)
    assert search.best(JOB.pp).replayed_s() < start.replayed_s()


def test_starts_hold_every_layer() -> None:
    weights = [3.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    for cut in balanced_cuts(weights, 3):
        assert cut[0] == 0 and cut[-1] == len(weights) and list(cut) == sorted(set(cut)) and len(cut) == 4
