"""A plan with its reasons, as text for people and as an object for tools."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from optimus.cost.memory import NOT_MODELLED
from optimus.planner.planning import Planned
from optimus.planner.rejected import count_by_reason
from optimus.planner.systems.registry import TP_OVERLAP, System
from optimus.render.simulation import cost_model, head
from optimus.render.text import apart, columns, gigabytes, seconds, wrap
from optimus.schedule.bubbles import Bubbles
from optimus.verify.validator import RULES

SCHEMA = "optimus.plan-result/1"
WORTH_IT = 1.02  # below this a simpler system is the better answer


def plan_json(planned: Planned, *, file: Path | None, digest: str | None) -> dict[str, object]:
    """The object of `optimus plan --json`."""
    plan, comparison, bounds = planned.plan, planned.comparison, planned.bounds
    return {
        "schema": SCHEMA,
        "job": plan.name,
        "strategy": plan.strategy,
        "preset": comparison.assumptions.name,
        "cost_model": cost_model(comparison),
        "step_s": planned.step_s,
        "estimate_s": plan.claims.estimate_s,
        "floor_s": comparison.floor_s,
        "step_over_floor": planned.step_s / comparison.floor_s,
        "floor_1f1b_s": comparison.floor_1f1b_s,
        "step_over_floor_1f1b": planned.step_s / comparison.floor_1f1b_s,
        "bound_s": bounds.bound_s,
        "bound": bounds.binds,
        "bounds_s": {
            "floor": bounds.floor_s,
            "total work": bounds.work_s,
            "critical path": bounds.critical_path_s,
        },
        "hidden_share_strict": planned.hidden_strict,
        "hidden_share_placed": planned.hidden_placed,
        "speedup": planned.speedup,
        "worth": _worth(planned),
        "search_s": planned.search_s,
        "peak_memory_bytes": max(held.peak for held in plan.memory),
        "memory_bytes": asdict(planned.system.memory),
        "bubbles_s": asdict(planned.system.bubbles),
        "considered": planned.found.considered,
        "rejected": [{"layout": r.words, "reason": r.reason} for r in planned.rejected],
        "layouts": {name: asdict(module.layout) for name, module in plan.modules.items()},
        "systems": {name: {"step_s": system.step_s} for name, system in comparison.systems.items()},
        "not_possible": comparison.missing,
        "checked": planned.report.rules,
        "not_modelled": list(NOT_MODELLED),
        "file": None if file is None else str(file),
        "sha256": digest,
    }


def plan_text(planned: Planned) -> list[str]:
    """What it is worth, what was chosen, the table of systems, memory, what was rejected, the proof."""
    first, *rest = head(planned.comparison)
    lines = [first, *_worth_lines(planned), *rest]
    lines += wrap("search", _search_words(planned))
    lines += ["", *_chosen(planned), "", *_table(planned), ""]
    lines += _hidden_lines(planned)
    lines += ["", *_memory(planned), ""]
    lines += _rejected(planned)
    lines += wrap("not modelled", "; ".join(NOT_MODELLED))
    lines += wrap("checked", _checked(planned))
    return lines


def _search_words(planned: Planned) -> str:
    found = planned.found
    words = f"of {found.considered} encoder layouts beside it {len(found.tried)} were scheduled"
    words += f"; {planned.search_s:.1f} s with all systems"
    return "; ".join([words, *found.remarks])


def _chosen(planned: Planned) -> list[str]:
    plan, llm = planned.plan, planned.found.llm
    rows = [
        [
            "llm",
            str(llm.layout),
            f"microbatch {llm.sequences:.3g}",
            f"{llm.microbatches} microbatches",
            llm.order_name,
            f"recompute {plan.modules['llm'].recompute}",
        ]
    ]
    for name, module in plan.encoders.items():
        split = [module.pipelines.count(pipeline) for pipeline in range(1 + max(module.pipelines))]
        pipelines = "1 pipeline" if len(split) == 1 else f"{len(split)} pipelines with"
        recompute = f"recompute {module.recompute}"
        rows.append([name, str(module.layout), pipelines, _each(split, module.pieces), "", recompute])
    body = columns(rows[0], rows[1:], left=6)
    return [f"  chosen {line}" if place == 0 else f"         {line}" for place, line in enumerate(body)]


def _each(split: list[int], pieces: int) -> str:
    """`8 microbatches`, of what size if they are parts of the LLM's."""
    each = str(split[0]) if len(set(split)) == 1 else "+".join(map(str, split))
    each += " microbatch" if each == "1" else " microbatches"
    return each if pieces == 1 else f"{each} of 1/{pieces}"


def _table(planned: Planned) -> list[str]:
    comparison, name = planned.comparison, planned.plan.strategy
    header = [
        "system",
        "step s",
        "over floor",
        f"speed-up of {name}",
        "peak GB",
        "MFU %",
        f"TP {TP_OVERLAP:.0%}",
    ]
    rows = []
    for own, system in sorted(comparison.systems.items(), key=lambda item: item[1].step_s):
        speedup = "-" if own == "llm-only" else f"{system.step_s / planned.step_s:.3f}"
        rows.append(
            [
                f"{own} (floor)" if own == "llm-only" else own,
                seconds(system.step_s),
                f"{comparison.over_floor(own):.3f}",
                speedup,
                gigabytes(system.memory.total) + ("" if system.fits else " !"),
                f"{100 * system.mfu:.1f}",
                seconds(system.overlapped_step_s),
            ]
        )
        if system.measured_step_s is not None:
            rows.append(_measured(planned, system))
    lines = columns(header, rows)
    lines.append(
        f"  TP {TP_OVERLAP:.0%}: step s if the framework already hid {TP_OVERLAP:.0%} of the TP traffic."
    )
    if any(not system.fits for system in comparison.systems.values()):
        lines.append(f"  ! does not fit in {gigabytes(comparison.context.capacity_bytes)} GB")
    for own, reason in comparison.missing.items():
        lines += wrap(f"  {own}", f"not possible: {reason}", indent=18)
    return lines


def _measured(planned: Planned, system: System) -> list[str]:
    assert system.measured_step_s is not None
    over = system.measured_step_s / planned.comparison.floor_s
    speedup = system.measured_step_s / planned.step_s
    held = system.measured_memory_bytes
    row = ["  measured", seconds(system.measured_step_s), f"{over:.3f}", f"{speedup:.3f}"]
    return [*row, "" if held is None else gigabytes(held), "", ""]


def _worth(planned: Planned) -> dict[str, object]:
    """What going to the best system without filling gives, and what filling adds to it."""
    reference, simpler = planned.reference, planned.simpler
    return {
        "reference": None if reference is None else reference.name,
        "speedup": None if reference is None else planned.speedup[reference.name],
        "simpler_system": None if simpler is None else simpler.name,
        "speedup_over_simpler": None if simpler is None else planned.speedup[simpler.name],
    }


def _worth_lines(planned: Planned) -> list[str]:
    reference, simpler = planned.reference, planned.simpler
    if simpler is None:
        return wrap("worth", "nothing that fits was compared; name systems with --system")
    gain, parts = planned.speedup[simpler.name], []
    if reference is not None:
        speedup = planned.speedup[reference.name]
        words = f"{speedup:.3f} times the speed of {reference.name} ({1 - 1 / speedup:.1%} less time)"
        if simpler is not reference:
            words += f": {speedup / gain:.3f} by going to {simpler.name}, {gain:.3f} by this plan"
        parts.append(words)
    if gain < WORTH_IT:
        than = "no faster than" if gain < 1.0005 else f"only {gain:.3f} times as fast as"
        parts.append(f"it is {than} {simpler.name}, which is simpler: take that")
    elif simpler is not reference:
        parts.append(f"{gain:.3f} times the speed of {simpler.name}, the best of the others")
    return wrap("worth", "; ".join(parts))


def _hidden_lines(planned: Planned) -> list[str]:
    plan, bounds = planned.plan, planned.bounds
    coarse = planned.found.notes.get("hidden_share_coarse")
    hidden = f"strict {planned.hidden_strict:.0%}, placed {planned.hidden_placed:.0%}"
    hidden += "" if coarse is None else f" (coarse {coarse:.0%})"
    hidden += f"; bubbles left {_bubbles(planned.system)}"
    over = planned.step_s / bounds.bound_s
    bound = f"{seconds(bounds.bound_s)} s at this layout of the LLM ({bounds.binds} binds); "
    bound += f"the step is {over:.3f} times that"
    without = "" if planned.found.is_estimated_whole else ", without them,"
    claim = (
        f"{seconds(planned.step_s)} s, replayed with transfers and all encoder traffic; the algorithm's own "
        f"estimate{without} is {seconds(plan.claims.estimate_s)} s"
    )
    return [*wrap("hidden", hidden), *wrap("bound", bound), *wrap("claim", claim)]


def _bubbles(system: System) -> str:
    found: Bubbles = system.bubbles
    parts = {
        "TP": found.tp,
        "PP": found.pp_warmup + found.pp_cooldown + found.pp_other,
        "DP": found.dp_all_gather + found.dp_reduce_scatter,
    }
    return " ".join(f"{name} {value / system.step_s:.1%}" for name, value in parts.items())


def _memory(planned: Planned) -> list[str]:
    system, capacity = planned.system, planned.comparison.context.capacity_bytes
    memory = system.memory
    parts = {
        "states": memory.states,
        "llm activations": memory.llm_activations,
        "encoder activations": memory.encoder_activations,
        "logits": memory.logits,
        "seam": memory.seam,
        "communicators": memory.communicators,
        "reserve": memory.reserve,
    }
    shown = " | ".join(f"{name} {gigabytes(value)}" for name, value in parts.items())
    first = f"memory, worst rank ({system.worst_rank})  {gigabytes(memory.total)} of {gigabytes(capacity)} GB"
    return [f"  {first}", *wrap("", shown, indent=4)]


def _rejected(planned: Planned) -> list[str]:
    """Counts by reason, with one of each."""
    return wrap("rejected", "; ".join(count_by_reason(planned.rejected)) or "none")


def _checked(planned: Planned) -> str:
    report = planned.report
    held = sum(report.rules.values())
    words = f"{held} of {len(RULES)} rules"
    if report.step_s is not None:
        gap = apart(report.step_s, planned.step_s)
        words += f"; an independent replay of the programs and the claim are {gap}"
    if not report.ok:
        words += f"; first violation: {report.violations[0]}"
    return words
