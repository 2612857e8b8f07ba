"""Names and initial values of parameters in any range of layers, and models that the engine refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from one_process import parameters_by_name
from tiny_models import DTYPE, ENCODERS, LLMS, build, random_samples, tiny_model

from optimus.errors import UserError
from optimus.job.attention import LatentAttention
from optimus.job.model import Encoder, Experts, Llm
from optimus.models.build import build_layers, count_layers
from optimus.models.microbatch_inputs import build_encoder_inputs, build_llm_inputs
from optimus.models.sample import SampleItem


@pytest.mark.parametrize("name", [*LLMS, *ENCODERS])
def test_any_range_of_layers_has_the_parameters_of_the_whole(name: str) -> None:
    module, layers = build(name)
    parameters = parameters_by_name(module, layers)
    assert sum(parameter.numel() for parameter in parameters.values()) == module.parameters()
    count = count_layers(module)
    for first, end in [(0, 1), (1, count), (2, 3), (count - 1, count), (1, 1)]:
        part = build_layers(module, dtype=DTYPE, first=first, end=end)
        assert len(part) == end - first
        for parameter, value in parameters_by_name(module, part, first=first).items():
            assert torch.equal(value, parameters[parameter]), parameter
    drawn = [p.flatten()[0].item() for n, p in parameters.items() if not n.endswith("norm.weight")]
    assert len(set(drawn)) == len(drawn)
    other = parameters_by_name(module, build_layers(module, dtype=DTYPE, seed=1))
    assert not torch.equal(
        other[f"{module.name}.layers.0.qkv.weight"], parameters[f"{module.name}.layers.0.qkv.weight"]
    )


def test_names_are_those_of_checkpoints() -> None:
    module, layers = build("windows")
    names = list(parameters_by_name(module, layers))
    assert names[:2] == ["vision.patches.weight", "vision.patches.bias"]
    assert "vision.layers.1.qkv.weight" in names and "vision.layers.2.up.norm.weight" in names
    assert names[-1] == "vision.projector.linears.1.bias"


def test_a_tied_head_shares_the_table_or_has_an_equal_one() -> None:
    llm = LLMS["gpt"]
    layers = build_layers(llm, dtype=DTYPE)
    assert layers[0][0].weight is layers[-1][0].weight
    count = count_layers(llm)
    last = build_layers(llm, dtype=DTYPE, first=count - 1)
    assert torch.equal(last[0][0].weight, layers[0][0].weight)
    assert "llm.embedding.weight" in parameters_by_name(llm, last, first=count - 1)


def test_what_the_engine_does_not_run_is_named() -> None:
    llm, encoder = LLMS["llama"], ENCODERS["windows"]
    latent = LatentAttention(
        query_rank=4, key_value_rank=4, nope_head_dim=4, rope_head_dim=4, value_head_dim=4
    )
    attention = llm.stack.attention
    cases: list[tuple[Encoder | Llm, str]] = [
        (
            replace(llm, stack=replace(llm.stack, experts=Experts(count=2, active=1, width=4))),
            "llm.stack.experts",
        ),
        (replace(llm, stack=replace(llm.stack, attention=replace(attention, latent=latent))), "latent"),
        (
            replace(llm, stack=replace(llm.stack, attention=replace(attention, window_tokens=4))),
            "window_tokens",
        ),
        (replace(encoder, feeds=(0, 1)), "model.vision.feeds"),
    ]
    for module, field in cases:
        with pytest.raises(UserError, match="the engine does not run it yet") as error:
            build_layers(module, dtype=DTYPE)
        assert field in error.value.field


def test_items_that_do_not_fit_their_encoder_are_refused() -> None:
    windows, learned, sound = ENCODERS["windows"], ENCODERS["learned"], ENCODERS["sound"]

    def refused(encoder: Encoder, grid: tuple[int, ...], tokens: int, match: str) -> None:
        item = SampleItem(offset=0, grid=grid, inputs=torch.zeros(tokens, encoder.patch_inputs))
        with pytest.raises(UserError, match=match):
            build_encoder_inputs(encoder, [(0, 0, item)], 400, seed=0, step=0)

    refused(windows, (3, 4), 12, "multiples of 2")
    refused(windows, (4,), 4, "multiples of 2")
    refused(windows, (4, 4), 15, "shape")
    refused(learned, (2, 12), 24, "larger than 10 x 10")
    refused(replace(learned, positions=128), (10, 8), 80, "larger than 8 x 16")
    refused(sound, (5,), 5, "multiple of 2")
    merged = replace(windows, projector=replace(windows.projector, merge=2))
    refused(merged, (4, 4), 16, "use 1")
    attention = replace(windows.stack.attention, window_tokens=9)
    refused(replace(windows, stack=replace(windows.stack, attention=attention)), (4, 4), 16, "use 16")


@pytest.mark.parametrize(
    ("positions", "sides"), [(100, (10, 10)), (101, (10, 10)), (128, (8, 16)), (2048, (32, 64))]
)
def test_every_place_of_an_image_has_a_learned_position_of_its_own(
    positions: int, sides: tuple[int, int]
) -> None:
    """Also where they make no square, as those of the paper's encoders."""
    learned = ENCODERS["learned"]
    encoder = replace(learned, positions=positions)
    tokens = sides[0] * sides[1]
    item = SampleItem(offset=0, grid=sides, inputs=torch.zeros(tokens, encoder.patch_inputs))
    _, context = build_encoder_inputs(encoder, [(0, 0, item)], tokens, seed=0, step=0)
    assert context.positions is not None
    assert sorted(context.positions.tolist()) == list(range(tokens))


def test_a_sample_longer_than_the_learned_positions_is_refused() -> None:
    model = tiny_model("gpt")
    with pytest.raises(UserError, match="use 65 or more"):
        build_llm_inputs(model.llm, random_samples(model, 1, length=65), [], 1.0, seed=0, step=0)
