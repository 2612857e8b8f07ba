"""Formats a comparison of systems as text and JSON, for `optimus simulate` and `optimus plan`."""

from __future__ import annotations

from dataclasses import asdict

from optimus.cli.simulate import CAUSES_REMARK, SCHEMA, SHORT_CAUSES
from optimus.cli.text import align_columns, wrap_remark, wrap_text
from optimus.cost.memory import NOT_MODELLED, RankMemory
from optimus.job.own_layers import find_untrainable
from optimus.planner.compare import Comparison
from optimus.planner.systems.base import OVERLAPPED_TP_SHARE, SimulatedSystem
from optimus.render.format_numbers import format_gigabytes, format_parameter_count, format_seconds
from optimus.schedule.bubbles import CAUSES

MAX_CALIBRATION = 1.5  # measured over computed step, or its inverse; beyond it the job is doubtful
TP_SHARE = f"{OVERLAPPED_TP_SHARE:.0%}"
PEAK_REMARK = "peak GB counts p99 of steps; the table of the worst rank counts the mean step."
TP_SHARE_REMARK = f"TP {TP_SHARE}: step s if {TP_SHARE} of the TP traffic is already overlapped."
SHORT_COMPONENTS = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "llm_activations": "llm act",
    "encoder_activations": "enc act",
    "communicators": "nccl",
}


def build_comparison_json(comparison: Comparison) -> dict[str, object]:
    """Returns the object of `optimus simulate JOB --json`."""
    job, context = comparison.job, comparison.context
    return {
        "schema": SCHEMA,
        "job": job.name,
        "gpus": job.cluster.gpus,
        "cluster": job.cluster.name,
        "preset": comparison.assumptions.name,
        "assumptions": comparison.assumptions.describe(),
        "cost_model": build_cost_model_json(comparison),
        "layout": {"llm": asdict(context.layout)},
        "floor_s": comparison.floor_s,
        "floor_1f1b_s": comparison.floor_1f1b_s,
        "systems": {name: _system_json(comparison, system) for name, system in comparison.systems.items()},
        "not_possible": comparison.missing,
        "workload": {
            "sequence_tokens": job.workload.sequence_tokens,
            "sequences_per_step": job.workload.sequences_per_step,
            "encoder_share_of_tokens": {
                encoder.name: job.workload.share_of_tokens(encoder.name) for encoder in job.model.encoders
            },
        },
        "rejected": [{"layout": r.label, "reason": r.reason} for r in comparison.rejected],
        "notes": list(job.notes),
        "not_modelled": list(NOT_MODELLED),
    }


def build_cost_model_json(comparison: Comparison) -> dict[str, object]:
    """Returns the source of the durations, and warnings where a profile was extrapolated."""
    profile, calibration = comparison.context.cost_model.profile, comparison.calibration
    source: dict[str, object] = {
        "source": comparison.source,
        "profile": profile.name or None,
        "warnings": comparison.profile_notes,
    }
    if calibration is not None:
        source["calibration"] = {**asdict(calibration), "scale": calibration.scale}
    return source


def _system_json(comparison: Comparison, system: SimulatedSystem) -> dict[str, object]:
    result: dict[str, object] = {
        "step_s": system.step_s,
        "step_over_floor": comparison.over_floor(system.name),
        "step_s_if_tp_overlapped": {str(OVERLAPPED_TP_SHARE): system.overlapped_step_s},
        "peak_memory_bytes": system.memory.total,
        "peak_memory_bytes_p99": None if system.search_result is None else system.peak_bytes,
        "fits": system.fits,
        "mfu": system.mfu,
        "tokens_per_s_per_gpu": system.tokens_per_s_per_gpu,
        "bubbles_s": asdict(system.bubbles),
        "memory_bytes": asdict(system.memory),
        "worst_rank": system.worst_rank,
        "how": system.how,
        "tasks": len(system.schedule),
    }
    if system.measured_step_s is not None:
        result["measured_step_s"] = system.measured_step_s
    if system.measured_memory_bytes is not None:
        result["measured_memory_bytes"] = system.measured_memory_bytes
    return result


def format_comparison(comparison: Comparison) -> list[str]:
    """Returns the table of systems, their settings, the worst rank's memory and what is not modelled."""
    lines = [*format_job(comparison), *format_header(comparison)]
    lines += ["", *_table(comparison), "", *_calibration(comparison)]
    lines += wrap_remark(CAUSES_REMARK)
    lines += wrap_remark(TP_SHARE_REMARK)
    if any(system.peak_bytes > system.memory.total for system in comparison.systems.values()):
        lines += wrap_remark(PEAK_REMARK)
    if comparison.is_stated and comparison.context.layout.pp == 1:
        lines += wrap_remark("With pp 1 there is one stage: stage0 and balanced are the same.")
    lines.append("")
    for name, system in comparison.systems.items():
        lines += wrap_text(f"  {name}", system.how, indent=18)
    for name, reason in comparison.missing.items():
        lines += wrap_text(f"  {name}", f"not possible: {reason}", indent=18)
    lines += ["", *_memory(comparison), ""]
    lines += wrap_text("not modelled", "; ".join(NOT_MODELLED))
    return lines


def format_job(comparison: Comparison) -> list[str]:
    """Returns the job, its cluster and its model."""
    job, model, workload = comparison.job, comparison.job.model, comparison.job.workload
    batch = f"{workload.sequences_per_step} sequences of {workload.sequence_tokens} tokens a step"
    modules = (f"{module.name} {format_parameter_count(module.parameters())}" for module in model.modules)
    lines = wrap_text("job", f"{job.name}: {job.cluster.gpus} x {job.cluster.gpu.name}, {batch}")
    lines += wrap_text("model", f"{model.name}: {' + '.join(modules)}")
    untrainable = find_untrainable(model)
    if untrainable is not None:
        words = f"{untrainable.field} = {untrainable.value}"
        lines += wrap_text("", f"can be planned, not trained on our own layers: {words}")
    return lines


def format_header(comparison: Comparison) -> list[str]:
    """Returns the cost model, the layout of the LLM and the data that an answer is based on."""
    lines = wrap_text("cost model", f"{comparison.source}; preset {_preset(comparison)}")
    for note in comparison.profile_notes:
        lines += wrap_text("profile", note)
    lines += wrap_text(*_layouts(comparison))
    lines += wrap_text("data", _data(comparison))
    for note in comparison.job.notes:
        lines += wrap_text("assumed", note)
    return lines


def _layouts(comparison: Comparison) -> tuple[str, str]:
    """Names the LLM's layout that is stated, or counts those that were searched."""
    if comparison.is_stated:
        return "llm layout", f"{comparison.context.layout} (as stated)"
    slower = sum(layout.reason.startswith("slower") for layout in comparison.rejected)
    fit = f"{slower + comparison.compared} fit as pipelines, {slower} are slower"
    return (
        "layouts",
        f"{comparison.considered} of the LLM: {fit}, {comparison.compared} compared in all systems",
    )


def _data(comparison: Comparison) -> str:
    """Returns the share of encoder tokens in a mean sequence."""
    model, workload = comparison.job.model, comparison.job.workload
    parts = []
    for encoder in model.encoders:
        load = workload.encoder_load(encoder.name, encoder.merge)
        share = workload.share_of_tokens(encoder.name)
        parts.append(
            f"{encoder.name} {share:.1%} ({load.tokens:,.0f} encoder tokens, "
            f"{load.tokens / encoder.merge:,.0f} LLM tokens)"
        )
    return f"mean sequence: {', '.join(parts)}"


def _calibration(comparison: Comparison) -> list[str]:
    """Compares the measured step with the one computed before calibration."""
    if comparison.calibration is None:
        return []
    ratio = comparison.calibration.scale
    words = f"the measured step is {abs(ratio - 1):.0%} {'above' if ratio > 1 else 'below'} the computed one"
    words += "; all times here are scaled by it"
    if not 1 / MAX_CALIBRATION < ratio < MAX_CALIBRATION:
        words += ": check layout, microbatch, recompute and workload of the job before trusting the table"
    return wrap_text("today", words)


def _preset(comparison: Comparison) -> str:
    a = comparison.assumptions
    parts = [
        a.name,
        f"slow-down under collectives {a.residence_slowdown:.0%}",
        f"launch {a.launch_s * 1e6:.0f} us",
        f"TP overlapped {a.tp_overlapped_share:.0%}",
        f"DP exposed: {a.dp_exposure}",
    ]
    if (a.efficiency, a.traffic_scale) != (1.0, 1.0):
        parts.append(f"compute rates x {a.efficiency:.3g}, seconds of traffic x {a.traffic_scale:.3g}")
    return ", ".join(parts)


def _table(comparison: Comparison) -> list[str]:
    header = ["system", "step s", "over floor", f"TP {TP_SHARE}", "MFU %", "tok/s/GPU", "peak GB"]
    header += [f"{SHORT_CAUSES[cause]} %" for cause in CAUSES]
    rows = []
    for name, system in sorted(comparison.systems.items(), key=lambda item: item[1].step_s):
        label = f"{name} (floor)" if name == "llm-only" else name
        row = [
            label,
            format_seconds(system.step_s),
            f"{comparison.over_floor(name):.3f}",
            format_seconds(system.overlapped_step_s),
            f"{100 * system.mfu:.1f}",
            f"{system.tokens_per_s_per_gpu:.0f}",
            format_gigabytes(system.peak_bytes) + ("" if system.fits else " !"),
        ]
        row += [f"{100 * getattr(system.bubbles, cause) / system.step_s:.1f}" for cause in CAUSES]
        rows.append(row)
        if system.measured_step_s is not None:
            rows.append(_measured_row(comparison, system, len(header)))
    lines = align_columns(header, rows, breaks=[header.index("peak GB") + 1])
    if any(not system.fits for system in comparison.systems.values()):
        capacity = format_gigabytes(comparison.context.capacity_bytes)
        lines += wrap_remark(f"! does not fit in {capacity} GB, even with full recomputation")
    return lines


def _measured_row(comparison: Comparison, system: SimulatedSystem, width: int) -> list[str]:
    """Returns the row of a measured step, shown below the computed one."""
    assert system.measured_step_s is not None
    row = ["  measured", format_seconds(system.measured_step_s)]
    row.append(f"{system.measured_step_s / comparison.floor_s:.3f}")
    row += ["", "", "", ""]
    if system.measured_memory_bytes is not None:
        row[-1] = format_gigabytes(system.measured_memory_bytes)
    return row + [""] * (width - len(row))


def _memory(comparison: Comparison) -> list[str]:
    """Returns the memory of every system's worst rank, by component."""
    names = [
        name for name in asdict(RankMemory()) if any(_component(s, name) for s in comparison.systems.values())
    ]
    header = ["worst rank, GB", "rank", "total", *(SHORT_COMPONENTS.get(name, name) for name in names)]
    rows = [
        [
            name,
            system.worst_rank,
            format_gigabytes(system.memory.total),
            *(format_gigabytes(_component(system, part)) for part in names),
        ]
        for name, system in comparison.systems.items()
    ]
    states = ("params", "grads", "optim", "llm act", "enc act")
    minor = next((place for place in range(3, len(header)) if header[place] not in states), 0)
    return align_columns(header, rows, left=2, breaks=[minor])


def _component(system: SimulatedSystem, name: str) -> float:
    return float(getattr(system.memory, name))
