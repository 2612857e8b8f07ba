"""JSON that people can read: an entry per line, but lists of numbers on one."""

from __future__ import annotations

import json
from typing import Any

WIDTH = 110


def json_text(value: Any) -> str:
    """What fits stands on one line, and so does a list of numbers."""
    return _laid_out(value, "") + "\n"


def _laid_out(value: Any, indent: str) -> str:
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not isinstance(value, dict | list) or len(indent) + len(flat) <= WIDTH or not value:
        return flat
    deeper = indent + "  "
    if isinstance(value, list):
        if not any(isinstance(item, dict | list) for item in value):
            return flat
        items = [_laid_out(item, deeper) for item in value]
        return "[\n" + ",\n".join(f"{deeper}{item}" for item in items) + f"\n{indent}]"
    entries = [f"{deeper}{json.dumps(name)}: {_laid_out(item, deeper)}" for name, item in value.items()]
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
