"""Compares frozen, LoRA and checkpointed splits with one process of transformers treated the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from hf_chain import compare, gradients, parts_of, run_step
from peft import LoraConfig, PeftModel, inject_adapter_in_model

from optimus.errors import UserError
from optimus.hf import SplitModel, checkpoint_activations, freeze, split_model, train_only
from optimus.hf.lora import ADAPTER, add_lora, save_lora

TOWERS = {"qwen2_audio": "model.audio_tower.*", "gemma3": "model.vision_tower.*"}
PROJECTORS = {"qwen2_audio": "*.multi_modal_projector.*", "gemma3": "*.multi_modal_projector.*"}
OPTION_CASES = ["qwen2_5_vl", "qwen3_vl_tied", "gemma3", "qwen2_audio"]


def split_of(model: Any, case: str) -> SplitModel:
    blocks = {"audio" if case == "qwen2_audio" else "vision": [2, 2]}
    return split_model(model, stages=[1, 3], blocks=blocks)


def step(split: SplitModel, case: str) -> tuple[float, dict[str, Any]]:
    return run_step(split, [split.inputs(batch) for batch in hf_models.microbatches(case)]), gradients(split)


@pytest.mark.ci("hf")
@pytest.mark.parametrize("case", OPTION_CASES)
@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_parameters_get_no_gradient_and_change_no_other(case: str, frozen: bool) -> None:
    def choose(model: Any) -> None:
        if frozen:
            freeze(model, TOWERS.get(case, "model.visual.*"))
        else:
            train_only(model, PROJECTORS.get(case, "*.merger.*"))

    split = split_of(hf_models.build(case), case)
    choose(split.model)
    loss, grads = step(split, case)
    model = hf_models.build(case)
    choose(model)
    expected = hf_models.reference(case, model)
    assert 0 < len(expected[1]) < len(list(model.parameters()))
    compare(loss, grads, expected)


def test_patterns_without_a_parameter_are_refused() -> None:
    with torch.device("meta"):
        model = hf_models.MODELS["gemma3"]()
    with pytest.raises(UserError, match="matches no parameter"):
        freeze(model, "model.visual.*")


@pytest.mark.ci("hf")
@pytest.mark.parametrize("case", [*OPTION_CASES, "qwen3_vl_moe", "qwen2_5_omni"])
def test_checkpointing_changes_no_gradient(case: str) -> None:
    split = split_of(hf_models.build(case), case)
    checkpoint_activations(parts_of(split))
    loss, grads = step(split, case)
    model = hf_models.build(case)
    compare(loss, grads, hf_models.reference(case, model))


def lora_config() -> LoraConfig:
    return LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj", "qkv", "linear", "linear_fc1"])


@pytest.mark.ci("hf")
@pytest.mark.parametrize("case", OPTION_CASES)
def test_lora_on_parts_is_lora_on_the_model(case: str, tmp_path: Path) -> None:
    model = hf_models.build(case)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    inject_adapter_in_model(lora_config(), model, adapter_name=ADAPTER)
    generator = torch.Generator().manual_seed(3)
    values: dict[str, Any] = {}
    for name, parameter in sorted(model.named_parameters()):
        if ".lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            values[name] = parameter.data
    expected = hf_models.reference(case, model)

    split = split_of(hf_models.build(case), case)
    add_lora(split.model, parts_of(split), lora_config())
    for part in parts_of(split):
        for name, parameter in part.hf.named_parameters():
            if ".lora_" in name:
                parameter.data = values[name].clone()
    loss, grads = step(split, case)
    compare(loss, grads, expected)

    save_lora(parts_of(split), lora_config(), tmp_path)
    loaded = PeftModel.from_pretrained(hf_models.build(case), tmp_path)
    stored = {name.removeprefix("base_model.model."): p for name, p in loaded.named_parameters()}
    assert {name for name in stored if ".lora_" in name} == set(values)
    for name, value in values.items():
        assert torch.equal(stored[name], value.to(stored[name].dtype)), name


def test_adapters_that_are_not_carried_are_refused_by_name() -> None:
    with torch.device("meta"):
        model = hf_models.MODELS["gemma3"]()
    parts = parts_of(split_model(model, stages=[4]))
    for field, value in {"modules_to_save": ["lm_head"], "bias": "all", "use_dora": True}.items():
        with pytest.raises(UserError, match=field):
            add_lora(model, parts, LoraConfig(target_modules=["q_proj"], **{field: value}))
    with pytest.raises(UserError, match="matches no module"):
        add_lora(model, parts, LoraConfig(target_modules=["query"]))
