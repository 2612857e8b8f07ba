"""The end of a training run as text for people and as an object for tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimus.ir.plan import Plan
from optimus.job.job import Job

FAR = 1.25  # times the prediction, or a part of it
UNCALIBRATED = (
    "the plan was not made with a profile of this machine, so its predicted step is the formula's; "
    "`optimus profile {job}` gives one"
)

WIDER = "the run computed in {dtype}, and plans count bfloat16: compare with `dtype: bfloat16` under `run:`"


def training_json(summary: Any) -> dict[str, Any]:
    """The object of `optimus train --json`."""
    return {
        "schema": "optimus.train/1",
        "steps": summary.steps,
        "final_loss": summary.final_loss,
        "step_s_median": summary.step_s_median,
        "device": summary.device,
        **({} if summary.memory is None else {"memory": memory_json(summary.memory)}),
    }


def memory_json(use: Any) -> dict[str, Any]:
    """One rank's bytes: planned, and counted in a step."""
    return {
        "rank": use.rank,
        "planned_bytes": {**use.planned, "peak": use.planned_peak},
        "counted_bytes": {**use.counted, "peak": use.counted_peak},
        "lines_over": use.lines_over,
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
    lines += [] if summary.memory is None else memory_text(summary.memory)
    if not is_calibrated(plan) and not 1 / FAR < measured / claim < FAR:
        lines.append(f"note   {UNCALIBRATED.format(job=job.name)}")
    if summary.device == "cuda":
        lines.append("note   the GPU path is written for NCCL's rules; no run on GPUs is recorded yet")
    return [*lines, f"wrote {run_dir}/metrics.jsonl and plan.json"]


def memory_text(use: Any) -> list[str]:
    """A table of one rank's bytes: planned, and counted in a step."""
    rows = [(name, use.planned[name], use.counted[name]) for name in use.planned]
    rows.append(("peak", use.planned_peak, use.counted_peak))
    names = [name.replace("_", " ").replace("llm", "LLM") for name, _, _ in rows]
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
