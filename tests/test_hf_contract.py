"""Says what moved when transformers moves: private names and habits of forwards that optimus.hf uses."""

from __future__ import annotations

import inspect
from typing import Any

import hf_models
import pytest
import torch
import transformers
from hf_chain import parts_of
from peft.tuners import tuners_utils
from transformers import conversion_mapping, core_model_loading

from optimus.hf.families import find_family
from optimus.hf.split import split_model


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def build_on_meta(case: str) -> Any:
    with torch.device("meta"):
        return hf_models.MODELS[case]()


def test_the_conversion_of_names_is_where_it_was() -> None:
    assert parameters(core_model_loading.rename_source_key)[:5] == [
        "source_key",
        "weight_renamings",
        "weight_converters",
        "base_model_prefix",
        "meta_state_dict",
    ]
    assert parameters(conversion_mapping.get_model_conversion_mapping)[0] == "model"
    assert core_model_loading.dot_natural_key("a.10.b") > core_model_loading.dot_natural_key("a.9.b")
    converter = core_model_loading.WeightConverter(
        source_patterns=["a.*.x", "a.*.y"],
        target_patterns="b",
        operations=[core_model_loading.MergeModulelist(dim=0), core_model_loading.Concatenate(dim=1)],
    )
    assert converter.source_patterns == ["a.*.x", "a.*.y"]
    assert [operation.dim for operation in converter.operations] == [0, 1]
    turn = core_model_loading.Transpose(1, 2, check_dims=True)
    assert (turn.dim0, turn.dim1, turn.check_dims) == (1, 2, True)


def test_models_have_the_fields_of_loading() -> None:
    model = build_on_meta("qwen3_vl_tied")
    assert model.all_tied_weights_keys == {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    assert model._tied_weights_keys
    assert isinstance(model._keys_to_ignore_on_load_unexpected, set)
    assert model.base_model_prefix == "model"
    assert build_on_meta("qwen3_vl").all_tied_weights_keys == {}
    assert callable(model._init_weights)


def test_peft_finds_targets_by_the_function_we_ask() -> None:
    assert parameters(tuners_utils.check_target_module_exists) == ["config", "key"]


@pytest.mark.parametrize("case", hf_models.CASES)
def test_modules_are_where_families_say(case: str) -> None:
    model = build_on_meta(case)
    family = find_family(model.config)
    assert {"embed_tokens", "layers", "norm", "rotary_emb"} <= set(model.model.language_model._modules)
    assert "lm_head" in model._modules
    known = {"language_model"}
    for tower in family.towers.values():
        module = model.model._modules[tower.module]
        known |= {tower.module, tower.projector} - {""}
        assert isinstance(getattr(model.config, tower.token), int)
        if tower.features:
            assert callable(getattr(model.model, tower.features))
        if tower.videos:
            assert callable(getattr(model.model, tower.video_features))
        if tower.cut is not None:
            layers = tower.cut.layers.split(".")[0]
            optional = {"pos_embed", "head"}  # not in every tower of its kind
            own = {layers, *tower.cut.stem, *tower.cut.tail}
            stateless = {"rotary_pos_emb", "deepstack_merger_list"}
            assert own - optional <= set(module._modules) <= own | stateless
        accepted = set(parameters(model.model.forward))
        assert {"input_ids", "position_ids", "attention_mask", *tower.inputs, *tower.videos} <= accepted
    assert set(model.model._modules) == known, "a module that no part would hold"
    direct = [*model._parameters, *model.model._parameters, *model.model.language_model._parameters]
    assert not direct, "a parameter that every part would hold"


@pytest.mark.parametrize("case", hf_models.CASES)
def test_parts_hold_every_parameter_once(case: str) -> None:
    model = build_on_meta(case)
    blocks = {"audio" if case == "qwen2_audio" else "vision": [1, 3]}
    split = split_model(model, stages=[1, 2, 1], blocks=blocks)
    names = [name.removeprefix("hf.") for part in parts_of(split) for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))


def test_the_range_of_transformers_is_the_tested_one() -> None:
    assert (5, 20) <= tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
