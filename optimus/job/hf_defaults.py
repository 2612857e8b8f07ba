"""Knows the class defaults of transformers' configurations, for keys that a config.json leaves out.

They are stored (`python -m benchmarks.docs.hf_defaults` writes them): importing transformers imports torch.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import optimus.catalog

# Objects without a model_type of their own in released files, and other names of the same class.
ALIASES = {
    "kimi_k2": "deepseek_v3",
    "moonvit": "kimi_k25_vision",
    "siglip": "siglip_vision_model",
    "clip": "clip_vision_model",
}


@cache
def _load_table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = json.loads(
        (Path(optimus.catalog.__file__).parent / "hf_defaults.json").read_text(encoding="utf-8")
    )
    return table


def find_class_defaults(model_type: object) -> dict[str, Any]:
    """Returns the defaults of a class by its `model_type`; none for a class that is not stored."""
    name = model_type if isinstance(model_type, str) else ""
    return _load_table().get(ALIASES.get(name, name), {})
