"""Explains why a layout was not chosen: the rule it breaks, the bytes it lacks, or the seconds it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from optimus.cost.assumptions import Assumptions
from optimus.cost.measured_profile import Profile
from optimus.cost.memory import RankMemory
from optimus.errors import DoesNotFit, OptimusError, UserError
from optimus.ir.binding import list_bound_parts, rebuild_job, require_plan_of_job
from optimus.ir.plan import Plan
from optimus.ir.planfile import load_plan
from optimus.ir.ranks import LLM
from optimus.job.checks import check_job
from optimus.job.job import Job
from optimus.job.layout import Layout, LayoutConstraints, PartialLayout, parse_layout
from optimus.job.read import add_stated_layouts
from optimus.planner.context import PlanningContext
from optimus.planner.filled_plan import RejectedLayout
from optimus.planner.layouts import choose_smallest_context, common_encoder_layouts
from optimus.planner.plan_replay import ReplayedPlan, replay_llm_alone, replay_plan
from optimus.planner.planning import PlanningResult, make_plan
from optimus.planner.systems.colocation_search import ColocationSearch
from optimus.planner.systems.paper_candidate import PaperCandidate
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.planner.systems.pipeline_search import first_fitting_pipeline
from optimus.planner.systems.registry import is_allowed, load_system
from optimus.sensitivity.time_breakdown import break_down_step, describe_step_difference, subtract_breakdowns
from optimus.verify.validator import require_proven_plan

Verdict = Literal["own", "rule", "memory", "impossible", "slower", "faster", "equal"]
EQUAL_WITHIN = 1e-6  # relative difference below which two steps count as equal
FIELD = "LAYOUT"  # name of the argument in errors
MAX_COMPONENTS_SHOWN = 3  # of the memory, in a sentence
COMPONENT_LABELS = {"llm_activations": "LLM activations", "encoder_activations": "encoder activations"}


@dataclass(frozen=True, kw_only=True)
class PlanFigures:
    """Figures of a plan, at its own or at another layout."""

    step_s: float
    layouts: Mapping[str, Layout]
    microbatch_sequences: float
    recompute: Mapping[str, str]
    peak_bytes: int
    spent_s: Mapping[str, float]  # by the keys of `time_breakdown.LABELS`, on the mean GPU
    llm_alone_s: float | None  # the step with the encoders taken out

    @property
    def not_hidden_s(self) -> float | None:
        """Seconds that encoders add to the LLM's step."""
        return None if self.llm_alone_s is None else self.step_s - self.llm_alone_s


@dataclass(frozen=True, kw_only=True)
class LayoutExplanation:
    """Why a plan does not use a layout: one sentence in `reason`, and its figures."""

    asked: tuple[str, ...]
    verdict: Verdict
    reason: str
    plan_step_s: float
    plan_layouts: Mapping[str, Layout]
    hint: str = ""  # what would make it possible
    plan: PlanFigures | None = None  # of a layout that fits: both in full
    other: PlanFigures | None = None
    need: MemoryRequirement | None = None  # of one that does not fit

    @property
    def differences_s(self) -> dict[str, float]:
        """Seconds that the layout spends more than the plan, by part; they sum to the steps' difference."""
        if self.plan is None or self.other is None:
            return {}
        return subtract_breakdowns(self.plan.spent_s, self.other.spent_s)


def explain_layout(
    plan: Plan | PlanningResult | str | Path,
    *stated: str,
    job: Job | None = None,
    profile: Profile | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    **layouts: str,
) -> LayoutExplanation:
    """Explains why a plan does not use a layout, stated as `llm="pp8 tp4"` or `"llm=pp8,tp4"`.

    Axes that are not stated are searched as `make_plan` does; an LLM of which no axis is stated keeps its
    layout. `job` and `profile` are needed for a plan file that does not hold all of them.
    """
    asked = tuple(_normal(text) for text in (*stated, *(f"{name}={text}" for name, text in layouts.items())))
    choices = _choices(asked)
    explainer = _Explainer(_question(plan, job, profile), asked, choices)
    return explainer.if_chosen() or explainer.if_invalid() or explainer.by_planning(progress)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Question:
    """The plan that is asked about, and the inputs it was made with."""

    plan: Plan
    job: Job
    assumptions: Assumptions
    profile: Profile | None


def _question(
    plan: Plan | PlanningResult | str | Path, job: Job | None, profile: Profile | None
) -> _Question:
    if isinstance(plan, PlanningResult):
        compared = plan.comparison
        return _Question(
            plan=plan.plan,
            job=compared.job,
            assumptions=compared.assumptions,
            profile=compared.context.cost_model.profile,
        )
    loaded = plan if isinstance(plan, Plan) else load_plan(Path(plan))
    if loaded.bound_to.get("profile", {}) != {"kernels": []} and profile is None:
        raise UserError(
            field="--profile",
            problem="is missing: the plan was made with a profile, of which it holds the hash only",
            hint="name the file with --profile",
        )
    planned_job = rebuild_job(loaded) if job is None else job
    file = None if isinstance(plan, Plan) else str(plan)
    require_plan_of_job(loaded, list_bound_parts(planned_job, profile), file=file)
    require_proven_plan(loaded, file=file)
    return _Question(plan=loaded, job=planned_job, assumptions=_assumptions(loaded), profile=profile)


def _assumptions(plan: Plan) -> Assumptions:
    """Returns the assumptions in the plan's notes."""
    noted: Any = plan.notes.get("preset")
    try:
        return Assumptions(**noted)
    except TypeError:
        problem = "does not name the plan's assumptions as this version knows them"
        raise UserError(field="notes.preset", problem=problem, hint="plan again") from None


# ---------------------------------------------------------------------------- what is asked


def _normal(text: str) -> str:
    """Returns `llm=dp8 pp8 tp8` as `llm=dp8,pp8,tp8`."""
    return ",".join(text.replace(",", " ").split())


def _choices(asked: Iterable[str]) -> dict[str, PartialLayout]:
    """Returns what is stated of each module; a module stated twice is refused."""
    choices: dict[str, PartialLayout] = {}
    for text in asked:
        name, choice = parse_layout(text, field=FIELD)
        if name in choices:
            raise UserError(field=FIELD, value=text, problem=f"states {name} again", hint="state it once")
        choices[name] = choice
    if not choices:
        hint = "write for example llm=pp8,tp4"
        raise UserError(field=FIELD, problem="is missing: which layout is asked about?", hint=hint)
    return choices


class _Explainer:
    """Answers one question, from the cheapest check to planning the job again."""

    def __init__(
        self, question: _Question, asked: tuple[str, ...], choices: dict[str, PartialLayout]
    ) -> None:
        self.question, self.asked, self.choices = question, asked, choices
        plan = question.plan
        self.layouts = {name: module.layout for name, module in plan.modules.items()}
        self.job = replace(question.job, layout=self._stated(), today=None)

    def _stated(self) -> LayoutConstraints:
        """Returns the asked layout in place of the job's, so that a plan file alone gives the same answer."""
        kept = {}
        if LLM not in self.choices:
            axes = asdict(self.layouts[LLM])
            axes.pop("chunks")
            kept[LLM] = PartialLayout(**axes)
        bare = replace(self.question.job.layout, modules=kept)
        return add_stated_layouts(bare, self.asked, self.question.job.model, field=FIELD)

    def _reason(self, verdict: Verdict, sentence: str, **more: Any) -> LayoutExplanation:
        return LayoutExplanation(
            asked=self.asked,
            verdict=verdict,
            reason=sentence,
            plan_step_s=self.question.plan.claims.step_s,
            plan_layouts=self.layouts,
            **more,
        )

    def if_chosen(self) -> LayoutExplanation | None:
        """Returns the reason if the plan has this layout already."""
        for name, choice in self.choices.items():
            if any(getattr(self.layouts[name], axis) != size for axis, size in choice.stated().items()):
                return None
        return self._reason("own", "this is the plan's layout")

    def if_invalid(self) -> LayoutExplanation | None:
        """Returns the reason if model, GPUs or batch are not divisible by the layout."""
        try:
            check_job(self.job)
        except UserError as error:
            return self._invalid(error)
        return None

    def _invalid(self, error: UserError) -> LayoutExplanation:
        what = error.field if error.value is None else f"{error.field} = {error.value}"
        return self._reason("rule", f"breaks a rule: {what} {error.problem}", hint=error.hint)

    def by_planning(self, progress: Callable[[str, int, int], None]) -> LayoutExplanation:
        """Plans the job at the layout by the same strategy, or `fsdp`, and compares part by part."""
        question, plans, refusals = self.question, list[PlanningResult](), list[DoesNotFit]()
        for strategy in self._strategies:
            try:
                planned = make_plan(
                    self.job,
                    strategy=strategy,
                    assumptions=question.assumptions,
                    profile=question.profile,
                    systems=[],
                    progress=progress,
                )
                plans.append(planned)
            except UserError as error:
                if error.field.startswith("--"):
                    raise
                return self._invalid(error)
            except DoesNotFit as no:
                refusals.append(no)
        if not plans:
            return self._does_not_fit(refusals[0])
        return self._compare(min(plans, key=lambda each: each.plan.claims.step_s))

    @property
    def _strategies(self) -> list[str]:
        """The strategies by which the layout is planned: one, and `fsdp` if it may have the layout."""
        contained = (self._strategy, *load_system(self._strategy).contains)
        sharded = ["fsdp"] if "fsdp" not in contained and is_allowed("fsdp", self.job) else []
        return [self._strategy, *sharded]

    @property
    def _strategy(self) -> str:
        """The plan's; `optimus` if the plan has no pipeline of the LLM, of which a layout is asked."""
        strategy = self.question.plan.strategy
        return strategy if load_system(strategy).needs_llm_pipeline else "optimus"

    def _does_not_fit(self, no: DoesNotFit) -> LayoutExplanation:
        question = self.question
        need = find_memory_requirement(self.job, question.assumptions, question.profile, self._strategy)
        if need is None:
            return self._reason("impossible", f"cannot be planned: {no.problem}", hint=no.hint)
        return self._reason("memory", f"does not fit: {need.description}", hint=no.hint, need=need)

    def _compare(self, planned: PlanningResult) -> LayoutExplanation:
        assert planned.report.ok, f"the plan does not hold: {planned.report.violations[0]}"
        plan = _figures(self.question.plan, self.question.job)
        other = _figures(planned.plan, self.job)
        verdict: Verdict = "slower" if other.step_s > plan.step_s else "faster"
        if abs(other.step_s - plan.step_s) <= EQUAL_WITHIN * plan.step_s:
            verdict = "equal"
        sentence = describe_step_difference(
            plan.step_s,
            other.step_s,
            subtract_breakdowns(plan.spent_s, other.spent_s),
            not_hidden_s=_both(plan.not_hidden_s, other.not_hidden_s),
            equal=verdict == "equal",
        )
        sentence = "; ".join([sentence, *self._remarks(planned)])
        return self._reason(verdict, sentence, plan=plan, other=other)

    def _remarks(self, planned: PlanningResult) -> Iterable[str]:
        """Yields remarks where the plan does not follow all that was asked for."""
        if self._strategy != self.question.plan.strategy:
            yield f"planned by {self._strategy}: {self.question.plan.strategy} has no pipeline of the LLM"
        elif planned.plan.strategy != self._strategy:
            yield f"as {planned.plan.strategy}, which is faster there than {self._strategy} or alone fits"
        for name, choice in self.choices.items():
            layout = planned.plan.modules[name].layout
            for axis, size in choice.stated().items():
                if getattr(layout, axis) != size:
                    taken = f"{axis}{getattr(layout, axis)}"
                    yield f"{name} {axis}{size} is not forced: strategy {planned.plan.strategy} took {taken}"


def _figures(plan: Plan, job: Job) -> PlanFigures:
    replayed = replay_plan(plan)
    return PlanFigures(
        step_s=replayed.timeline.step_s,
        layouts={name: module.layout for name, module in plan.modules.items()},
        microbatch_sequences=job.workload.sequences_per_step
        / plan.modules[LLM].layout.dp
        / plan.microbatches,
        recompute={name: module.recompute for name, module in plan.modules.items()},
        peak_bytes=max(held.peak for held in plan.memory),
        spent_s=break_down_step(replayed),
        llm_alone_s=_llm_alone_s(plan),
    )


def _both(one: float | None, other: float | None) -> tuple[float, float] | None:
    return None if one is None or other is None else (one, other)


def _llm_alone_s(plan: Plan) -> float | None:
    try:
        alone: ReplayedPlan = replay_llm_alone(plan)
    except UserError:
        return None  # the LLM waits for an op that only an encoder has
    return alone.timeline.step_s


# ---------------------------------------------------------------------------- memory


@dataclass(frozen=True, kw_only=True)
class MemoryRequirement:
    """Bytes of the worst rank with the most recomputation allowed, and the capacity of a GPU."""

    needed_bytes: float
    capacity_bytes: float
    llm_layout: Layout
    stage: int  # of the LLM alone, its worst
    llm_alone: RankMemory  # there
    encoders: Layout | None = None  # the layout that needs least; None: the LLM alone does not fit

    @property
    def largest(self) -> str:
        """The component with the most bytes."""
        if self.encoders is not None and self.encoder_bytes > max(_by_size(self.llm_alone).values()):
            return "encoders"
        return next(iter(_by_size(self.llm_alone)))

    @property
    def encoder_bytes(self) -> float:
        """Bytes that encoders add to the LLM's worst rank."""
        return 0.0 if self.encoders is None else self.needed_bytes - self.llm_alone.total

    @property
    def description(self) -> str:
        """E.g. `the LLM alone needs 132.4 of 80.0 GB on stage 0 at dp4 pp1 tp1: optimizer 60.1, ...`."""
        parts = list(_by_size(self.llm_alone).items())[:MAX_COMPONENTS_SHOWN]
        held = ", ".join(f"{COMPONENT_LABELS.get(name, name)} {_gb(size)}" for name, size in parts)
        if self.encoders is None:
            needs = f"the LLM alone needs {_gb(self.needed_bytes)} of {_gb(self.capacity_bytes)} GB"
            return f"{needs} on stage {self.stage} at {self.llm_layout}: {held}"
        needs, capacity = _gb(self.needed_bytes), _gb(self.capacity_bytes)
        if self.needed_bytes > self.capacity_bytes:
            needs = f"{needs} of {capacity} GB are needed on the worst rank"
        else:
            estimate = f"the estimate before scheduling was {needs}"
            needs = f"every schedule made needs more than {capacity} GB; {estimate}"
        where = f"with encoders at {self.encoders} and the LLM at {self.llm_layout}"
        llm = f"the LLM {_gb(self.llm_alone.total)} ({held})"
        return f"{needs} {where}: {llm}, encoders {_gb(self.encoder_bytes)}"


def find_memory_requirement(
    job: Job, assumptions: Assumptions, profile: Profile | None, strategy: str
) -> MemoryRequirement | None:
    """Returns the memory that a job needs at its stated layout, or None if memory is not the reason."""
    try:
        context, _ = choose_smallest_context(job, assumptions, profile)
    except OptimusError:
        return None
    llm = _most_recomputed(context, first_fitting_pipeline(context, (job.model.llm,)))
    stage = max(range(llm.layout.pp), key=lambda place: llm.memories[place].total)
    capacity, alone = context.capacity_bytes, llm.memories[stage]
    need = MemoryRequirement(
        needed_bytes=alone.total, capacity_bytes=capacity, llm_layout=llm.layout, stage=stage, llm_alone=alone
    )
    if not llm.fits:
        return need
    layouts = [
        layout
        for layout in common_encoder_layouts(context, llm.layout)
        if not isinstance(layout, RejectedLayout)
    ]
    estimates = {layout: _with_encoders(context, llm, layout, strategy) for layout in layouts}
    needed = {layout: size for layout, size in estimates.items() if size is not None}
    if not needed:
        return None  # no layout divides model and batch
    best = min(needed, key=lambda layout: needed[layout])
    return replace(need, needed_bytes=needed[best], encoders=best)


def _by_size(memory: RankMemory) -> dict[str, float]:
    """Returns the components, largest first, with model states summed."""
    parts = {
        "model states": memory.states,
        "llm_activations": memory.llm_activations,
        "logits": memory.logits,
        "communicators": memory.communicators,
        "reserve": memory.reserve,
    }
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def _most_recomputed(context: PlanningContext, llm: PipelineCandidate) -> PipelineCandidate:
    *_, policy = context.recompute_policies((context.job.model.llm,))
    return replace(llm, layers=context.layers((context.job.model.llm,), llm.sequences, policy), policy=policy)


def _with_encoders(
    context: PlanningContext, llm: PipelineCandidate, layout: Layout, strategy: str
) -> float | None:
    """Returns the strategy's estimate of the worst rank's bytes, or None if it cannot run."""
    *_, policy = context.recompute_policies(context.job.model.encoders)
    if strategy == "paper":
        candidate = PaperCandidate(context, llm, layout, dict(policy))
        if candidate.num_pipelines > llm.microbatches:
            return None
        return candidate.peak_bytes_bound(-(-llm.microbatches // candidate.num_pipelines))
    candidates = ColocationSearch(context, llm).memory_ladder({name: layout for name, _ in policy})
    return min(candidate.peak_bytes_bound for candidate in candidates)


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f}"
