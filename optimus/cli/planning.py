"""The command line: parse, call, print."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from optimus import __version__
from optimus.console import announced_compilation, check_writable, progress_bar, show
from optimus.errors import DoesNotFit, OptimusError, UserError, nearest

OK, NO, USER_ERROR, OUR_BUG = 0, 1, 2, 70

Job = Annotated[
    tyro.conf.Positional[str],
    tyro.conf.arg(
        metavar="JOB",
        help="a job.yaml, a catalog job (paper/strong-3072), or with --on a catalog model or a config.json",
    ),
]
On = Annotated[str | None, tyro.conf.arg(metavar="GPU:COUNT", help="cluster to run on, e.g. h100:512")]
LayoutWords = Annotated[
    tuple[str, ...],
    tyro.conf.arg(metavar="MODULE=AXES ...", help="state layouts, e.g. llm=pp8,tp4,chunks2"),
]
Trace = Annotated[
    Path | None,
    tyro.conf.arg(metavar="FILE.json.gz", help="write every op as a trace for Perfetto"),
]
TRACE_ENDINGS = (".json.gz", ".json")
PlanFile = tyro.conf.Positional[Path]
Json = Annotated[bool, tyro.conf.arg(help="print one JSON object and nothing else")]
Preset = Annotated[
    str,
    tyro.conf.arg(help="set of assumptions: default, paper, paper-first-chunk, clean or clean-slack"),
]


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
    picture: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE.svg", help="draw every stage of the systems over time")
    ] = None
    trace: Trace = None
    json: Json = False

    def __call__(self) -> int:
        from optimus.cost.assumptions import preset
        from optimus.job.read import find_job
        from optimus.program.planfile import is_plan_file
        from optimus.render.simulation import simulation_json, simulation_text

        if self.picture is not None:
            check_writable("--picture", self.picture, ".svg")
        if self.trace is not None:
            check_writable("--trace", self.trace, *TRACE_ENDINGS)
        if is_plan_file(self.job):
            return self._replay()
        assumptions = preset(self.preset)
        job = find_job(self.job, self.on, self.layout)
        with progress_bar() as progress, announced_compilation():
            from optimus.search.compare import compare_systems

            comparison = compare_systems(
                job, names=_split(self.system) or None, assumptions=assumptions, progress=progress
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
        from optimus.program.planfile import load_plan
        from optimus.render.replay import replay_json, replay_text

        for flag in ("on", "system", "layout", "picture", "preset"):
            if getattr(self, flag) not in (None, (), "default"):
                problem = "says nothing to a plan file, which is already decided"
                raise UserError(field=f"--{flag}", problem=problem, hint="leave it out, or name the job")
        plan = load_plan(Path(self.job))
        with announced_compilation():
            from optimus.search.replaying import replay_plan

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
    strategy: Annotated[str, tyro.conf.arg(help="scheduler: paper (the paper's algorithm)")] = "paper"
    system: Annotated[
        tuple[str, ...],
        tyro.conf.arg(metavar="NAME ...", help="compare with these only; all that apply if left out"),
    ] = ()
    layout: LayoutWords = ()
    preset: Preset = "default"
    trace: Trace = None
    json: Json = False

    def __call__(self) -> int:
        from optimus.cost.assumptions import preset
        from optimus.job.read import find_job
        from optimus.program.planfile import is_plan_file, save_plan

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
        with progress_bar() as progress, announced_compilation():
            from optimus.render.planning import plan_json, plan_text
            from optimus.search.planning import make_plan

            planned = make_plan(
                job,
                strategy=self.strategy,
                assumptions=assumptions,
                systems=_split(self.system) or None,
                progress=progress,
            )
        lines = plan_text(planned)
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
        lines.append(f"next   optimus check {output} | optimus simulate {output} --trace FILE.json.gz")
        show(plan_json(planned, file=output, digest=digest), lines, as_json=self.json)
        return OK


@dataclass(frozen=True)
class Check:
    """Prove a plan: nine rules, by code that shares nothing with what made it."""

    plan: Annotated[PlanFile, tyro.conf.arg(metavar="PLAN", help="a plan file")]
    job: Annotated[
        str | None, tyro.conf.arg(metavar="JOB", help="also check that the plan was made for this job")
    ] = None
    on: On = None
    json: Json = False

    def __call__(self) -> int:
        from optimus.program.planfile import load_plan
        from optimus.program.validator import check_plan
        from optimus.render.checking import check_json, check_text

        plan = load_plan(self.plan)
        report = check_plan(plan)
        if self.job is not None:
            from optimus.job.read import find_job
            from optimus.search.planning import bound_parts, report_mismatches

            report = report_mismatches(report, plan, bound_parts(find_job(self.job, self.on)))
        elif self.on is not None:
            raise UserError(field="--on", problem="needs --job", hint="name the job, or leave --on out")
        show(check_json(plan, report), check_text(plan, report), as_json=self.json)
        return OK if report.ok else NO


@dataclass(frozen=True)
class Diff:
    """Compare two plans: layouts, step, memory, and the first op that differs."""

    a: Annotated[PlanFile, tyro.conf.arg(metavar="A", help="a plan file")]
    b: Annotated[PlanFile, tyro.conf.arg(metavar="B", help="another")]
    json: Json = False

    def __call__(self) -> int:
        from optimus.program.difference import compare_plans
        from optimus.program.planfile import load_plan
        from optimus.render.difference import difference_json, difference_text

        difference = compare_plans(load_plan(self.a), load_plan(self.b))
        show(difference_json(difference), difference_text(difference), as_json=self.json)
        return OK if difference.same else NO


COMMANDS = (Catalog, Init, Simulate, Plan, Check, Diff)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `optimus` and `optimus-mllm`."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Runs one command and returns its exit code."""
    if arguments in (["--version"], ["-V"]):
        print(__version__)
        return OK
    try:
        _check_words(arguments)
        command = tyro.cli(
            Catalog | Init | Simulate | Plan | Check | Diff,
            prog="optimus",
            args=arguments or ["--help"],
            description="Plans multimodal LLM training: where its time and memory go, and how encoder work "
            "fits the LLM's idle time (--version: prints it).",
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes),
        )
        return command()
    except DoesNotFit as no:
        print(no, file=sys.stderr)
        if "--json" in arguments:
            show(
                {"schema": "optimus.no/1", "ok": False, "problem": no.problem, "hint": no.hint},
                [],
                as_json=True,
            )
        return NO
    except OptimusError as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:
        return OK
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        print(
            f"This is a bug in Optimus {__version__}, not a mistake of yours. "
            "Please report it with the lines above.",
            file=sys.stderr,
        )
        return OUR_BUG


def _split(names: tuple[str, ...]) -> list[str]:
    """`a b` and `a,b` are the same list."""
    return [part for name in names for part in name.split(",") if part]


def _check_words(arguments: list[str]) -> None:
    """Mistakes that the parser would take for something else, or answer at length."""
    commands = [command.__name__.lower() for command in COMMANDS]
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        raise UserError(
            field="command",
            value=arguments[0],
            problem="is not a command",
            hint=nearest(arguments[0], commands),
        )
    for flag in ("--system", "--layout"):
        if arguments.count(flag) > 1:
            raise UserError(
                field=flag, problem="is given twice", hint=f"name all after one {flag}, with spaces"
            )
