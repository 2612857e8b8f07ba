"""Turns a released config.json into a model, with json alone (no transformers)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optimus.errors import one_of
from optimus.job import hf_vision
from optimus.job.hf_json import HfConfig, load_config
from optimus.job.hf_text import TEXT_TYPES, read_llm
from optimus.job.model import Encoder, Llm, Model


@dataclass(frozen=True, kw_only=True)
class Family:
    """Where a family keeps its language model, and how its encoder is read."""

    encoder: Callable[[HfConfig, Llm], Encoder]
    text: str = "text_config"  # Qwen2-VL's older files hold it at the top


FAMILIES = {
    "qwen2_vl": Family(encoder=hf_vision.qwen2_vl),
    "qwen2_5_vl": Family(encoder=hf_vision.qwen2_5_vl),
    "qwen3_vl": Family(encoder=hf_vision.qwen3_vl),
    "qwen3_vl_moe": Family(encoder=hf_vision.qwen3_vl),
    "internvl_chat": Family(encoder=hf_vision.internvl, text="llm_config"),
    "kimi_k25": Family(encoder=hf_vision.kimi),
    "llava": Family(encoder=hf_vision.llava),
    "llava_next": Family(encoder=hf_vision.llava),
    "llava_onevision": Family(encoder=hf_vision.llava),
    "gemma3": Family(encoder=hf_vision.gemma3),
}
FLAT = ("qwen2_vl", "qwen2_5_vl")  # their language model may stand at the top of the file


def read_hf_config(path: Path) -> Model:
    """The model of a released config.json; what the file leaves out is an error, not a class default."""
    config = load_config(path)
    kind = config.read(str, "model_type")
    if kind in TEXT_TYPES and kind not in FAMILIES:
        hint = "write a job file with model: {encoders: ..., llm: ...}, or use a multimodal config.json"
        raise config["model_type"].error("is a language model without an encoder", hint)
    if kind not in FAMILIES:
        hint = f"supported: {one_of(sorted(FAMILIES))}; or write dimensions by hand in a job file"
        raise config["model_type"].error("is not a supported model", hint)
    family = FAMILIES[kind]
    text = config if kind in FLAT and not config.has(family.text) else config.inner(family.text)
    llm = read_llm(text, config)
    encoder = family.encoder(config, llm)
    derived = f"; derived: {', '.join(config.derived)}" if config.derived else ""
    return Model(name=_name(path), encoders=(encoder,), llm=llm, source=f"{path} ({kind}){derived}")


def _name(path: Path) -> str:
    if path.name == "config.json":
        return path.resolve().parent.name or "model"
    return path.stem.removesuffix("_config").rpartition("--")[2] or "model"
