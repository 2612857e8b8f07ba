"""The difference of two plans as text for people and as an object for tools."""

from __future__ import annotations

from dataclasses import asdict

from optimus.ir.diff import Change, Difference
from optimus.render.text import columns, gigabytes, seconds, wrap

SCHEMA = "optimus.diff/1"


def difference_json(difference: Difference) -> dict[str, object]:
    """The object of `optimus diff --json`."""
    return {
        "schema": SCHEMA,
        "same": difference.same,
        "names": list(difference.names),
        "step_s": {**_pair(difference.step_s), "ratio": difference.ratio},
        "peak_bytes": _pair(difference.peak_bytes),
        "layouts": [asdict(change) for change in difference.layouts],
        "settings": [asdict(change) for change in difference.settings],
        "fields": list(difference.fields),
        "lines": {
            **_pair(difference.lines),
            "only_a": difference.only_a,
            "only_b": difference.only_b,
            "moved": difference.moved,
        },
        "first": None if difference.first is None else asdict(difference.first),
    }


def _pair(values: tuple[float, float]) -> dict[str, float]:
    return {"a": values[0], "b": values[1]}


def difference_text(difference: Difference) -> list[str]:
    """A table of what differs, how many lines came, went or moved, and the first of them."""
    if difference.same:
        return ["The plans are the same."]
    (step_a, step_b), (peak_a, peak_b) = difference.step_s, difference.peak_bytes
    ratio = "" if difference.ratio is None else f"{difference.ratio:.3f}x"
    rows = [
        ["step s", seconds(step_a), seconds(step_b), ratio],
        ["peak GB", gigabytes(peak_a), gigabytes(peak_b), f"{(peak_b - peak_a) / 1e9:+.1f}"],
        *(_row(f"layout {change.field}", change) for change in difference.layouts),
        *(_row(change.field, change) for change in difference.settings),
    ]
    lines = columns(["", "A", "B", ""], rows)
    if difference.fields:
        lines += ["", *wrap("  Header fields that differ:", ", ".join(difference.fields), indent=29)]
    lines += ["", *_lines(difference)]
    return lines


def _row(label: str, change: Change) -> list[str]:
    return [label, change.a or "-", change.b or "-", ""]


def _lines(difference: Difference) -> list[str]:
    first = difference.first
    if first is None:
        return [f"  All {difference.lines[0]:,} lines are the same."]
    a, b = difference.lines
    only = f"{difference.only_a:,} only in A, {difference.only_b:,} only in B"
    return [
        f"  Lines: {a:,} in A, {b:,} in B; {only}, {difference.moved:,} moved.",
        f"  The first that differs is line {first.line} of class {first.device}:",
        f"    A  {first.a or '(the program has ended)'}",
        f"    B  {first.b or '(the program has ended)'}",
    ]
