"""Decides what a run does about steps whose gradients are not finite, or far larger than usual.

The optimizer leaves such a step out on the device, on all ranks alike, whatever the policy: masters and
checkpoints never get it. The policy says whether the run goes on.
"""

from __future__ import annotations

import math

from optimus.engine.config import RunPolicy, StepMetrics
from optimus.errors import UserError


class PolicyWatch:
    """Follows the steps of a run and says when it ends."""

    def __init__(self, policy: RunPolicy) -> None:
        self._policy, self._in_a_row, self._last_skipped, self._retried = policy, 0, 0, -1

    def wants_retry(self, metrics: StepMetrics) -> bool:
        """Tells if a step is trained again first: one that was not finite, and not tried before.

        What a fault of the machine has caused does not come back; nothing has changed, so the run goes on as
        if it had not happened.
        """
        is_new = bool(metrics.skipped_steps) and not _is_finite(metrics) and metrics.step != self._retried
        if is_new:
            self._retried = metrics.step
        return is_new

    def find_stop(self, metrics: StepMetrics) -> UserError | None:
        """Returns why the run ends with a step, the same on all ranks; None if it goes on."""
        if not metrics.skipped_steps:
            if metrics.step >= self._last_skipped:  # not one that is trained again after going back
                self._in_a_row = 0
            return None
        self._in_a_row += 1
        self._last_skipped = metrics.step
        if self._action(metrics) == "stop":
            return self._describe_spike(metrics) if _is_finite(metrics) else _describe_not_finite(metrics)
        if self._in_a_row >= self._policy.max_skipped:
            return UserError(
                field="run.max_skipped",
                value=self._policy.max_skipped,
                problem=f"steps in a row up to step {metrics.step} were left out, so training has stopped",
                hint="lower run.optimizer.lr, or look at the samples of these steps",
            )
        return None

    def wants_rewind(self, metrics: StepMetrics) -> bool:
        """Tells if the run goes back to its last checkpoint and leaves out the batch of a step."""
        return bool(metrics.skipped_steps) and self._action(metrics) == "rewind"

    def _action(self, metrics: StepMetrics) -> str:
        return self._policy.on_spike if _is_finite(metrics) else self._policy.on_nan

    def _describe_spike(self, metrics: StepMetrics) -> UserError:
        return UserError(
            field=f"gradient_norm of step {metrics.step}",
            value=metrics.gradient_norm,
            problem=f"exceeds its median {self._policy.spike_factor:g} times, so training has stopped",
            hint="lower run.optimizer.lr, raise run.spike_factor, or use on_spike: skip",
        )


def no_way_back(step: int) -> UserError:
    """Returns the error for a step that the run should go back from before it has saved a checkpoint."""
    return UserError(
        field=f"gradients of step {step}",
        problem="are not finite or a spike, and there is no checkpoint to go back to",
        hint="lower run.optimizer.lr, or save checkpoints more often",
    )


def _is_finite(metrics: StepMetrics) -> bool:
    return math.isfinite(metrics.loss) and math.isfinite(metrics.gradient_norm)


def _describe_not_finite(metrics: StepMetrics) -> UserError:
    name = "gradient_norm" if math.isfinite(metrics.loss) else "loss"
    return UserError(
        field=f"{name} of step {metrics.step}",
        value=getattr(metrics, name),
        problem="is not finite, so training has stopped",
        hint="lower run.optimizer.lr or run.optimizer.clip, use run.on_nan: skip, or look at the samples "
        "of this step",
    )
