"""The end of a training run as text for people and as an object for tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimus.job.job import Job
from optimus.program.plan import Plan

FAR = 1.25  # times the prediction, or a part of it
UNCALIBRATED = (
    "the plan was not made with a profile of this machine, so its predicted step is the formula's; "
    "`optimus profile {job}` gives one"
)


def training_json(summary: Any) -> dict[str, Any]:
    """The object of `optimus train --json`."""
    return {
        "schema": "optimus.train/1",
        "steps": summary.steps,
        "final_loss": summary.final_loss,
        "step_s_median": summary.step_s_median,
        "device": summary.device,
    }


def is_calibrated(plan: Plan) -> bool:
    """Whether a plan was priced by what a machine measured."""
    return bool(plan.bound_to.get("profile", {}).get("kernels"))


def prediction(plan: Plan) -> str:
    """The step that a plan claims, before it runs."""
    how = "by the profile" if is_calibrated(plan) else "uncalibrated"
    return f"predicted step {plan.claims.step_s:.3g} s ({how})"


def training_text(summary: Any, job: Job, plan: Plan, run_dir: Path) -> list[str]:
    """Steps, loss, the measured step beside the predicted one, and what was written."""
    if not summary.steps:
        return ["no steps were asked for"]
    claim, measured = plan.claims.step_s, summary.step_s_median
    tokens = job.workload.sequences_per_step * job.workload.sequence_tokens / measured
    compared = f"{measured / claim:.2g} times the predicted {claim:.3g} s"
    lines = [
        f"{summary.steps} {'step' if summary.steps == 1 else 'steps'}   loss {summary.final_loss:.4f}",
        f"median step {measured:.3g} s, {compared}   {tokens:,.0f} tokens/s",
    ]
    if not is_calibrated(plan) and not 1 / FAR < measured / claim < FAR:
        lines.append(f"note   {UNCALIBRATED.format(job=job.name)}")
    if summary.device == "cuda":
        lines.append("note   the GPU path is written for NCCL's rules; no run on GPUs is recorded yet")
    return [*lines, f"wrote {run_dir}/metrics.jsonl and plan.json"]
