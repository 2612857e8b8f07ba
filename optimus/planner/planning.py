"""Plans a job: searches the best plan, compares it with other systems, and checks it by all rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any

from optimus.cost.assumptions import Assumptions, get_preset
from optimus.cost.measured_profile import Profile
from optimus.cost.memory import RankMemory
from optimus.errors import DoesNotFit, OptimusError, UserError, nearest, one_of
from optimus.ir.binding import find_binding_mismatches, flatten_and_hash_parts, list_bound_parts
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.job.layout import Layout, PartialLayout
from optimus.planner.compare import Comparison, compare_systems
from optimus.planner.filled_plan import RejectedLayout, SearchResult
from optimus.planner.layouts import choose_smallest_context, common_encoder_layouts, encoder_layout_conflict
from optimus.planner.step_bounds import StepBounds, compute_step_bounds
from optimus.planner.systems.base import SimulatedSystem
from optimus.planner.systems.paper_candidate import PaperCandidate
from optimus.planner.systems.pipeline_search import first_fitting_pipeline
from optimus.planner.systems.registry import (
    SYSTEMS,
    applicable_systems,
    default_baselines,
    load_system,
    plan_making_systems,
)
from optimus.verify.validator import MAX_VIOLATIONS, CheckReport, Violation, check_plan

MAX_GPU_FACTOR = 64  # times the job's GPUs that remedies try
MAX_REMEDIES = 3  # named in one hint
MIN_SPEEDUP_WORTH_FILLING = 1.02  # over a simpler system, which is recommended where the gain is smaller


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanningResult:
    """A plan, the systems it is compared with, lower bounds, and the validator's report."""

    plan: Plan
    comparison: Comparison
    bounds: StepBounds
    report: CheckReport
    search_result: SearchResult

    @property
    def system(self) -> SimulatedSystem:
        return self.comparison.systems[self.plan.strategy]

    @property
    def step_s(self) -> float:
        return self.plan.claims.step_s

    @property
    def floor_s(self) -> float:
        return self.comparison.floor_s

    @property
    def systems(self) -> dict[str, SimulatedSystem]:
        return self.comparison.systems

    @property
    def memory(self) -> RankMemory:
        """Memory of the worst rank."""
        return self.system.memory

    @property
    def hidden_strict(self) -> float:
        return self.bounds.hidden_share(self.step_s)

    @property
    def hidden_placed(self) -> float:
        """The paper's measure: the share of encoder work placed inside bubbles."""
        return self.search_result.hidden_share

    @property
    def speedup(self) -> dict[str, float]:
        """Time of every other system over this plan's (measured where the job says so)."""
        return {system.name: _seconds(system) / self.step_s for system in self._others}

    @property
    def rejected(self) -> list[RejectedLayout]:
        return [*self.comparison.rejected, *self.search_result.rejected]

    @property
    def simpler(self) -> SimulatedSystem | None:
        """The fastest system that fits and fills no bubbles, of those that were compared."""
        return next(iter(self.rivals), None)

    @property
    def rivals(self) -> list[SimulatedSystem]:
        """All systems that fit and fill no bubbles, of those that were compared, fastest first."""
        return sorted((system for system in self._others if system.fits), key=_seconds)

    @property
    def reference(self) -> SimulatedSystem | None:
        """The system in common use: today's, or stage0; None if it was not compared or does not fit."""
        system = self.systems.get("today") or self.systems.get("stage0")
        return system if system is not None and system.fits else None

    @property
    def _others(self) -> list[SimulatedSystem]:
        skipped = "llm-only", self.plan.strategy
        return [system for name, system in self.comparison.systems.items() if name not in skipped]


def make_plan(
    job: Job,
    *,
    strategy: str = "optimus",
    assumptions: Assumptions | str = "default",
    profile: Profile | None = None,
    systems: Iterable[str] | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> PlanningResult:
    """Plans a job by one system and checks the plan by all rules; others are compared, none is recommended.

    `systems` are those to compare with: all that apply, by default.
    """
    comparison = compare_for_plan(
        job, [strategy], assumptions=assumptions, profile=profile, systems=systems, progress=progress
    )
    return build_plan(comparison, strategy)


def compare_for_plan(
    job: Job,
    strategies: Sequence[str],
    *,
    assumptions: Assumptions | str = "default",
    profile: Profile | None = None,
    systems: Iterable[str] | None = None,
    effort: float = 1.0,
    also_on_pipelines: bool = False,
    cores: int = 1,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    report_known: Callable[[Comparison], None] = lambda comparison: None,
) -> Comparison:
    """Simulates the strategies, of which one is to be planned, and the systems to compare them with.

    DoesNotFit proposes changes under which a job fits.
    """
    for strategy in strategies:
        _check(job, strategy)
    others = default_baselines(job) if systems is None else systems
    names = dict.fromkeys(["llm-only", *applicable_systems(others, job), *strategies])
    try:
        comparison = compare_systems(
            job,
            names=names,
            assumptions=assumptions,
            profile=profile,
            effort=effort,
            also_on_pipelines=also_on_pipelines,
            cores=cores,
            progress=progress,
            report_known=report_known,
        )
    except DoesNotFit as no:
        raise _with_remedies(no, job, assumptions) from no
    if not any(name in comparison.systems for name in strategies):
        raise _with_remedies(DoesNotFit(comparison.missing[strategies[0]], ""), job, assumptions)
    return comparison


def build_plan(
    comparison: Comparison, strategy: str, notes: Mapping[str, Any] = MappingProxyType({})
) -> PlanningResult:
    """Binds the plan of a compared system to the job, adds notes for its readers, and checks it."""
    system = comparison.systems[strategy]
    if not system.fits:
        raise DoesNotFit(
            f"{strategy} needs {system.peak_bytes / 1e9:.1f} of "
            f"{comparison.context.capacity_bytes / 1e9:.0f} GB at p99 of steps",
            "plan another system, use more GPUs, or recompute: full",
        )
    result = system.search_result
    assert result is not None, "candidates of a system that makes a plan are search results"
    comparison = replace(comparison, context=result.context)
    bounds = compute_step_bounds(comparison.context, result.llm, comparison.floor_s)
    plan = _bind(replace(result.plan, strategy=strategy), comparison)
    plan = replace(plan, notes=_rounded({**_list_notes(plan, comparison, bounds, result), **notes}))
    return PlanningResult(
        plan=plan, comparison=comparison, bounds=bounds, report=check_plan(plan), search_result=result
    )


def _check(job: Job, strategy: str) -> None:
    """Refuses an unknown strategy, a job without encoders, and one that forbids plans."""
    if strategy not in plan_making_systems():
        compared = "is compared with others, and has no plan that could be run"
        raise UserError(
            field="--strategy",
            value=strategy,
            problem=compared if strategy in SYSTEMS else "is not a strategy",
            hint=nearest(strategy, plan_making_systems()),
        )
    if not job.model.encoders:
        raise DoesNotFit(
            f"{job.model.name} has no encoder to place", "optimus simulate says where an LLM's time goes"
        )
    system = load_system(strategy)
    if not system.keeps_layout(job):
        raise UserError(
            field="layout.llm",
            value=" ".join(f"{axis}{size}" for axis, size in job.layout.of(LLM).stated().items()),
            problem=f"is stated, and {strategy} cannot have it",
            hint="leave it out of the job, or plan another system with --strategy",
        )
    allowed_as = system.allowed_as
    if allowed_as not in (None, *job.layout.limits.allow):
        raise UserError(
            field="layout.limits.allow",
            value=", ".join(job.layout.limits.allow),
            problem=f"leaves out {allowed_as}, which {strategy} does",
            hint=f"add {allowed_as}, or plan another system with --strategy",
        )


def check_plan_or_result(plan: Plan | PlanningResult) -> CheckReport:
    """Checks a plan, or what `make_plan` returned, by every rule."""
    return check_plan(plan.plan if isinstance(plan, PlanningResult) else plan)


def add_binding_violations(report: CheckReport, plan: Plan, parts: Mapping[str, Any]) -> CheckReport:
    """Adds a violation of rule `binding` for every field in which the plan and a job differ."""
    violations = tuple(
        Violation(
            rule="binding",
            where=f"{each.part}.{each.field}",
            problem=f"the plan was made for {each.planned}, the job has {each.given}",
        )
        for each in find_binding_mismatches(plan, parts)
    )
    holds = report.rules["binding"] and not violations
    return replace(
        report,
        rules={**report.rules, "binding": holds},
        violations=(*report.violations, *violations[:MAX_VIOLATIONS]),
    )


def _bind(plan: Plan, comparison: Comparison) -> Plan:
    parts = list_bound_parts(comparison.job, comparison.context.cost_model.profile)
    fields, hashes = flatten_and_hash_parts(parts)
    return replace(plan, bound_to=fields, hashes=hashes)


def _list_notes(
    plan: Plan, comparison: Comparison, bounds: StepBounds, result: SearchResult
) -> dict[str, Any]:
    """Returns figures for readers of the plan file; none depends on the time that planning took."""
    notes = {
        "preset": comparison.assumptions.describe(),
        "floor_s": comparison.floor_s,
        "floor_1f1b_s": comparison.floor_1f1b_s,
        "bound_s": bounds.bound_s,
        "bound": bounds.largest_name,
        "mfu": comparison.systems[plan.strategy].mfu,
        "hidden_share_strict": bounds.hidden_share(plan.claims.step_s),
        "hidden_share_placed": result.hidden_share,
        "systems_s": {name: system.step_s for name, system in comparison.systems.items()},
        **result.notes,
        "limits": asdict(comparison.job.layout.limits),  # so that a later search stays within them
    }
    unfit = [name for name, system in comparison.systems.items() if not system.fits]
    if unfit:
        notes["systems_unfit"] = unfit
    return notes


def _rounded(value: Any) -> Any:
    """Rounds floats to twelve digits, so that notes are the same on every machine."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 12) if isinstance(value, float) else value


def _seconds(system: SimulatedSystem) -> float:
    return system.step_s if system.measured_step_s is None else system.measured_step_s


def _with_remedies(refusal: DoesNotFit, job: Job, assumptions: Assumptions | str) -> DoesNotFit:
    """Returns the error with a hint that names changes under which the job fits."""
    remedies = _suggest_remedies(job, assumptions)
    return DoesNotFit(refusal.problem, remedies or refusal.hint or "nothing that was tried makes it fit")


# ---------------------------------------------------------------------------- remedies


def _suggest_remedies(job: Job, assumptions: Assumptions | str) -> str:
    """Returns a hint that names changes under which the job fits; empty if none of them helps."""
    assumed = get_preset(assumptions) if isinstance(assumptions, str) else assumptions
    remedies: dict[str, str] = {}  # description by kind of change, the first that fits of each
    for kind, description, changed in _changes(job):
        if kind not in remedies and _fits(changed, assumed):
            remedies[kind] = description
        if len(remedies) == MAX_REMEDIES:
            break
    return f"it fits with {one_of(remedies.values())}" if remedies else ""


def _changes(job: Job) -> Iterator[tuple[str, str, Job]]:
    """Yields kind, description and changed job: recomputation, layouts, more GPUs, fewer GPUs."""
    stated = [m.name for m in job.model.modules if m.recompute not in ("auto", "full")]
    if stated:
        yield "recompute", f"recompute: full for {one_of(stated)}", _recomputed(job)
    for text, changed in _layouts(job):
        yield "layout", f"--layout {text}", changed
    gpus, times = job.cluster.gpus, 2
    while times <= MAX_GPU_FACTOR:
        yield "more", f"{gpus * times} GPUs", job.replace(gpus=gpus * times)
        times *= 2
    for fewer in (gpus // 2, gpus // 4, gpus // 8):
        if fewer:
            yield "fewer", f"{fewer} GPUs", job.replace(gpus=fewer)


def _recomputed(job: Job) -> Job:
    encoders = tuple(replace(encoder, recompute="full") for encoder in job.model.encoders)
    llm = replace(job.model.llm, recompute="full")
    return replace(job, model=replace(job.model, encoders=encoders, llm=llm))


def _layouts(job: Job) -> Iterator[tuple[str, Job]]:
    """Yields other layouts of the LLM on the same GPUs, smallest first."""
    stated = job.layout.of("llm").stated()
    encoders = {name: choice for name, choice in job.layout.modules.items() if name != "llm"}
    sizes = product((1, 2, 4, 8, 16), (1, 2, 4, 8))
    for pp, tp in sorted(sizes, key=lambda size: (size[0] * size[1], size[0])):
        choice = PartialLayout(pp=pp, tp=tp, cp=stated.get("cp"), ep=stated.get("ep"))
        if job.cluster.gpus % (pp * tp) == 0 and encoder_layout_conflict(job, Layout(pp=pp, tp=tp)) is None:
            modules = {**encoders, "llm": choice}
            yield f"llm=pp{pp},tp{tp}", replace(job, layout=replace(job.layout, modules=modules))


def _fits(job: Job, assumptions: Assumptions) -> bool:
    """Returns whether LLM and encoders fit in some layout; nothing is scheduled."""
    try:
        context, _ = choose_smallest_context(job, assumptions)
        llm = first_fitting_pipeline(context, (job.model.llm,))
    except OptimusError:
        return False
    if not llm.fits:
        return False
    for layout in common_encoder_layouts(context, llm.layout):
        if isinstance(layout, RejectedLayout):
            continue
        *_, policy = context.recompute_policies(job.model.encoders)
        candidate = PaperCandidate(context, llm, layout, dict(policy))
        even = -(-llm.microbatches // candidate.num_pipelines)
        if (
            candidate.num_pipelines <= llm.microbatches
            and candidate.peak_bytes_bound(even) <= context.capacity_bytes
        ):
            return True
    return False
