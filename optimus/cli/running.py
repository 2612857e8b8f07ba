"""Commands that need torch: measure, train."""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from optimus.cli.flags import (
    NO,
    OK,
    USER_ERROR,
    Job,
    Json,
    LayoutWords,
    Measured,
    On,
    Preset,
    load_profile_of,
    trainer_part,
)
from optimus.cli.local_training import make_folder, require_torch, run_ranks
from optimus.console import announced_compilation, check_writable, progress_bar, show, training_progress
from optimus.environment import Launched, launched
from optimus.errors import OptimusError, UserError

if TYPE_CHECKING:
    from optimus.cost.measured import Profile as MeasuredProfile
    from optimus.engine.config import Training
    from optimus.ir.plan import Plan
    from optimus.job.job import Job as JobToRun

RUN_DIR = Path("optimus-run")


@dataclass(frozen=True)
class Profile:
    """Measure a job's segments and the links of this machine, for plans made with --profile."""

    job: Job
    on: On = None
    output: Annotated[
        Path | None,
        tyro.conf.arg(
            aliases=["-o"],
            metavar="PROFILE.yaml",
            help="where to write; the job's name and .profile.yaml if left out",
        ),
    ] = None
    json: Json = False

    def __call__(self) -> int:
        from optimus.cost.profile_file import save_profile
        from optimus.job.read import find_job
        from optimus.render.profiling import profile_json, profile_text

        job = find_job(self.job, self.on)
        output = self.output or Path(f"{job.name.replace('/', '-')}.profile.yaml")
        check_writable("--output", output, ".yaml")
        described = output.with_suffix(".cluster.yaml")
        check_writable("--output", described)
        segments, links, machine = (
            trainer_part(f"optimus.profiler.{name}") for name in ("segments", "links", "machine")
        )
        with progress_bar() as progress:
            measured = segments.profile_job(job, progress=progress)
            progress("links", 0, 1)
            found = replace(
                measured,
                name=output.name.removesuffix(".yaml"),
                links=links.measure_links(),
                slowdown=links.measure_slowdown(),
            )
            cluster = machine.describe_machine(found.links, ranks=job.cluster.gpus)
        digest = save_profile(found, output)
        described.write_text(machine.cluster_text(cluster))
        lines = profile_text(found, cluster)
        lines += ["", f"wrote {output} (sha256 {digest[:12]}) and {described}"]
        lines.append(f"next   optimus plan {self.job} --on {described}:{cluster.gpus} --profile {output}")
        show(
            profile_json(found, file=output, cluster_file=described, digest=digest), lines, as_json=self.json
        )
        return OK


@dataclass(frozen=True)
class Train:
    """Train a job on made-up data: on this host by itself, or as one rank under torchrun.

    With --dry-run it trains nothing: one rank of a job of any size is built and steps on this CPU without
    numbers, and says what it does, whom it talks to, and what memory that takes beside what the plan says.
    """

    job: Job
    on: On = None
    plan: Annotated[
        Path | None, tyro.conf.arg(metavar="PLAN", help="run this plan; made anew if left out")
    ] = None
    profile: Measured = None
    layout: LayoutWords = ()
    preset: Preset = "default"
    steps: Annotated[int | None, tyro.conf.arg(help="steps to train; 20, or what the job's run says")] = None
    run_dir: Annotated[
        Path,
        tyro.conf.arg(
            aliases=["--run"],  # which torchrun takes for an option of its own
            metavar="FOLDER",
            help="where metrics.jsonl, the plan and reports of failures go; begun anew by every run",
        ),
    ] = RUN_DIR
    memory: Annotated[
        bool, tyro.conf.arg(help="count the bytes of all tensors in the last step, beside the plan's")
    ] = False
    dry_run: Annotated[
        bool,
        tyro.conf.arg(
            help="only step one rank, without numbers and other ranks; exit code 1 if it does not fit"
        ),
    ] = False
    rank: Annotated[int | None, tyro.conf.arg(help="which rank --dry-run steps; 0 if left out")] = None
    quiet: Annotated[bool, tyro.conf.arg(help="show no progress")] = False
    json: Json = False

    def __call__(self) -> int:
        place = launched()
        self._check_flags(place)
        if self.dry_run:
            return self._dry_run()
        if place is None:
            return self._launch()
        rendezvous = trainer_part("optimus.engine.rendezvous")
        try:
            return self._rank(place)
        except OptimusError as error:
            if rendezvous.first_to_say(str(error)):
                raise
            time.sleep(0.3)  # until it is said: the first rank to end ends all
            return USER_ERROR

    def _launch(self) -> int:
        """Starts the ranks on this host and waits for them."""
        from optimus.job.read import find_job
        from optimus.render.training import prediction, training_json, training_text

        require_torch()
        job, profile = find_job(self.job, self.on, self.layout), load_profile_of(self.profile)
        training = self._training(job)
        make_folder("--run-dir", self.run_dir)
        plan = self._plan(job, profile)
        if not self.json:
            print(f"{job.name}   {plan.ranks.world} ranks   {prediction(plan)}", flush=True)
        code, summary = run_ranks(job, plan, training, visible=not self.quiet)
        if summary is not None:
            show(training_json(summary), training_text(summary, job, plan, self.run_dir), as_json=self.json)
        return code

    def _check_flags(self, place: Launched | None) -> None:
        """Flags that mean something only with others, or without them."""
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
        for flag, given in (
            ("--steps", self.steps is not None),
            ("--memory", self.memory),
            ("--run-dir", self.run_dir != RUN_DIR),
        ):
            if given:
                raise UserError(
                    field=flag,
                    problem="is of a training run: a dry run is one step, whose memory is counted",
                    hint=f"leave out {flag}",
                )

    def _dry_run(self) -> int:
        """One rank in this process."""
        from optimus.job.read import find_job
        from optimus.render.dry_run import dry_run_json, dry_run_text

        job, profile = find_job(self.job, self.on, self.layout), load_profile_of(self.profile)
        training, rank = self._training(job), self.rank or 0
        engine = trainer_part("optimus.engine.dry_run")
        engine.check_rank(rank, job.cluster.gpus)
        plan = self._plan(job, profile)
        found = engine.dry_run(job, plan, training, rank)
        show(dry_run_json(found), dry_run_text(found, plan), as_json=self.json)
        return OK if found.fits else NO

    def _rank(self, place: Launched) -> int:
        """This process is one rank of several; rank 0 speaks for all."""
        from optimus.engine.config import PLAN
        from optimus.ir.planfile import plan_digest, save_plan
        from optimus.job.read import find_job
        from optimus.render.training import training_json, training_text

        job, profile = find_job(self.job, self.on, self.layout), load_profile_of(self.profile)
        training = self._training(job)
        plan = self._plan(job, profile)
        trainer = trainer_part("optimus.engine.trainer")
        make_folder("--run-dir", self.run_dir)
        digest = save_plan(plan, self.run_dir / PLAN) if place.rank == 0 else plan_digest(plan)
        with training_progress(training.steps) if self._speaks else nullcontext() as report:

            def each(metrics: Any) -> None:
                if report is not None:
                    report(metrics.step, metrics.loss, metrics.step_s, metrics.tokens_per_s)

            summary = trainer.train_rank(job, plan, digest, training, each)
        if summary.rank == 0:
            show(training_json(summary), training_text(summary, job, plan, self.run_dir), as_json=self.json)
        return OK

    def _training(self, job: JobToRun) -> Training:
        from optimus.engine.config import training_of

        return training_of(
            job.run.settings, steps=self.steps, run_dir=self.run_dir, counts_memory=self.memory
        )

    @property
    def _speaks(self) -> bool:
        place = launched()
        return not self.quiet and (place is None or place.rank == 0)

    def _plan(self, job: JobToRun, profile: MeasuredProfile | None) -> Plan:
        """The plan that was named, if it is for this job and holds; else a new one."""
        from optimus.verify.validator import ready_plan

        if self.plan is not None:
            from optimus.ir.planfile import load_plan

            plan = load_plan(self.plan)
            ready_plan(plan, job, profile, file=str(self.plan))
            return plan
        from optimus.planner.planning import make_plan

        with ExitStack() as stack:
            progress = stack.enter_context(progress_bar()) if self._speaks else _silent
            if self._speaks:
                stack.enter_context(announced_compilation())
            plan = make_plan(
                job, assumptions=self.preset, profile=profile, systems=(), progress=progress
            ).plan
        ready_plan(plan, job, profile)
        return plan


def _silent(name: str, done: int, total: int) -> None:
    """Another rank shows progress."""
