"""Turns a config.json into a model, family by family, with json alone (no transformers)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from optimus.errors import one_of
from optimus.job import hf_audio, hf_gemma, hf_phi4, hf_siglip, hf_towers
from optimus.job.hf_defaults import find_class_defaults
from optimus.job.hf_file import HfConfig, load_hf_config
from optimus.job.hf_llm import TEXT_TYPES, read_hf_llm
from optimus.job.model import Encoder, Llm, Model

EncoderReader = Callable[[HfConfig, Llm], Encoder]
# Readers of encoders by `model_type`.
ENCODER_READERS: dict[str, tuple[EncoderReader, ...]] = {
    "gemma3": (hf_siglip.read_gemma3,),
    "gemma4": (hf_gemma.read_gemma4_vision, hf_gemma.read_gemma4_audio),
    "glm4v": (hf_towers.read_glm4v,),
    "glm4v_moe": (hf_towers.read_glm4v,),
    "idefics3": (hf_siglip.read_idefics3,),
    "internvl": (hf_towers.read_internvl,),
    "internvl_chat": (hf_towers.read_internvl,),
    "kimi_k25": (hf_towers.read_kimi,),
    "kimi_vl": (hf_towers.read_kimi,),
    "llama4": (hf_towers.read_llama4,),
    "llava": (hf_siglip.read_llava,),
    "llava_next": (hf_siglip.read_llava,),
    "llava_onevision": (hf_siglip.read_llava,),
    "minicpmv4_6": (hf_siglip.read_minicpm,),
    "mistral3": (hf_siglip.read_mistral3,),
    "paligemma": (hf_siglip.read_paligemma,),
    "phi4_multimodal": (hf_phi4.read_phi4_vision, hf_phi4.read_phi4_audio),
    "qwen2_5_omni_thinker": (hf_towers.read_qwen2_5_vl, hf_audio.read_qwen2_5_omni),
    "qwen2_5_vl": (hf_towers.read_qwen2_5_vl,),
    "qwen2_audio": (hf_audio.read_qwen2_audio,),
    "qwen2_vl": (hf_towers.read_qwen2_vl,),
    "qwen3_5": (hf_towers.read_qwen3_vl,),
    "qwen3_5_moe": (hf_towers.read_qwen3_vl,),
    "qwen3_omni_moe_thinker": (hf_towers.read_qwen3_vl, hf_audio.read_qwen3_omni),
    "qwen3_vl": (hf_towers.read_qwen3_vl,),
    "qwen3_vl_moe": (hf_towers.read_qwen3_vl,),
    "smolvlm": (hf_siglip.read_idefics3,),
}
# Families that transformers knows and the cost model does not describe, and why.
REFUSED = {
    "gemma3n": "a vision tower of timm, whose sizes its file does not state, and AltUp",
    "mllama": "cross-attention layers",
    "phi4mm": "a vision tower in code of its own, whose sizes its file does not state",
}
THINKERS = {"qwen2_5_omni": "qwen2_5_omni_thinker", "qwen3_omni_moe": "qwen3_omni_moe_thinker"}
TEXT_KEYS = {"internvl_chat": "llm_config"}  # key of the language model, if it is not `text_config`
OPTIONAL = {"gemma4": ("vision_config", "audio_config")}  # encoders that a file may leave out
# Files, of which some are older, that hold the language model at the top, and its model_type.
FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text", "phi4_multimodal": "phi4_multimodal"}


def read_hf_config(path: Path) -> Model:
    """Reads the model of a config.json; the model's source lists values that the file leaves out."""
    config = load_hf_config(path)
    kind = config.read(str, "model_type")
    if kind in THINKERS:
        config.derived.append("of the model only the thinker is read")
        config, kind = config.inner("thinker_config"), THINKERS[kind]
    if kind in REFUSED:
        hint = "write dimensions by hand in a job file, as far as they can be stated"
        raise config["model_type"].error(f"has {REFUSED[kind]}, which the cost model does not describe", hint)
    if kind in TEXT_TYPES and kind not in ENCODER_READERS:
        hint = "write a job file with model: {encoders: ..., llm: ...}, or use a multimodal config.json"
        raise config["model_type"].error("is a language model without an encoder", hint)
    if kind not in ENCODER_READERS:
        hint = f"supported: {one_of(sorted(ENCODER_READERS))}; or write dimensions by hand in a job file"
        raise config["model_type"].error("is not a supported model", hint)
    key = TEXT_KEYS.get(kind, "text_config")
    flat = kind in FLAT and not config.has(key) and (config.has("hidden_size") or FLAT[kind] == kind)
    top = HfConfig(config.node, config.derived, find_class_defaults(FLAT.get(kind)))
    text = top if flat else config.inner(key)
    llm = read_hf_llm(text, config)
    readers = ENCODER_READERS[kind]
    if kind in OPTIONAL:
        readers = tuple(read for read, key in zip(readers, OPTIONAL[kind], strict=True) if config.has(key))
    encoders = tuple(read(config, llm) for read in readers)
    if not encoders:
        raise config[OPTIONAL[kind][0]].error("is missing: the model has no encoder", "add an encoder")
    derived = tuple(dict.fromkeys(config.derived))
    return Model(
        name=_name(path),
        encoders=encoders,
        llm=llm,
        source="; derived: ".join((f"{path} ({kind})", ", ".join(derived)))
        if derived
        else f"{path} ({kind})",
        family=kind,
        derived=derived,
    )


def _name(path: Path) -> str:
    if path.name == "config.json":
        return path.resolve().parent.name or "model"
    return path.stem.removesuffix("_config").rpartition("--")[2] or "model"
