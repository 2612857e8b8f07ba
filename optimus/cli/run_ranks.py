"""The verb `train`: trains a job with one process per rank on this host."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from optimus.cli.console import follow_metrics
from optimus.cli.flags import INTERRUPTED, import_trainer
from optimus.cli.train_inputs import add_folders, make_folder, open_data, refuse_other_lengths
from optimus.errors import OptimusError, UserError

if TYPE_CHECKING:
    from optimus.cost.measured_profile import Profile
    from optimus.engine.config import TrainingConfig, TrainingSummary
    from optimus.ir.plan import Plan
    from optimus.job.job import Job
    from optimus.planner.planning import PlanningResult


def ignore_progress(name: str, done: int, total: int) -> None:
    """Reports no progress: another rank does."""


class RanksFailed(OptimusError):
    """A rank failed; its message is on standard error."""


def train(
    job: Job,
    plan: Plan | PlanningResult | None = None,
    *,
    steps: int | None = None,
    run_dir: Path | str | None = None,
    profile: Profile | None = None,
    model: Path | str | None = None,
    save: Path | str | None = None,
    first_step: int = 0,
    checkpoint_every: int | None = None,
    resume: bool = False,
    restarts: int = 0,
) -> TrainingSummary:
    """Trains a job, one process per rank on this host; returns rank 0's summary.

    Samples are those of the job's `data:`, whose index is written if there is none, or synthetic. Without a
    plan it runs what is recommended for the engine. `profile` is the profile that the plan was made with, if
    any. Metrics and the last ops of failed ranks are written to `run_dir`. `model` is a model folder of
    transformers whose weights are trained, `save` the folder that they are written to. `first_step` is the
    number of the first step, of a run that goes on from another's weights. Checkpoints are saved in `run_dir`
    after every `checkpoint_every` steps; `resume` goes on from the newest, under any plan, and `restarts`
    says how often the ranks are started again when one fails.
    """
    from optimus.engine.run_section import read_training_config
    from optimus.job.own_layers import refuse_untrainable
    from optimus.job.targets import restrict_to_target
    from optimus.planner.planning import PlanningResult
    from optimus.sensitivity.recommend import plan_job
    from optimus.verify.validator import require_valid_plan

    require_torch()
    refuse_untrainable(job.model)
    folder = None if run_dir is None else make_folder("run_dir", Path(run_dir))
    config = read_training_config(
        job.run,
        steps=steps,
        first_step=first_step,
        run_dir=folder,
        checkpoint_every=checkpoint_every,
        resume=resume,
        model=job.model,
    )
    if folder is None and (config.checkpoint.every or resume):
        raise UserError(
            field="run_dir", problem="is needed for checkpoints", hint='add run_dir="optimus-run"'
        )
    training = add_folders(config, job, model, save)
    if job.data is not None:
        refuse_other_lengths(job, open_data(job.data, progress=ignore_progress).index)
    if plan is None:
        plan = plan_job(restrict_to_target(job, "engine"), profile=profile)
    if isinstance(plan, PlanningResult):
        profile, plan = plan.comparison.context.cost_model.profile, plan.plan
    require_valid_plan(plan, job, profile)
    code, summary = run_ranks(job, plan, training, restarts=restarts)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if summary is None:
        raise RanksFailed(f"a rank failed first, with code {code}; its last lines are on standard error")
    return summary


def run_ranks(
    job: Job, plan: Plan, training: TrainingConfig, *, visible: bool = False, restarts: int = 0
) -> tuple[int, TrainingSummary | None]:
    """Starts the ranks of a checked plan; returns the exit code and the summary if the run ended itself."""
    from optimus.engine.checkpoint_folder import refuse_other_run
    from optimus.engine.config import METRICS, PLAN
    from optimus.ir.planfile import save_plan

    launcher = import_trainer("optimus.engine.launcher")
    with tempfile.TemporaryDirectory(prefix="optimus-") as name:
        private = Path(name)
        folder = training.run_dir or private
        if not training.resume:
            if training.checkpoint.every:
                refuse_other_run(folder)
            (folder / METRICS).unlink(missing_ok=True)
        digest = save_plan(plan, folder / PLAN)
        absolute = replace(training, run_dir=folder.absolute())
        with (
            follow_metrics(folder / METRICS, training.end_step, saves=training.save_dir is not None)
            if visible
            else nullcontext()
        ):
            result: tuple[int, TrainingSummary | None] = launcher.launch_training(
                job, plan, digest, absolute, private, restarts=restarts
            )
        return result


def require_torch() -> None:
    """Raises if torch is not installed, without loading it, which takes a second."""
    if find_spec("torch") is None:
        import_trainer("torch")
