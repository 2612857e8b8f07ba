"""Cuts of layers: against all cuts on small cases, and the shapes that must never happen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_memory import setting_of

from optimus.cost.assumptions import get_preset
from optimus.ir.ranks import LLM
from optimus.job.read import find_job
from optimus.planner.layouts import choose_smallest_context
from optimus.planner.systems.pipeline import PipelineCandidate, find_least_recomputed
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


def test_the_least_recomputation_that_fits_is_that_of_all_policies_in_order() -> None:
    """Three encoders and the LLM, so 81 policies, on GPUs of every size from too small to large enough."""
    context, _ = choose_smallest_context(find_job("omni-3", "h100:64"), get_preset("default"))
    modules = context.job.model.modules
    (*_, most), sizes = context.recompute_policies(modules), set[int | None]()

    def build(policy: tuple[tuple[str, str], ...], free_bytes: float = 0.0) -> PipelineCandidate:
        layers = context.layers(modules, 1, policy)
        return PipelineCandidate(
            context=replace(context, kept_free_bytes=free_bytes),
            layers=layers,
            cut=cut_proportionally([1.0] * len(layers), context.layout.pp),
            order_name="1f1b",
            microbatches=8,
            layout=context.layout,
            sequences=1,
            policy=policy,
        )

    policies = list(context.recompute_policies(modules))
    least, largest = build(most).least_bytes, max(build(policy).peak_bytes for policy in policies)
    for step in range(13):
        free_bytes = context.capacity_bytes - (least + (largest - least) * step / 12)
        every = (number for number, policy in enumerate(policies) if build(policy, free_bytes).fits)
        found = find_least_recomputed(
            context.recompute_ladders(modules), partial(build, free_bytes=free_bytes), lambda c: c.fits
        )
        expected = next(every, None)
        sizes.add(expected)
        assert expected == (None if found is None else policies.index(found.policy))
    assert None in sizes and 0 in sizes and len(sizes) >= 5


@pytest.mark.parametrize("name", ["paper/strong-3072", "omni-3", "internvl3-78b", "siglip-so400m-8b"])
def test_no_less_recomputation_needs_less_than_the_bound(name: str) -> None:
    """The search passes over policies by this bound; every pair of policies is compared."""
    job = find_job(name) if "/" in name else find_job(name, "h100:64")
    context, _ = choose_smallest_context(job, get_preset("default"))
    modules = context.job.model.modules
    order = {step: number for number, step in enumerate(("none", "selective", "full"))}

    def pipelines() -> Iterator[PipelineCandidate]:
        for policy in context.recompute_policies(modules):
            layers = context.layers(modules, 1, policy)
            cut = cut_proportionally([1.0] * len(layers), context.layout.pp)
            yield PipelineCandidate(
                context=context,
                layers=layers,
                cut=cut,
                order_name="1f1b",
                microbatches=8,
                layout=context.layout,
                sequences=1,
                policy=policy,
            )

    every = list(pipelines())
    compared = 0
    for one in every:
        for other in every:
            pairs = zip(one.policy, other.policy, strict=True)
            if all(order[more] >= order[less] for (_, more), (_, less) in pairs):
                assert one.least_bytes <= other.mean_bytes
                compared += 1
    assert compared > len(every) and LLM in dict(every[0].policy)
