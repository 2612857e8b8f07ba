"""Commands that work without torch: look up, plan, check, compare."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from optimus.cli.flags import (
    NO,
    OK,
    TRACE_ENDINGS,
    ComparedWith,
    Job,
    Json,
    LayoutWords,
    Measured,
    On,
    PlanFile,
    Preset,
    Strategy,
    Trace,
    load_profile_of,
    split_names,
)
from optimus.console import announced_compilation, check_writable, progress_bar, show
from optimus.errors import UserError

if TYPE_CHECKING:
    from optimus.job.layout import Layout
    from optimus.planner.planning import Planned


@dataclass(frozen=True)
class Catalog:
    """List the models, clusters and jobs that come with Optimus."""

    json: Json = False

    def __call__(self) -> int:
        from optimus.render.listing import catalog_json, catalog_text

        show(catalog_json(), catalog_text(), as_json=self.json)
        return OK


@dataclass(frozen=True)
class Init:
    """Write a commented job file from a released config.json."""

    hf: Annotated[
        str,
        tyro.conf.arg(
            metavar="CONFIG.json", help="the model: its config.json, its folder, or a catalog name"
        ),
    ]
    on: Annotated[str, tyro.conf.arg(metavar="GPU:COUNT", help="cluster to run on, e.g. h100:512")]
    output: Annotated[
        Path, tyro.conf.arg(aliases=["-o"], metavar="JOB.yaml", help="where to write the job")
    ] = Path("job.yaml")
    json: Json = False

    def __call__(self) -> int:
        from optimus.job.write import write_job_yaml

        text = write_job_yaml(self.hf, self.on, folder=self.output.parent)
        if self.output.exists():
            raise UserError(
                field="--output", value=str(self.output), problem="exists", hint="name another file with -o"
            )
        check_writable("--output", self.output)
        self.output.write_text(text)
        found = {"schema": "optimus.init/1", "job": text, "file": str(self.output)}
        lines = [f"wrote {self.output}", f"next   optimus simulate {self.output}"]
        show(found, lines, as_json=self.json)
        return OK


@dataclass(frozen=True)
class Simulate:
    """Say where the time and memory of a job go, under each known way to run it, or play a plan file."""

    job: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(
            metavar="JOB|PLAN",
            help="a job.yaml, a catalog job (paper/strong-3072), with --on a catalog model or a config.json; "
            "or a plan file",
        ),
    ]
    on: On = None
    system: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            metavar="NAME ...",
            help="only these: llm-only, stage0, balanced, balanced-best, three-phase, separate-gpus, fsdp, "
            "paper, today",
        ),
    ] = ()
    layout: LayoutWords = ()
    preset: Preset = "default"
    profile: Measured = None
    picture: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE.svg", help="draw every stage of the systems over time")
    ] = None
    trace: Trace = None
    json: Json = False

    def __call__(self) -> int:
        from optimus.cost.assumptions import preset
        from optimus.ir.planfile import is_plan_file
        from optimus.job.read import find_job
        from optimus.render.simulation import simulation_json, simulation_text

        if self.picture is not None:
            check_writable("--picture", self.picture, ".svg")
        if self.trace is not None:
            check_writable("--trace", self.trace, *TRACE_ENDINGS)
        if is_plan_file(self.job):
            return self._replay()
        assumptions = preset(self.preset)
        job = find_job(self.job, self.on, self.layout)
        profile = load_profile_of(self.profile)
        with progress_bar() as progress, announced_compilation():
            from optimus.planner.compare import compare_systems

            comparison = compare_systems(
                job,
                names=split_names(self.system) or None,
                assumptions=assumptions,
                profile=profile,
                progress=progress,
            )
        lines = simulation_text(comparison)
        if self.picture is not None:
            from optimus.render.picture import write_picture

            write_picture(comparison, self.picture)
            lines += ["", f"wrote {self.picture}"]
        if self.trace is not None and comparison.systems:
            from optimus.render.trace import write_trace

            played = {name: (made.schedule, made.timeline) for name, made in comparison.systems.items()}
            write_trace(played, self.trace)
            lines += ["", f"wrote {self.trace}"]
        show(simulation_json(comparison), lines, as_json=self.json)
        return OK if comparison.systems else NO

    def _replay(self) -> int:
        """A plan file says all of itself."""
        from optimus.ir.planfile import load_plan
        from optimus.render.replay import replay_json, replay_text

        for flag in ("on", "system", "layout", "picture", "preset", "profile"):
            if getattr(self, flag) not in (None, (), "default"):
                problem = "says nothing to a plan file, which is already decided"
                raise UserError(field=f"--{flag}", problem=problem, hint="leave it out, or name the job")
        plan = load_plan(Path(self.job))
        with announced_compilation():
            from optimus.planner.replaying import replay_plan

            replayed = replay_plan(plan)
        lines = replay_text(replayed)
        if self.trace is not None:
            from optimus.render.trace import write_trace

            write_trace({plan.strategy: (replayed.schedule, replayed.timeline)}, self.trace)
            lines += ["", f"wrote {self.trace}"]
        show(replay_json(replayed), lines, as_json=self.json)
        return OK


@dataclass(frozen=True)
class Plan:
    """Lay out and schedule a job, prove the schedule, and write the plan file."""

    job: Job
    on: On = None
    output: Annotated[
        Path | None,
        tyro.conf.arg(
            aliases=["-o"], metavar="PLAN", help="where to write; the job's name and .plan.json if left out"
        ),
    ] = None
    strategy: Strategy = "optimus"
    system: ComparedWith = ()
    layout: LayoutWords = ()
    preset: Preset = "default"
    profile: Measured = None
    noise: Annotated[
        bool, tyro.conf.arg(help="also play the plan under noise: how much of the speed-up is left")
    ] = False
    trace: Trace = None
    no_sure: Annotated[
        bool, tyro.conf.arg(help="leave out how sure the answer is, which takes a large job a minute or two")
    ] = False
    json: Json = False

    def __call__(self) -> int:
        from optimus.cost.assumptions import preset
        from optimus.ir.planfile import is_plan_file, save_plan
        from optimus.job.read import find_job

        assumptions = preset(self.preset)
        if is_plan_file(self.job):
            raise UserError(
                field="JOB", value=self.job, problem="is a plan already", hint="check, simulate or diff it"
            )
        job = find_job(self.job, self.on, self.layout)
        output = self.output or Path(f"{job.name.replace('/', '-')}.plan.json")
        check_writable("--output", output, ".json")
        if self.trace is not None:
            check_writable("--trace", self.trace, *TRACE_ENDINGS)
        profile = load_profile_of(self.profile)
        with progress_bar() as progress, announced_compilation():
            from optimus.planner.planning import make_plan
            from optimus.render.planning import plan_json, plan_text

            planned = make_plan(
                job,
                strategy=self.strategy,
                assumptions=assumptions,
                profile=profile,
                systems=split_names(self.system) or None,
                progress=progress,
            )
            noisy = _under_noise(planned) if self.noise else None
        lines = plan_text(planned) + ([] if noisy is None else noisy[0])
        if not planned.report.ok:
            print("\n".join(lines), file=sys.stderr)
            raise AssertionError(f"the plan does not hold: {planned.report.violations[0]}")
        digest = save_plan(planned.plan, output)
        size = output.stat().st_size / 1e6
        lines += ["", f"wrote {output} (format 1, {size:.1f} MB, sha256 {digest[:12]})"]
        if self.trace is not None:
            from optimus.render.trace import write_trace

            write_trace(
                {planned.plan.strategy: (planned.system.schedule, planned.system.timeline)}, self.trace
            )
            lines.append(f"wrote {self.trace} (open it at ui.perfetto.dev)")
        further = f"optimus why {output} {_neighbour(planned.plan.modules['llm'].layout)}"
        lines.append(f"next   optimus check {output} | optimus report {output} | {further}")
        found = plan_json(planned, file=output, digest=digest)
        found |= {} if noisy is None else {"noise": noisy[1]}
        if self.no_sure or not self.json:
            show(found, lines, as_json=self.json)
        if not self.no_sure:
            self._say_how_sure(planned, found)
        return OK

    def _say_how_sure(self, planned: Planned, found: dict[str, object]) -> None:
        """Last, and after the plan is written: an answer does not wait for it."""
        with progress_bar() as progress:
            from optimus.render.assessing import assessed_json, assessed_text
            from optimus.sensitivity.assess import assess_plan

            assessed = assess_plan(planned, progress=progress)
        show({**found, **assessed_json(assessed)}, ["", *assessed_text(assessed)], as_json=self.json)


def _neighbour(layout: Layout) -> str:
    """Another layout of the LLM that a reader may wonder about: twice the stages, or half of them."""
    pp = 2 * layout.pp if layout.dp % 2 == 0 else max(1, layout.pp // 2)
    return f"llm=pp{pp},tp{layout.tp}"


def _under_noise(planned: Planned) -> tuple[list[str], dict[str, object]]:
    from optimus.render.noise import noise_json, noise_text
    from optimus.sensitivity.noise import under_noise

    found = under_noise(planned.plan, planned.comparison)
    return noise_text(found), noise_json(found)


@dataclass(frozen=True)
class Check:
    """Prove a plan: nine rules, by code that shares nothing with what made it."""

    plan: Annotated[PlanFile, tyro.conf.arg(metavar="PLAN", help="a plan file")]
    job: Annotated[
        str | None, tyro.conf.arg(metavar="JOB", help="also check that the plan was made for this job")
    ] = None
    on: On = None
    profile: Annotated[
        Path | None,
        tyro.conf.arg(metavar="FILE.yaml", help="with --job: also that it was made with this profile"),
    ] = None
    json: Json = False

    def __call__(self) -> int:
        from optimus.ir.planfile import load_plan
        from optimus.render.checking import check_json, check_text
        from optimus.verify.validator import check_plan

        plan = load_plan(self.plan)
        report = check_plan(plan)
        if self.job is not None:
            from optimus.ir.binding import bound_parts
            from optimus.job.read import find_job
            from optimus.planner.planning import report_mismatches

            parts = bound_parts(find_job(self.job, self.on), load_profile_of(self.profile))
            report = report_mismatches(report, plan, parts)
        for flag in ("on", "profile") if self.job is None else ():
            if getattr(self, flag) is not None:
                hint = f"name the job, or leave --{flag} out"
                raise UserError(field=f"--{flag}", problem="needs --job", hint=hint)
        show(check_json(plan, report), check_text(plan, report), as_json=self.json)
        return OK if report.ok else NO


@dataclass(frozen=True)
class Diff:
    """Compare two plans: layouts, step, memory, and the first op that differs."""

    a: Annotated[PlanFile, tyro.conf.arg(metavar="A", help="a plan file")]
    b: Annotated[PlanFile, tyro.conf.arg(metavar="B", help="another")]
    json: Json = False

    def __call__(self) -> int:
        from optimus.ir.diff import compare_plans
        from optimus.ir.planfile import load_plan
        from optimus.render.difference import difference_json, difference_text

        difference = compare_plans(load_plan(self.a), load_plan(self.b))
        show(difference_json(difference), difference_text(difference), as_json=self.json)
        return OK if difference.same else NO
