"""Parameter counts of every configuration that is read agree with transformers' own classes on `meta`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.docs import hf_defaults
from benchmarks.docs.supported_models import (
    DATA,
    LEFT_OUT,
    NO_CLASS,
    PAGE,
    RELEASED,
    WRITTEN,
    compute_all,
    fill,
    read_stored,
)
from optimus.cost.assumptions import get_preset
from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.flops import forward_flops, layer_flops, patch_embedding_flops
from optimus.cost.priced_layer import price_llm_layers
from optimus.errors import UserError
from optimus.exporters.targets import export_plan
from optimus.ir.binding import flatten_and_hash_parts, list_bound_parts
from optimus.ir.op import OpKind
from optimus.job.hf_config import ENCODER_READERS, REFUSED, THINKERS, read_hf_config
from optimus.job.hf_defaults import find_class_defaults
from optimus.job.layout import Layout
from optimus.job.model import Model
from optimus.job.read import find_job, load_job
from optimus.job.workload import TokenLoad
from optimus.job.write import format_job_yaml
from optimus.planner.planning import make_plan
from optimus.verify.validator import check_plan

REFRESH = "run python -m benchmarks.docs.supported_models and read what changed"
MAX_DIFFERENCE = 0.01
FORMS = json.loads((DATA / "released_forms.json").read_text())
PHI4 = {"model_type": "phi4_multimodal", "num_hidden_layers": 32, "vision_config": {"num_hidden_layers": 27}}
PHI4 |= {"audio_config": {"num_blocks": 24}}


def read(folder: Path, config: dict[str, Any]) -> Model:
    (folder / "config.json").write_text(json.dumps(config))
    return read_hf_config(folder / "config.json")


def test_the_page_shows_what_is_stored() -> None:
    page = PAGE.read_text()
    assert fill(page, read_stored()) == page, REFRESH


def test_counts_agree_and_every_family_is_there_in_both_forms() -> None:
    stored = read_stored()
    accepted = {key: row for key, row in stored.items() if "refused" not in row}
    assert len(accepted) >= 30
    for key, row in accepted.items():
        assert row["ours"] == pytest.approx(row["transformers"], rel=MAX_DIFFERENCE), key
        assert bool(row["left out"]) <= (row["model_type"] in LEFT_OUT), key
    for form in (RELEASED, WRITTEN):
        assert sum(key.endswith(form) for key in accepted) >= 20
    refused = {row["model_type"] for row in stored.values() if "refused" in row}
    assert refused == set(REFUSED) - set(NO_CLASS)
    kinds = {row["model_type"] for row in accepted.values()}
    assert kinds == {*ENCODER_READERS, *THINKERS} - {"internvl_chat"}


# Keys of Whisper's 32 layers have no bias; ours has one for queries, keys and values.
KEY_BIASES = dict.fromkeys(("qwen2_audio", "qwen2_5_omni", "qwen2_5_omni_thinker"), 32 * 1280)


def test_counts_of_every_module_agree_but_for_what_is_left_out_by_name() -> None:
    """A total hides an encoder that is wrong behind a large LLM."""
    for key, row in read_stored().items():
        for name, (ours, theirs, left_out) in row.get("modules", {}).items():
            more = KEY_BIASES.get(row["model_type"], 0) if name == "audio" else 0
            assert ours + left_out == theirs + more, (key, name)
            assert left_out == 0 or name != "llm", key


@pytest.mark.ci("hf")
@pytest.mark.filterwarnings("ignore")
def test_the_stored_counts_are_those_of_today() -> None:
    pytest.importorskip("transformers")
    assert compute_all() == read_stored(), REFRESH


@pytest.mark.ci("hf")
@pytest.mark.filterwarnings("ignore")
def test_the_stored_defaults_are_those_of_transformers() -> None:
    pytest.importorskip("transformers")
    text = json.dumps(hf_defaults.build_defaults(), indent=1, sort_keys=True) + "\n"
    assert text == hf_defaults.PATH.read_text(), "run python -m benchmarks.docs.hf_defaults"


@pytest.mark.parametrize("name", FORMS)
def test_a_released_form_can_be_a_job(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FORMS[name]))
    job = find_job(tmp_path, on="h100:64")
    assert job.model.family == FORMS[name]["model_type"]


def test_several_encoders_of_a_file_are_read(tmp_path: Path) -> None:
    thinker = FORMS["Qwen2.5-Omni-7B (thinker)"]
    model = read(tmp_path, {"model_type": "qwen2_5_omni", "thinker_config": thinker, "talker_config": {}})
    assert [(encoder.name, encoder.modality) for encoder in model.encoders] == [
        ("vision", "vision"),
        ("audio", "audio"),
    ]
    assert model.encoders == read(tmp_path, thinker).encoders and "only the thinker" in model.source


def test_class_defaults_fill_what_a_file_leaves_out_and_are_named(tmp_path: Path) -> None:
    model = read(tmp_path, FORMS["Gemma-3-4B"])
    attention = model.llm.stack.attention
    assert (attention.heads, attention.kv_heads, attention.head_dim, model.llm.tied) == (8, 4, 256, True)
    assert attention.rope.theta == 1e6 and attention.rope.local_theta == 1e4
    assert "text_config.num_attention_heads = 8 (class default)" in model.derived
    (note, *_) = find_job(tmp_path, on="h100:64").notes
    assert note.startswith("model: ") and "text_config.num_attention_heads = 8 (class default)" in note
    llava = read(tmp_path, FORMS["LLaVA-1.5-7B"]).llm.stack
    assert (llava.hidden, llava.attention.kv_heads, llava.attention.head_dim) == (4096, 32, 128)


def test_a_default_that_a_class_computes_is_not_taken_from_another_size(tmp_path: Path) -> None:
    """Llama's heads follow its width, which the file states."""
    assert "head_dim" not in find_class_defaults("llama")
    config = json.loads(json.dumps(FORMS["LLaVA-1.5-7B"]))
    config["text_config"] |= {"hidden_size": 2048, "num_attention_heads": 32}
    assert read(tmp_path, config).llm.stack.attention.head_dim == 64


def test_images_have_the_tokens_of_their_configuration(tmp_path: Path) -> None:
    tokens = {name: read(tmp_path, FORMS[name]).encoders[0].tokens_per_item for name in FORMS}
    assert tokens["Gemma-3-4B"] == 256 and tokens["PaliGemma-3B"] == 256 and tokens["InternVL3-8B"] == 256
    assert tokens["LLaVA-1.5-7B"] == 576 and tokens["Idefics3-8B"] == 169 and tokens["SmolVLM-2.2B"] == 81
    assert tokens["Llama-4-Scout"] == 144  # of a tile
    assert tokens["Qwen2.5-VL-7B"] == tokens["Pixtral-12B"] == 0


@pytest.mark.parametrize(
    ("name", "block", "key", "value"),
    [
        ("GLM-4.5V", "text_config", "moe_layer_freq", 2),
        ("InternVL3-8B", "", "downsample_ratio", 1e-200),
        ("InternVL3-8B", "", "downsample_ratio", 0.3),
        ("Llama-4-Scout", "vision_config", "pixel_shuffle_ratio", 1e-9),
        ("Llama-4-Scout", "vision_config", "intermediate_size", 3072),
        ("Llama-4-Scout", "vision_config", "vision_output_dim", 7680),
        ("Qwen3.5-27B", "text_config", "linear_num_key_heads", 7),
        ("LLaVA-1.5-7B", "vision_config", "model_type", "dinov2"),
        ("LLaVA-1.5-7B", "text_config", "model_type", "mamba"),
        ("InternVL3-8B", "vision_config", "image_size", [448, 224]),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name(
    tmp_path: Path, name: str, block: str, key: str, value: object
) -> None:
    config = json.loads(json.dumps(FORMS[name]))
    (config[block] if block else config)[key] = value
    with pytest.raises(UserError) as caught:
        read(tmp_path, config)
    assert caught.value.field == (f"{block}.{key}" if block else key)


def test_layers_of_two_kinds_are_told_apart(tmp_path: Path) -> None:
    maverick = read(tmp_path, FORMS["Llama-4-Maverick"]).llm.stack
    assert [maverick.has_experts(layer) for layer in range(4)] == [False, True, False, True]
    assert maverick.layer_parameters(1) > 50 * maverick.layer_parameters(0)
    windows = [maverick.attention.window_of(layer) for layer in range(8)]
    assert windows == [8192, 8192, 8192, None] * 2
    qwen = read(tmp_path, FORMS["Qwen3.5-35B-A3B"]).llm.stack
    linear = [qwen.at(layer).attention.linear is not None for layer in range(8)]
    assert linear == [True, True, True, False] * 2
    omni = json.loads(json.dumps(FORMS["Qwen3-Omni-30B-A3B (thinker)"]))
    omni["text_config"] |= {"decoder_sparse_step": 2, "mlp_only_layers": [1]}
    stack = read(tmp_path, omni).llm.stack
    assert [stack.has_experts(layer) for layer in range(6)] == [False, False, False, True, False, True]


@pytest.mark.ci("hf")
def test_flops_of_linear_attention_are_those_of_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the products of transformers' module on `meta`, with its triangular system as a product."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen3_5TextConfig

    monkeypatch.setattr(modeling, "is_torchdynamo_exporting", lambda: True)
    config, tokens = Qwen3_5TextConfig(num_hidden_layers=4), 512
    with torch.device("meta"):
        module = modeling.Qwen3_5GatedDeltaNet(config, 0)
        with FlopCounterMode(display=False) as counter:
            module(torch.empty(1, tokens, config.hidden_size))
    written = {"model_type": "qwen3_5", "text_config": config.to_dict(), "vision_config": {}}
    stack = read(tmp_path, written).llm.stack
    load = TokenLoad(tokens=tokens, squares=tokens**2)
    mlp = 2.0 * tokens * stack.mlp.parameters(stack.hidden)
    assert layer_flops(stack, 0, load) - mlp == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.ci("hf")
def test_flops_of_a_conformer_are_those_of_its_module(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Gemma4AudioConfig

    config, tokens = Gemma4AudioConfig(_attn_implementation="eager"), 240
    context = config.attention_chunk_size + config.attention_context_left - 1
    with torch.device("meta"):
        module = modeling.Gemma4AudioLayer(config, 0)
        with FlopCounterMode(display=False) as counter:
            positions = torch.empty(1, config.attention_context_left, config.hidden_size)
            module(torch.empty(1, tokens, config.hidden_size), None, positions)
    stack = read(tmp_path, FORMS["Gemma-4-E2B"]).encoder("audio").stack
    assert stack.attention.window_tokens == context
    load = TokenLoad(tokens=tokens, squares=tokens**2)
    relative = 2.0 * tokens * config.hidden_size**2  # projected once for a few positions, not per token
    assert layer_flops(stack, 0, load) - relative == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.ci("hf")
def test_flops_of_phi_4_s_conformer_are_those_of_its_module(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.phi4_multimodal.modeling_phi4_multimodal")
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Phi4MultimodalAudioConfig

    config, tokens = Phi4MultimodalAudioConfig(_attn_implementation="eager"), 500
    with torch.device("meta"):
        layer = modeling.Phi4MultimodalAudioConformerEncoderLayer(config)
        front = modeling.Phi4MultimodalAudioNemoConvSubsampling(config)
        with FlopCounterMode(display=False) as counted:
            layer(torch.empty(1, tokens, config.hidden_size), torch.empty(1, 1, tokens, tokens))
        with FlopCounterMode(display=False) as before:
            front(torch.empty(1, tokens * config.time_reduction, config.input_size), None)
    encoder, load = read(tmp_path, PHI4).encoder("audio"), TokenLoad(tokens=tokens, squares=tokens**2)
    assert layer_flops(encoder.stack, 0, load) == pytest.approx(counted.get_total_flops(), rel=0.01)
    left_out = before.get_total_flops() - patch_embedding_flops(encoder, load)
    assert left_out / (left_out + forward_flops(encoder, load)) == pytest.approx(0.1, rel=0.05)


def test_layers_of_gemma_4_share_keys_and_values(tmp_path: Path) -> None:
    stack = read(tmp_path, FORMS["Gemma-4-E2B"]).llm.stack
    kinds = [stack.at(layer).attention for layer in (0, 4, 15, 19)]
    assert [kind.head_dim for kind in kinds] == [256, 512, 256, 512]
    assert [kind.kv_projection for kind in kinds] == ["both", "both", "none", "none"]
    assert [kind.window_tokens for kind in kinds] == [512, None, 512, None]
    assert stack.at(15).mlp.width == 2 * stack.at(14).mlp.width


def test_linear_attention_costs_in_proportion_to_its_tokens(tmp_path: Path) -> None:
    stack = read(tmp_path, FORMS["Qwen3.5-27B"]).llm.stack
    short, long = (TokenLoad(tokens=2**16, squares=2**16 * span) for span in (2**10, 2**16))
    assert layer_flops(stack, 0, short) == layer_flops(stack, 0, long)
    assert layer_flops(stack, 3, short) < layer_flops(stack, 3, long)


@pytest.mark.parametrize("name", ["Qwen3.5-35B-A3B", "Llama-4-Maverick", "Kimi-VL-A3B", "Gemma-4-E2B"])
def test_layers_of_several_kinds_can_be_priced_and_written(tmp_path: Path, name: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(FORMS[name]))
    job = find_job(config, on="h100:64")
    path = tmp_path / "job.yaml"
    path.write_text(format_job_yaml(config, "h100:64"), encoding="utf-8")
    assert load_job(path) == job
    assert ("stack.variants" in path.read_text()) == (name not in ("Kimi-VL-A3B", "Phi-4-multimodal"))
    cost_model = ClusterCostModel(cluster=job.cluster, assumptions=get_preset("clean"))
    layout, load = Layout(tp=2, cp=2), job.workload.llm_load()
    layers = price_llm_layers(job.model.llm, load, layout, cost_model, "selective")
    for kind in (OpKind.FORWARD, OpKind.BACKWARD, OpKind.WEIGHT_GRAD):
        assert all(sum(k.duration_s for k in layer.kernels[kind]) > 0 for layer in layers[1:-1])
    held = sum(layer.flops for layer in layers)
    assert held == pytest.approx(forward_flops(job.model.llm, load))
    bound, _ = flatten_and_hash_parts(list_bound_parts(job))
    assert not any(str(value).startswith("sha256") for value in bound["model"].values())


def shrink(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Returns a configuration of the same kinds of layers, but few of them, and few experts."""
    small = dict.fromkeys(("num_hidden_layers", "depth", "num_blocks"), layers)
    small["num_kv_shared_layers"] = layers // 2
    small |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)
    config = {
        key: shrink(value, layers) if isinstance(value, dict) else value for key, value in config.items()
    }
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][-layers:]
    return config | {key: value for key, value in small.items() if config.get(key)}


LINEAR = "linear attention is priced as the products of its chunks, which were not measured"
NOTES = {
    "Qwen3.5-27B": (LINEAR, "multi-token-prediction layers are left out"),
    "Gemma-4-E2B": (
        "keys and values that a later stage shares are not sent in the plan",
        "of the convolutions before the audio encoder only the linear layer is priced",
    ),
    "Phi-4-multimodal": (
        "the pooling head of the vision tower is left out",
        "of the convolutions before the audio encoder only the linear layer is priced",
    ),
    "Kimi-VL-A3B": (),
    "Qwen3.5-35B-A3B": (LINEAR,),
    "Llama-4-Maverick": ("attention in chunks is priced as a window of as many tokens",),
    "Gemma-4-26B-A4B": (),
}


@pytest.mark.parametrize(
    "name",
    list(NOTES)[:2] + [pytest.param(name, marks=pytest.mark.ci("search")) for name in list(NOTES)[2:]],
)
def test_new_kinds_of_layers_are_planned_checked_and_not_exported_silently(tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shrink(FORMS.get(name, PHI4), 4)))
    encoders = [f"{encoder.name}=dp8" for encoder in read_hf_config(path).encoders]
    axes = "llm=pp2,tp2,chunks1" if "experts" not in path.read_text() else "llm=pp2,tp1,ep2,chunks1"
    job = find_job(path, "h100:8", (axes, *encoders))
    for note in NOTES[name]:
        assert any(line.startswith(f"model: {note}") for line in job.notes), job.notes
    job = replace(job, workload=replace(job.workload, sequences_per_step=8))
    plan = make_plan(job, systems=()).plan
    assert check_plan(plan).ok
    refused = [feature.what for feature in export_plan(plan, "megatron").not_supported]
    constants = next((what for what in refused if what.startswith("the LLM's constants ")), "")
    assert ("stack.post_norms" in constants) == name.startswith("Gemma")
    assert ("stack.norm_offset" in constants) == name.startswith("Qwen3.5")
    assert ("stack.attention.window_tokens" in constants) == name.startswith(("Gemma", "Llama"))
    assert ("the LLM's layers of other kinds" in refused) == (name not in ("Kimi-VL-A3B", "Phi-4-multimodal"))


def test_both_forms_of_internvl_are_one_model(tmp_path: Path) -> None:
    """transformers has no class of the hub's own form, which names the same sizes otherwise."""
    config = json.loads(json.dumps(FORMS["InternVL3-8B"]))
    chat = {"model_type": "internvl_chat", "select_layer": -1, "llm_config": config["text_config"]}
    chat |= {"downsample_ratio": config["downsample_ratio"], "vision_config": dict(config["vision_config"])}
    chat["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    chat["vision_config"] |= {"model_type": "intern_vit_6b", "qkv_bias": True, "qk_normalization": False}
    chat["vision_config"]["norm_type"] = "layer_norm"
    ours, theirs = read(tmp_path, chat), read(tmp_path, config)
    assert [module.parameters() for module in ours.modules] == [
        module.parameters() for module in theirs.modules
    ]
