"""How a run is carried out: data, optimizer, paths. Never part of a plan's hash."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Run:
    """Free-form settings of the trainer; the planner never looks at them."""

    settings: dict[str, Any] = field(default_factory=dict)
