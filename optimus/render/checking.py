"""The verdict of a check, as text for people and as an object for tools."""

from __future__ import annotations

from dataclasses import asdict

from optimus.ir.plan import Plan
from optimus.render.text import apart, wrap
from optimus.verify.validator import Report

SCHEMA = "optimus.check/1"
WHAT = {
    "coverage": "every phase of every op exactly once, on the rank that owns it",
    "data": "nothing runs before what it needs, nothing after the optimizer",
    "pairs": "both ends of every pair send and receive in the same order",
    "deadlock": "no circle of waits, with blocking sends and with one FIFO per communicator",
    "groups": "collectives in the same order on all ranks that share them",
    "memory": "within the GPU at every line, and back to nothing at the end",
    "lanes": "one op at a time per lane, encoder work where the plan says",
    "claim": "an independent replay takes the claimed time",
    "binding": "model, cluster, workload and profile are those of the hashes",
}


def check_json(plan: Plan, report: Report) -> dict[str, object]:
    """The object of `optimus check --json`."""
    return {
        "schema": SCHEMA,
        "job": plan.name,
        "ok": report.ok,
        "rules": report.rules,
        "violations": [asdict(violation) for violation in report.violations],
        "more_violations": report.more,
        "step_s": report.step_s,
        "claimed_step_s": plan.claims.step_s,
        "single_connection_holds": report.single_connection_holds,
        "lines": sum(len(program) for program in plan.programs),
        "device_classes": len(plan.programs),
        "gpus": plan.ranks.world,
    }


def check_text(plan: Plan, report: Report) -> list[str]:
    """One line per rule, then what breaks it."""
    lines = sum(len(program) for program in plan.programs)
    size = f"{plan.ranks.world} GPUs, {len(plan.programs)} device classes, {lines:,} lines"
    found = [f"{plan.name}   strategy {plan.strategy}   {size}", ""]
    found += [f"  {'ok ' if holds else 'NO '} {rule:<10}{WHAT[rule]}" for rule, holds in report.rules.items()]
    found.append("")
    if report.step_s is not None:
        claimed = plan.claims.step_s
        found.append(
            f"replayed {report.step_s:.6f} s, claimed {claimed:.6f} s ({apart(report.step_s, claimed)})"
        )
    if report.rules["coverage"]:
        holds = "holds" if report.single_connection_holds else "does not hold"
        holds += "" if plan.single_connection else " (the plan does not ask for it)"
        found.append(f"one queue for all communication (CUDA_DEVICE_MAX_CONNECTIONS=1): {holds}")
    for violation in report.violations:
        found += wrap(f"  {violation.rule}", f"{violation.where}: {violation.problem}", indent=12)
    for rule, count in report.more.items():
        found.append(f"  {rule:<10}and {count} more")
    broken = sum(not holds for holds in report.rules.values())
    found.append("ok" if report.ok else f"{broken} of {len(report.rules)} rules do not hold")
    return found
