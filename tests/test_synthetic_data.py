"""Synthetic items have the tokens of the workload, and a learned position for each of them."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus.engine.synthetic_data import SyntheticDataset, make_item_grids
from optimus.job.read import find_job
from optimus.models.microbatch_inputs import build_encoder_inputs, fits_positions

SIGLIP = find_job("siglip-so400m-8b", "h100:8")
VISION = SIGLIP.model.encoders[0]


@given(st.integers(1, 2000), st.sampled_from(["vision", "audio"]), st.integers(0, 1100))
def test_an_item_larger_than_learned_positions_is_made_of_tiles(
    tokens: int, modality: Literal["vision", "audio"], positions: int
) -> None:
    encoder = replace(VISION, modality=modality, positions=positions)
    grids = make_item_grids(encoder, tokens)
    assert sum(map(prod, grids)) == tokens * encoder.projector.merge
    fitting = [fits_positions(encoder, grid) for grid in grids]
    assert all(fitting) or len(grids) == 1, "what has no tile stays, and the engine refuses it"


def test_an_item_that_fits_is_one() -> None:
    assert make_item_grids(VISION, 169) == ((26, 26),)
    assert make_item_grids(VISION, 171)[0] == (26, 26) and len(make_item_grids(VISION, 171)) == 2
    assert make_item_grids(replace(VISION, positions=0), 971) == ((2, 1942),)


@pytest.mark.parametrize("number", range(3))
def test_samples_of_a_workload_with_larger_images_can_be_encoded(number: int) -> None:
    """Images of the assumed workload have up to 1,024 tokens; SigLIP has positions for 169."""
    data = SyntheticDataset(job=SIGLIP)
    sample, sizes = data.sample(number), data.sizes(number)
    items = sample.items["vision"]
    assert tuple(item.tokens for item in items) == sizes.items["vision"]
    offsets = [item.offset for item in items]
    ends = [item.offset + item.tokens // VISION.projector.merge for item in items]
    assert all(end <= begin for end, begin in zip(ends, offsets[1:], strict=False))
    assert int((sample.labels >= 0).sum()) == data.labels(number)
    capacity = sum(item.tokens for item in items)
    placed = [(number, index, item) for index, item in enumerate(items)]
    inputs, _ = build_encoder_inputs(VISION, placed, capacity, seed=0, step=0)
    assert inputs.shape == (capacity, VISION.patch_inputs)
