"""Commands that need torch: measure, train."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from optimus.cli.flags import OK, Job, Json, LayoutWords, Measured, On, Preset, load_profile_of, trainer_part
from optimus.console import (
    announced_compilation,
    check_writable,
    following,
    progress_bar,
    show,
    training_progress,
)
from optimus.environment import launched

if TYPE_CHECKING:
    from optimus.cost.measured import Profile as MeasuredProfile
    from optimus.job.job import Job as JobToRun
    from optimus.program.plan import Plan


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
            found = replace(measured, name=output.name.removesuffix(".yaml"), links=links.measure_links())
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
    """Train a job on made-up data: on this host by itself, or as one rank under torchrun."""

    job: Job
    on: On = None
    plan: Annotated[
        Path | None, tyro.conf.arg(metavar="PLAN", help="run this plan; made anew if left out")
    ] = None
    profile: Measured = None
    layout: LayoutWords = ()
    preset: Preset = "default"
    steps: Annotated[int | None, tyro.conf.arg(help="steps to train; 20, or what the job's run says")] = None
    run: Annotated[
        Path | None,
        tyro.conf.arg(metavar="FOLDER", help="where metrics.jsonl and the plan go; optimus-run if left out"),
    ] = None
    quiet: Annotated[bool, tyro.conf.arg(help="show no progress")] = False
    json: Json = False

    def __call__(self) -> int:
        from optimus.job.read import find_job
        from optimus.program.planfile import save_plan

        trainer_part("torch")
        job, profile = find_job(self.job, self.on, self.layout), load_profile_of(self.profile)
        if launched() is not None:
            return self._rank(job, profile)
        folder = self.run or Path("optimus-run")
        check_writable("--run", folder)
        plan, path = self._plan(job, profile), folder / "plan.json"
        folder.mkdir(exist_ok=True)
        save_plan(plan, path)
        steps = trainer_part("optimus.engine.trainer").training_of(job.run.settings, steps=self.steps).steps
        if not self.json:
            claim = f"predicted step {plan.claims.step_s:.3g} s"
            print(f"{job.name}   {plan.ranks.world} ranks   plan {path}   {claim}", flush=True)
        words = ["train", self.job, "--plan", str(path), "--run", str(folder), "--quiet"]
        words += [] if self.on is None else ["--on", self.on]
        words += [] if self.profile is None else ["--profile", str(self.profile)]
        words += ["--layout", *self.layout] if self.layout else []
        words += ["--steps", str(steps), *(["--json"] if self.json else [])]
        with following(folder / "metrics.jsonl", steps):
            code: int = trainer_part("optimus.engine.launch").launch("optimus", words, plan.ranks.world)
        return code

    def _plan(self, job: JobToRun, profile: MeasuredProfile | None) -> Plan:
        """The plan that was named, if it is for this job and holds; else a new one."""
        from optimus.program.planfile import load_plan
        from optimus.search.planning import make_plan, ready_plan

        if self.plan is not None:
            plan = load_plan(self.plan)
            ready_plan(plan, job, profile, file=str(self.plan))
            return plan
        with progress_bar() as progress, announced_compilation():
            return make_plan(
                job, assumptions=self.preset, profile=profile, systems=(), progress=progress
            ).plan

    def _rank(self, job: JobToRun, profile: MeasuredProfile | None) -> int:
        """This process is one rank of several."""
        from optimus.program.planfile import plan_digest
        from optimus.render.training import training_json, training_text

        trainer = trainer_part("optimus.engine.trainer")
        plan = self._plan(job, profile)
        training = trainer.training_of(job.run.settings, steps=self.steps, run_dir=self.run)
        if self.run is not None:
            self.run.mkdir(exist_ok=True)
        with nullcontext() if self.quiet else training_progress(training.steps) as report:

            def each(metrics: Any) -> None:
                if report is not None:
                    report(metrics.step, metrics.loss, metrics.step_s, metrics.tokens_per_s)

            summary = trainer.train_rank(job, plan, plan_digest(plan), training, each)
        if summary.rank == 0:
            show(training_json(summary), training_text(summary, job, plan), as_json=self.json)
        return OK
