"""A dry run of one rank as text for people and as an object for tools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from optimus.ir.plan import ALL, Plan
from optimus.render.text import columns, gigabytes, wrap
from optimus.render.training import WIDER, memory_json

SCHEMA = "optimus.dry-run/1"
ALONE = "one step of this rank by itself: shapes without numbers, messages that end at once"
LARGE_BYTES = 10e9  # from here on in gigabytes


def dry_run_json(found: Any) -> dict[str, Any]:
    """The object of `optimus train --dry-run --json`."""
    return {
        "schema": SCHEMA,
        "job": found.job,
        "rank": found.rank,
        "world": found.world,
        "device_class": found.device_class,
        "places": {
            name: {"stage": place.pp, "replica": place.dp, "cp": place.cp, "tp": place.tp}
            for name, place in found.places.items()
        },
        "communicators": [asdict(each) for each in found.communicators],
        "groups_made": found.groups_made,
        "program": {
            "lines": sum(sum(verbs.values()) for verbs in found.program.values()),
            "actions": found.actions,
            "verbs": {name: dict(verbs) for name, verbs in found.program.items()},
            "encoder_phases": found.encoder_phases,
            "encoder_phases_in_slots": found.encoder_phases_in_slots,
        },
        "travels": [asdict(each) for each in found.travels],
        "parameters": {name: asdict(held) for name, held in found.parameters.items()},
        "memory": {
            **memory_json(found.memory),
            "planned_only_bytes": dict(found.planned_only),
            "dtype": found.memory.dtype,
            "error": found.memory.error,
            "most_over_bytes": found.memory.most_over,
            "peak_at": found.peak_at,
            "needed_bytes": found.needed_bytes,
            "capacity_bytes": found.capacity_bytes,
        },
        "fits": found.fits,
    }


def dry_run_text(found: Any, plan: Plan) -> list[str]:
    """Where the rank stands, whom it talks to, what it plays, and what that takes."""
    return [
        f"{found.job}   rank {found.rank} of {found.world}",
        *wrap("dry run", ALONE),
        *wrap("place", f"device class {found.device_class} ({found.class_name}); {_places(found, plan)}"),
        *wrap("program", _program(found)),
        *_slots(found, plan),
        *wrap("communicators", f"{len(found.communicators)} of several ranks; {_calls(found)}"),
        "",
        *columns(("communicator", "ranks", "first", "last"), list(_communicators(found))),
        "",
        *columns(("module", "parameters", "GB"), list(_parameters(found))),
        *_travels(found),
        "",
        *_memory(found),
    ]


def _places(found: Any, plan: Plan) -> str:
    parts = []
    for name, place in found.places.items():
        layout = plan.modules[name].layout
        parts.append(
            f"{name} stage {place.pp} of {layout.pp}, replica {place.dp} of {layout.dp}, "
            f"tp {place.tp} of {layout.tp}"
        )
    return "; ".join(parts)


def _program(found: Any) -> str:
    lines = sum(sum(verbs.values()) for verbs in found.program.values())
    parts = [
        f"{name} {', '.join(f'{verb} {times:,}' for verb, times in verbs.items())}"
        for name, verbs in found.program.items()
        if name != ALL
    ]
    return f"{lines:,} lines, all played; {'; '.join(parts)}"


def _calls(found: Any) -> str:
    return f"{found.groups_made} calls make them, on every rank and in a world of any size"


def _slots(found: Any, plan: Plan) -> list[str]:
    if plan.ranks.llm.tp == 1:
        return []
    inside, phases = found.encoder_phases_in_slots, found.encoder_phases
    return wrap(
        "slots", f"{inside:,} of {phases:,} compute phases of encoders run inside the LLM's collectives"
    )


def _communicators(found: Any) -> Iterator[tuple[str, ...]]:
    for each in found.communicators:
        yield each.axis, f"{each.size:,}", str(each.first), str(each.last)


def _parameters(found: Any) -> Iterator[tuple[str, ...]]:
    for name, held in found.parameters.items():
        yield name, f"{held.count:,}", f"{held.bytes / 1e9:.2f}"


def _travels(found: Any) -> list[str]:
    rows = [
        (
            f"{each.module}.{each.verb}",
            f"{each.times:,}",
            f"{' x '.join(map(str, each.shape))} {each.dtype}",
            f"{each.bytes / 1e6:.2f}",
        )
        for each in found.travels
    ]
    return ["", *columns(("travels", "times", "shape", "MB each"), rows)] if rows else []


def _memory(found: Any) -> list[str]:
    use = found.memory
    unit, size = ("GB", 1e9) if found.memory.planned_peak >= LARGE_BYTES else ("MB", 1e6)

    def row(name: str, planned: int, counted: int) -> tuple[str, ...]:
        apart = f"{planned / counted - 1:+.1%}" if counted else ""
        return _name(name), f"{planned / size:.2f}", f"{counted / size:.2f}", apart

    rows = [row(name, planned, use.counted[name]) for name, planned in use.planned.items()]
    rows.append(row("peak", use.planned_peak, use.counted_peak))
    rows += [(name, f"{planned / size:.2f}", "-", "") for name, planned in found.planned_only.items()]
    over = f"{use.lines_over:,} lines exceed the plan's replay, by {use.most_over / size:.2f} {unit} at most"
    capacity = f"{gigabytes(found.needed_bytes)} of {gigabytes(found.capacity_bytes)} GB"
    return [
        *columns((f"memory {unit}", "planned", "counted", "plan over count"), rows),
        "",
        *wrap("peak", f"while {found.peak_at} runs{f'; {over}' if use.lines_over else ''}"),
        *wrap("fits" if found.fits else "does not fit", f"{capacity}, with communicators and reserve"),
        *([] if use.dtype == "bfloat16" else wrap("note", WIDER.format(dtype=use.dtype))),
    ]


def _name(component: str) -> str:
    return component.replace("_", " ").replace("llm", "LLM")
