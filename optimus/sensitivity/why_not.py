"""The reason against a layout: the rule it breaks, the bytes it lacks, or the seconds it costs and where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from optimus.cost.assumptions import Assumptions
from optimus.cost.measured import Profile
from optimus.errors import DoesNotFit, UserError
from optimus.ir.binding import bound_parts, check_binding
from optimus.ir.plan import Plan
from optimus.ir.planfile import load_plan
from optimus.ir.ranks import LLM
from optimus.ir.rebuild_job import rebuild_job
from optimus.job.checks import check_job
from optimus.job.job import Job
from optimus.job.layout import Constraints, Layout, LayoutChoice, parse_layout
from optimus.job.read import stated_on_top
from optimus.job.typed import Places
from optimus.planner.planning import Planned, make_plan
from optimus.planner.replaying import Replayed, replay_llm_alone, replay_plan
from optimus.sensitivity.reason_words import compared_words
from optimus.sensitivity.time_breakdown import differences, spend
from optimus.sensitivity.why_not_memory import Need, find_need

Verdict = Literal["own", "rule", "memory", "impossible", "slower", "faster", "equal"]
ALIKE = 1e-6  # share of a step below which two are equally long
FIELD = "LAYOUT"


@dataclass(frozen=True, kw_only=True)
class Planning:
    """What planning at another layout says, beside the plan."""

    step_s: float
    layouts: Mapping[str, Layout]
    microbatch_sequences: float
    recompute: Mapping[str, str]
    peak_bytes: int
    spent_s: Mapping[str, float]  # by the names of `spending.WORDS`, as on the mean GPU
    llm_alone_s: float | None  # the step with the encoders taken out

    @property
    def not_hidden_s(self) -> float | None:
        """What encoders add to the step."""
        return None if self.llm_alone_s is None else self.step_s - self.llm_alone_s


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a plan is not laid out as asked. `reason` is one sentence, the rest are its numbers."""

    asked: tuple[str, ...]
    verdict: Verdict
    reason: str
    plan_step_s: float
    plan_layouts: Mapping[str, Layout]
    hint: str = ""  # what would make it possible
    plan: Planning | None = None  # of a layout that fits: both in full
    other: Planning | None = None
    need: Need | None = None  # of one that does not fit

    @property
    def differences_s(self) -> dict[str, float]:
        """What the layout spends more than the plan, by part; they sum to the difference of the steps."""
        if self.plan is None or self.other is None:
            return {}
        return differences(self.plan.spent_s, self.other.spent_s)


def explain_layout(
    plan: Plan | Planned | str | Path,
    *stated: str,
    job: Job | None = None,
    profile: Profile | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    **layouts: str,
) -> Reason:
    """Why the plan is not at `llm="pp8 tp4"`, nor at `llm=pp8,tp4` (both spellings, any module).

    What is not stated is searched as `make_plan` does; an LLM of which nothing is stated stays as it is.
    `job` and `profile`: of a plan from a file that does not hold all of them.
    """
    asked = tuple(_normal(text) for text in (*stated, *(f"{name}={text}" for name, text in layouts.items())))
    choices = _choices(asked)
    reason = _Reasoning(_question(plan, job, profile), asked, choices)
    return reason.own() or reason.rule() or reason.planned(progress)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Question:
    """The plan that is asked about, and what it was made with."""

    plan: Plan
    job: Job
    assumptions: Assumptions
    profile: Profile | None


def _question(plan: Plan | Planned | str | Path, job: Job | None, profile: Profile | None) -> _Question:
    if isinstance(plan, Planned):
        made = plan.comparison
        return _Question(
            plan=plan.plan, job=made.job, assumptions=made.assumptions, profile=made.context.prices.profile
        )
    found = plan if isinstance(plan, Plan) else load_plan(Path(plan))
    if found.bound_to.get("profile", {}) != {"kernels": []} and profile is None:
        raise UserError(
            field="--profile",
            problem="is missing: the plan was made with a profile, of which it holds the hash only",
            hint="name the file with --profile",
        )
    known = rebuild_job(found) if job is None else job
    check_binding(found, bound_parts(known, profile), file=None)
    return _Question(plan=found, job=known, assumptions=_assumptions(found), profile=profile)


def _assumptions(plan: Plan) -> Assumptions:
    """Those that the plan notes."""
    noted: Any = plan.notes.get("preset")
    try:
        return Assumptions(**noted)
    except TypeError:
        problem = "does not name the plan's assumptions as this version knows them"
        raise UserError(field="notes.preset", problem=problem, hint="plan again") from None


# ---------------------------------------------------------------------------- what is asked


def _normal(text: str) -> str:
    """`llm=dp8 pp8 tp8` as `llm=dp8,pp8,tp8`."""
    return ",".join(text.replace(",", " ").split())


def _choices(asked: Iterable[str]) -> dict[str, LayoutChoice]:
    """What is stated of each module, once."""
    found: dict[str, LayoutChoice] = {}
    for text in asked:
        name, choice = parse_layout(text, field=FIELD)
        if name in found:
            raise UserError(field=FIELD, value=text, problem=f"states {name} again", hint="state it once")
        found[name] = choice
    if not found:
        hint = "write for example llm=pp8,tp4"
        raise UserError(field=FIELD, problem="is missing: which layout is asked about?", hint=hint)
    return found


class _Reasoning:
    """One question, from the cheapest answer to planning the job anew."""

    def __init__(self, question: _Question, asked: tuple[str, ...], choices: dict[str, LayoutChoice]) -> None:
        self.question, self.asked, self.choices = question, asked, choices
        plan = question.plan
        self.layouts = {name: module.layout for name, module in plan.modules.items()}
        self.job = replace(question.job, layout=self._stated(), today=None)

    def _stated(self) -> Constraints:
        """What is asked in place of all that the job states, so that the file alone gives the same answer."""
        kept = {}
        if LLM not in self.choices:
            axes = asdict(self.layouts[LLM])
            axes.pop("chunks")
            kept[LLM] = LayoutChoice(**axes)
        bare = replace(self.question.job.layout, modules=kept)
        return stated_on_top(bare, self.asked, self.question.job.model, field=FIELD)

    def _reason(self, verdict: Verdict, words: str, **more: Any) -> Reason:
        return Reason(
            asked=self.asked,
            verdict=verdict,
            reason=words,
            plan_step_s=self.question.plan.claims.step_s,
            plan_layouts=self.layouts,
            **more,
        )

    def own(self) -> Reason | None:
        """If the plan is laid out so already."""
        for name, choice in self.choices.items():
            if any(getattr(self.layouts[name], axis) != size for axis, size in choice.stated().items()):
                return None
        return self._reason("own", "this is the plan's layout")

    def rule(self) -> Reason | None:
        """If model, GPUs or batch cannot be divided so."""
        try:
            check_job(self.job, Places())
        except UserError as error:
            return self._broken(error)
        return None

    def _broken(self, error: UserError) -> Reason:
        what = error.field if error.value is None else f"{error.field} = {error.value}"
        return self._reason("rule", f"breaks a rule: {what} {error.problem}", hint=error.hint)

    def planned(self, progress: Callable[[str, int, int], None]) -> Reason:
        """Planned at the layout by the same strategy, and compared part by part."""
        question = self.question
        try:
            found = make_plan(
                self.job,
                strategy=question.plan.strategy,
                assumptions=question.assumptions,
                profile=question.profile,
                systems=[],
                progress=progress,
            )
        except UserError as error:
            if error.field.startswith("--"):
                raise
            return self._broken(error)
        except DoesNotFit as no:
            return self._unfit(no)
        return self._compared(found)

    def _unfit(self, no: DoesNotFit) -> Reason:
        question = self.question
        need = find_need(self.job, question.assumptions, question.profile, question.plan.strategy)
        if need is None:
            return self._reason("impossible", f"cannot be planned: {no.problem}", hint=no.hint)
        return self._reason("memory", f"does not fit: {need.words}", hint=no.hint, need=need)

    def _compared(self, found: Planned) -> Reason:
        assert found.report.ok, f"the plan does not hold: {found.report.violations[0]}"
        plan = _planning(self.question.plan, self.question.job)
        other = _planning(found.plan, self.job)
        verdict: Verdict = "slower" if other.step_s > plan.step_s else "faster"
        if abs(other.step_s - plan.step_s) <= ALIKE * plan.step_s:
            verdict = "equal"
        words = compared_words(
            plan.step_s,
            other.step_s,
            differences(plan.spent_s, other.spent_s),
            not_hidden_s=_both(plan.not_hidden_s, other.not_hidden_s),
            alike=verdict == "equal",
        )
        words = "; ".join([words, *self._remarks(found)])
        return self._reason(verdict, words, plan=plan, other=other)

    def _remarks(self, found: Planned) -> Iterable[str]:
        """Where what was planned is not all that was asked for."""
        for name, choice in self.choices.items():
            layout = found.plan.modules[name].layout
            for axis, size in choice.stated().items():
                if getattr(layout, axis) != size:
                    taken = f"{axis}{getattr(layout, axis)}"
                    yield f"{name} {axis}{size} is not forced: strategy {found.plan.strategy} took {taken}"


def _planning(plan: Plan, job: Job) -> Planning:
    played = replay_plan(plan)
    return Planning(
        step_s=played.timeline.step_s,
        layouts={name: module.layout for name, module in plan.modules.items()},
        microbatch_sequences=job.workload.sequences_per_step
        / plan.modules[LLM].layout.dp
        / plan.microbatches,
        recompute={name: module.recompute for name, module in plan.modules.items()},
        peak_bytes=max(held.peak for held in plan.memory),
        spent_s=spend(played),
        llm_alone_s=_llm_alone_s(plan),
    )


def _both(one: float | None, other: float | None) -> tuple[float, float] | None:
    return None if one is None or other is None else (one, other)


def _llm_alone_s(plan: Plan) -> float | None:
    try:
        alone: Replayed = replay_llm_alone(plan)
    except UserError:
        return None  # an LLM that waits for what only an encoder does
    return alone.timeline.step_s
