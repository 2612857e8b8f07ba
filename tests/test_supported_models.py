"""Parameter counts of every configuration that is read agree with transformers' own classes on `meta`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.docs import hf_defaults
from benchmarks.docs.supported_models import (
    DATA,
    PAGE,
    RELEASED,
    WRITTEN,
    compute_all,
    fill,
    read_stored,
)
from optimus.errors import UserError
from optimus.job.hf_config import ENCODER_READERS, REFUSED, THINKERS, read_hf_config
from optimus.job.hf_defaults import find_class_defaults
from optimus.job.model import Model
from optimus.job.read import find_job

REFRESH = "run python -m benchmarks.docs.supported_models and read what changed"
MAX_DIFFERENCE = 0.01
FORMS = json.loads((DATA / "released_forms.json").read_text())


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
    for form in (RELEASED, WRITTEN):
        assert sum(key.endswith(form) for key in accepted) >= 20
    refused = {row["model_type"] for row in stored.values() if "refused" in row}
    assert refused == set(REFUSED)
    kinds = {row["model_type"] for row in accepted.values()}
    assert kinds == {*ENCODER_READERS, *THINKERS} - {"internvl_chat"}


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
    assert tokens["Qwen2.5-VL-7B"] == tokens["Pixtral-12B"] == 0


@pytest.mark.parametrize(
    ("name", "block", "key", "value"),
    [
        ("Llama-4-Scout", "text_config", "interleave_moe_layer_step", 2),
        ("Qwen3-Omni-30B-A3B (thinker)", "text_config", "decoder_sparse_step", 2),
        ("LLaVA-1.5-7B", "vision_config", "model_type", "dinov2"),
        ("LLaVA-1.5-7B", "text_config", "model_type", "mamba"),
        ("InternVL3-8B", "vision_config", "image_size", [448, 224]),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name(
    tmp_path: Path, name: str, block: str, key: str, value: object
) -> None:
    config = json.loads(json.dumps(FORMS[name]))
    config[block][key] = value
    with pytest.raises(UserError) as caught:
        read(tmp_path, config)
    assert caught.value.field == f"{block}.{key}"
