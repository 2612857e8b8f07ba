"""One number from one measured step: how much longer everything takes than the cost model says."""

from __future__ import annotations

from dataclasses import dataclass

from optimus.cost.measured_profile import ANALYTIC
from optimus.errors import DoesNotFit
from optimus.planner.context import PlanningContext
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.planner.systems.today import TodaySystem


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A step that was measured, and what the model says of the same system.

    Their ratio multiplies all seconds of kernels, links and launches, so that systems stay in proportion: it
    says how long a step takes, not which system wins.
    """

    measured_s: float
    modelled_s: float

    @property
    def scale(self) -> float:
        return self.measured_s / self.modelled_s

    def words(self, source: str) -> str:
        """`analytic, calibrated on your measured 17.9 s (was 6 % low before)`."""
        off = self.modelled_s / self.measured_s - 1
        before = f"was {100 * abs(off):.0f} % {'low' if off < 0 else 'high'} before"
        kept = source.removesuffix(ANALYTIC.partition(", ")[2]) if source == ANALYTIC else f"{source}, "
        return f"{kept}calibrated on your measured {self.measured_s:.3g} s ({before})"


def calibrate_on_measured_step(context: PlanningContext) -> Calibration | None:
    """What `today.measured` of the job says of the model; None if nothing, or if today's system cannot be."""
    today = context.job.today
    if today is None or today.measured_step_s is None:
        return None
    try:
        modelled_s = TodaySystem().simulate(LlmPipelines(context)).step_s
    except DoesNotFit:
        return None
    return Calibration(measured_s=today.measured_step_s, modelled_s=modelled_s)
