"""Gathers what a report shows from a plan, its replay and, where there is one, its comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from optimus import __version__
from optimus.cost.measured import ANALYTIC
from optimus.cost.memory import NOT_MODELLED
from optimus.errors import UserError
from optimus.ir.op import Floats, Lane, OpKind, Schedule
from optimus.ir.plan import Plan
from optimus.ir.planfile import plan_digest
from optimus.ir.ranks import LLM
from optimus.planner.compare import Comparison
from optimus.planner.replaying import ReplayedPlan, replay_llm_alone, replay_plan
from optimus.render.boxes import device_rows
from optimus.render.report_data import (
    Bar,
    Point,
    ReportData,
    Scene,
    Source,
    Summary,
    Tries,
    Where,
    WorstRank,
)
from optimus.schedule.bubbles import find_bubbles, mean_bubbles
from optimus.schedule.plan_memory import alive_along
from optimus.schedule.simulate import Timeline
from optimus.schedule.slack import find_slack
from optimus.sensitivity.tornado import Tornado, find_tornado

MAX_ROWS = 32  # device classes that are drawn; of more, the first TP block of every stage
LLM_PART, ENCODER_PART, OPTIMIZER_PART = "llm", "encoder", "optimizer"


def gather_report(
    plan: Plan,
    *,
    digest: str | None = None,
    comparison: Comparison | None = None,
    sure: Tornado | None = None,
) -> ReportData:
    """Everything a report of `plan` shows; `sure` takes the place of our own replays."""
    played = replay_plan(plan)
    return ReportData(
        summary=_summary(plan),
        where=_where(plan, played, comparison),
        scenes=_scenes(plan, played),
        memory=_worst_rank(plan, played),
        sure=sure or find_tornado(plan, played.schedule, comparison),
        tries=None if comparison is None else _tries(plan, comparison),
        source=_source(plan, digest or plan_digest(plan), comparison),
    )


def _number(notes: Mapping[str, Any], name: str) -> float | None:
    """A figure of the notes, which are free: anything may stand there, or nothing."""
    found = notes.get(name)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


def _summary(plan: Plan) -> Summary:
    notes = plan.notes
    return Summary(
        job=plan.name,
        gpus=plan.ranks.world,
        strategy=plan.strategy,
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
    """Module, layout, pipelines, microbatches, order and recomputation, as `optimus plan` prints them."""
    rows = []
    for name, module in sorted(plan.modules.items(), key=lambda item: item[0] != LLM):
        recompute = f"recompute {module.recompute}"
        if name == LLM:
            count = f"{plan.microbatches} microbatches"
            rows.append((name, str(module.layout), "", count, plan.order, recompute))
            continue
        split = np.bincount(module.pipelines).tolist() if module.pipelines else [0]
        each = str(split[0]) if len(set(split)) == 1 else "+".join(map(str, split))
        each += " microbatch" if each == "1" else " microbatches"
        pipelines = "1 pipeline" if len(split) == 1 else f"{len(split)} pipelines with"
        rows.append((name, str(module.layout), pipelines, each, "", recompute))
    return tuple(rows)


# ---------------------------------------------------------------------------- where the step goes


def _where(plan: Plan, played: ReplayedPlan, comparison: Comparison | None) -> Where:
    own = Bar(
        name=plan.strategy,
        step_s=plan.claims.step_s,
        parts=_parts(played.schedule, played.timeline),
        own=True,
        fits=max(held.peak for held in plan.memory) <= plan.capacity_bytes,
    )
    if comparison is None:
        noted = plan.notes.get("systems_s")
        totals = noted if isinstance(noted, dict) else {}
        found = {name: _number(totals, name) for name in totals if name != plan.strategy}
        bars = [Bar(name=name, step_s=step, parts={}) for name, step in found.items() if step is not None]
        missing, floor_s = dict[str, str](), _number(plan.notes, "floor_s")
    else:
        bars = [
            Bar(
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
    ranked = sorted([own, *bars], key=lambda bar: bar.step_s)
    return Where(bars=tuple(ranked), floor_s=floor_s, missing=missing)


def _parts(schedule: Schedule, timeline: Timeline, weights: Floats | None = None) -> dict[str, float]:
    """Seconds of the mean GPU: compute by module, and idle time by cause."""
    compute = np.flatnonzero(schedule.lane == Lane.COMPUTE)
    is_llm = np.array([name == LLM for name in schedule.modules])[schedule.module[compute]]
    part = np.where(schedule.kind[compute] == OpKind.OPTIMIZER, 2, np.where(is_llm, 0, 1))
    place = schedule.device[compute].astype(np.int64) * 3 + part
    spent = (timeline.finish_s - timeline.start_s)[compute]
    by_device = np.bincount(place, weights=spent, minlength=3 * schedule.num_devices).reshape(-1, 3)
    mean = np.average(by_device, axis=0, weights=weights).tolist()
    found = dict(zip((LLM_PART, ENCODER_PART, OPTIMIZER_PART), mean, strict=True))
    return found | asdict(mean_bubbles(find_bubbles(schedule, timeline), weights))


# ---------------------------------------------------------------------------- stages over time


def _scenes(plan: Plan, played: ReplayedPlan) -> tuple[Scene, ...]:
    found = []
    try:
        found.append(_scene(plan, replay_llm_alone(plan), "LLM alone, in the order of the plan"))
    except UserError:
        pass  # a plan whose LLM waits for what only an encoder does is drawn by itself
    found.append(_scene(plan, played, "the plan, encoders included"))
    return tuple(found)


def _scene(plan: Plan, played: ReplayedPlan, label: str) -> Scene:
    ranks, count = plan.ranks, played.schedule.num_devices
    devices = tuple(d for d in range(count) if count <= MAX_ROWS or ranks.coordinates(d)[1:] == (0, 0))
    rows = device_rows(played)
    return Scene(
        label=label,
        schedule=played.schedule,
        timeline=played.timeline,
        slack_s=find_slack(played.schedule, played.timeline),
        rows=tuple(replace(rows[device], label=_short(rows[device].label)) for device in devices),
        devices=devices,
    )


def _short(name: str) -> str:
    """A device class as there is room for: `stage 3`, and `3 tp 1` for its TP block 1."""
    return name if len(name) <= 8 else name.removeprefix("stage ").replace(" tp block ", " tp ")


# ---------------------------------------------------------------------------- memory


def _worst_rank(plan: Plan, played: ReplayedPlan) -> WorstRank:
    """The class that claims most; what lives along its program, at the times at which lines begin."""
    device = max(range(len(plan.memory)), key=lambda place: plan.memory[place].peak)
    held = plan.memory[device]
    changing = {
        "llm activations": held.llm_activations,
        "encoder activations": held.encoder_activations,
        "seam": held.seam,
    }
    alive = list(alive_along(plan, plan.programs))[device].astype(np.float64)
    times = np.maximum.accumulate(played.timeline.start_s[played.schedule.device == device])
    changes = np.flatnonzero(np.any(np.diff(alive, axis=0, prepend=-1.0) != 0, axis=1))
    return WorstRank(
        name=played.schedule.device_name(device),
        components={name: size for name, size in (*held.fixed.items(), *changing.items()) if size},
        capacity_bytes=plan.capacity_bytes,
        fixed_bytes=sum(held.fixed.values()),
        times_s=times[changes],
        alive={name: alive[changes, place] for place, name in enumerate(changing)},
        step_s=played.timeline.step_s,
    )


# ---------------------------------------------------------------------------- what was tried


def _tries(plan: Plan, comparison: Comparison) -> Tries:
    points = [
        Point(
            name=name,
            step_s=system.step_s,
            peak_bytes=system.memory.total,
            reason=system.how if system.fits else f"does not fit; {system.how}",
            sort="system" if system.fits else "rejected",
        )
        for name, system in comparison.systems.items()
        if name != plan.strategy
    ]
    made = comparison.systems.get(plan.strategy)
    found = None if made is None else made.search_result
    encoders = {module.layout for module in plan.encoders.values()}
    step_s, peak = plan.claims.step_s, float(max(held.peak for held in plan.memory))
    chosen = "; ".join(f"{name} {module.layout}" for name, module in plan.modules.items())
    points.append(Point(name=chosen, step_s=step_s, peak_bytes=peak, reason="chosen", sort="chosen"))
    for each in [] if found is None else found.tried:
        if {each.layout} != encoders:
            over = each.step_s / step_s - 1
            reason = f"{100 * abs(over):.1f} % {'slower' if over >= 0 else 'faster'}, "
            reason += "replayed" if each.replayed else "as estimated"
            words = f"{each.module} {each.layout}"
            points.append(
                Point(
                    name=words, step_s=each.step_s, peak_bytes=each.peak_bytes, reason=reason, sort="layout"
                )
            )
    rejected = [*comparison.rejected, *([] if found is None else found.rejected)]
    points += [
        Point(name=each.words, step_s=None, peak_bytes=each.peak_bytes, reason=each.reason, sort="rejected")
        for each in rejected
    ]
    return Tries(
        points=tuple(points),
        considered=0 if found is None else found.considered,
        capacity_bytes=plan.capacity_bytes,
    )


def _source(plan: Plan, digest: str, comparison: Comparison | None) -> Source:
    measured = bool(plan.bound_to.get("profile", {}).get("kernels"))
    model = f"measured profile {plan.hashes.get('profile', '')[:12]}" if measured else ANALYTIC
    preset = plan.notes.get("preset")
    return Source(
        version=__version__,
        tool=plan.tool,
        digest=digest,
        cost_model=model if comparison is None else comparison.source,
        preset=str(preset.get("name", "")) if isinstance(preset, dict) else "",
        not_modelled=NOT_MODELLED,
    )
