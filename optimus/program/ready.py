"""The last look at a plan before ranks play it: is it for this job, and does it hold."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

from optimus.errors import UserError
from optimus.job.job import Job
from optimus.program.binding import check_binding
from optimus.program.plan import Plan
from optimus.program.validator import check_plan


class Measured(Protocol):
    """What of a profile a plan is bound to."""

    @property
    def issue_s(self) -> float | None: ...

    @property
    def slowdown(self) -> float | None: ...

    def bound(self) -> Any: ...


def bound_parts(job: Job, profile: Measured | None = None) -> dict[str, Any]:
    """What a plan is bound to: never what is under `run:`."""
    measured: dict[str, Any] = {"kernels": [] if profile is None else profile.bound()}
    if profile is not None and profile.issue_s is not None:
        measured["issue_s"] = profile.issue_s
    if profile is not None and profile.slowdown is not None:
        measured["slowdown"] = profile.slowdown
    return {
        "model": asdict(job.model),
        "cluster": asdict(job.cluster),
        "workload": asdict(job.workload),
        "profile": measured,
    }


def ready_plan(plan: Plan, job: Job, profile: Measured | None = None, *, file: str | None = None) -> None:
    """Refuses, before anything runs, a plan that was made for another job or does not hold."""
    check_binding(plan, bound_parts(job, profile), file=file)
    report = check_plan(plan)
    if not report.ok:
        first = report.violations[0]
        raise UserError(
            field=first.where,
            problem=f"breaks the rule `{first.rule}`: {first.problem}",
            hint="plan again; optimus check shows all violations",
            file=file,
        )
