"""Released config.json files become models; what they leave out is never guessed in silence."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus.errors import OptimusError, UserError
from optimus.job.hf_config import ENCODER_READERS, REFUSED, read_hf_config
from optimus.job.model import Model
from optimus.job.read import find_job, load_job, load_model
from optimus.job.write import format_job_yaml

CONFIGS = Path(__file__).parent / "data" / "configs"

QWEN2_TEXT = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
QWEN2_VISION = {"depth": 32, "num_heads": 16, "in_chans": 3, "patch_size": 14, "spatial_merge_size": 2}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}
# The keys of each family, with the dimensions of a released model, written here by hand.
BY_HAND: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        **QWEN2_TEXT,
        "model_type": "qwen2_5_vl",
        "vision_config": {
            **QWEN2_VISION,
            "hidden_size": 1280,
            "intermediate_size": 3456,
            "out_hidden_size": 8192,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
    "qwen2_vl": {
        **QWEN2_TEXT,
        "model_type": "qwen2_vl",
        "vision_config": {
            **QWEN2_VISION,
            "embed_dim": 1280,
            "mlp_ratio": 4,
            "hidden_size": 8192,
            "temporal_patch_size": 2,
        },
    },
    "internvl_chat": {
        "model_type": "internvl_chat",
        "downsample_ratio": 0.5,
        "select_layer": -1,
        "llm_config": {**QWEN2_TEXT, "model_type": "qwen2", "vocab_size": 151674},
        "vision_config": {
            "hidden_size": 3200,
            "intermediate_size": 12800,
            "num_hidden_layers": 45,
            "num_attention_heads": 25,
            "patch_size": 14,
            "image_size": 448,
            "qkv_bias": False,
            "qk_normalization": True,
            "norm_type": "rms_norm",
        },
    },
    "llava_onevision": {
        "model_type": "llava_onevision",
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
        "text_config": {**QWEN2_TEXT, "model_type": "qwen2"},
        "vision_config": {**SIGLIP, "num_hidden_layers": 26},
    },
    "gemma3": {
        "model_type": "gemma3",
        "mm_tokens_per_image": 256,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "vocab_size": 262208,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
            "attention_bias": False,
        },
        "vision_config": {**SIGLIP, "image_size": 896},
    },
}


def written(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def released(name: str) -> Model:
    return read_hf_config(next(CONFIGS.glob(f"*--{name}_config.json")))


@pytest.mark.parametrize(
    ("name", "total_b", "llm_active_b"),
    [
        ("Qwen3-VL-235B-A22B-Instruct", 235.7, 22.2),
        ("Qwen3-VL-30B-A3B-Instruct", 31.07, 3.35),
        ("Qwen3-VL-32B-Instruct", 33.36, 32.76),
        ("Qwen3-VL-8B-Instruct", 8.77, 8.19),
        ("Qwen3-VL-2B-Instruct", 2.13, 1.72),
        ("Kimi-K2.5", 1026.9, 32.86),
    ],
)
def test_released_files_have_the_parameters_of_their_cards(
    name: str, total_b: float, llm_active_b: float
) -> None:
    model = released(name)
    assert model.name == name
    assert model.parameters() / 1e9 == pytest.approx(total_b, rel=0.002)
    assert model.llm.parameters(active=True) / 1e9 == pytest.approx(llm_active_b, rel=0.002)


@pytest.mark.parametrize(
    ("family", "vision_b", "llm_b"),
    [
        ("qwen2_5_vl", 0.705, 72.71),
        ("qwen2_vl", 0.700, 72.71),
        ("internvl_chat", 5.708, 72.70),
        ("llava_onevision", 0.475, 72.71),
        ("gemma3", 0.423, 27.01),
    ],
)
def test_other_families_have_the_parameters_of_their_cards(
    tmp_path: Path, family: str, vision_b: float, llm_b: float
) -> None:
    model = read_hf_config(written(tmp_path, BY_HAND[family]))
    assert model.encoders[0].parameters() / 1e9 == pytest.approx(vision_b, rel=0.01)
    assert model.llm.parameters() / 1e9 == pytest.approx(llm_b, rel=0.002)


def sizes(value: Any) -> Any:
    """Returns a model with every constant at its default."""
    if isinstance(value, tuple):
        return tuple(map(sizes, value))
    if not is_dataclass(value) or isinstance(value, type):
        return value
    kept = [each.name for each in fields(value) if not each.metadata.get("constant")]
    return type(value)(**{name: sizes(getattr(value, name)) for name in kept})


def test_the_catalog_has_the_sizes_of_the_released_files(tmp_path: Path) -> None:
    for name, model in (
        ("qwen3-vl-235b", released("Qwen3-VL-235B-A22B-Instruct")),
        ("kimi-k2.5", released("Kimi-K2.5")),
        ("qwen2.5-vl-72b", read_hf_config(written(tmp_path, BY_HAND["qwen2_5_vl"]))),
        ("internvl3-78b", read_hf_config(written(tmp_path, BY_HAND["internvl_chat"]))),
    ):
        assert load_model(name).modules == sizes(model.modules), name


def test_deepstack_feeds_the_embedding_and_the_layers_behind_it() -> None:
    encoder = released("Qwen3-VL-8B-Instruct").encoders[0]
    assert encoder.feeds == (0, 1, 2, 3)
    assert encoder.projector.merge == 4 and encoder.projector.widths == (4608, 4096)
    assert encoder.patch_inputs == 3 * 2 * 16 * 16


def test_windows_are_tokens_and_gemma_alternates(tmp_path: Path) -> None:
    qwen = read_hf_config(written(tmp_path, BY_HAND["qwen2_5_vl"])).encoders[0].stack.attention
    assert (qwen.window_of(0), qwen.window_of(7)) == (64, None)
    gemma = read_hf_config(written(tmp_path, BY_HAND["gemma3"]))
    assert [gemma.llm.stack.attention.window_of(layer) for layer in (4, 5, 6)] == [1024, None, 1024]
    assert gemma.encoders[0].projector.merge == 16


def test_latent_attention_and_experts_of_kimi() -> None:
    stack = released("Kimi-K2.5").llm.stack
    assert stack.attention.latent is not None and stack.attention.latent.key_value_rank == 512
    assert stack.experts is not None and (stack.experts.count, stack.experts.shared_width) == (384, 2048)
    assert not stack.has_experts(0) and stack.has_experts(1)


def test_what_is_derived_is_said(tmp_path: Path) -> None:
    assert "in_channels = 3 (images are RGB)" in released("Kimi-K2.5").source
    model = read_hf_config(written(tmp_path, BY_HAND["internvl_chat"]))
    assert "llm_config.head_dim = 128 (hidden_size / num_attention_heads)" in model.source


def test_a_layer_selected_before_the_last_cuts_the_tower(tmp_path: Path) -> None:
    config = {**BY_HAND["llava_onevision"], "vision_feature_layer": -2}
    assert read_hf_config(written(tmp_path, config)).encoders[0].stack.layers == 25


@pytest.mark.parametrize("family", sorted(BY_HAND))
def test_every_missing_key_is_named(tmp_path: Path, family: str) -> None:
    """Take out one key at a time: the same model (not needed), a named default, or an error with the key."""
    whole = read_hf_config(written(tmp_path, BY_HAND[family]))
    nested = [key for key, value in BY_HAND[family].items() if isinstance(value, dict)]
    for block, key in [("", key) for key in BY_HAND[family]] + [
        (b, k) for b in nested for k in BY_HAND[family][b]
    ]:
        config = json.loads(json.dumps(BY_HAND[family]))
        del (config[block] if block else config)[key]
        path, refused = written(tmp_path, config), None
        try:
            model = read_hf_config(path)
            assert model == whole or f"{key} " in model.source.partition("; derived: ")[2], key
        except UserError as error:
            refused = error
        assert refused is None or (key in refused.field and refused.file == str(path))


def test_a_language_model_alone_is_refused() -> None:
    with pytest.raises(UserError, match="without an encoder"):
        released("Meta-Llama-3.1-8B")


def test_an_unknown_model_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_hf_config(written(tmp_path, {"model_type": "no_such_vl"}))
    assert all(name in caught.value.hint for name in ENCODER_READERS)


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_a_model_that_cannot_be_described_is_refused_with_the_reason(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserError, match=REFUSED[kind]):
        read_hf_config(written(tmp_path, {"model_type": kind}))


def test_images_of_a_fixed_size_reach_the_assumed_workload(tmp_path: Path) -> None:
    job = find_job(written(tmp_path, BY_HAND["gemma3"]), on="h100:64")
    assert job.model.encoders[0].tokens_per_item == 256
    lengths = [n for sequence in job.workload.sequences for n in sequence.lengths("vision")]
    assert lengths and max(lengths) <= 256
    text = format_job_yaml(tmp_path / "config.json", "h100:64")
    assert "item: 256" in text


def test_a_folder_with_a_config_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "My-VL-72B"
    folder.mkdir()
    written(folder, BY_HAND["qwen2_5_vl"])
    assert find_job(folder, on="h100:512").name == "My-VL-72B"


@pytest.mark.parametrize("name", ["Qwen3-VL-235B-A22B-Instruct", "Kimi-K2.5"])
def test_init_writes_a_job_that_loads_and_equals_the_one_in_memory(tmp_path: Path, name: str) -> None:
    config = next(CONFIGS.glob(f"*--{name}_config.json"))
    path = tmp_path / "job.yaml"
    path.write_text(format_job_yaml(config, "h100:512"), encoding="utf-8")
    assert load_job(path) == find_job(config, on="h100:512")


def test_init_writes_paths_that_start_at_the_job_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "jobs").mkdir()
    written(tmp_path / "a b", BY_HAND["qwen2_vl"])
    monkeypatch.chdir(tmp_path)
    text = format_job_yaml("a b/config.json", "a100:64", folder=Path("jobs"))
    Path("jobs/job.yaml").write_text(text, encoding="utf-8")
    assert load_job("jobs/job.yaml") == find_job("a b/config.json", on="a100:64")


@pytest.mark.ci
@settings(max_examples=150, deadline=None)
@given(
    family=st.sampled_from(sorted(BY_HAND)),
    pick=st.integers(0, 1_000),
    value=st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 10**20),
        st.text(max_size=5),
        st.lists(st.integers()),
        st.floats(),
    ),
)
def test_mutated_files_give_a_model_or_a_typed_error(
    tmp_path_factory: pytest.TempPathFactory, family: str, pick: int, value: object
) -> None:
    config = json.loads(json.dumps(BY_HAND[family]))
    spots = [(config, key) for key in config]
    spots += [(inner, key) for inner in config.values() if isinstance(inner, dict) for key in inner]
    block, key = spots[pick % len(spots)]
    block[key] = value
    path = written(tmp_path_factory.mktemp("fuzz"), config)
    refused = None
    try:
        find_job(path, on="h100:512")
    except OptimusError as error:
        refused = error
    assert refused is None or "\nhint: " in str(refused)
