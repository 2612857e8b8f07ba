"""Layouts that were not taken, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimus.job.layout import Layout


@dataclass(frozen=True, kw_only=True)
class RejectedLayout:
    """A layout that was not taken, and why."""

    layout: Layout
    reason: str
    module: str = "llm"
    peak_bytes: float | None = None  # what it would need, where memory is the reason

    @property
    def words(self) -> str:
        """`vision dp96 pp4 tp8`, or the LLM's alone."""
        return str(self.layout) if self.module == "llm" else f"{self.module} {self.layout}"


def summarize_rejections(rejected: Sequence[RejectedLayout]) -> list[str]:
    """`3 memory (e.g. vision dp96 pp4 tp8, 88.4 of 80 GB)`: how often each sort of reason was met."""
    by_sort: dict[str, list[str]] = {}
    for each in rejected:
        sort, _, rest = each.reason.partition(":")
        by_sort.setdefault(sort, []).append(f"{each.words}, {rest.strip()}")
    return [f"{len(found)} {sort} (e.g. {found[-1]})" for sort, found in sorted(by_sort.items())]
