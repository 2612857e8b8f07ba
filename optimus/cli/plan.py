"""`optimus plan`: lays out and schedules a job, proves the schedule and writes the plan file."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from optimus.cli.console import announce_compilation, check_writable, print_lines, print_result, progress_bar
from optimus.cli.flags import (
    OK,
    TRACE_ENDINGS,
    EffortFlag,
    JobArgument,
    JsonFlag,
    LayoutFlag,
    OnFlag,
    PresetFlag,
    ProfileFlag,
    SystemsFlag,
    TargetFlag,
    TraceFlag,
    check_effort,
    describe_option,
    load_optional_profile,
    split_names,
)
from optimus.cli.text import (
    align_columns,
    format_next_commands,
    format_time_gap,
    wrap_closing_line,
    wrap_remark,
    wrap_text,
)
from optimus.environment import usable_cores
from optimus.errors import UserError
from optimus.render.format_numbers import format_gigabytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optimus.job.job import Job
    from optimus.job.layout import Layout
    from optimus.job.model import Model
    from optimus.planner.compare import Comparison
    from optimus.planner.planning import PlanningResult
    from optimus.planner.systems.base import SimulatedSystem
    from optimus.sensitivity.recommend import RecommendedPlan

SCHEMA = "optimus.plan-result/1"


@dataclass(frozen=True)
class PlanCommand:
    """Search layouts, schedule the encoders, verify the schedule, write the plan."""

    job: JobArgument
    on: OnFlag = None
    output: Annotated[
        Path | None,
        describe_option(
            aliases=["-o"], metavar="PLAN", help="the file to write; default: the job's name and .plan.json"
        ),
    ] = None
    strategy: Annotated[
        str | None,
        describe_option(
            metavar="NAME",
            help="plan this system instead of the recommended one: fsdp, stage0, balanced, balanced-best, "
            "three-phase, paper (the paper's algorithm) or optimus",
        ),
    ] = None
    system: SystemsFlag = ()
    target: TargetFlag = None
    layout: LayoutFlag = ()
    preset: PresetFlag = "default"
    profile: ProfileFlag = None
    effort: EffortFlag = 1.0
    noise: Annotated[
        bool, describe_option(help="also simulate the plan under noise: the speed-up that is left")
    ] = False
    trace: TraceFlag = None
    no_sure: Annotated[
        bool, describe_option(help="simulate no perturbed cost models, which say how sure the answer is")
    ] = False
    json: JsonFlag = False

    def __call__(self) -> int:
        from optimus.ir.planfile import save_plan

        job, output = self._read()
        comparison, first_table_s = self._compare(job)
        planned = self._plan(comparison)
        lines = _plan_text(planned)
        if not planned.report.ok:
            print_lines(lines, to_stderr=True)
            raise AssertionError(f"the plan does not hold: {planned.report.violations[0]}")
        digest = save_plan(planned.plan, output)
        result = {**_plan_json(planned), "first_table_s": first_table_s}
        result |= {"file": str(output), "sha256": digest}
        if self.noise:
            from optimus.cli.uncertainty import build_noise_json, format_noise
            from optimus.sensitivity.noise_study import simulate_under_noise

            noise = simulate_under_noise(planned.plan, planned.comparison)
            lines += format_noise(noise)
            result["noise"] = build_noise_json(noise)
        lines += ["", *self._written(planned, output, digest)]
        print_result(result, lines, as_json=self.json)
        return OK

    def _read(self) -> tuple[Job, Path]:
        """Reads the job; mistakes in flags and files are found before the search."""
        from optimus.ir.planfile import is_plan_file
        from optimus.job.read import find_job
        from optimus.job.targets import restrict_to_target

        check_effort(self.effort)
        if is_plan_file(self.job):
            raise UserError(
                field="JOB", value=self.job, problem="is a plan already", hint="check, simulate or diff it"
            )
        job = find_job(self.job, self.on, self.layout)
        if self.target is not None:
            job = restrict_to_target(job, self.target)
        output = self.output or Path(f"{job.name.replace('/', '-')}.plan.json")
        check_writable("--output", output, ".json")
        if self.trace is not None:
            check_writable("--trace", self.trace, *TRACE_ENDINGS)
        return job, output

    def _compare(self, job: Job) -> tuple[Comparison, float]:
        """Compares all systems; returns the seconds until the first table, too.

        The table of systems that fill no bubbles is printed as soon as they are known, then others' rows.
        """
        from optimus.cost.assumptions import get_preset

        begin = time.monotonic()
        known: list[tuple[Comparison, float]] = []

        def report_known(comparison: Comparison) -> None:
            known.append((comparison, time.monotonic() - begin))
            if not self.json:
                print_lines(_first_table(comparison))

        assumptions, profile = get_preset(self.preset), load_optional_profile(self.profile)
        with progress_bar("planning") as progress, announce_compilation():
            from optimus.sensitivity.recommend import compare_to_recommend

            comparison = compare_to_recommend(
                job,
                strategy=self.strategy,
                assumptions=assumptions,
                profile=profile,
                systems=split_names(self.system) or None,
                effort=self.effort,
                cores=usable_cores(),
                progress=progress,
                report_known=report_known,
            )
        ((first, first_table_s),) = known
        if not self.json:
            print_lines(_complete_table(first, comparison))
        return comparison, first_table_s

    def _plan(self, comparison: Comparison) -> RecommendedPlan:
        """Recommends a system, over drawn batches and perturbed cost models, and plans it."""
        with progress_bar("planning") as progress:
            from optimus.sensitivity.perturb import DRAWS
            from optimus.sensitivity.recommend import plan_recommended, recommend

            draws = 0 if self.no_sure else DRAWS
            recommendation = recommend(comparison, draws=draws, cores=usable_cores(), progress=progress)
        return plan_recommended(comparison, recommendation, strategy=self.strategy)

    def _written(self, planned: PlanningResult, output: Path, digest: str) -> list[str]:
        """Writes the trace, and returns the files written and the commands to try next."""
        from optimus.ir.plan import FORMAT
        from optimus.ir.ranks import LLM

        plan, size_mb = planned.plan, output.stat().st_size / 1e6
        lines = wrap_closing_line(
            "wrote", f"{output} (format {FORMAT}, {size_mb:.1f} MB, sha256 {digest[:12]})"
        )
        if self.trace is not None:
            from optimus.render.trace import write_trace

            lowered = planned.search_result.filled.lowered
            write_trace({plan.strategy: (lowered.schedule, lowered.timeline)}, self.trace)
            lines += wrap_closing_line("wrote", f"{self.trace} (open it at ui.perfetto.dev)")
        layout = plan.modules[LLM].layout
        profile = "" if self.profile is None else f" --profile {self.profile}"
        why = f"optimus why {output} {suggest_neighbour_layout(layout)}{profile}"
        flags = "" if self.on is None else f" --on {self.on}"
        flags += f" --layout {' '.join(self.layout)}" if self.layout else ""
        run, remark = suggest_run_command(
            self.job,
            flags + profile,
            self.target,
            model=planned.comparison.job.model,
            layout=layout,
            plan=output,
        )
        lines += format_next_commands(run, label="run")
        lines += wrap_closing_line("", remark) if remark else []
        return [*lines, *format_next_commands(f"optimus report {output}", why)]


def suggest_run_command(
    job: str, flags: str, target: str | None, *, model: Model, layout: Layout, plan: Path
) -> tuple[str, str]:
    """Names the command that runs the plan or exports it, or makes one that can be run, and a remark.

    `flags` are those that the plan was made with, by which the job is found again.
    """
    from optimus.job.own_layers import find_unsplittable, find_untrainable

    if target not in (None, "engine"):
        return f"optimus export {plan} --to {target}", ""
    refused = find_untrainable(model)
    if refused is not None:
        remark = f"(our engine does not run {refused.field} = {refused.value})"
        return f"optimus plan {job}{flags} --for megatron", remark
    if layout.ep > 1 or (layout.cp > 1 and find_unsplittable(model.llm) is not None):
        return f"optimus plan {job}{flags} --for engine", f"(our engine does not run {layout})"
    remark = "(first with --dry-run: memory and messages of every rank, without GPUs)"
    return f"optimus train {job} --plan {plan}{flags}", remark


def suggest_neighbour_layout(layout: Layout) -> str:
    """Names another LLM layout that a reader may ask about: twice the stages, or half of them."""
    pp = 2 * layout.pp if layout.dp % 2 == 0 else max(1, layout.pp // 2)
    return f"llm=pp{pp},tp{layout.tp}"


def _plan_json(planned: RecommendedPlan) -> dict[str, object]:
    """Returns the object of `optimus plan --json`, but for the file."""
    from optimus.cli.comparison import build_cost_model_json
    from optimus.cli.uncertainty import build_uncertainty_json
    from optimus.cost.memory import NOT_MODELLED

    plan, comparison, bounds = planned.plan, planned.comparison, planned.bounds
    return {
        "schema": SCHEMA,
        "job": plan.name,
        **build_uncertainty_json(planned.recommendation),
        "strategy": plan.strategy,
        "preset": comparison.assumptions.name,
        "cost_model": build_cost_model_json(comparison),
        "step_s": planned.step_s,
        "lagged_s": plan.claims.lagged_s,
        "estimate_s": plan.claims.estimate_s,
        "floor_s": comparison.floor_s,
        "step_over_floor": planned.step_s / comparison.floor_s,
        "floor_1f1b_s": comparison.floor_1f1b_s,
        "step_over_floor_1f1b": planned.step_s / comparison.floor_1f1b_s,
        "bound_s": bounds.bound_s,
        "bound": bounds.largest_name,
        "bounds_s": {
            "floor": bounds.floor_s,
            "total work": bounds.work_s,
            "critical path": bounds.critical_path_s,
        },
        "hidden_share_strict": planned.hidden_strict,
        "hidden_share_placed": planned.hidden_placed,
        "speedup": planned.speedup,
        "worth": _worth(planned),
        "search_s": comparison.search_s,
        "peak_memory_bytes": max(held.peak for held in plan.memory),
        "peak_memory_bytes_p99": planned.search_result.peak_bytes_at_p99,
        "memory_bytes": asdict(planned.system.memory),
        "bubbles_s": asdict(planned.system.bubbles),
        "considered": planned.search_result.considered,
        "rejected": [{"layout": r.label, "reason": r.reason} for r in planned.rejected],
        "layouts": {name: asdict(module.layout) for name, module in plan.modules.items()},
        "systems": {name: {"step_s": system.step_s} for name, system in comparison.systems.items()},
        "not_possible": comparison.missing,
        "checked": planned.report.rules,
        "not_modelled": list(NOT_MODELLED),
    }


def _first_table(comparison: Comparison) -> list[str]:
    """Returns the job and the table of the first systems, at the mean of the data."""
    from optimus.cli.comparison import format_header, format_job

    return [*format_job(comparison), *format_header(comparison), "", *_rows(comparison, comparison.systems)]


def _complete_table(known: Comparison, comparison: Comparison) -> list[str]:
    """Returns the rows of the other systems, aligned with those known before, and remarks."""
    from optimus.sensitivity.recommend import add_plans_on_pipelines

    comparison = add_plans_on_pipelines(comparison)
    others = [name for name in comparison.systems if name not in known.systems]
    if known.floor_s != comparison.floor_s:  # another system showed a faster LLM
        return ["", *_rows(comparison, comparison.systems), *_remarks(comparison), ""]
    above = len(_rows(comparison, known.systems))
    return [*_rows(comparison, [*known.systems, *others])[above:], *_remarks(comparison), ""]


def _plan_text(planned: RecommendedPlan) -> list[str]:
    """Returns the recommendation and the plan's layouts, hidden share, memory, rejected layouts and proof."""
    from optimus.cli.uncertainty import format_recommendation
    from optimus.cost.memory import NOT_MODELLED

    lines = [*format_recommendation(planned), *_chosen(planned), ""]
    lines += wrap_text("search", _search_words(planned))
    lines += _hidden_lines(planned)
    lines += wrap_text("memory", _memory(planned))
    lines += _rejected(planned)
    lines += wrap_text("not modelled", "; ".join(NOT_MODELLED))
    lines += wrap_text("checked", _checked(planned))
    return lines


def _search_words(planned: PlanningResult) -> str:
    search, words = planned.search_result, [f"{planned.comparison.search_s:.1f} s for all systems"]
    if search.tried:
        words.insert(0, f"{len(search.tried)} of {search.considered} encoder layouts were scheduled")
    return "; ".join([*words, *search.remarks])


def _chosen(planned: PlanningResult) -> list[str]:
    """Returns a paragraph per module: layout, microbatches, order and recomputation."""
    plan, llm = planned.plan, planned.search_result.llm
    size = f"{llm.sequences:.3g} {'sequence' if llm.sequences == 1 else 'sequences'}"
    noun = "microbatch" if llm.microbatches == 1 else "microbatches"
    microbatches = f"{llm.microbatches} {noun} of {size}"
    recompute = f"recompute {plan.modules['llm'].recompute}"
    lines = wrap_text("chosen", f"llm {llm.layout}; {microbatches}; {llm.order_label}; {recompute}")
    for name, module in plan.encoders.items():
        split = [module.pipelines.count(pipeline) for pipeline in range(1 + max(module.pipelines))]
        pipelines = "1 pipeline with" if len(split) == 1 else f"{len(split)} pipelines with"
        microbatches = f"{pipelines} {_microbatches(split, module.microbatches_per_llm_microbatch)}"
        lines += wrap_text("", f"{name} {module.layout}; {microbatches}; recompute {module.recompute}")
    return lines


def _microbatches(split: list[int], pieces: int) -> str:
    """Formats `8 microbatches`, or `16 microbatches of 1/2 of the LLM's`."""
    counts = str(split[0]) if len(set(split)) == 1 else "+".join(map(str, split))
    words = f"{counts} microbatch" if counts == "1" else f"{counts} microbatches"
    return words if pieces == 1 else f"{words} of 1/{pieces} of the LLM's"


WHERE_ENCODERS_RUN = (
    "Encoders run: in stage 0 of the LLM's pipeline (stage0), as layers of all its stages (balanced, and at "
    "its best), before and after the LLM (three-phase), in its idle time (optimus). From the simplest to the "
    "most involved: fsdp, stage0, balanced, balanced-best, three-phase, optimus."
)


def _rows(comparison: Comparison, names: Iterable[str]) -> list[str]:
    """Returns the header and a row for every system: the fastest first, but those that fill bubbles last."""
    from optimus.cli.comparison import TP_SHARE
    from optimus.planner.systems.registry import fills_bubbles
    from optimus.sensitivity.recommend import system_of

    header = ["system", "step s", "over floor", "peak GB", "MFU %", f"TP {TP_SHARE}"]
    rows = []
    systems = [(name, comparison.systems[name]) for name in names]
    for name, system in sorted(systems, key=lambda item: (fills_bubbles(system_of(item[0])), item[1].step_s)):
        rows.append(
            [
                f"{name} (floor)" if name == "llm-only" else name,
                format_seconds(system.step_s),
                f"{comparison.over_floor(name):.3f}",
                format_gigabytes(system.peak_bytes) + ("" if system.fits else " !"),
                f"{100 * system.mfu:.1f}",
                format_seconds(system.overlapped_step_s),
            ]
        )
        if system.measured_step_s is not None:
            rows.append(_measured(comparison, system))
    return align_columns(header, rows)


def _remarks(comparison: Comparison) -> list[str]:
    from optimus.cli.comparison import TP_SHARE_REMARK
    from optimus.sensitivity.recommend import system_of

    lines = wrap_remark(f"Steps at the mean of the data, memory at p99 of steps. {TP_SHARE_REMARK}")
    lines += wrap_remark(WHERE_ENCODERS_RUN)
    for name, system in comparison.systems.items():
        if system.how.startswith("as "):  # a plan of its own was not faster
            lines += wrap_remark(
                f"{name} is {system.how.partition(':')[0]}: nothing that it tried is faster."
            )
        elif name != system_of(name):
            lines += wrap_remark(f"{name}: around a pipeline of the LLM, not a fully sharded one.")
    if any(not system.fits for system in comparison.systems.values()):
        lines += wrap_remark(f"! does not fit in {format_gigabytes(comparison.context.capacity_bytes)} GB")
    for name, reason in comparison.missing.items():
        lines += wrap_text(f"  {name}", f"not possible: {reason}", indent=18)
    return lines


def _measured(comparison: Comparison, system: SimulatedSystem) -> list[str]:
    assert system.measured_step_s is not None
    held = system.measured_memory_bytes
    row = ["  measured", format_seconds(system.measured_step_s)]
    row.append(f"{system.measured_step_s / comparison.floor_s:.3f}")
    return [*row, "" if held is None else format_gigabytes(held), "", ""]


def _worth(planned: PlanningResult) -> dict[str, object]:
    """Returns the speed-up over what people run, and over the best system that fills no bubbles."""
    reference, simpler = planned.reference, planned.simpler
    return {
        "reference": None if reference is None else reference.name,
        "speedup": None if reference is None else planned.speedup.get(reference.name, 1.0),
        "simpler_system": None if simpler is None else simpler.name,
        "speedup_over_simpler": None if simpler is None else planned.speedup[simpler.name],
    }


def _hidden_lines(planned: PlanningResult) -> list[str]:
    from optimus.planner.systems.registry import fills_bubbles

    plan, bounds = planned.plan, planned.bounds
    coarse = planned.search_result.notes.get("hidden_share_coarse")
    hidden = f"strict {max(0.0, planned.hidden_strict):.0%}, placed {planned.hidden_placed:.0%}"
    hidden += "" if coarse is None else f" (coarse {coarse:.0%})"
    over = planned.step_s / bounds.bound_s
    bound = f"{format_seconds(bounds.bound_s)} s at this layout of the LLM ({bounds.largest_name} binds); "
    bound += f"the step is {over:.3f} times the bound"
    without = "" if planned.search_result.estimate_includes_traffic else ", without them,"
    claim = (
        f"{format_seconds(planned.step_s)} s, replayed with transfers and all encoder traffic; "
        f"the scheduler's estimate{without} is {format_seconds(plan.claims.estimate_s)} s"
    )
    if plan.dealing_replicas > 1:
        replicas, lagged = plan.dealing_replicas, format_seconds(plan.claims.lagged_s)
        claim += f"; images dealt over {replicas} replicas, {lagged} s if all encoders are half a bin behind"
    lines = wrap_text("hidden", hidden) if fills_bubbles(plan.strategy) else []
    lines += wrap_text("idle", f"{_bubbles(planned.system)} of the step")
    return [*lines, *wrap_text("bound", bound), *wrap_text("claim", claim)]


def _bubbles(system: SimulatedSystem) -> str:
    bubbles = system.bubbles
    parts = {
        "TP": bubbles.tp,
        "PP": bubbles.pp_warmup + bubbles.pp_cooldown + bubbles.pp_other,
        "DP": bubbles.dp_all_gather + bubbles.dp_reduce_scatter,
    }
    return ", ".join(f"{name} {value / system.step_s:.1%}" for name, value in parts.items())


def _memory(planned: PlanningResult) -> str:
    system, capacity = planned.system, planned.comparison.context.capacity_bytes
    memory = system.memory
    parts = {
        "states": memory.states,
        "LLM activations": memory.llm_activations,
        "encoder activations": memory.encoder_activations,
        "logits": memory.logits,
        "seam": memory.seam,
        "communicators": memory.communicators,
        "reserve": memory.reserve,
    }
    total = f"{format_gigabytes(memory.total)} of {format_gigabytes(capacity)} GB"
    heavy = planned.search_result.peak_bytes_at_p99
    if heavy is not None and heavy > memory.total:
        total += f" ({format_gigabytes(heavy)} at p99 of steps)"
    components = ", ".join(f"{name} {format_gigabytes(value)}" for name, value in parts.items())
    return f"{total} on the worst rank ({system.worst_rank}): {components}"


def _rejected(planned: PlanningResult) -> list[str]:
    """Counts rejected layouts by reason, with one example of each."""
    from optimus.planner.filled_plan import summarize_rejections

    words = "; ".join(summarize_rejections(planned.rejected)) or "none"
    return wrap_text("rejected", f"as pipelines: {words}" if planned.plan.strategy == "fsdp" else words)


def _checked(planned: PlanningResult) -> str:
    report = planned.report
    held = sum(report.rules.values())
    words = f"{held} of {len(report.rules)} rules hold"
    if report.step_s is not None:
        gap = format_time_gap(report.step_s, planned.step_s)
        words += f"; an independent replay and the claim are {gap}"
    if not report.ok:
        words += f"; first violation: {report.violations[0]}"
    return words
