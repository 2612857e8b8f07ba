"""Formats what a training run did, as text and as JSON."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimus.cli.text import wrap_closing_line, wrap_text
from optimus.cli.train_inputs import build_data_json
from optimus.errors import show_value

if TYPE_CHECKING:
    from optimus.data.sample_index import SampleIndex
    from optimus.engine.config import TrainingSummary
    from optimus.ir.plan import Plan
    from optimus.job.job import Job

MAX_STEP_RATIO = 1.25  # measured over predicted, or its inverse; beyond it a profile is recommended
UNCALIBRATED = (
    "the plan was made without a profile of this machine, so its predicted step comes from the analytic cost "
    "model; `optimus profile {job}` measures one"
)
NOT_RUN_ON_GPUS = "the GPU path follows NCCL's rules, but no run on GPUs is recorded yet"


def build_train_json(summary: TrainingSummary, index: SampleIndex | None) -> dict[str, Any]:
    """Returns the object of `optimus train --json`; `index` is that of the data, if they are files."""
    from optimus.cli.dry_run import build_memory_json

    return {
        "schema": "optimus.train/1",
        "steps": summary.steps,
        "final_loss": summary.final_loss,
        "step_s_median": summary.step_s_median,
        "device": summary.device,
        "waiting_steps": summary.waiting_steps,
        "skipped_samples": summary.skipped_samples,
        "skipped_steps": summary.skipped_steps,
        "eval_loss": summary.eval_loss,
        "skipped": list(summary.skipped),
        "stopped_by": summary.stopped_by or None,
        "checkpoint": summary.checkpoint or None,
        "goodput": summary.goodput,
        **({} if index is None else {"data": build_data_json(index)}),
        **({} if summary.memory is None else {"memory": build_memory_json(summary.memory)}),
    }


def _is_calibrated(plan: Plan) -> bool:
    """Tells whether a plan was made with a profile."""
    return bool(plan.bound_to.get("profile", {}).get("kernels"))


def format_predicted_step(plan: Plan) -> str:
    """Formats the step that a plan claims, before it runs."""
    how = "by the profile" if _is_calibrated(plan) else "uncalibrated"
    return f"{plan.strategy}; predicted step {plan.claims.step_s:.3g} s ({how})"


def format_train_summary(
    summary: TrainingSummary, job: Job, plan: Plan, argument: str, run_dir: Path, save: Path | None
) -> list[str]:
    """Returns steps, loss, measured and predicted step, memory, and the files written."""
    from optimus.cli.dry_run import format_memory
    from optimus.engine.checkpoint_folder import CHECKPOINTS

    if summary.step_s_median is None:
        return ["0 steps"] if save is None else ["0 steps", *wrap_closing_line("saved", str(save))]
    claim, measured = plan.claims.step_s, summary.step_s_median
    tokens = job.workload.sequences_per_step * job.workload.sequence_tokens / measured
    count = "1 step" if summary.steps == 1 else f"{summary.steps} steps"
    ratio = f"{measured / claim:.2g}" if measured < 100 * claim else f"{measured / claim:,.0f}"
    compared = f"{ratio} times the predicted {claim:.3g} s"
    loss = "not finite" if summary.final_loss is None else f"{summary.final_loss:.4f}"
    left_out = f"; {summary.skipped_steps} left out" if summary.skipped_steps else ""
    held_out = "" if summary.eval_loss is None else f"; {summary.eval_loss:.4f} on held-out batches"
    lines = wrap_text("loss", f"{loss} after {count}{left_out}{held_out}")
    lines += wrap_text("step", f"median {measured:.3g} s, {compared}; {tokens:,.0f} tokens/s")
    if job.data is not None:
        lines += wrap_text("waited", f"for data in {summary.waiting_steps} of {count}")
    if summary.skipped:
        named = "; ".join(map(show_value, summary.skipped))
        skipped = max(summary.skipped_samples, len(summary.skipped))  # an encoder's rank may name more
        samples = "1 sample" if skipped == 1 else f"{skipped:,} samples"
        broken = f"{samples} with broken files trained nothing: {named}"
        lines += wrap_closing_line("note", broken)
    lines += [] if summary.memory is None else format_memory(summary.memory)
    if not _is_calibrated(plan) and not 1 / MAX_STEP_RATIO < measured / claim < MAX_STEP_RATIO:
        lines += wrap_closing_line("note", UNCALIBRATED.format(job=argument))
    if summary.device == "cuda":
        lines += wrap_closing_line("note", NOT_RUN_ON_GPUS)
    if summary.stopped_by:
        name = signal.Signals(summary.stopped_by).name
        lines += wrap_closing_line("note", f"{name} has stopped the run; --resume goes on with it")
    if summary.checkpoint:
        saved = run_dir / CHECKPOINTS / Path(summary.checkpoint).name
        lines += wrap_closing_line("saved", f"{saved}, a checkpoint")
    if save is not None:
        lines += wrap_closing_line("saved", f"{save}, weights and configuration")
    return [*lines, *wrap_closing_line("wrote", f"{run_dir}/metrics.jsonl and plan.json")]
