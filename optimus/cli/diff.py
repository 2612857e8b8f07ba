"""`optimus diff`: compares two plan files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from optimus.cli.console import print_result
from optimus.cli.flags import NO, OK, JsonFlag, describe_option
from optimus.cli.text import align_columns, wrap_remark, wrap_text
from optimus.render.format_numbers import format_gigabytes, format_seconds

if TYPE_CHECKING:
    from optimus.ir.plan_diff import PlanDifference, SettingChange

SCHEMA = "optimus.diff/1"


@dataclass(frozen=True)
class DiffCommand:
    """Compare two plans: layouts, step, memory, and the first op that differs."""

    a: Annotated[tyro.conf.Positional[Path], describe_option(metavar="A", help="a plan file")]
    b: Annotated[tyro.conf.Positional[Path], describe_option(metavar="B", help="another")]
    json: JsonFlag = False

    def __call__(self) -> int:
        from optimus.ir.plan_diff import compare_plans
        from optimus.ir.planfile import load_plan
        from optimus.verify.validator import require_proven_plan

        a, b = load_plan(self.a), load_plan(self.b)
        for plan, file in ((a, self.a), (b, self.b)):
            require_proven_plan(plan, file=str(file))
        difference = compare_plans(a, b)
        print_result(build_diff_json(difference), format_diff(difference), as_json=self.json)
        return OK if difference.same else NO


def build_diff_json(difference: PlanDifference) -> dict[str, object]:
    """Returns the object of `optimus diff --json`."""
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


def format_diff(difference: PlanDifference) -> list[str]:
    """Returns a table of differences, counts of added, removed and moved lines, and the first of them."""
    if difference.same:
        return ["The plans are the same."]
    (step_a, step_b), (peak_a, peak_b) = difference.step_s, difference.peak_bytes
    ratio = "" if difference.ratio is None else f"{difference.ratio:.3f}x"
    rows = [
        ["step s", format_seconds(step_a), format_seconds(step_b), ratio],
        ["peak GB", format_gigabytes(peak_a), format_gigabytes(peak_b), f"{(peak_b - peak_a) / 1e9:+.1f}"],
        *(_row(f"layout {change.field}", change) for change in difference.layouts),
        *(_row(change.field, change) for change in difference.settings),
    ]
    lines = align_columns(["", "A", "B", ""], rows)
    if difference.fields:
        lines += ["", *wrap_remark(f"Header fields that differ: {', '.join(difference.fields)}.")]
    return [*lines, "", *_lines(difference)]


def _row(label: str, change: SettingChange) -> list[str]:
    return [label, change.a or "-", change.b or "-", ""]


def _lines(difference: PlanDifference) -> list[str]:
    first = difference.first
    if first is None:
        return wrap_remark(f"All {difference.lines[0]:,} lines are the same.")
    a, b = difference.lines
    only = f"{difference.only_a:,} only in A, {difference.only_b:,} only in B"
    return [
        *wrap_remark(f"Lines: {a:,} in A, {b:,} in B; {only}, {difference.moved:,} moved."),
        *wrap_remark(f"The first that differs is line {first.line} of device class {first.device}:"),
        *wrap_text("    A", first.a or "(end of the program)", indent=7),
        *wrap_text("    B", first.b or "(end of the program)", indent=7),
    ]
