"""Formats a dry run of one rank, and the planned and counted memory of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from optimus.cli.text import align_columns, wrap_closing_line, wrap_text
from optimus.cli.train_summary import format_predicted_step
from optimus.engine.config import MemoryUse
from optimus.ir.plan import ALL, Plan
from optimus.render.format_numbers import format_gigabytes

if TYPE_CHECKING:
    from optimus.engine.rank_dry_run import DryRun

SCHEMA = "optimus.dry-run/1"
ALONE = "one step of this rank alone, on fake tensors; communication completes at once"
MIN_GB_BYTES = 10e9  # a peak from which memory is shown in GB instead of MB
DTYPE_NOTE = (
    "the run computes in {dtype}, and plans assume bfloat16: to compare, set `dtype: bfloat16` under `run:`"
)


def build_dry_run_json(run: DryRun, plan: Plan) -> dict[str, Any]:
    """Returns the object of `optimus train --dry-run --json`."""
    return {
        "schema": SCHEMA,
        "job": run.job,
        "rank": run.rank,
        "world": run.world,
        "strategy": plan.strategy,
        "step_s": plan.claims.step_s,
        "layouts": {name: asdict(module.layout) for name, module in plan.modules.items()},
        "device_class": run.device_class,
        "places": {
            name: {"stage": place.pp, "replica": place.dp, "cp": place.cp, "tp": place.tp}
            for name, place in run.places.items()
        },
        "communicators": [asdict(group) for group in run.communicators],
        "groups_made": run.groups_made,
        "program": {
            "lines": sum(sum(verbs.values()) for verbs in run.program.values()),
            "actions": run.actions,
            "verbs": {name: dict(verbs) for name, verbs in run.program.items()},
            "encoder_phases": run.encoder_phases,
            "encoder_phases_in_slots": run.encoder_phases_in_slots,
        },
        "travels": [asdict(message) for message in run.travels],
        "parameters": {name: asdict(held) for name, held in run.parameters.items()},
        "memory": {
            **build_memory_json(run.memory),
            "planned_only_bytes": dict(run.planned_only),
            "dtype": run.memory.dtype,
            "error": run.memory.error,
            "most_over_bytes": run.memory.most_over,
            "peak_at": run.peak_at,
            "needed_bytes": run.needed_bytes,
            "capacity_bytes": run.capacity_bytes,
        },
        "fits": run.fits,
    }


def format_dry_run(run: DryRun, plan: Plan) -> list[str]:
    """Returns system and step of the plan, and place, program, groups, messages and memory of the rank."""
    return [
        *wrap_text("job", f"{run.job}, rank {run.rank} of {run.world}"),
        *wrap_text("plan", format_predicted_step(plan)),
        *wrap_text("dry run", ALONE),
        *wrap_text("place", f"device class {run.device_class} ({run.class_name}); {_places(run, plan)}"),
        *wrap_text("program", _program(run)),
        *_slots(run, plan),
        *wrap_text("communicators", f"{len(run.communicators)}, made by {run.groups_made} calls per rank"),
        "",
        *_communicators(run),
        "",
        *_parameters(run),
        *_messages(run),
        "",
        *_memory(run),
    ]


def _places(run: DryRun, plan: Plan) -> str:
    parts = []
    for name, place in run.places.items():
        layout = plan.modules[name].layout
        parts.append(
            f"{name} stage {place.pp} of {layout.pp}, replica {place.dp} of {layout.dp}, "
            f"tp {place.tp} of {layout.tp}"
        )
    return "; ".join(parts)


def _program(run: DryRun) -> str:
    lines = sum(sum(verbs.values()) for verbs in run.program.values())
    parts = [
        f"{name} {', '.join(f'{verb} {times:,}' for verb, times in verbs.items())}"
        for name, verbs in run.program.items()
        if name != ALL
    ]
    return f"{lines:,} lines; {'; '.join(parts)}"


def _slots(run: DryRun, plan: Plan) -> list[str]:
    if plan.ranks.llm.tp == 1:
        return []
    inside, phases = run.encoder_phases_in_slots, run.encoder_phases
    return wrap_text(
        "slots", f"{inside:,} of {phases:,} encoder compute phases run under the LLM's collectives"
    )


def _communicators(run: DryRun) -> list[str]:
    rows = [(group.axis, f"{group.size:,}", str(group.first), str(group.last)) for group in run.communicators]
    return align_columns(("communicator", "ranks", "first", "last"), rows)


def _parameters(run: DryRun) -> list[str]:
    rows = [(name, f"{held.count:,}", f"{held.bytes / 1e9:.2f}") for name, held in run.parameters.items()]
    return align_columns(("module", "parameters", "GB"), rows)


def _messages(run: DryRun) -> list[str]:
    rows = [
        (
            f"{message.module}.{message.verb}",
            f"{message.times:,}",
            f"{' x '.join(map(str, message.shape))} {message.dtype}",
            f"{message.bytes / 1e6:.2f}",
        )
        for message in run.travels
    ]
    return ["", *align_columns(("message", "times", "shape", "MB each"), rows)] if rows else []


def _memory(run: DryRun) -> list[str]:
    use = run.memory
    capacity = f"{format_gigabytes(run.needed_bytes)} of {format_gigabytes(run.capacity_bytes)} GB"
    over = f"; {_lines_over(use)}" if use.lines_over else ""
    return [
        *_memory_table(use, run.planned_only),
        "",
        *wrap_text("peak", f"while {run.peak_at} runs{over}"),
        *wrap_text("fits" if run.fits else "does not fit", f"{capacity}, with communicators and reserve"),
        *_dtype_note(use),
    ]


def build_memory_json(use: MemoryUse) -> dict[str, Any]:
    """Returns one rank's bytes: planned, and counted in a step."""
    return {
        "rank": use.rank,
        "planned_bytes": {**use.planned, "peak": use.planned_peak},
        "counted_bytes": {**use.counted, "peak": use.counted_peak},
        "lines_over": use.lines_over,
    }


def format_memory(use: MemoryUse) -> list[str]:
    """Returns a table of one rank's bytes: planned, and counted in a step."""
    words = f"rank {use.rank} has the highest peak; "
    words += f"the plan is {abs(use.error):.1%} {'above' if use.error >= 0 else 'below'} the count"
    words += f"; {_lines_over(use)}" if use.lines_over else ""
    return [*wrap_text("memory", words), "", *_memory_table(use, {}), "", *_dtype_note(use)]


def _memory_table(use: MemoryUse, planned_only: Mapping[str, int]) -> list[str]:
    unit, size = _unit(use)

    def row(name: str, planned: int, counted: int) -> tuple[str, ...]:
        error = f"{planned / counted - 1:+.1%}" if counted else ""
        label = name.replace("_", " ").replace("llm", "LLM")
        return label, f"{planned / size:,.2f}", f"{counted / size:,.2f}", error

    both = {name: (planned, use.counted[name]) for name, planned in use.planned.items()}
    rows = [row(name, *sizes) for name, sizes in both.items() if any(sizes)]
    rows.append(row("peak", use.planned_peak, use.counted_peak))
    rows += [(name, f"{planned / size:,.2f}", "-", "") for name, planned in planned_only.items()]
    return align_columns((f"memory {unit}", "planned", "counted", "plan over count"), rows)


def _unit(use: MemoryUse) -> tuple[str, float]:
    return ("GB", 1e9) if use.planned_peak >= MIN_GB_BYTES else ("MB", 1e6)


def _lines_over(use: MemoryUse) -> str:
    unit, size = _unit(use)
    return f"{use.lines_over:,} lines hold more than planned, by at most {use.most_over / size:.2f} {unit}"


def _dtype_note(use: MemoryUse) -> list[str]:
    return [] if use.dtype == "bfloat16" else wrap_closing_line("note", DTYPE_NOTE.format(dtype=use.dtype))
