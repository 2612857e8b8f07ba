"""Writes optimus/catalog/hf_defaults.json: class defaults of transformers' configurations."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import optimus.catalog

PATH = Path(optimus.catalog.__file__).parent / "hf_defaults.json"
# Configurations whose defaults are stored; those of their parts come with them.
FAMILIES = (
    "gemma3", "gemma4", "glm4v", "glm4v_moe", "idefics3", "internvl", "kimi_k25", "llama4", "llava",
    "llava_next", "llava_onevision", "minicpmv4_6", "mistral3", "paligemma", "phi4_multimodal",
    "qwen2_5_omni", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_5", "qwen3_5_moe",
    "qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
)  # fmt: skip
PARTS = (
    "clip_vision_model", "deepseek_v3", "gemma", "llama", "mistral", "ministral3", "pixtral", "qwen2",
    "qwen3", "qwen3_moe", "siglip_vision_model", "gemma4_text", "gemma4_vision", "gemma4_audio",
)  # fmt: skip
BLOCKS = ("text_config", "vision_config", "audio_config", "thinker_config")
# Keys that no reader looks at.
UNUSED = ("id2label", "label2id", "initializer_range", "transformers_version", "layer_types", "moe_layers",
          "no_rope_layers", "dtype", "architectures", "talker_config", "token2wav_config", "code2wav_config",
          "_name_or_path", "chunk_size_feed_forward", "output_attentions", "output_hidden_states",
          "return_dict", "is_encoder_decoder", "use_cache", "problem_type")  # fmt: skip


def build_defaults() -> dict[str, dict[str, Any]]:
    """Returns the defaults of every class; blocks of a composite are named by their model_type."""
    from transformers import CONFIG_MAPPING

    table: dict[str, dict[str, Any]] = {}
    for name in (*FAMILIES, *PARTS):
        _add(table, name, CONFIG_MAPPING[name]().to_dict())
    for name, defaults in table.items():
        if not any(block in defaults for block in BLOCKS):
            table[name] = _stated_defaults(CONFIG_MAPPING[name])
    return dict(sorted(table.items()))


def _stated_defaults(kind: Any) -> dict[str, Any]:
    """Returns the defaults of a class's fields, without those that it computes from other fields."""
    values = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    return _plain(
        values | {"model_type": kind.model_type, "rope_parameters": getattr(kind(), "rope_parameters", None)}
    )


def _add(table: dict[str, dict[str, Any]], name: str, values: dict[str, Any]) -> None:
    blocks = {key: values[key] for key in BLOCKS if isinstance(values.get(key), dict)}
    table[name] = _plain({key: value for key, value in values.items() if key not in BLOCKS})
    for key, block in blocks.items():
        if block["model_type"] not in table:
            _add(table, block["model_type"], block)
        composite = any(inner in block for inner in BLOCKS)
        table[name][key] = {"model_type": block["model_type"]} if composite else _plain(block)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in values.items()
        if value is not None
        and key not in UNUSED
        and not key.endswith(("_token_id", "_token_index", "dropout"))
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(build_defaults(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
