"""Cuts for torch's schedules are as good as the best of all, where all can be tried."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

pytest.importorskip("torch")

from benchmarks.divided_job import DividedJob
from benchmarks.divided_torch import DividedTorch, torch_variants
from benchmarks.draws import MEANS
from benchmarks.torch_cuts import balanced, choose
from benchmarks.torch_replay import Programs

JOB = DividedJob(ranks=8, dp=1)  # four stages
HALVES = 2 * (JOB.encoder_layers + JOB.pp)
SCHEDULES = ("balanced 1F1B", "balanced Interleaved", "balanced ZBV")


def step_s(variant: DividedTorch, programs: Programs) -> float:
    return variant.replayed_s(MEANS, programs)


@pytest.mark.parametrize(
    "name",
    ["balanced 1F1B", *(pytest.param(name, marks=pytest.mark.ci("engine")) for name in SCHEDULES[1:])],
)
def test_no_other_cut_is_faster(name: str) -> None:
    cuts = torch_variants(JOB)[name]
    chosen = choose(cuts, JOB.pp, step_s)
    parts = len(chosen.variant.stages)
    best_s = min(
        step_s(cuts.variant((0, *inner, HALVES)), chosen.programs)
        for inner in combinations(range(1, HALVES), parts - 1)
        if max(b - a for a, b in zip((0, *inner), (*inner, HALVES), strict=True)) <= 2 * HALVES // parts
    )
    assert step_s(chosen.variant, chosen.programs) == pytest.approx(best_s)


def test_the_search_improves_what_it_begins_with() -> None:
    cuts = torch_variants(JOB)["balanced ZBV"]
    begun = choose(replace(cuts, is_fixed=True), JOB.pp, step_s)
    found = choose(cuts, JOB.pp, step_s)
    assert step_s(found.variant, found.programs) < step_s(begun.variant, begun.programs)


def test_starts_hold_every_layer() -> None:
    weights = [3.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    for cut in balanced(weights, 3):
        assert cut[0] == 0 and cut[-1] == len(weights) and list(cut) == sorted(set(cut)) and len(cut) == 4
