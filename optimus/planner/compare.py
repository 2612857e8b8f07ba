"""Simulates a job under several systems, each at its best layout, and compares their time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import inf

from optimus.cost.assumptions import Assumptions, get_preset
from optimus.cost.measured_profile import ANALYTIC, Profile
from optimus.errors import DoesNotFit, UserError, nearest
from optimus.job.job import Job
from optimus.planner.context import PlanningContext
from optimus.planner.filled_plan import RejectedLayout
from optimus.planner.forked import Forked, compute_by_key
from optimus.planner.layouts import is_llm_layout_stated, rank_llm_layouts
from optimus.planner.systems.base import SIMULATE_WITHIN, SimulatedSystem, simulate_step_s
from optimus.planner.systems.fsdp import FsdpSystem
from optimus.planner.systems.llm_only import LlmOnlySystem, LlmPipelines, ShardedLlm
from optimus.planner.systems.registry import SYSTEMS, default_baselines, is_allowed, load_system
from optimus.planner.systems.today import TodaySystem
from optimus.protocols import System

ON_OTHER_CORE = "stage0", "balanced", "separate-gpus"  # systems that take about half of the time
SIMILAR_WITHIN = 1.02  # steps of the LLM alone: the layout with the least cp comes first


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """Simulated systems of a job, and the reasons why others cannot run it."""

    job: Job
    assumptions: Assumptions
    context: PlanningContext  # at the layout of the LLM's best pipeline; at the plan's where there is a plan
    systems: dict[str, SimulatedSystem]
    missing: dict[str, str]
    llm_only: SimulatedSystem  # the floor: the best pipeline or fully sharded layout of the LLM alone
    floor_1f1b_s: float
    rejected: tuple[RejectedLayout, ...]
    considered: int  # layouts of the LLM,
    compared: int  # and those at which all systems were simulated
    search_s: float  # that comparing took
    calibration: Calibration | None = None  # on the step that the job measured
    # Systems whose best plan is around a fully sharded LLM, at their best around a pipeline of it.
    on_pipelines: Mapping[str, SimulatedSystem] = field(default_factory=dict)

    @property
    def profile_notes(self) -> list[str]:
        """Warnings about kernels that the profile does not cover or covers by extrapolation."""
        cost_model = self.context.cost_model
        return cost_model.profile.notes(cost_model.profile_gaps)

    @property
    def is_stated(self) -> bool:
        """True if the job left no choice of the LLM's layout."""
        return is_llm_layout_stated(self.job)

    @property
    def source(self) -> str:
        """Source of all seconds: a profile or formulas, and the calibration."""
        source = self.context.cost_model.profile.source
        return source if self.calibration is None else self.calibration.describe(source)

    @property
    def floor_s(self) -> float:
        return self.llm_only.step_s

    def over_floor(self, name: str) -> float:
        return self.systems[name].step_s / self.floor_s


def compare_systems(
    job: Job,
    *,
    names: Iterable[str] | None = None,
    assumptions: Assumptions | str = "default",
    profile: Profile | None = None,
    effort: float = 1.0,
    also_on_pipelines: bool = False,
    cores: int = 1,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    report_known: Callable[[Comparison], None] = lambda comparison: None,
) -> Comparison:
    """Simulates the job under each named system (by default all that apply and schedule no encoder work).

    Each is taken at the best of the layouts that the job leaves open. `effort` multiplies the budgets of
    searches: layouts that are compared, cuts and encoder schedules that are tried. With `also_on_pipelines`,
    systems whose best plan is around a fully sharded LLM are searched around its pipelines too. With more
    than one core processes share the work; the answer is the same. `report_known` gets the comparison of all
    systems that contain no others, before the others are searched, which takes longer.
    """
    begin = time.monotonic()
    assumed = get_preset(assumptions) if isinstance(assumptions, str) else assumptions
    if profile is not None:
        profile.check_model(job.model)
        assumed = _with_host(assumed, profile)
    if job.today is not None and job.today.token_dispatcher is not None:  # it is the trainer's, on any layout
        assumed = replace(assumed, token_dispatcher=job.today.token_dispatcher)
    checked = _check_names(job, names)
    ranked = rank_llm_layouts(job, assumed, profile, progress, effort=effort, cores=cores)
    calibration = calibrate_on_measured_step(ranked.contexts[0])
    if calibration is not None:
        assumed = assumed.scaled(calibration.scale)
    contexts = [context.with_assumptions(assumed) for context in ranked.contexts]
    searched = [LlmPipelines(replace(context, effort=effort, cores=cores)) for context in contexts]
    best = _BestOverLayouts(checked, searched, progress, also_on_pipelines=also_on_pipelines)
    fastest_llm = best.price_llm_alone()
    on_other_core = [name for name in checked if name in ON_OTHER_CORE]
    silent = best.without_progress() if cores > 1 else best
    with Forked(partial(silent.simulate_all, on_other_core), cores=cores, shared=best.shared) as other:
        llm_only, floor_1f1b_s = best.simulate_floor()
        best.simulate_all(
            [name for name in checked if name not in on_other_core and not load_system(name).contains]
        )
        best.add(other.result())

    def compare(outcomes: dict[str, SimulatedSystem | str]) -> Comparison:
        floor = _lower_floor(llm_only, [*outcomes.values(), *best.on_pipelines.values()])
        if LlmOnlySystem.name in outcomes:
            outcomes[LlmOnlySystem.name] = floor
        return Comparison(
            job=job,
            assumptions=assumed,
            context=fastest_llm.context,
            systems={name: each for name, each in outcomes.items() if isinstance(each, SimulatedSystem)},
            missing={name: reason for name, reason in outcomes.items() if isinstance(reason, str)},
            llm_only=floor,
            floor_1f1b_s=floor_1f1b_s,
            rejected=ranked.rejected,
            considered=ranked.considered,
            compared=len(searched),
            search_s=time.monotonic() - begin,
            calibration=calibration,
            on_pipelines=best.on_pipelines,
        )

    report_known(compare({name: best.simulate(name) for name in checked if not load_system(name).contains}))
    return compare({name: best.simulate(name) for name in checked})


_StepsAtLayouts = dict[tuple[str, LlmPipelines], float]  # by name of a system
_Simulated = tuple[dict[str, SimulatedSystem | str], _StepsAtLayouts]


class _BestOverLayouts:
    """Simulates every system at the best of several LLM layouts."""

    def __init__(
        self,
        names: Sequence[str],
        searched: Sequence[LlmPipelines],
        progress: Callable[[str, int, int], None],
        *,
        also_on_pipelines: bool,
    ) -> None:
        self._searched, self._progress = searched, progress
        self._also_on_pipelines = also_on_pipelines
        # Systems whose best plan is around a fully sharded LLM, at their best around a pipeline of it.
        self.on_pipelines: dict[str, SimulatedSystem] = {}
        contained = chain.from_iterable(load_system(name).contains for name in names)
        self._total = (len({"llm-only", *names, *contained}) + 1) * len(searched)
        self._total += sum(load_system(name).takes_sharded for name in names)
        self._floors_s: dict[LlmPipelines, float] = {}  # the LLM's own step at every layout, by estimate
        self._steps_s: _StepsAtLayouts = {}  # some by estimate
        self._outcomes: dict[str, SimulatedSystem | str] = {}
        self._done = 0

    def _report(self, name: str) -> None:
        """Reports the system that is searched next, and the fastest one so far."""
        found = [each for each in self._outcomes.values() if isinstance(each, SimulatedSystem)]
        complete = (each for each in found if each.fits and each.name != LlmOnlySystem.name)
        best = min(complete, key=lambda each: each.step_s, default=None)
        so_far = "" if best is None else f" (so far {best.name} {best.step_s:.3g} s)"
        self._progress(f"{name}{so_far}", self._done, self._total)
        self._done += 1

    @property
    def possible(self) -> list[LlmPipelines]:
        """Layouts in which the LLM fits, the fastest for it alone first; of similar ones, least cp."""
        similar_s = SIMILAR_WITHIN * min(self._floors_s.values())
        return sorted(self._floors_s, key=lambda p: (max(similar_s, self._floors_s[p]), p.context.layout.cp))

    def price_llm_alone(self) -> LlmPipelines:
        """Estimates the LLM's best pipeline at every layout; returns the layout where it is fastest."""
        refusals = []
        for pipelines, found in compute_by_key(
            LlmPipelines.search,
            dict.fromkeys(self._searched, 1.0),
            cores=self._searched[0].context.cores,
            report=lambda pipelines: self._report(LlmOnlySystem.name),
            shared=self.shared,
        ).items():
            if isinstance(found, DoesNotFit):
                refusals.append(found)
            else:
                pipelines.of_llm, pipelines.all_modules = found
                self._floors_s[pipelines] = pipelines.of_llm[0].estimate_s
        if not self._floors_s:
            raise refusals[0]
        return self.possible[0]

    def simulate_floor(self) -> tuple[SimulatedSystem, float]:
        """Simulates the LLM alone, of all op orders and with (interleaved) 1F1B; each at its best layout."""
        floor, plain = self.simulate(LlmOnlySystem.name), None
        assert isinstance(floor, SimulatedSystem), "the LLM fits at the layouts that are compared"
        for pipelines in self.possible:
            if not self._is_floor_above(inf if plain is None else plain.step_s, pipelines):
                simulated = LlmOnlySystem().simulate_candidate(pipelines.floor_1f1b)
                plain = simulated if plain is None or simulated.step_s < plain.step_s else plain
        assert plain is not None, "the first layout is not skipped"
        if plain.step_s < floor.step_s:  # estimates, which order the candidates of `floor`, are not exact
            floor = self._outcomes[LlmOnlySystem.name] = plain
        return floor, plain.step_s

    @property
    def shared(self) -> list[object]:
        """Objects that all systems refer to."""
        contexts = [pipelines.context for pipelines in self._searched]
        parts = [part for context in contexts for part in (context, context.cost_model, context.cache)]
        return [contexts[0].job, *parts, *self._searched]

    def without_progress(self) -> _BestOverLayouts:
        """Returns the same search, which reports nothing."""
        other = copy(self)
        other._progress = lambda name, done, total: None
        return other

    def simulate_all(self, names: Iterable[str]) -> _Simulated:
        """Simulates systems; returns what is then known of all, and their steps at single layouts."""
        for name in names:
            self.simulate(name)
        return self._outcomes, self._steps_s

    def add(self, simulated: _Simulated) -> None:
        """Adds systems that were simulated elsewhere."""
        outcomes, steps_s = simulated
        self._done += len(self._searched) * len(outcomes.keys() - self._outcomes.keys())
        self._outcomes |= outcomes
        self._steps_s |= steps_s

    def simulate(self, name: str) -> SimulatedSystem | str:
        """Returns the system at its best layout, once, or the reason why it cannot run."""
        if name not in self._outcomes:
            outcome = self._outcomes[name] = self._simulate_with_contained(load_system(name))
            if isinstance(outcome, str) or not is_around_sharded_llm(outcome):
                self.on_pipelines.pop(name, None)
        return self._outcomes[name]

    def _simulate_with_contained(self, system: System) -> SimulatedSystem | str:
        """Simulates a system and those it contains; the plan of one that is faster is its own, too."""
        job = self._searched[0].context.job
        outcomes = [self.simulate(name) for name in system.contains if is_allowed(name, job)]
        contained = [each for each in outcomes if isinstance(each, SimulatedSystem) and each.fits]
        fastest = min(contained, key=lambda each: each.step_s, default=None)
        known_s = inf if fastest is None else fastest.step_s
        if system.takes_sharded:
            own = self._simulate_around_llms(system, known_s, contained)
        else:
            own = self._simulate_over_layouts(system, known_s)
        if fastest is None or (isinstance(own, SimulatedSystem) and own.step_s <= fastest.step_s):
            return own
        plan = fastest.search_result
        assert plan is not None, "contained systems make plans"
        result = replace(plan, assignment=fastest.candidate.batch_assignment())
        if isinstance(own, SimulatedSystem) and own.search_result is not None:
            search = own.search_result
            result = replace(
                result, considered=search.considered, rejected=search.rejected, tried=search.tried
            )
        how = f"as {fastest.name}: {fastest.how}"
        return replace(fastest, name=system.name, how=how, candidate=result)

    def _is_floor_above(self, limit_s: float, pipelines: LlmPipelines) -> bool:
        """Returns whether the LLM alone takes longer at a layout; where it is close, it is simulated."""
        estimate_s = pipelines.of_llm[0].estimate_s
        if limit_s == inf or SIMULATE_WITHIN * estimate_s <= limit_s:
            return False
        return estimate_s > SIMULATE_WITHIN * limit_s or simulate_step_s(pipelines.of_llm[0]) > limit_s

    def _order_layouts(self, system: System, known_s: float) -> list[LlmPipelines]:
        """Returns layouts by a system's estimates or first schedules, by contained systems, by the LLM."""
        if not system.searches_layouts:
            return self.possible[:1]
        if system.simulate_within < inf:
            return sorted(self.possible, key=lambda pipelines: _least_estimate_s(system, pipelines))

        def step_s(pipelines: LlmPipelines) -> float:
            known = (self._steps_s.get((name, pipelines), inf) for name in system.contains)
            return min(known, default=inf)

        below = system.looking_below(known_s)

        def first_step_s(pipelines: LlmPipelines) -> float:
            return inf if self._is_floor_above(known_s, pipelines) else below.first_step_s(pipelines)

        by_contained = sorted(self.possible, key=step_s)
        return sorted(by_contained, key=first_step_s) if len(by_contained) > 1 else by_contained

    def _list_sharded(self, system: System) -> list[LlmPipelines]:
        """Returns the LLM's fully sharded layouts, if the system and the job take them and one fits."""
        context = self.possible[0].context
        sharded = ShardedLlm(context)
        if not system.takes_sharded or not is_allowed(FsdpSystem.name, context.job):
            return []
        try:
            return [sharded] if sharded.of_llm else []
        except DoesNotFit:
            return []

    def _simulate_over_layouts(self, system: System, known_s: float) -> SimulatedSystem | str:
        """Returns the system at its best layout, or why it runs at none."""
        best, refusals = self._search_layouts(system, known_s, self._order_layouts(system, known_s))
        return refusals[0] if best is None else best

    def _simulate_around_llms(
        self, system: System, known_s: float, contained: Sequence[SimulatedSystem]
    ) -> SimulatedSystem | str:
        """Returns the system at its best: around pipelines of the LLM or, if faster, a fully sharded one."""
        least_s = known_s
        if self._also_on_pipelines:
            least_s = min((s.step_s for s in contained if not is_around_sharded_llm(s)), default=inf)
        on_pipelines, refusals = self._search_layouts(system, least_s, self._order_layouts(system, least_s))
        found = on_pipelines is not None and on_pipelines.fits
        found_s = on_pipelines.step_s if on_pipelines is not None and found else inf
        sharded, refused = self._search_layouts(
            system, min(known_s, found_s), self._list_sharded(system), again=found
        )
        systems = [each for each in (on_pipelines, sharded) if each is not None]
        own = min(systems, key=lambda each: (not each.fits, each.step_s), default=None)
        if self._also_on_pipelines and found_s < least_s and on_pipelines is not None:
            self.on_pipelines[system.name] = on_pipelines
        return own or [*refusals, *refused][0]

    def _search_layouts(
        self, system: System, known_s: float, layouts: Iterable[LlmPipelines], *, again: bool = False
    ) -> tuple[SimulatedSystem | None, list[str]]:
        """Skips layouts at which the LLM's pipeline alone, or all candidates by estimate, are slower.

        A layout after the first is skipped also if it is slower than a known step of a contained system.
        """
        best: SimulatedSystem | None = None
        refusals: list[str] = []
        for pipelines in layouts:
            self._report(system.name)
            again = again or best is not None
            best_s = best.step_s if best is not None and best.fits else inf
            limit_s = min(known_s, best_s) if again and (best is None or best.fits) else inf
            if system.needs_llm_pipeline and self._is_floor_above(limit_s, pipelines):
                continue
            try:
                if system.simulate_within < inf:
                    estimate_s = _least_estimate_s(system, pipelines)
                    if estimate_s > system.simulate_within * limit_s or (best and estimate_s == inf):
                        self._steps_s[system.name, pipelines] = estimate_s
                        continue
                below = system.looking_below(min(known_s, limit_s), again=again)
                simulated = below.simulate(pipelines)
            except DoesNotFit as no:
                refusals.append(no.problem)
                continue
            self._steps_s[system.name, pipelines] = simulated.step_s
            if best is None or (simulated.fits, -simulated.step_s) > (best.fits, -best.step_s):
                best = simulated
        return best, refusals


def is_around_sharded_llm(system: SimulatedSystem) -> bool:
    """Returns whether the plan of a system is around an LLM that is fully sharded."""
    result = system.search_result
    return result is not None and result.llm.locked


def _lower_floor(floor: SimulatedSystem, outcomes: Iterable[SimulatedSystem | str]) -> SimulatedSystem:
    """Returns the floor, or the LLM of a faster system, which estimates or layouts had left out."""
    for system in outcomes:
        if isinstance(system, SimulatedSystem) and system.step_s < floor.step_s:
            alone = system.candidate.llm_pipeline
            if alone is not None and alone.fits:
                floor = min(floor, LlmOnlySystem().simulate_candidate(alone), key=lambda each: each.step_s)
    return floor


def _least_estimate_s(system: System, pipelines: LlmPipelines) -> float:
    """Returns the least step of a system's candidates at a layout by their estimates; inf if none fits."""
    with suppress(DoesNotFit):
        candidates = sorted(pipelines.candidates(system), key=lambda candidate: candidate.estimate_s)
        return next((candidate.estimate_s for candidate in candidates if candidate.fits), inf)
    return inf


def _with_host(assumptions: Assumptions, profile: Profile) -> Assumptions:
    """Replaces launch time and slow-down under collectives by the profile's, unless the preset has 0."""
    if profile.issue_s is not None and assumptions.launch_s != 0:
        assumptions = replace(assumptions, launch_s=profile.issue_s)
    if profile.slowdown is not None and assumptions.residence_slowdown != 0:
        assumptions = replace(assumptions, residence_slowdown=profile.slowdown)
    return assumptions


def _check_names(job: Job, names: Iterable[str] | None) -> list[str]:
    if names is None:
        return default_baselines(job)
    distinct = list(dict.fromkeys(names))
    for name in distinct:
        if name not in SYSTEMS:
            raise UserError(
                field="--system", value=name, problem="is not a system", hint=nearest(name, SYSTEMS)
            )
    if "today" in distinct and job.today is None:
        raise UserError(
            field="--system",
            value="today",
            problem="needs a job with a `today` section",
            hint="add today: {framework, layout, measured} to the job file",
        )
    return distinct


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A measured step, and the modelled step of the same system.

    Their ratio multiplies all seconds of kernels, links and launches, so that systems stay in proportion: it
    changes how long a step takes, not which system wins.
    """

    measured_s: float
    modelled_s: float

    @property
    def scale(self) -> float:
        return self.measured_s / self.modelled_s

    def describe(self, source: str) -> str:
        """Returns e.g. `analytic, calibrated on your measured 17.9 s (was 6 % low before)`."""
        off = self.modelled_s / self.measured_s - 1
        before = f"was {100 * abs(off):.0f} % {'low' if off < 0 else 'high'} before"
        kept = source.removesuffix(ANALYTIC.partition(", ")[2]) if source == ANALYTIC else f"{source}, "
        return f"{kept}calibrated on your measured {self.measured_s:.3g} s ({before})"


def calibrate_on_measured_step(context: PlanningContext) -> Calibration | None:
    """Compares the model with `today.measured` of the job; None if absent or if today's system cannot run."""
    today = context.job.today
    if today is None or today.measured_step_s is None:
        return None
    try:
        modelled_s = TodaySystem().simulate(LlmPipelines(context)).step_s
    except DoesNotFit:
        return None
    return Calibration(measured_s=today.measured_step_s, modelled_s=modelled_s)
