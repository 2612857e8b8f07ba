"""Refuses by name what our own layers cannot train; constants of a config.json reach the layers."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ENCODERS, LLMS, tiny_model

from optimus.cli.run_ranks import train
from optimus.errors import UserError
from optimus.ir.binding import flatten_and_hash_parts, list_bound_parts
from optimus.job import own_layers
from optimus.job.attention import LinearAttention, Rope, RopeScaling
from optimus.job.hf_config import ENCODER_READERS, read_hf_config
from optimus.job.model import Encoder, LayerVariant, Linear, Llm, Mlp, Model, PerLayerInputs
from optimus.job.own_layers import COMPARED_FAMILIES, find_unsupported, find_untrainable, refuse_untrainable
from optimus.job.read import find_job
from optimus.models.build import build_layers

CONFIGS = Path(__file__).parent / "data" / "configs"


def changed(value: Any, path: str, new: object) -> Any:
    """Returns a copy of nested dataclasses with the field at `path` replaced."""
    name, _, rest = path.partition(".")
    return replace(value, **{name: changed(getattr(value, name), rest, new) if rest else new})


BY_NAME: dict[str, list[tuple[str, object]]] = {
    "llama": [
        ("stack.attention.rope.scaling", RopeScaling(type="llama3", factor=8.0)),
        ("stack.attention.rope.local_theta", 1e4),
        ("stack.attention.rope.partial_factor", 0.5),
        ("stack.attention.rope.interleaved", True),
        ("stack.attention.rope.interleaved_sections", True),
        ("stack.attention.rotary", False),
        ("stack.attention.softmax_scale", 0.5),
        ("stack.attention.softcap", 50.0),
        ("stack.mlp.activation", "gelu_pytorch_tanh"),
        ("stack.norm_offset", True),
        ("stack.post_norms", True),
        ("stack.layer_scale", True),
        ("stack.attention.linear", LinearAttention(value_head_dim=8)),
        ("stack.attention.output_gate", True),
        ("stack.attention.kv_projection", "keys"),
        ("stack.variants", (LayerVariant(layers=(0,), mlp=Mlp(width=8)),)),
        ("stack.linears", (Linear(inputs=8, outputs=8),)),
        ("stack.extra_parameters", 8),
        ("per_layer_inputs", PerLayerInputs(vocab=64, width=8)),
        ("embedding_scale", 5.6),
        ("logit_softcap", 30.0),
    ],
    "qwen": [("stack.attention.qk_norm_kind", "l2"), ("stack.attention.qk_norm_over", "hidden")],
    "windows": [
        ("class_token", True),
        ("pre_norm", True),
        ("drops_first_row", True),
        ("interpolates_positions", True),
        ("deepstack_layers", (1,)),
        ("stack.attention.rope.sections", (2, 2)),
        ("stack.mlp.merge", 4),
        ("projector.norm", "layernorm"),
        ("projector.deepstack_norm", True),
        ("projector.activation", "silu"),
    ],
    "learned": [("stack.attention.rotary", True), ("stack.mlp.activation", "quick_gelu")],
    "sound": [("stack.attention.rotary", True)],
}


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [(name, path, value) for name, cases in BY_NAME.items() for path, value in cases],
)
def test_a_constant_that_layers_cannot_honour_is_refused_by_name(name: str, path: str, value: object) -> None:
    module: Encoder | Llm = LLMS[name] if name in LLMS else ENCODERS[name]
    assert find_unsupported(module) is None
    refused = find_unsupported(changed(module, path, value))
    assert refused is not None and refused.field == f"model.{module.name}.{path}"
    with pytest.raises(UserError, match="the engine does not run it yet"):
        build_layers(changed(module, path, value), dtype=torch.float64, device="meta")


def test_every_constant_is_honoured_or_refused() -> None:
    """A constant added to the model without a limit or a place in the layers is missed by no one."""
    honoured = {"theta", "sections", "dropout_rate", "norm_eps", "patch_bias", "final_norm", "family", "rope"}
    honoured |= {"tokens_per_second", "tokens_per_item"}  # the latter of assumed workloads
    named = {path.rpartition(".")[2] for cases in BY_NAME.values() for path, _ in cases}
    stack = LLMS["llama"].stack
    of_model = [LLMS["llama"], ENCODERS["windows"], ENCODERS["windows"].projector, tiny_model()]
    parts: list[Any] = [*of_model, stack, stack.attention, stack.mlp, Rope()]
    constants = {each.name for part in parts for each in fields(part) if each.metadata.get("constant")}
    assert constants == honoured | named


@pytest.mark.parametrize("name", ["llama", "windows"])
def test_constants_reach_the_layers(name: str) -> None:
    module: Encoder | Llm = LLMS[name] if name in LLMS else ENCODERS[name]
    layers = build_layers(changed(module, "stack.norm_eps", 0.5), dtype=torch.float64)
    norms = [part for layer in layers for whole in layer for part in whole.modules() if hasattr(part, "eps")]
    assert len(norms) == 2 * module.stack.layers + 1 and all(norm.eps == 0.5 for norm in norms)
    if isinstance(module, Encoder):
        bare = build_layers(replace(module, patch_bias=False, final_norm=False), dtype=torch.float64)
        assert bare[0][0].bias is None and bare[-1][0].norm is None


def test_a_family_that_no_test_compares_is_refused_and_can_be_planned(tmp_path: Path) -> None:
    model = replace(tiny_model(), family="gemma3")
    refused = find_untrainable(model)
    assert refused is not None and refused.field == "model.family" and refused.value == "gemma3"
    with pytest.raises(UserError, match=r"model\.family = gemma3"):
        refuse_untrainable(model)
    with pytest.raises(UserError, match=r"model\.family = gemma3"):
        train(replace(find_job("cpu/tiny-vl"), model=model), run_dir=tmp_path)
    assert find_untrainable(tiny_model()) is None


def test_a_compared_family_is_checked_field_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(own_layers.COMPARED_FAMILIES, "gemma3", "tests/test_own_layers.py")
    assert find_untrainable(replace(tiny_model(), family="gemma3")) is None
    model = changed(tiny_model(), "llm.logit_softcap", 30.0)
    refused = find_untrainable(replace(model, family="gemma3"))
    assert refused is not None and refused.field == "model.llm.logit_softcap"


def test_compared_families_name_their_test() -> None:
    root = Path(__file__).parent.parent
    for family, test in COMPARED_FAMILIES.items():
        assert family in ENCODER_READERS and family in (root / test).read_text()


def read(config: dict[str, Any], folder: Path) -> Model:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return read_hf_config(path)


def test_constants_are_read_alike_from_released_files_and_those_of_transformers(tmp_path: Path) -> None:
    (path,) = CONFIGS.glob("*Qwen3-VL-8B*")
    config = json.loads(path.read_text())
    text = config["text_config"]
    text.pop("rope_scaling", None)
    text |= {"rope_theta": 7e6, "rms_norm_eps": 1e-4}
    text["rope_scaling"] = {"rope_type": "default", "mrope_section": [20, 22, 22], "mrope_interleaved": True}
    released = read(config, tmp_path)
    del text["rope_theta"]
    text["rope_parameters"] = {**text.pop("rope_scaling"), "rope_theta": 7e6}
    assert read(config, tmp_path) == released
    stack = released.llm.stack
    assert stack.attention.rope == Rope(theta=7e6, sections=(20, 22, 22), interleaved_sections=True)
    assert (stack.norm_eps, stack.mlp.activation, released.family) == (1e-4, "silu", "qwen3_vl")
    encoder = released.encoders[0]
    assert encoder.deepstack_layers == (8, 16, 24) and encoder.interpolates_positions and encoder.rotary
    assert encoder.stack.mlp.activation == "gelu_pytorch_tanh"


def test_a_scaling_is_read_with_its_numbers() -> None:
    (path,) = CONFIGS.glob("*Kimi-K2.5*")
    attention = read_hf_config(path).llm.stack.attention
    assert attention.rope.theta == 50_000 and attention.rope.scaling == RopeScaling(
        type="yarn",
        factor=64.0,
        original_max_position_embeddings=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    )


def test_plans_are_bound_to_constants_only_where_they_differ_from_their_default() -> None:
    job = find_job("cpu/tiny-vl")
    before, hashes = flatten_and_hash_parts(list_bound_parts(job))
    assert not [name for name in before["model"] if "rope" in name or "eps" in name or name == "family"]
    model = changed(job.model, "llm.stack.attention.rope.theta", 5e5)
    after, other = flatten_and_hash_parts(list_bound_parts(replace(job, model=model)))
    assert after["model"] == before["model"] | {"llm.stack.attention.rope.theta": 5e5}
    assert other["model"] != hashes["model"]


def test_sections_must_cover_the_frequencies(tmp_path: Path) -> None:
    (path,) = CONFIGS.glob("*Qwen3-VL-8B*")
    config = json.loads(path.read_text())
    config["text_config"]["rope_scaling"] = {"mrope_section": [20, 20, 20]}
    read(config, tmp_path)
    with pytest.raises(UserError, match="add up to 60, and half of the rotated head is 64"):
        find_job(tmp_path, on="h100:8")
