"""Lists the families of transformers that tests compare equal, as data: towers and how they are cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from optimus.errors import UserError, one_of


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The division of a tower into blocks: its layers, and modules of the first or the last block only."""

    layers: str
    stem: tuple[str, ...]
    tail: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Tower:
    """An encoder: where it is in the model, the inputs it reads and the tokens its rows replace."""

    module: str  # of the inner model, with `projector` behind it
    inputs: tuple[str, ...]  # names in the processor's output: what the first block gets, then its keywords
    token: str  # field of the configuration: the id of its placeholder
    features: str = "get_image_features"  # "" if the model's forward computes rows inline
    projector: str = ""
    cut: Cut | None = None
    videos: tuple[str, ...] = ()  # as inputs, of videos through the same tower
    video_token: str = ""
    video_features: str = "get_video_features"


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts about a `model_type` that its modules do not state."""

    towers: dict[str, Tower]
    texts: tuple[str, ...]  # model_type of the text model, as compared by tests
    text_inputs: tuple[str, ...] = ()  # of the processor, beside ids, masks, positions and labels


RANDOM = ("dropout", "layerdrop", "drop_path")  # in the names of fields
QWEN_CUT = Cut(layers="blocks", stem=("patch_embed", "pos_embed"), tail=("merger",))
CUTS = {  # by model_type of the vision or audio configuration
    "siglip_vision_model": Cut(
        layers="encoder.layers", stem=("embeddings",), tail=("post_layernorm", "head")
    ),
    "clip_vision_model": Cut(
        layers="encoder.layers", stem=("embeddings", "pre_layrnorm"), tail=("post_layernorm",)
    ),
    "internvl_vision": Cut(layers="encoder.layer", stem=("embeddings",), tail=("layernorm",)),
    "qwen2_audio_encoder": Cut(
        layers="layers", stem=("conv1", "conv2", "embed_positions"), tail=("avg_pooler", "layer_norm")
    ),
}

QWEN_VISION = Tower(
    module="visual",
    inputs=("pixel_values", "image_grid_thw"),
    token="image_token_id",
    cut=QWEN_CUT,
    videos=("pixel_values_videos", "video_grid_thw"),
    video_token="video_token_id",
)
VISION = Tower(
    module="vision_tower",
    inputs=("pixel_values",),
    token="image_token_id",
    projector="multi_modal_projector",
)
AUDIO = Tower(
    module="audio_tower",
    inputs=("input_features", "feature_attention_mask"),
    token="audio_token_id",
    features="get_audio_features",
)

FAMILIES = {
    "qwen2_vl": Family(
        towers={"vision": QWEN_VISION}, texts=("qwen2_vl_text",), text_inputs=("mm_token_type_ids",)
    ),
    "qwen2_5_vl": Family(
        towers={"vision": QWEN_VISION},
        texts=("qwen2_5_vl_text",),
        text_inputs=("mm_token_type_ids", "second_per_grid_ts"),
    ),
    "qwen3_vl": Family(
        towers={"vision": QWEN_VISION}, texts=("qwen3_vl_text",), text_inputs=("mm_token_type_ids",)
    ),
    "qwen3_vl_moe": Family(
        towers={"vision": QWEN_VISION}, texts=("qwen3_vl_moe_text",), text_inputs=("mm_token_type_ids",)
    ),
    "llava": Family(towers={"vision": VISION}, texts=("llama", "qwen2")),
    "internvl": Family(towers={"vision": VISION}, texts=("qwen2",)),
    "gemma3": Family(towers={"vision": VISION}, texts=("gemma3_text",), text_inputs=("token_type_ids",)),
    "qwen2_audio": Family(
        towers={"audio": replace(AUDIO, features="", projector="multi_modal_projector")}, texts=("qwen2",)
    ),
    "qwen2_5_omni_thinker": Family(
        towers={"vision": QWEN_VISION, "audio": AUDIO},
        texts=("qwen2_5_omni_text",),
        text_inputs=("video_second_per_grid",),
    ),
}


def find_family(config: Any) -> Family:
    """Returns what is known of a configuration's family; refuses by name what no test compares equal."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UserError(
            field="model_type",
            value=config.model_type,
            problem="is a family that no test compares equal to transformers",
            hint=f"use {one_of(FAMILIES)}",
        )
    text = config.get_text_config().model_type
    if text not in family.texts:
        raise UserError(
            field="text_config.model_type",
            value=text,
            problem=f"is no text model that a test of {config.model_type} compares equal",
            hint=f"use {one_of(family.texts)}",
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            field="quantization_config", problem="is set", hint="train from weights that are not quantized"
        )
    _refuse_uncompared("", config.to_dict())
    return replace(family, towers={name: _known_tower(config, t) for name, t in family.towers.items()})


def _refuse_uncompared(prefix: str, fields: Mapping[str, Any]) -> None:
    """Refuses layers that depend on the microbatches before, which stages see in another order.

    Masks of dropout are drawn; dynamic rotary scaling remembers the longest sequence.
    """
    for name, value in fields.items():
        if isinstance(value, dict):
            _refuse_uncompared(f"{prefix}{name}.", value)
        elif any(word in str(name) for word in RANDOM) and isinstance(value, (int, float)) and value > 0:
            raise UserError(
                field=f"{prefix}{name}",
                value=value,
                problem="drops activations or layers, which no test compares equal",
                hint=f"set {name} to 0 in config.json",
            )
        elif (name, value) == ("rope_type", "dynamic"):
            raise UserError(
                field=f"{prefix}{name}",
                value=value,
                problem="scales by the longest sequence so far, which no test compares equal",
                hint="set another type, or train with FSDP2",
            )


def _known_tower(config: Any, tower: Tower) -> Tower:
    """Returns a tower with its cut; one of an AutoModel is known by its `model_type`."""
    if not tower.projector:
        return tower
    field = "audio_config" if tower.module == "audio_tower" else "vision_config"
    kind = getattr(config, field).model_type
    if kind not in CUTS:
        raise UserError(
            field=f"{field}.model_type",
            value=kind,
            problem=f"is no tower that a test of {config.model_type} compares equal",
            hint=f"use {one_of(CUTS)}",
        )
    return replace(tower, cut=CUTS[kind])
