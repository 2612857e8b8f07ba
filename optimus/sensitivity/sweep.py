"""Plans a job at every value of one range, and keeps of each plan what a table and a picture show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from optimus.cost.assumptions import Assumptions
from optimus.cost.measured import Profile
from optimus.errors import DoesNotFit, UserError, one_of
from optimus.ir.ranks import LLM
from optimus.job.checks import check_job
from optimus.job.job import Job
from optimus.job.layout import Layout, LayoutChoice
from optimus.job.typed import Places
from optimus.planner.planning import Planned, make_plan

PERCENT = 100  # steps of progress in a point


@dataclass(frozen=True, kw_only=True)
class Plans:
    """A plan at one point, in figures."""

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
        """Over the simpler system."""
        return None if self.simpler_s is None else self.simpler_s / self.step_s


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value of the range: its plan, or why there is none."""

    value: int
    gpus: int
    tokens: int  # of a step
    plan: Plans | None = None
    reason: str = ""

    def tokens_per_s_per_gpu(self, step_s: float) -> float:
        """Of the LLM, if a step takes so long."""
        return self.tokens / step_s / self.gpus


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A job over a range."""

    job: str
    axis: str  # a name of AXES
    strategy: str
    preset: str
    gpu: str
    points: tuple[Point, ...]

    @property
    def possible(self) -> list[tuple[Point, Plans]]:
        return [(point, point.plan) for point in self.points if point.plan is not None]


def _with_axis(job: Job, axis: str, value: int) -> Job:
    """The LLM's layout with one axis stated; dp follows."""
    stated = {name: size for name, size in job.layout.of(LLM).stated().items() if name != "dp"}
    modules = {**job.layout.modules, LLM: LayoutChoice(**{**stated, axis: value})}
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
) -> Sweep:
    """Plans the job at every value of one range: GPUs at the same batch, sequences per step, pp or tp.

    A value at which the job cannot run is a point with its reason.
    """
    axis, values = _range({"gpus": gpus, "batch": batch, "pp": pp, "tp": tp})
    names = None if systems is None else list(systems)

    def plan_at(place: int, changed: Job) -> Planned:
        def within(name: str, done: int, total: int) -> None:
            at = PERCENT * place + PERCENT * done // max(1, total)
            progress(f"{axis} {values[place]}: {name}", at, PERCENT * len(values))

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
    return Sweep(
        job=job.name,
        axis=axis,
        strategy=strategy,
        preset=assumptions if isinstance(assumptions, str) else assumptions.name,
        gpu=job.cluster.gpu.name,
        points=tuple(points),
    )


def _point(value: int, job: Job, plan: Callable[[], Planned]) -> Point:
    """A value with its plan, or with the reason why there is none."""
    tokens = job.workload.sequence_tokens * job.workload.sequences_per_step
    point = Point(value=value, gpus=job.cluster.gpus, tokens=tokens)
    try:
        check_job(job, Places())
        return replace(point, plan=_figures(plan()))
    except UserError as error:
        if error.field.startswith("--"):
            raise  # a flag is wrong, and so at every point
        return replace(point, reason=_said(error))
    except DoesNotFit as no:
        return replace(point, reason=no.problem)


def _range(given: Mapping[str, Sequence[int]]) -> tuple[str, list[int]]:
    """The one range, in order, each value once."""
    named = [axis for axis, values in given.items() if values]
    flags = [f"--{axis}" for axis in given]
    if not named:
        hint = f"give one of {one_of(flags)}, e.g. --gpus 256,512,1024"
        raise UserError(field="--gpus", problem="is missing: a sweep needs a range", hint=hint)
    if len(named) > 1:
        problem = f"stands beside --{named[0]}, and a sweep has one range"
        raise UserError(field=f"--{named[1]}", problem=problem, hint="keep one of them")
    axis = named[0]
    for value in given[axis]:
        if value < 1:
            raise UserError(field=f"--{axis}", value=value, problem="is less than 1", hint="use 1 or more")
    return axis, sorted(set(given[axis]))


def _said(error: UserError) -> str:
    what = error.field if error.value is None else f"{error.field} = {error.value}"
    return f"{what} {error.problem}"


def _figures(made: Planned) -> Plans:
    assert made.report.ok, f"the plan does not hold: {made.report.violations[0]}"
    simpler = made.simpler
    return Plans(
        layouts={name: module.layout for name, module in made.plan.modules.items()},
        step_s=made.step_s,
        floor_s=made.floor_s,
        simpler=None if simpler is None else simpler.name,
        simpler_s=None if simpler is None else made.speedup[simpler.name] * made.step_s,
        peak_bytes=made.memory.total,
        capacity_bytes=made.comparison.context.capacity_bytes,
    )
