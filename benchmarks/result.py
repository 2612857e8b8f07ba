"""What a bench found, the same shape for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EVENLY = "all work evenly on all ranks"


@dataclass(frozen=True, kw_only=True)
class VariantTime:
    """One way to run the job. What a bench does not find out is None."""

    step_s: float  # median
    over_ours: float
    over_ours_low: float | None = None  # 95 % interval
    over_ours_high: float | None = None
    step_low_s: float | None = None  # shortest and longest step that counts
    step_high_s: float | None = None
    predicted_s: float | None = None  # by a replay into which nothing measured goes
    error: float | None = None  # step over prediction, less 1
    steps: int | None = None  # that count
    disturbed: int | None = None  # steps that do not count, because the host was late


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Variants side by side; `problems` are answers of no: what should hold and does not."""

    bench: str
    variants: Mapping[str, VariantTime]
    ours: str  # name of our variant
    bound_s: float
    ours_over_bound: float
    bound: str = EVENLY  # what takes so long
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems
