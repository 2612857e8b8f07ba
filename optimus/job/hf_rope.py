"""Reads rotary embeddings of a config.json: `rope_parameters` of transformers 5, or the older two keys."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_type_hints

from optimus.job.attention import Rope, RopeScaling
from optimus.job.hf_file import CLASS_DEFAULT, HfConfig
from optimus.job.typed import Amount, Share, Whole, read_typed

UNSCALED = ("default", "mrope", "axial")  # types without a scaling
FULL, SLIDING = "full_attention", "sliding_attention"  # blocks of models with two kinds of layers
KEYS: dict[str, tuple[str, Any]] = {  # the field of each key, and its type
    "rope_theta": ("theta", Amount),
    "mrope_section": ("sections", tuple[Whole, ...]),
    "mrope_interleaved": ("interleaved_sections", bool),
    "partial_rotary_factor": ("partial_factor", Share),
}


def read_rope(config: HfConfig, expected: Rope | None = None) -> Rope:
    """Reads the rotary embedding of a language model or tower.

    `expected` holds what the class does whatever the file says, and sections for files without them.
    """
    block = next((config.inner(key) for key in ("rope_parameters", "rope_scaling") if config.has(key)), None)
    local = config.read(Amount, "rope_local_base_freq") if config.has("rope_local_base_freq") else None
    if block is not None and block.has(FULL):
        if block.has(SLIDING) and block.inner(SLIDING).has("rope_theta"):
            local = block.inner(SLIDING).read(Amount, "rope_theta")
        block = block.inner(FULL)
    places = [config] if block is None else [block, config]
    rope = replace(expected or Rope(), local_theta=local)
    stated: dict[str, Any] = {}
    for key, (field, kind) in KEYS.items():
        place = next((place for place in places if place.has(key)), None)
        if place is not None:
            stated[field] = place.read(kind, key)
    if "theta" not in stated:
        default = config.defaults.get("rope_parameters", {})
        theta = default.get(FULL, default).get("rope_theta", 10_000.0)
        stated["theta"] = config.derive("rope_theta", float(theta), CLASS_DEFAULT)
        if SLIDING in default and local is None:
            stated["local_theta"] = float(default[SLIDING]["rope_theta"])
    rope = replace(rope, **stated)
    return rope if block is None else replace(rope, scaling=_read_scaling(block))


def _read_scaling(block: HfConfig) -> RopeScaling | None:
    kind = block.read(str, "rope_type", "type") if block.has("rope_type") or block.has("type") else "default"
    if kind in UNSCALED:
        return None
    hints = get_type_hints(RopeScaling, include_extras=True)
    names = (field.name for field in fields(RopeScaling) if field.name != "type")
    return RopeScaling(
        type=kind, **{name: read_typed(hints[name], block[name]) for name in names if block.has(name)}
    )
