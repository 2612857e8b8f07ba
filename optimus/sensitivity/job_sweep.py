"""Plans a job at every value of one range and keeps the figures for a table and a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from optimus.cost.assumptions import Assumptions
from optimus.cost.measured_profile import Profile
from optimus.errors import DoesNotFit, UserError, one_of
from optimus.ir.ranks import LLM
from optimus.job.checks import check_job
from optimus.job.job import Job
from optimus.job.layout import Layout, PartialLayout
from optimus.planner.planning import PlanningResult, make_plan

PROGRESS_STEPS = 100  # per point of the sweep


@dataclass(frozen=True, kw_only=True)
class SweepFigures:
    """Figures of the plan at one point."""

    layouts: Mapping[str, Layout]
    step_s: float
    floor_s: float
    simpler: str | None  # the fastest system that fits and fills no bubbles, of those compared
    simpler_s: float | None
    peak_bytes: float
    capacity_bytes: float

    @property
    def over_floor(self) -> float:
        return self.step_s / self.floor_s

    @property
    def speedup(self) -> float | None:
        """Step of the simpler system over the plan's."""
        return None if self.simpler_s is None else self.simpler_s / self.step_s


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One value of the range, with its plan or the reason why there is none."""

    value: int
    gpus: int
    tokens: int  # of a step
    plan: SweepFigures | None = None
    reason: str = ""

    def tokens_per_s_per_gpu(self, step_s: float) -> float:
        """Returns LLM tokens per second and GPU for a step time."""
        return self.tokens / step_s / self.gpus


@dataclass(frozen=True, kw_only=True)
class JobSweep:
    """Plans of a job over a range."""

    job: str
    axis: str  # a name of AXES
    strategy: str
    preset: str
    gpu: str
    points: tuple[SweepPoint, ...]

    @property
    def possible(self) -> list[tuple[SweepPoint, SweepFigures]]:
        return [(point, point.plan) for point in self.points if point.plan is not None]


def _with_axis(job: Job, axis: str, value: int) -> Job:
    """Returns the job with one axis of the LLM's layout stated; dp follows."""
    stated = {name: size for name, size in job.layout.of(LLM).stated().items() if name != "dp"}
    modules = {**job.layout.modules, LLM: PartialLayout(**{**stated, axis: value})}
    return replace(job, layout=replace(job.layout, modules=modules))


AXES: dict[str, Callable[[Job, int], Job]] = {
    "gpus": lambda job, value: job.replace(gpus=value),
    "batch": lambda job, value: job.replace(sequences_per_step=value),
    "pp": lambda job, value: _with_axis(job, "pp", value),
    "tp": lambda job, value: _with_axis(job, "tp", value),
}


def sweep_job(
    job: Job,
    *,
    gpus: Sequence[int] = (),
    batch: Sequence[int] = (),
    pp: Sequence[int] = (),
    tp: Sequence[int] = (),
    strategy: str = "optimus",
    assumptions: Assumptions | str = "default",
    profile: Profile | None = None,
    systems: Iterable[str] | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> JobSweep:
    """Plans the job at every value of one range: GPUs at the same batch, sequences per step, pp or tp.

    A value at which the job cannot run becomes a point with its reason.
    """
    axis, values = _range({"gpus": gpus, "batch": batch, "pp": pp, "tp": tp})
    names = None if systems is None else list(systems)

    def plan_at(place: int, changed: Job) -> PlanningResult:
        def within(name: str, done: int, total: int) -> None:
            at = PROGRESS_STEPS * place + PROGRESS_STEPS * done // max(1, total)
            progress(f"{axis} {values[place]}: {name}", at, PROGRESS_STEPS * len(values))

        return make_plan(
            changed,
            strategy=strategy,
            assumptions=assumptions,
            profile=profile,
            systems=names,
            progress=within,
        )

    points = []
    for place, value in enumerate(values):
        changed = AXES[axis](job, value)
        points.append(_point(value, changed, partial(plan_at, place, changed)))
    return JobSweep(
        job=job.name,
        axis=axis,
        strategy=strategy,
        preset=assumptions if isinstance(assumptions, str) else assumptions.name,
        gpu=job.cluster.gpu.name,
        points=tuple(points),
    )


def _point(value: int, job: Job, plan: Callable[[], PlanningResult]) -> SweepPoint:
    """Returns the point of a value, with its plan or with the reason why there is none."""
    tokens = job.workload.sequence_tokens * job.workload.sequences_per_step
    point = SweepPoint(value=value, gpus=job.cluster.gpus, tokens=tokens)
    try:
        check_job(job)
        return replace(point, plan=_figures(plan()))
    except UserError as error:
        if error.field.startswith("--"):
            raise  # a wrong flag is wrong at every point
        return replace(point, reason=_describe(error))
    except DoesNotFit as no:
        return replace(point, reason=no.problem)


def _range(ranges: Mapping[str, Sequence[int]]) -> tuple[str, list[int]]:
    """Returns the axis and its sorted, distinct values; exactly one range must be given."""
    named = [axis for axis, values in ranges.items() if values]
    flags = [f"--{axis}" for axis in ranges]
    if not named:
        hint = f"give one of {one_of(flags)}, e.g. --gpus 256,512,1024"
        raise UserError(field="--gpus", problem="is missing: a sweep needs a range", hint=hint)
    if len(named) > 1:
        problem = f"cannot be combined with --{named[0]}: a sweep has one range"
        raise UserError(field=f"--{named[1]}", problem=problem, hint="keep one of them")
    axis = named[0]
    for value in ranges[axis]:
        if value < 1:
            raise UserError(field=f"--{axis}", value=value, problem="is less than 1", hint="use 1 or more")
    return axis, sorted(set(ranges[axis]))


def _describe(error: UserError) -> str:
    what = error.field if error.value is None else f"{error.field} = {error.value}"
    return f"{what} {error.problem}"


def _figures(planned: PlanningResult) -> SweepFigures:
    assert planned.report.ok, f"the plan does not hold: {planned.report.violations[0]}"
    simpler = planned.simpler
    return SweepFigures(
        layouts={name: module.layout for name, module in planned.plan.modules.items()},
        step_s=planned.step_s,
        floor_s=planned.floor_s,
        simpler=None if simpler is None else simpler.name,
        simpler_s=None if simpler is None else planned.speedup[simpler.name] * planned.step_s,
        peak_bytes=planned.system.peak_bytes,
        capacity_bytes=planned.comparison.context.capacity_bytes,
    )
