"""Gathers the values that a report shows from a plan, its replay and, if there is one, its comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from optimus import __version__
from optimus.cost.measured_profile import ANALYTIC
from optimus.cost.memory import NOT_MODELLED
from optimus.errors import UserError
from optimus.ir.op import Floats, Lane, OpKind, Schedule
from optimus.ir.plan import Plan
from optimus.ir.planfile import hash_plan
from optimus.ir.ranks import LLM
from optimus.planner.compare import Comparison
from optimus.planner.plan_replay import ReplayedPlan, replay_llm_alone, replay_plan
from optimus.render.timeline_svg import TimelineRow, build_timeline_rows
from optimus.schedule.bubbles import average_bubbles, find_op_slack, sum_bubbles_by_cause
from optimus.schedule.plan_claims import live_bytes_by_line
from optimus.schedule.simulator import Timeline
from optimus.sensitivity.tornado import Tornado, compute_tornado

MAX_ROWS = 32  # device classes that are drawn; of more, the first TP block of every stage
LLM_PART, ENCODER_PART, OPTIMIZER_PART = "llm", "encoder", "optimizer"


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """Table at the top of the report; None where the plan file does not say."""

    job: str
    gpus: int
    strategy: str
    recommendation: str  # the sentence of the planner; empty where the plan file has none
    chosen: tuple[tuple[str, ...], ...]  # module, layout, and more, a row per module
    step_s: float
    estimate_s: float
    floor_s: float | None
    bound_s: float | None
    bound: str
    hidden_strict: float | None
    hidden_placed: float | None
    mfu: float | None
    peak_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, kw_only=True)
class SystemStepTime:
    """Step of one system; `parts` are seconds of the mean GPU that sum to it, or empty where not known."""

    name: str
    step_s: float
    parts: Mapping[str, float]
    is_reported: bool = False  # the plan of this report
    fits: bool | None = None  # None: not known
    how: str = ""


@dataclass(frozen=True, kw_only=True)
class StepBreakdown:
    """Step times of all systems, the fastest first."""

    bars: tuple[SystemStepTime, ...]
    floor_s: float | None
    missing: Mapping[str, str]  # systems that cannot run the job, with the reason

    @property
    def reported(self) -> SystemStepTime:
        return next(bar for bar in self.bars if bar.is_reported)


@dataclass(frozen=True, kw_only=True, eq=False)
class TimelineData:
    """A replay to be drawn: the LLM alone, or the plan."""

    label: str
    schedule: Schedule
    timeline: Timeline
    slack_s: Floats  # by op
    rows: tuple[TimelineRow, ...]  # of `devices`, for the picture without a script
    devices: tuple[int, ...]  # those that are drawn


@dataclass(frozen=True, kw_only=True)
class WorstRankMemory:
    """Memory of the device class that needs most, by component and over the step."""

    name: str
    components: Mapping[str, int]
    capacity_bytes: int
    fixed_bytes: int  # of the components that are there all the time
    times_s: Floats  # a step function: `alive` holds from its time on
    alive: Mapping[str, Floats]  # bytes of what comes and goes
    step_s: float

    @property
    def peak_bytes(self) -> int:
        return sum(self.components.values())


@dataclass(frozen=True, kw_only=True)
class CandidatePoint:
    """A candidate of the search; without a step it was not scheduled, without bytes it was not counted."""

    name: str
    step_s: float | None
    peak_bytes: float | None
    reason: str  # against it; or that it was chosen, or is another system
    sort: str  # chosen, layout, system or rejected


@dataclass(frozen=True, kw_only=True)
class TriedCandidates:
    """All candidates of the search and the comparison."""

    points: tuple[CandidatePoint, ...]
    considered: int
    capacity_bytes: int


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Foot of the page: version, cost model and hash."""

    version: str
    tool: str  # version that made the plan
    digest: str
    cost_model: str
    preset: str
    not_modelled: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportData:
    """Everything a report shows."""

    summary: PlanSummary
    breakdown: StepBreakdown
    timelines: tuple[TimelineData, ...]  # the LLM alone, unless it cannot run alone, and the plan
    memory: WorstRankMemory
    tornado: Tornado
    candidates: TriedCandidates | None
    provenance: Provenance


def gather_report_data(
    plan: Plan,
    *,
    digest: str | None = None,
    comparison: Comparison | None = None,
    tornado: Tornado | None = None,
) -> ReportData:
    """Returns everything a report of `plan` shows; `tornado` replaces its own sensitivity analysis."""
    replay = replay_plan(plan)
    return ReportData(
        summary=_summary(plan),
        breakdown=_break_down(plan, replay, comparison),
        timelines=_timelines(plan, replay),
        memory=_worst_rank(plan, replay),
        tornado=tornado or compute_tornado(plan, replay.schedule, comparison),
        candidates=None if comparison is None else _candidates(plan, comparison),
        provenance=_provenance(plan, digest or hash_plan(plan), comparison),
    )


def _number(notes: Mapping[str, Any], name: str) -> float | None:
    """Returns a figure of the plan's notes, which may hold anything or nothing."""
    value = notes.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _summary(plan: Plan) -> PlanSummary:
    notes = plan.notes
    return PlanSummary(
        job=plan.name,
        gpus=plan.ranks.world,
        strategy=plan.strategy,
        recommendation=str(notes.get("recommendation", "")),
        chosen=_chosen(plan),
        step_s=plan.claims.step_s,
        estimate_s=plan.claims.estimate_s,
        floor_s=_number(notes, "floor_s"),
        bound_s=_number(notes, "bound_s"),
        bound=str(notes.get("bound", "")),
        hidden_strict=_number(notes, "hidden_share_strict"),
        hidden_placed=_number(notes, "hidden_share_placed"),
        mfu=_number(notes, "mfu"),
        peak_bytes=max(held.peak for held in plan.memory),
        capacity_bytes=plan.capacity_bytes,
    )


def _chosen(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Returns a row per module: layout, pipelines, microbatches, order and recomputation."""
    rows = []
    for name, module in sorted(plan.modules.items(), key=lambda item: item[0] != LLM):
        recompute = f"recompute {module.recompute}"
        if name == LLM:
            count = f"{plan.microbatches} microbatches"
            order = "fully sharded" if plan.locked else plan.order
            rows.append((name, str(module.layout), "", count, order, recompute))
            continue
        split = np.bincount(module.pipelines).tolist() if module.pipelines else [0]
        count = str(split[0]) if len(set(split)) == 1 else "+".join(map(str, split))
        count += " microbatch" if count == "1" else " microbatches"
        pipelines = "1 pipeline" if len(split) == 1 else f"{len(split)} pipelines with"
        rows.append((name, str(module.layout), pipelines, count, "", recompute))
    return tuple(rows)


# ---------------------------------------------------------------------------- time


def _break_down(plan: Plan, replay: ReplayedPlan, comparison: Comparison | None) -> StepBreakdown:
    reported = SystemStepTime(
        name=plan.strategy,
        step_s=plan.claims.step_s,
        parts=_parts(replay.schedule, replay.timeline),
        is_reported=True,
        fits=max(held.peak for held in plan.memory) <= plan.capacity_bytes,
    )
    if comparison is None:
        noted = plan.notes.get("systems_s")
        totals = noted if isinstance(noted, dict) else {}
        steps = {name: _number(totals, name) for name in totals if name != plan.strategy}
        bars = [
            SystemStepTime(name=name, step_s=step, parts={})
            for name, step in steps.items()
            if step is not None
        ]
        missing, floor_s = dict[str, str](), _number(plan.notes, "floor_s")
    else:
        bars = [
            SystemStepTime(
                name=name,
                step_s=system.step_s,
                parts=_parts(system.schedule, system.timeline, system.candidate.device_gpus),
                fits=system.fits,
                how=system.how,
            )
            for name, system in comparison.systems.items()
            if name != plan.strategy
        ]
        missing, floor_s = comparison.missing, comparison.floor_s
    ranked = sorted([reported, *bars], key=lambda bar: bar.step_s)
    return StepBreakdown(bars=tuple(ranked), floor_s=floor_s, missing=missing)


def _parts(schedule: Schedule, timeline: Timeline, weights: Floats | None = None) -> dict[str, float]:
    """Returns seconds of the mean GPU: compute by module, and idle time by cause."""
    compute = np.flatnonzero(schedule.lane == Lane.COMPUTE)
    is_llm = np.array([name == LLM for name in schedule.modules])[schedule.module[compute]]
    part = np.where(schedule.kind[compute] == OpKind.OPTIMIZER, 2, np.where(is_llm, 0, 1))
    place = schedule.device[compute].astype(np.int64) * 3 + part
    spent = (timeline.finish_s - timeline.start_s)[compute]
    by_device = np.bincount(place, weights=spent, minlength=3 * schedule.num_devices).reshape(-1, 3)
    mean = np.average(by_device, axis=0, weights=weights).tolist()
    compute_s = dict(zip((LLM_PART, ENCODER_PART, OPTIMIZER_PART), mean, strict=True))
    return compute_s | asdict(average_bubbles(sum_bubbles_by_cause(schedule, timeline), weights))


# ---------------------------------------------------------------------------- timelines


def _timelines(plan: Plan, replay: ReplayedPlan) -> tuple[TimelineData, ...]:
    timelines = []
    try:
        timelines.append(_timeline_data(plan, replay_llm_alone(plan), "LLM alone, in the order of the plan"))
    except UserError:
        pass  # the LLM of this plan waits for an op of an encoder: only the plan is drawn
    timelines.append(_timeline_data(plan, replay, "the plan, encoders included"))
    return tuple(timelines)


def _timeline_data(plan: Plan, replay: ReplayedPlan, label: str) -> TimelineData:
    ranks, count = plan.ranks, replay.schedule.num_devices
    devices = tuple(d for d in range(count) if count <= MAX_ROWS or ranks.coordinates(d)[1:] == (0, 0))
    rows = build_timeline_rows(replay)
    return TimelineData(
        label=label,
        schedule=replay.schedule,
        timeline=replay.timeline,
        slack_s=find_op_slack(replay.schedule, replay.timeline),
        rows=tuple(replace(rows[device], label=_short(rows[device].label)) for device in devices),
        devices=devices,
    )


def _short(name: str) -> str:
    """Shortens the name of a device class: `stage 3`, or `3 tp 1` for its TP block 1."""
    return name if len(name) <= 8 else name.removeprefix("stage ").replace(" tp block ", " tp ")


# ---------------------------------------------------------------------------- memory


def _worst_rank(plan: Plan, replay: ReplayedPlan) -> WorstRankMemory:
    """Returns the class that claims most, and the bytes alive along its program when each line begins."""
    device = max(range(len(plan.memory)), key=lambda place: plan.memory[place].peak)
    held = plan.memory[device]
    changing = {
        "llm activations": held.llm_activations,
        "encoder activations": held.encoder_activations,
        "seam": held.seam,
        "gathered": held.gathered,
        "logits": held.logits,
    }
    alive = list(live_bytes_by_line(plan, plan.programs))[device].astype(np.float64)
    times = np.maximum.accumulate(replay.timeline.start_s[replay.schedule.device == device])
    changes = np.flatnonzero(np.any(np.diff(alive, axis=0, prepend=-1.0) != 0, axis=1))
    return WorstRankMemory(
        name=replay.schedule.device_name(device),
        components={name: size for name, size in (*held.fixed.items(), *changing.items()) if size},
        capacity_bytes=plan.capacity_bytes,
        fixed_bytes=sum(held.fixed.values()),
        times_s=times[changes],
        alive={name: alive[changes, place] for place, name in enumerate(changing)},
        step_s=replay.timeline.step_s,
    )


# ---------------------------------------------------------------------------- candidates


def _candidates(plan: Plan, comparison: Comparison) -> TriedCandidates:
    points = [
        CandidatePoint(
            name=name,
            step_s=system.step_s,
            peak_bytes=system.peak_bytes,
            reason=system.how if system.fits else f"does not fit; {system.how}",
            sort="system" if system.fits else "rejected",
        )
        for name, system in comparison.systems.items()
        if name != plan.strategy
    ]
    planned = comparison.systems.get(plan.strategy)
    result = None if planned is None else planned.search_result
    encoders = {module.layout for module in plan.encoders.values()}
    step_s, peak = plan.claims.step_s, float(max(held.peak for held in plan.memory))
    chosen = "; ".join(f"{name} {module.layout}" for name, module in plan.modules.items())
    points.append(CandidatePoint(name=chosen, step_s=step_s, peak_bytes=peak, reason="chosen", sort="chosen"))
    for tried in [] if result is None else result.tried:
        if {tried.layout} != encoders:
            over = tried.step_s / step_s - 1
            reason = f"{100 * abs(over):.1f} % {'slower' if over >= 0 else 'faster'}, "
            reason += "replayed" if tried.replayed else "as estimated"
            name = f"{tried.module} {tried.layout}"
            points.append(
                CandidatePoint(
                    name=name, step_s=tried.step_s, peak_bytes=tried.peak_bytes, reason=reason, sort="layout"
                )
            )
    rejected = [*comparison.rejected, *([] if result is None else result.rejected)]
    points += [
        CandidatePoint(
            name=layout.label,
            step_s=None,
            peak_bytes=layout.peak_bytes,
            reason=layout.reason,
            sort="rejected",
        )
        for layout in rejected
    ]
    return TriedCandidates(
        points=tuple(points),
        considered=0 if result is None else result.considered,
        capacity_bytes=plan.capacity_bytes,
    )


def _provenance(plan: Plan, digest: str, comparison: Comparison | None) -> Provenance:
    measured = bool(plan.bound_to.get("profile", {}).get("kernels"))
    model = f"measured profile {plan.hashes.get('profile', '')[:12]}" if measured else ANALYTIC
    preset = plan.notes.get("preset")
    return Provenance(
        version=__version__,
        tool=plan.tool,
        digest=digest,
        cost_model=model if comparison is None else comparison.source,
        preset=str(preset.get("name", "")) if isinstance(preset, dict) else "",
        not_modelled=NOT_MODELLED,
    )
