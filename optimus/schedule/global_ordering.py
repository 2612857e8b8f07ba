"""Global ordering: which encoder output feeds which LLM microbatch, and whether all come in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Ends = Sequence[Sequence[float]]  # by pipeline, each in the order in which it runs its microbatches


class Points(Protocol):
    """The LLM's dependency points."""

    def late_s(self, ends_s: Ends) -> float:
        """By how much the latest of all ends is behind its point; at most 0 if all come in time."""
        ...


class Interchangeable:
    """F_1 <= F_2 <= ...: the i-th encoder microbatch to end, of any pipeline, becomes LLM microbatch i."""

    def __init__(self, points_s: Sequence[float]) -> None:
        self._points = list(points_s)

    def late_s(self, ends_s: Ends) -> float:
        return _late([end for own in ends_s for end in own], self._points)


class Assigned:
    """Points of every pipeline's own microbatches: a backward is of what its forward became.

    (In the mirror an end is a begin: no backward begins before B_i.)
    """

    def __init__(self, points_s: Sequence[Sequence[float]]) -> None:
        self._points = points_s

    def late_s(self, ends_s: Ends) -> float:
        return max(_late(own, points) for own, points in zip(ends_s, self._points, strict=True))


def _late(ends_s: Sequence[float], points_s: Sequence[float]) -> float:
    late = [end - point for end, point in zip(sorted(ends_s), points_s, strict=True)]
    return max(late, default=-float("inf"))


def assign_sorted(ends_s: Ends) -> tuple[int, ...]:
    """The pipeline that feeds each LLM microbatch: the i-th to end becomes microbatch i."""
    events = [
        (end, pipeline, number) for pipeline, ends in enumerate(ends_s) for number, end in enumerate(ends)
    ]
    return tuple(pipeline for _, pipeline, _ in sorted(events))
