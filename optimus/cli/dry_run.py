"""Formats a dry run of one rank, and the planned and counted memory of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from optimus.cli.text import columns, wrap
from optimus.engine.config import MemoryUse
from optimus.ir.plan import ALL, Plan
from optimus.render.units import gigabytes

if TYPE_CHECKING:
    from optimus.engine.dry_run import DryRun

SCHEMA = "optimus.dry-run/1"
ALONE = "one step of this rank by itself: shapes without numbers, messages that end at once"
MIN_GB_BYTES = 10e9  # a peak from which memory is shown in GB instead of MB
WIDER = "the run computed in {dtype}, and plans count bfloat16: compare with `dtype: bfloat16` under `run:`"


def dry_run_json(run: DryRun) -> dict[str, Any]:
    """Returns the object of `optimus train --dry-run --json`."""
    return {
        "schema": SCHEMA,
        "job": run.job,
        "rank": run.rank,
        "world": run.world,
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
            **memory_json(run.memory),
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


def dry_run_text(run: DryRun, plan: Plan) -> list[str]:
    """Returns the rank's place, program, communicators, parameters, messages and memory."""
    return [
        f"{run.job}   rank {run.rank} of {run.world}",
        *wrap("dry run", ALONE),
        *wrap("place", f"device class {run.device_class} ({run.class_name}); {_places(run, plan)}"),
        *wrap("program", _program(run)),
        *_slots(run, plan),
        *wrap("communicators", f"{len(run.communicators)} of several ranks; {_calls(run)}"),
        "",
        *columns(("communicator", "ranks", "first", "last"), list(_communicators(run))),
        "",
        *columns(("module", "parameters", "GB"), list(_parameters(run))),
        *_travels(run),
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
    return f"{lines:,} lines, all played; {'; '.join(parts)}"


def _calls(run: DryRun) -> str:
    return f"{run.groups_made} calls make them, on every rank and in a world of any size"


def _slots(run: DryRun, plan: Plan) -> list[str]:
    if plan.ranks.llm.tp == 1:
        return []
    inside, phases = run.encoder_phases_in_slots, run.encoder_phases
    return wrap(
        "slots", f"{inside:,} of {phases:,} compute phases of encoders run inside the LLM's collectives"
    )


def _communicators(run: DryRun) -> Iterator[tuple[str, ...]]:
    for group in run.communicators:
        yield group.axis, f"{group.size:,}", str(group.first), str(group.last)


def _parameters(run: DryRun) -> Iterator[tuple[str, ...]]:
    for name, held in run.parameters.items():
        yield name, f"{held.count:,}", f"{held.bytes / 1e9:.2f}"


def _travels(run: DryRun) -> list[str]:
    rows = [
        (
            f"{message.module}.{message.verb}",
            f"{message.times:,}",
            f"{' x '.join(map(str, message.shape))} {message.dtype}",
            f"{message.bytes / 1e6:.2f}",
        )
        for message in run.travels
    ]
    return ["", *columns(("travels", "times", "shape", "MB each"), rows)] if rows else []


def _memory(run: DryRun) -> list[str]:
    use = run.memory
    unit, size = ("GB", 1e9) if run.memory.planned_peak >= MIN_GB_BYTES else ("MB", 1e6)

    def row(name: str, planned: int, counted: int) -> tuple[str, ...]:
        apart = f"{planned / counted - 1:+.1%}" if counted else ""
        return _name(name), f"{planned / size:.2f}", f"{counted / size:.2f}", apart

    rows = [row(name, planned, use.counted[name]) for name, planned in use.planned.items()]
    rows.append(row("peak", use.planned_peak, use.counted_peak))
    rows += [(name, f"{planned / size:.2f}", "-", "") for name, planned in run.planned_only.items()]
    over = f"{use.lines_over:,} lines exceed the plan's replay, by {use.most_over / size:.2f} {unit} at most"
    capacity = f"{gigabytes(run.needed_bytes)} of {gigabytes(run.capacity_bytes)} GB"
    return [
        *columns((f"memory {unit}", "planned", "counted", "plan over count"), rows),
        "",
        *wrap("peak", f"while {run.peak_at} runs{f'; {over}' if use.lines_over else ''}"),
        *wrap("fits" if run.fits else "does not fit", f"{capacity}, with communicators and reserve"),
        *([] if use.dtype == "bfloat16" else wrap("note", WIDER.format(dtype=use.dtype))),
    ]


def _name(component: str) -> str:
    return component.replace("_", " ").replace("llm", "LLM")


def memory_json(use: MemoryUse) -> dict[str, Any]:
    """Returns one rank's bytes: planned, and counted in a step."""
    return {
        "rank": use.rank,
        "planned_bytes": {**use.planned, "peak": use.planned_peak},
        "counted_bytes": {**use.counted, "peak": use.counted_peak},
        "lines_over": use.lines_over,
    }


def memory_text(use: MemoryUse) -> list[str]:
    """Returns a table of one rank's bytes: planned, and counted in a step."""
    rows = [(name, use.planned[name], use.counted[name]) for name in use.planned]
    rows.append(("peak", use.planned_peak, use.counted_peak))
    names = [_name(name) for name, _, _ in rows]
    wide = max(map(len, names))
    over = f"; in {use.lines_over} lines there was more than planned" if use.lines_over else ""
    share = f"the plan is {abs(use.error):.1%} {'above' if use.error >= 0 else 'below'} the count{over}"
    wider = [] if use.dtype == "bfloat16" else [f"note   {WIDER.format(dtype=use.dtype)}"]
    return [
        f"memory of rank {use.rank}, which held most   {share}",
        *(
            f"  {name:{wide}}  planned {planned / 1e6:10,.1f} MB   counted {counted / 1e6:10,.1f} MB"
            for name, (_, planned, counted) in zip(names, rows, strict=True)
        ),
        *wider,
    ]
