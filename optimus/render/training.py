"""The end of a training run as text for people and as an object for tools."""

from __future__ import annotations

from typing import Any

from optimus.job.job import Job
from optimus.program.plan import Plan


def training_json(summary: Any) -> dict[str, Any]:
    """The object of `optimus train --json`."""
    return {
        "schema": "optimus.train/1",
        "steps": summary.steps,
        "final_loss": summary.final_loss,
        "step_s_median": summary.step_s_median,
        "device": summary.device,
    }


def training_text(summary: Any, job: Job, plan: Plan) -> list[str]:
    """Steps, loss, and the measured step beside the predicted one."""
    if not summary.steps:
        return ["no steps were asked for"]
    claim, measured = plan.claims.step_s, summary.step_s_median
    tokens = job.workload.sequences_per_step * job.workload.sequence_tokens / measured
    compared = f"{measured / claim:.2f} of the predicted {claim:.3g} s"
    lines = [
        f"{summary.steps} steps   loss {summary.final_loss:.4f}",
        f"median step {measured:.3g} s ({compared})   {tokens:,.0f} tokens/s",
    ]
    if summary.device == "cuda":
        lines.append("note   the GPU path is written for NCCL's rules; no run on GPUs is recorded yet")
    return lines
