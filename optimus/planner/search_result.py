"""What a strategy found: a plan, how it came about, and what was passed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from optimus.job.layout import Layout
from optimus.planner.filled_plan import FilledPlan
from optimus.planner.rejected import Rejected
from optimus.planner.systems.pipeline import InlinePipeline


@dataclass(frozen=True, kw_only=True)
class TriedLayout:
    """An encoder layout that fits and was scheduled."""

    layout: Layout
    module: str
    step_s: float
    peak_bytes: float
    replayed: bool  # or its seconds are the algorithm's estimate, and its bytes an upper bound


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchResult:
    """The best plan of a strategy. `hidden_share`: of encoder compute, placed inside the LLM's bubbles."""

    filled: FilledPlan
    llm: InlinePipeline
    how: str  # what was chosen, in one line
    considered: int
    hidden_share: float
    notes: Mapping[str, Any] = field(default_factory=dict)  # for readers of the plan file
    is_estimated_whole: bool = True  # transfers and encoder traffic are in the algorithm's own estimate
    remarks: tuple[str, ...] = ()  # on the search, for those who read its result
    rejected: list[Rejected] = field(default_factory=list)
    tried: list[TriedLayout] = field(default_factory=list)
