"""A model computes the same with any bins, padding and microbatches."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch
from one_process import OneProcess, loss_scale, whole
from tiny_models import DTYPE, ENCODERS, close, images, random_samples, tiny_model
from torch import Tensor

from optimus.job.model import Model
from optimus.models.build import build_layers
from optimus.models.dropout import Dropout, make_dropout_keys
from optimus.models.microbatch_inputs import build_encoder_inputs, build_llm_inputs, find_llm_row_targets
from optimus.models.sample import PlacedItem, Sample, list_placed_items


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def in_bins(
    model: Model, oracle: OneProcess, samples: list[Sample], bins: list[list[int]], capacity: int
) -> Any:
    """Returns loss and gradients with all items assigned to bins and all samples in one microbatch."""
    starts = [sum(sample.length for sample in samples[:place]) for place in range(len(samples))]
    n = sum(sample.length for sample in samples)
    first_rows = {sample.number: start for sample, start in zip(samples, starts, strict=True)}
    rows, targets = [], []
    for encoder in model.encoders:
        items = [placed for sample in samples for placed in list_placed_items(sample, encoder.name)]
        outputs, places = [], []
        for members in bins:
            mine = [items[member] for member in members if member < len(items)]
            inputs, in_bin = build_encoder_inputs(
                encoder, mine, capacity, seed=oracle.seed, step=4, dtype=DTYPE
            )
            outputs.append(whole(oracle.layers[encoder.name], (inputs,), in_bin)[0])
            places.append(find_llm_row_targets(encoder, mine, capacity, first_rows, n))
        rows.append(torch.cat(outputs))
        targets.append(torch.cat(places))
    ids, context = build_llm_inputs(
        model.llm,
        samples,
        targets,
        loss_scale(samples),
        seed=oracle.seed,
        step=4,
        dtype=DTYPE,
        encoders=model.encoders,
    )
    parameters = oracle.parameters()
    (loss,) = whole(oracle.layers["llm"], (ids, *rows), context)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return float(loss.detach()), dict(zip(parameters, gradients, strict=True))


@pytest.mark.parametrize(
    ("llm", "encoders"),
    [("qwen", ("windows", "sound")), ("gpt", ("learned", "windowed sound"))],
)
def test_bins_padding_and_microbatches_change_nothing(llm: str, encoders: tuple[str, ...]) -> None:
    model = tiny_model(llm, encoders)
    oracle = OneProcess(model, seed=3)
    samples = random_samples(model, 5, seed=2, documents=llm == "qwen")
    assert any(sum(map(len, sample.items.values())) > 1 for sample in samples)
    loss, expected = oracle.loss_and_gradients(samples, step=4)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    orders: list[list[list[int]]] = [[list(range(12))], [[8, 5, 2], [], [11, 10, 9, 7, 6], [4, 3, 1, 0]]]
    for bins in orders:
        found_loss, found = in_bins(model, oracle, samples, bins, 260)
        assert found_loss == pytest.approx(loss, rel=1e-13)
        for name, gradient in expected.items():
            assert float((found[name] - gradient).abs().max()) <= 1e-13 * scale, name


@pytest.mark.parametrize("name", ENCODERS)
def test_an_item_has_the_same_rows_in_every_bin(name: str) -> None:
    encoder = ENCODERS[name]
    layers = build_layers(encoder, dtype=DTYPE)
    items = images(encoder)

    def rows(members: list[PlacedItem], capacity: int) -> Tensor:
        inputs, context = build_encoder_inputs(encoder, members, capacity, seed=1, step=2, dtype=DTYPE)
        return whole(layers, (inputs,), context)[0].detach()

    before, alone = items[2][2].tokens, items[0][2].tokens
    merge = encoder.projector.merge
    first = rows([items[0]], alone)
    second = rows([items[2], items[0], items[1]], 100)[before // merge :][: alone // merge]
    assert close(second, first)
    if encoder.stack.dropout:
        other = rows([(items[0][0] + 1, *items[0][1:])], alone)
        assert not close(other, first, 1e-3)


def test_dropout_masks_are_equal_bit_by_bit_in_every_bin() -> None:
    encoder = ENCODERS["learned"]
    items = images(encoder)
    _, one = build_encoder_inputs(encoder, [items[1]], 24, seed=1, step=2)
    _, two = build_encoder_inputs(encoder, [items[0], items[1]], 64, seed=1, step=2)
    assert one.dropout_keys is not None and two.dropout_keys is not None
    drop = Dropout("somewhere", 0.1)
    assert torch.equal(drop.keep_mask(one.dropout_keys, 16), drop.keep_mask(two.dropout_keys[16:40], 16))
    sample, number, item = items[1]
    _, other = build_encoder_inputs(encoder, [(sample, number + 1, item)], 24, seed=1, step=2)
    assert other.dropout_keys is not None and not (other.dropout_keys == one.dropout_keys).any()


def test_dropout_drops_its_share_and_masks_are_independent() -> None:
    rows, width, share = 2_000, 256, 0.1
    masks = [
        Dropout(site, share).keep_mask(
            make_dropout_keys(torch.arange(rows), seed=seed, step=step, sample=sample, item=item), width
        )
        for seed, step, sample, item, site in [
            (0, 0, 0, -1, "here"),
            (1, 0, 0, -1, "here"),
            (0, 1, 0, -1, "here"),
            (0, 0, 1, -1, "here"),
            (0, 0, 0, 0, "here"),
            (0, 0, 0, -1, "there"),
        ]
    ]
    deviation = sqrt(share * (1 - share) / (rows * width))
    for number, mask in enumerate(masks):
        dropped = (~mask).double()
        assert abs(float(dropped.mean()) - share) < 4 * deviation
        for axis, size in ((0, rows), (1, width)):
            assert float((dropped.mean(axis) - share).abs().max()) < 5 * sqrt(share * (1 - share) / size)
        for other in masks[:number]:
            both = float((~mask & ~other).double().mean())
            assert abs(both - share**2) < 5 * share / sqrt(rows * width)
        assert abs(float((dropped[1:] * dropped[:-1]).mean()) - share**2) < 5 * share / sqrt(rows * width)
