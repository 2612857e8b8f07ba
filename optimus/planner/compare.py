"""Answers one question: where does the time and memory of a job go, under each known way to run it?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from optimus.cost.assumptions import Assumptions, preset
from optimus.cost.measured import Profile
from optimus.errors import DoesNotFit, UserError, nearest
from optimus.job.job import Job
from optimus.planner.calibration import Calibration, calibrate
from optimus.planner.context import PlanningContext
from optimus.planner.layouts import is_stated
from optimus.planner.ranking import rank_contexts
from optimus.planner.rejected import Rejected
from optimus.planner.systems.pipeline import InlinePipeline
from optimus.planner.systems.registry import MAKERS, System, Systems, default_systems


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """Every system that was asked for; those that cannot run the job, with the reason."""

    job: Job
    assumptions: Assumptions
    context: PlanningContext  # of the floor; of the plan where one is made
    systems: dict[str, System]
    missing: dict[str, str]
    floor: InlinePipeline
    floor_s: float
    floor_1f1b_s: float
    rejected: tuple[Rejected, ...]
    considered: int  # layouts of the LLM,
    compared: int  # and in how many of them all systems were made
    calibration: Calibration | None = None  # on what the job measured

    @property
    def profile_notes(self) -> list[str]:
        """Where the profile was silent or stretched, over everything that was priced."""
        prices = self.context.prices
        return prices.profile.notes(prices.shortfalls)

    @property
    def is_stated(self) -> bool:
        """Whether the job left no choice of the LLM's layout."""
        return is_stated(self.job)

    @property
    def source(self) -> str:
        """Where seconds come from, in words."""
        source = self.context.prices.profile.source
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
    """Simulates the job under each named system (by default all that apply and schedule no encoder work).

    Each is taken at the best of the layouts that the job leaves open.
    """
    assumed = preset(assumptions) if isinstance(assumptions, str) else assumptions
    if profile is not None:
        profile.check_model(job.model)
        assumed = _with_host(assumed, profile)
    asked = _check_names(job, names)
    ranked = rank_contexts(job, assumed, profile, progress)
    calibration = calibrate(ranked.contexts[0])
    if calibration is not None:
        assumed = assumed.scaled(calibration.scale)
    at = [Systems(context.under(assumed)) for context in ranked.contexts]
    best = _Best(asked, at, progress)
    floor_s, floors = best.floor()
    made = {name: best.make(name) for name in asked}
    systems = {name: system for name, system in made.items() if isinstance(system, System)}
    return Comparison(
        job=job,
        assumptions=assumed,
        context=floors.context,
        systems=systems,
        missing={name: reason for name, reason in made.items() if isinstance(reason, str)},
        floor=floors.floor,
        floor_s=floor_s,
        floor_1f1b_s=min(each.step_s(each.floor_1f1b) for each in best.possible),
        rejected=ranked.rejected,
        considered=ranked.considered,
        compared=len(at),
        calibration=calibration,
    )


class _Best:
    """Every system at the best of several LLM layouts."""

    def __init__(
        self, asked: Sequence[str], at: Sequence[Systems], progress: Callable[[str, int, int], None]
    ) -> None:
        self._at, self._asked, self._progress = at, asked, progress
        self._floors: dict[Systems, float] = {}  # the LLM's own step at every layout
        self._done = 0

    def _say(self, name: str) -> None:
        self._progress(name, self._done, (len(self._asked) + 1) * len(self._at))
        self._done += 1

    @property
    def possible(self) -> list[Systems]:
        """At layouts in which the LLM fits; the fastest for it alone first."""
        return sorted(self._floors, key=self._floors.__getitem__)

    def floor(self) -> tuple[float, Systems]:
        """The LLM's own step at its best layout."""
        refusals = []
        for systems in self._at:
            self._say("llm-only")
            try:
                self._floors[systems] = systems.step_s(systems.floor)
            except DoesNotFit as no:
                refusals.append(no)
        if not self._floors:
            raise refusals[0]
        first = self.possible[0]
        return self._floors[first], first

    def make(self, name: str) -> System | str:
        """The system at its best layout, or why it cannot run.

        Where the LLM's pipeline alone is slower, no system that has one is looked at.
        """
        found: System | None = None
        reasons = []
        for systems in self.possible[:1] if name == "today" else self.possible:
            self._say(name)
            beaten = found is not None and found.fits and found.step_s <= self._floors[systems]
            if beaten and name != "fsdp":  # which has no pipeline
                continue
            try:
                made = systems.make(name)
            except DoesNotFit as no:
                reasons.append(no.problem)
                continue
            if found is None or (made.fits, -made.step_s) > (found.fits, -found.step_s):
                found = made
        return reasons[0] if found is None else found


def _with_host(assumptions: Assumptions, profile: Profile) -> Assumptions:
    """Launches, and compute under collectives, at what they were measured to take.

    A preset that leaves either out still does.
    """
    if profile.issue_s is not None and assumptions.launch_s != 0:
        assumptions = replace(assumptions, launch_s=profile.issue_s)
    if profile.slowdown is not None and assumptions.residence_slowdown != 0:
        assumptions = replace(assumptions, residence_slowdown=profile.slowdown)
    return assumptions


def _check_names(job: Job, names: Iterable[str] | None) -> list[str]:
    if names is None:
        return default_systems(job)
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
