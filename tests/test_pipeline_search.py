"""Cuts of layers: against all cuts on small cases, and the shapes that must never happen."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_memory import setting_of

from optimus.planner.systems.pipeline_search import (
    cut_proportionally,
    minimize_largest_stage,
    neighbouring_cuts,
)
from optimus.planner.systems.single_pipeline import cut_encoders_into_stage0

WEIGHTS = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def slowest(weights: list[int], cut: tuple[int, ...]) -> int:
    return max(sum(weights[a:b]) for a, b in pairwise(cut))


def is_cut(cut: tuple[int, ...], count: int, parts: int) -> bool:
    return len(cut) == parts + 1 and (cut[0], cut[-1]) == (0, count) and all(a < b for a, b in pairwise(cut))


@given(weights=WEIGHTS, data=st.data())
def test_the_dynamic_program_is_optimal(weights: list[int], data: st.DataObject) -> None:
    count = len(weights)
    parts = data.draw(st.integers(1, count))
    cut = minimize_largest_stage(weights, parts)
    assert is_cut(cut, count, parts)
    every = ((0, *inner, count) for inner in combinations(range(1, count), parts - 1))
    assert slowest(weights, cut) == min(slowest(weights, other) for other in every)


@given(weights=WEIGHTS, data=st.data())
def test_a_proportional_cut_leaves_no_part_empty(weights: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    assert is_cut(cut_proportionally([w + 1 for w in weights], parts), len(weights), parts)


@given(weights=WEIGHTS, data=st.data())
def test_neighbours_move_one_layer(weights: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    cut = cut_proportionally([w + 1 for w in weights], parts)
    for other in neighbouring_cuts(cut):
        assert is_cut(other, len(weights), parts)
        assert sum(abs(a - b) for a, b in zip(cut, other, strict=True)) == 1


@pytest.mark.parametrize("name", ["paper/strong-3072", "paper/A", "paper/dual-22-11"])
def test_stage0_holds_all_encoders_and_an_even_share_of_the_llm(name: str) -> None:
    context = setting_of(name)
    modules = context.job.model.modules
    layers = context.layers(modules, 2, tuple((m.name, "full") for m in modules))
    parts = context.layout.virtual_stages
    cut = cut_encoders_into_stage0(layers, "llm", parts)
    assert is_cut(cut, len(layers), parts)
    assert all(layer.module == "llm" for layer in layers[cut[1] :])
    first = next(place for place, layer in enumerate(layers) if layer.module == "llm")
    inside = range(first + 1, len(layers) - 1)  # without embedding and head
    blocks = [sum(place in inside for place in range(a, b)) for a, b in pairwise(cut)]
    assert sum(blocks) == context.job.model.llm.stack.layers
    assert max(blocks) - min(blocks) <= 1
