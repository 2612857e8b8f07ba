"""Answers one question: where does the time and memory of a job go, under each known way to run it?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from optimus.cost.assumptions import Assumptions, preset
from optimus.cost.measured import Profile
from optimus.errors import DoesNotFit, UserError, nearest
from optimus.job.job import Job
from optimus.search.calibration import Calibration, calibrate
from optimus.search.layouts import decide_setting
from optimus.systems.inline import InlinePipeline
from optimus.systems.known import MAKERS, STRATEGIES, System, Systems
from optimus.systems.rejected import Rejected
from optimus.systems.setting import Setting


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """Every system that was asked for; those that cannot run the job, with the reason."""

    job: Job
    assumptions: Assumptions
    setting: Setting
    systems: dict[str, System]
    missing: dict[str, str]
    floor: InlinePipeline
    floor_s: float
    floor_1f1b_s: float
    rejected: tuple[Rejected, ...]
    calibration: Calibration | None = None  # on what the job measured

    @property
    def profile_notes(self) -> list[str]:
        """Where the profile was silent or stretched, over everything that was priced."""
        prices = self.setting.prices
        return prices.profile.notes(prices.shortfalls)

    @property
    def source(self) -> str:
        """Where seconds come from, in words."""
        source = self.setting.prices.profile.source
        return source if self.calibration is None else self.calibration.words(source)

    def over_floor(self, name: str) -> float:
        return self.systems[name].step_s / self.floor_s


def compare_systems(
    job: Job,
    *,
    names: Iterable[str] | None = None,
    assumptions: Assumptions | str = "default",
    profile: Profile | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Comparison:
    """Simulates the job under each named system (by default all that apply and schedule no encoder work)."""
    assumed = preset(assumptions) if isinstance(assumptions, str) else assumptions
    if profile is not None:
        profile.check_model(job.model)
        assumed = _with_host(assumed, profile)
    asked = _check_names(job, names)
    setting, rejected = decide_setting(job, assumed, profile)
    calibration = calibrate(setting)
    if calibration is not None:
        assumed = assumed.scaled(calibration.scale)
        setting = replace(setting, prices=replace(setting.prices, assumptions=assumed))
    systems = Systems(setting)
    made: dict[str, System] = {}
    missing: dict[str, str] = {}
    for place, name in enumerate(["llm-only", *(name for name in asked if name != "llm-only")]):
        progress(name, place, len(asked) + 1)
        try:
            made[name] = systems.make(name)
        except DoesNotFit as no:
            if name == "llm-only":
                raise
            missing[name] = no.problem
    progress("floor", len(asked), len(asked) + 1)
    floor = made["llm-only"] if "llm-only" in asked else made.pop("llm-only")
    return Comparison(
        job=job,
        assumptions=assumed,
        setting=setting,
        systems={name: made[name] for name in asked if name in made},
        missing=missing,
        floor=systems.floor,
        floor_s=floor.step_s,
        floor_1f1b_s=systems.step_s(systems.floor_1f1b),
        rejected=rejected,
        calibration=calibration,
    )


def _with_host(assumptions: Assumptions, profile: Profile) -> Assumptions:
    """Launches at what the host was measured to take; a preset that leaves them out still does."""
    if profile.issue_s is None or assumptions.launch_s == 0:
        return assumptions
    return replace(assumptions, launch_s=profile.issue_s)


def _check_names(job: Job, names: Iterable[str] | None) -> list[str]:
    if names is None:
        apply = [name for name in MAKERS if name != "today" or job.today is not None]
        return [name for name in apply if name not in STRATEGIES]
    asked = list(dict.fromkeys(names))
    for name in asked:
        if name not in MAKERS:
            raise UserError(
                field="--system", value=name, problem="is not a system", hint=nearest(name, MAKERS)
            )
    if "today" in asked and job.today is None:
        raise UserError(
            field="--system",
            value="today",
            problem="needs a job with a `today` section",
            hint="add today: {framework, layout, measured} to the job file",
        )
    return asked
