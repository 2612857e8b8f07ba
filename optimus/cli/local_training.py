"""Trains on this host: what `optimus train` by itself and `optimus.train` have in common."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from optimus.cli.flags import trainer_part
from optimus.console import following
from optimus.errors import OptimusError, UserError

if TYPE_CHECKING:
    from optimus.cost.measured import Profile
    from optimus.engine.config import Summary, Training
    from optimus.ir.plan import Plan
    from optimus.job.job import Job
    from optimus.planner.planning import Planned

INTERRUPTED = 130


class RanksFailed(OptimusError):
    """A rank ended badly; what it said is on standard error."""


def train(
    job: Job,
    plan: Plan | Planned | None = None,
    *,
    steps: int | None = None,
    run_dir: Path | str | None = None,
    profile: Profile | None = None,
) -> Summary:
    """Trains a job on made-up data, one process per planned rank on this host; what rank 0 ends with.

    Makes a plan if none is given. `profile` is what the plan was priced by, if it was. Metrics and the last
    ops of ranks that fail go into `run_dir`.
    """
    from optimus.engine.config import training_of
    from optimus.planner.planning import Planned, make_plan
    from optimus.verify.validator import ready_plan

    require_torch()
    folder = None if run_dir is None else make_folder("run_dir", Path(run_dir))
    training = training_of(job.run.settings, steps=steps, run_dir=folder)
    if plan is None:
        plan = make_plan(job, profile=profile, systems=())
    if isinstance(plan, Planned):
        profile, plan = plan.comparison.context.prices.profile, plan.plan
    ready_plan(plan, job, profile)
    code, summary = run_ranks(job, plan, training)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if summary is None:
        raise RanksFailed(f"a rank failed first, with code {code}; its last lines are on standard error")
    return summary


def run_ranks(
    job: Job, plan: Plan, training: Training, *, visible: bool = False
) -> tuple[int, Summary | None]:
    """The exit code of the run and, if that is 0, its summary; `plan` must have been checked."""
    from optimus.engine.config import METRICS, PLAN
    from optimus.ir.planfile import save_plan

    handed, launcher = trainer_part("optimus.engine.rank_main"), trainer_part("optimus.engine.launcher")
    with tempfile.TemporaryDirectory(prefix="optimus-") as name:
        private = Path(name)
        folder = training.run_dir or private
        (folder / METRICS).unlink(missing_ok=True)
        digest = save_plan(plan, folder / PLAN)
        absolute = replace(training, run_dir=folder.absolute())
        handed.RankInputs(job=job, plan=plan, plan_hash=digest, training=absolute).save(private)
        shown = following(folder / METRICS, training.steps) if visible else nullcontext()
        with shown:
            code: int = launcher.launch(handed.ENTRY, [name], plan.ranks.world)
        return code, handed.summary_in(private) if code == 0 else None


def make_folder(field: str, folder: Path) -> Path:
    """Makes it, if need be, or says why that cannot be."""
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UserError(
            field=field,
            value=str(folder),
            problem=f"cannot be written: {error.strerror}",
            hint="name a folder that is yours, in one that exists",
        ) from None


def require_torch() -> None:
    """Says how to install it, without taking the second that it takes to load."""
    if find_spec("torch") is None:
        trainer_part("torch")
