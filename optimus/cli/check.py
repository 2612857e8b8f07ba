"""`optimus check`: verifies a plan file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from optimus.cli.console import print_result
from optimus.cli.flags import (
    NO,
    OK,
    JsonFlag,
    OnFlag,
    PlanArgument,
    describe_option,
    load_optional_profile,
    refuse_without_job,
)
from optimus.cli.text import align_columns, format_plan_title, format_time_gap, wrap_text

if TYPE_CHECKING:
    from optimus.ir.plan import Plan
    from optimus.verify.validator import CheckReport
    from optimus.verify.wait_graph import OpGrid

SCHEMA = "optimus.check/1"


@dataclass(frozen=True)
class CheckCommand:
    """Verify a plan by every rule and an independent replay."""

    plan: PlanArgument
    job: Annotated[
        str | None, describe_option(metavar="JOB", help="also check that the plan was made for this job")
    ] = None
    on: OnFlag = None
    profile: Annotated[
        Path | None,
        describe_option(metavar="FILE.yaml", help="with --job: also that it was made with this profile"),
    ] = None
    grid: Annotated[
        bool, describe_option(help="also show ops as cells, such as 2F0: chunk 2, forward, microbatch 0")
    ] = False
    json: JsonFlag = False

    def __call__(self) -> int:
        from optimus.ir.planfile import load_plan
        from optimus.verify.validator import check_plan

        refuse_without_job(self.job, on=self.on, profile=self.profile)
        plan = load_plan(self.plan)
        report = check_plan(plan)
        if self.job is not None:
            from optimus.ir.binding import list_bound_parts
            from optimus.job.read import find_job
            from optimus.planner.planning import add_binding_violations

            parts = list_bound_parts(find_job(self.job, self.on), load_optional_profile(self.profile))
            report = add_binding_violations(report, plan, parts)
        result, text = build_check_json(plan, report), _check_text(plan, report)
        if self.grid:
            from optimus.verify.wait_graph import build_op_grid

            grid = build_op_grid(plan, aligned=report.rules["coverage"] and report.rules["deadlock"])
            result["grid"] = [[None if op is None else str(op) for op in row] for row in grid]
            text = [*format_op_grid(grid), "", *text]
        print_result(result, text, as_json=self.json)
        return OK if report.ok else NO


def build_check_json(plan: Plan, report: CheckReport) -> dict[str, object]:
    """Returns the object of `optimus check --json`."""
    return {
        "schema": SCHEMA,
        "job": plan.name,
        "ok": report.ok,
        "rules": report.rules,
        "violations": [asdict(violation) for violation in report.violations],
        "more_violations": report.more,
        "step_s": report.step_s,
        "claimed_step_s": plan.claims.step_s,
        "claimed_lagged_s": plan.claims.lagged_s,
        "single_connection_holds": report.single_connection_holds,
        "lines": sum(len(program) for program in plan.programs),
        "device_classes": len(plan.programs),
        "gpus": plan.ranks.world,
    }


def _check_text(plan: Plan, report: CheckReport) -> list[str]:
    """Returns one line per rule, then the violations."""
    from optimus.verify.validator import RULES

    lines = sum(len(program) for program in plan.programs)
    size = f"{len(plan.programs)} device classes, {lines:,} lines"
    text = [*format_plan_title(plan, f"strategy {plan.strategy}", size), ""]
    for rule, holds in report.rules.items():
        text += wrap_text(f"  {'ok ' if holds else 'NO '} {rule}", RULES[rule], indent=16)
    text.append("")
    if report.step_s is not None:
        claimed = plan.claims.step_s
        gap = format_time_gap(report.step_s, claimed)
        text += wrap_text("", f"replayed {report.step_s:.6f} s, claimed {claimed:.6f} s ({gap})", indent=0)
    if report.rules["coverage"]:
        queue = "one queue for all communication (CUDA_DEVICE_MAX_CONNECTIONS=1): "
        queue += "holds" if report.single_connection_holds else "does not hold"
        text += wrap_text("", queue, indent=0)
    for violation in report.violations:
        text += wrap_text(f"  {violation.rule}", f"{violation.where}: {violation.problem}", indent=12)
    for rule, count in report.more.items():
        text.append(f"  {rule:<10}and {count} more")
    broken = sum(not holds for holds in report.rules.values())
    text.append("ok" if report.ok else f"{broken} of {len(report.rules)} rules do not hold")
    return text


def format_op_grid(grid: OpGrid) -> list[str]:
    """Returns one line per step and one column per device class."""
    header = ["step", *(f"class {device}" for device in range(len(grid[0]) if grid else 0))]
    cells = [["." if op is None else str(op) for op in row] for row in grid]
    return align_columns(header, [[str(step), *row] for step, row in enumerate(cells)])
