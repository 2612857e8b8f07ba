"""`optimus train`: trains a job on this host, or as one rank under torchrun."""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from optimus.cli.console import (
    announce,
    announce_compilation,
    print_lines,
    print_result,
    progress_bar,
    training_progress,
)
from optimus.cli.flags import (
    NO,
    OK,
    USER_ERROR,
    JobArgument,
    JsonFlag,
    LayoutFlag,
    OnFlag,
    PresetFlag,
    ProfileFlag,
    describe_option,
    import_trainer,
    load_optional_profile,
    split_names,
)
from optimus.cli.run_ranks import ignore_progress, require_torch, run_ranks
from optimus.cli.text import wrap_text
from optimus.cli.train_inputs import add_folders, format_data, make_folder, open_data, refuse_other_lengths
from optimus.cli.train_summary import build_train_json, format_predicted_step, format_train_summary
from optimus.environment import Launched, launched
from optimus.errors import OptimusError, UserError

if TYPE_CHECKING:
    from optimus.cost.measured_profile import Profile
    from optimus.engine.config import StepMetrics, TrainingConfig
    from optimus.ir.plan import Plan
    from optimus.job.job import Job

RUN_DIR = Path("optimus-run")


@dataclass(frozen=True)
class TrainCommand:
    """Train a job, on this host or as one rank under torchrun.

    Samples are those of the job's `data:`, or synthetic.

    Weights are those of its model.hf or --model, and go to --save.
    """

    job: JobArgument
    on: OnFlag = None
    plan: Annotated[Path | None, describe_option(metavar="PLAN", help="run this plan; default: make one")] = (
        None
    )
    profile: ProfileFlag = None
    layout: LayoutFlag = ()
    preset: PresetFlag = "default"
    steps: Annotated[
        int | None,
        describe_option(metavar="N", help="steps to train; default: those of the job's run, or 20"),
    ] = None
    first_step: Annotated[
        int,
        describe_option(
            metavar="N",
            help="number of the first step: go on where a run with N steps has stopped; default: 0",
        ),
    ] = 0
    run_dir: Annotated[
        Path,
        describe_option(
            aliases=["--run"],  # which torchrun takes for an option of its own
            metavar="FOLDER",
            help="folder for metrics.jsonl, the plan and failure reports; each run overwrites them",
        ),
    ] = RUN_DIR
    model: Annotated[
        Path | None,
        describe_option(
            metavar="FOLDER",
            help="a model folder of transformers (config.json and safetensors) whose weights are trained; "
            "default: model.hf of the job if it has weights, or random ones",
        ),
    ] = None
    save: Annotated[
        Path | None,
        describe_option(
            metavar="FOLDER",
            help="write the trained weights under the names, dtypes and files of --model",
        ),
    ] = None
    resume: Annotated[
        bool,
        describe_option(
            help="go on from the newest checkpoint in --run-dir, also one of another plan or number of GPUs; "
            "begin if there is none"
        ),
    ] = False
    checkpoint_every: Annotated[
        int | None,
        describe_option(
            metavar="N",
            help="save a checkpoint after every N steps and the last; default: run.checkpoint.every, or none",
        ),
    ] = None
    restarts: Annotated[
        int,
        describe_option(
            metavar="N", help="start all ranks again, from the newest checkpoint, up to N times; default: 0"
        ),
    ] = 0
    log: Annotated[
        tuple[str, ...],
        describe_option(
            metavar="NAME ...",
            help="trackers besides metrics.jsonl: tensorboard, wandb; default: those of the job's run.log",
        ),
    ] = ()
    memory: Annotated[
        bool,
        describe_option(help="count the bytes of all tensors in the last step and compare with the plan"),
    ] = False
    dry_run: Annotated[
        bool,
        describe_option(
            help="only step one rank once, on this CPU, with fake tensors and without other ranks: its "
            "program, communicators and memory; exit code 1 if it does not fit"
        ),
    ] = False
    rank: Annotated[int | None, describe_option(metavar="N", help="rank of --dry-run; default: 0")] = None
    quiet: Annotated[bool, describe_option(help="print no progress")] = False
    json: JsonFlag = False

    def __call__(self) -> int:
        place = launched()
        self._check_flags(place)
        if self.dry_run:
            return self._dry_run()
        if place is None:
            return self._launch()
        rendezvous = import_trainer("optimus.engine.rendezvous")
        try:
            return self._rank(place)
        except OptimusError as error:
            if rendezvous.is_first_to_report(str(error)):
                raise
            time.sleep(0.3)  # until the other rank has printed it: the first rank to exit ends all
            return USER_ERROR

    def _launch(self) -> int:
        """Starts the ranks on this host and waits for them."""
        require_torch()
        job, profile = self._job(), load_optional_profile(self.profile)
        training = self._training(job)
        make_folder("--run-dir", self.run_dir)
        plan = self._plan(job, profile)
        if not self.json and (training.model_dir or job.model_dir) is not None:
            print_lines(wrap_text("weights", self._describe_weights(job, training)))
        index = None if training.data is None else open_data(training.data, progress=None).index
        if not self.json and index is not None:
            print_lines(format_data(job, index))
        if not self.json:
            title = f"{job.name} on {plan.ranks.world} ranks; {format_predicted_step(plan)}"
            print_lines(wrap_text("job", title))
        code, summary = run_ranks(job, plan, training, visible=not self.quiet, restarts=self.restarts)
        if summary is not None:
            print_result(
                build_train_json(summary, index),
                format_train_summary(summary, job, plan, self.job, self.run_dir, self.save),
                as_json=self.json,
            )
        return code

    def _describe_weights(self, job: Job, training: TrainingConfig) -> str:
        if training.model_dir is None:
            return f"random: {job.model_dir} has no *.safetensors"
        return f"of {self.model or job.model_dir}"

    def _check_flags(self, place: Launched | None) -> None:
        """Raises if flags of a dry run and of a training run are mixed."""
        if not self.dry_run:
            if self.rank is not None:
                raise UserError(
                    field="--rank",
                    value=self.rank,
                    problem="is of a dry run",
                    hint="add --dry-run, or leave it out",
                )
            return
        if place is not None:
            raise UserError(
                field="--dry-run",
                problem=f"is one process by itself, and {place.world} were started",
                hint="call optimus train without torchrun",
            )
        for flag, is_given in (
            ("--steps", self.steps is not None),
            ("--first-step", self.first_step != 0),
            ("--memory", self.memory),
            ("--run-dir", self.run_dir != RUN_DIR),
            ("--model", self.model is not None),
            ("--save", self.save is not None),
            ("--resume", self.resume),
            ("--checkpoint-every", self.checkpoint_every is not None),
            ("--restarts", self.restarts != 0),
        ):
            if is_given:
                raise UserError(
                    field=flag,
                    problem="is of a training run: a dry run is one step, whose memory is counted",
                    hint=f"leave out {flag}",
                )

    def _dry_run(self) -> int:
        """Steps one rank in this process."""
        from optimus.cli.dry_run import build_dry_run_json, format_dry_run

        job, profile = self._job(), load_optional_profile(self.profile)
        training, rank = self._training(job), self.rank or 0
        engine = import_trainer("optimus.engine.rank_dry_run")
        engine.check_rank_exists(rank, job.cluster.gpus)
        plan = self._plan(job, profile)
        result = engine.dry_run_rank(job, plan, training, rank)
        print_result(build_dry_run_json(result, plan), format_dry_run(result, plan), as_json=self.json)
        return OK if result.fits else NO

    def _rank(self, place: Launched) -> int:
        """Trains one rank in this process; rank 0 prints the result."""
        from optimus.engine.checkpoint_folder import refuse_other_run
        from optimus.engine.config import PLAN
        from optimus.ir.planfile import hash_plan, save_plan

        job, profile = self._job(), load_optional_profile(self.profile)
        training = self._training(job)
        if training.checkpoint.every and not training.resume and not place.restart:
            refuse_other_run(self.run_dir)
        plan = self._plan(job, profile)
        has_folder = training.model_dir is not None or training.data is not None
        trainer = import_trainer("optimus.hf.train_folder" if has_folder else "optimus.engine.trainer")
        make_folder("--run-dir", self.run_dir)
        digest = save_plan(plan, self.run_dir / PLAN) if place.rank == 0 else hash_plan(plan)
        saves = training.save_dir is not None
        with (
            training_progress(training.end_step, saves=saves) if self._shows_progress else nullcontext()
        ) as report:

            def on_step(metrics: StepMetrics) -> None:
                if report is not None:
                    report(asdict(metrics))

            summary = trainer.train_rank(job, plan, digest, training, on_step)
        if summary.rank == 0:
            index = None if training.data is None else open_data(training.data, progress=None).index
            print_result(
                build_train_json(summary, index),
                format_train_summary(summary, job, plan, self.job, self.run_dir, self.save),
                as_json=self.json,
            )
        return OK

    def _job(self) -> Job:
        """Loads the job; a model that our own layers cannot train is refused before anything is planned."""
        from optimus.job.data_source import CONFIG
        from optimus.job.hf_config import read_hf_config
        from optimus.job.own_layers import refuse_untrainable
        from optimus.job.read import JOB_ENDINGS, find_job, load_data_source

        path, data = Path(self.job), None
        source = load_data_source(path) if path.suffix in JOB_ENDINGS and not self.dry_run else None
        if source is not None:
            refuse_untrainable(read_hf_config(source.model_dir / CONFIG))  # before indexing
            if self._shows_progress:
                announce(f"loading transformers, for the processor of {source.model_dir}")
            with (
                progress_bar("indexing") if self._shows_progress else nullcontext(ignore_progress) as progress
            ):
                data = open_data(source, progress=progress if launched() is None else None)
        job = find_job(self.job, self.on, self.layout)
        refuse_untrainable(job.model)
        if data is not None:
            refuse_other_lengths(job, data.index)
        return job

    def _training(self, job: Job) -> TrainingConfig:
        from optimus.engine.run_section import read_trackers, read_training_config

        training = read_training_config(
            job.run,
            steps=self.steps,
            first_step=self.first_step,
            run_dir=self.run_dir,
            count_memory=self.memory,
            log=read_trackers("--log", split_names(self.log)) if self.log else None,
            model=job.model,
            checkpoint_every=self.checkpoint_every,
            resume=self.resume,
        )
        if self.restarts and not training.checkpoint.every:
            raise UserError(
                field="--restarts",
                value=self.restarts,
                problem="would begin at the first step again: no checkpoints are saved",
                hint="add --checkpoint-every 100",
            )
        return add_folders(training, job, self.model, self.save)

    @property
    def _shows_progress(self) -> bool:
        place = launched()
        return not self.quiet and (place is None or place.rank == 0)

    def _plan(self, job: Job, profile: Profile | None) -> Plan:
        """Loads the plan that was named and checks that it is for this job, or plans what is recommended."""
        from optimus.verify.validator import require_valid_plan

        if self.plan is not None:
            from optimus.ir.planfile import load_plan

            plan = load_plan(self.plan)
            require_valid_plan(plan, job, profile, file=str(self.plan))
            return plan
        from optimus.job.targets import restrict_to_target
        from optimus.sensitivity.recommend import plan_job

        with ExitStack() as stack:
            progress = (
                stack.enter_context(progress_bar("planning")) if self._shows_progress else ignore_progress
            )
            if self._shows_progress:
                stack.enter_context(announce_compilation())
            planned = plan_job(
                restrict_to_target(job, "engine"),
                assumptions=self.preset,
                profile=profile,
                progress=progress,
            )
        plan = planned.plan
        require_valid_plan(plan, job, profile)
        return plan
