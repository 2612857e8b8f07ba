"""A bench's result as text for people and as an object for tools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from optimus.cli.text import columns, wrap
from optimus.render.units import seconds

SCHEMA = "optimus.bench/1"


def bench_json(result: Any) -> dict[str, Any]:
    """The object of `python -m benchmarks ... --json`; what a bench does not find out is left out."""
    return {
        "schema": SCHEMA,
        "bench": result.bench,
        "ok": result.ok,
        "ours": result.ours,
        "variants": {
            name: {key: value for key, value in asdict(variant).items() if value is not None}
            for name, variant in result.variants.items()
        },
        "bound": result.bound,
        "bound_s": result.bound_s,
        "ours_over_bound": result.ours_over_bound,
        "problems": list(result.problems),
        "notes": list(result.notes),
    }


def bench_text(result: Any) -> list[str]:
    """A line per variant, the shortest step first, then the bound, what is wrong, and notes."""
    return [*variants_text(result), *closing_text(result)]


def variants_text(result: Any) -> list[str]:
    """A line per variant, and the bound."""
    variants = sorted(result.variants.items(), key=lambda item: item[1].step_s)
    shown = [
        (header, cell) for header, cell in _COLUMNS.items() if any(cell(variant) for _, variant in variants)
    ]
    table = [[name, *(cell(variant) for _, cell in shown)] for name, variant in variants]
    lines = columns(["variant", *(header for header, _ in shown)], table)
    bound = f"{seconds(result.bound_s)} s, {result.bound}"
    return [*lines, "", *wrap("bound", f"{bound}; ours takes {result.ours_over_bound:.3f} of it")]


def closing_text(result: Any) -> list[str]:
    """What is wrong, and notes."""
    lines: list[str] = []
    for problem in result.problems:
        lines += wrap("NO", problem)
    for note in result.notes:
        lines += wrap("note", note)
    return lines


def _interval(variant: Any) -> str:
    if variant.over_ours_low is None or variant.over_ours_high is None:
        return ""
    return f"{variant.over_ours_low:.3f} to {variant.over_ours_high:.3f}"


def _range(variant: Any) -> str:
    if variant.step_low_s is None or variant.step_high_s is None:
        return ""
    return f"{seconds(variant.step_low_s)} to {seconds(variant.step_high_s)}"


_COLUMNS: dict[str, Callable[[Any], str]] = {
    "step s": lambda variant: seconds(variant.step_s),
    "over ours": lambda variant: f"{variant.over_ours:.3f}",
    "95 % interval": _interval,
    "range s": _range,
    "replayed s": lambda variant: "" if variant.predicted_s is None else seconds(variant.predicted_s),
    "error": lambda variant: "" if variant.error is None else f"{100 * variant.error:+.2f} %",
    "steps": lambda variant: "" if variant.steps is None else str(variant.steps),
    "disturbed": lambda variant: "" if variant.disturbed is None else str(variant.disturbed),
}
