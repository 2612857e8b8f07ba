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
        self._policy, self._in_a_row = policy, 0

    def find_stop(self, metrics: StepMetrics) -> UserError | None:
        """Returns why the run ends with a step, the same on all ranks; None if it goes on."""
        if not metrics.skipped_steps:
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        is_finite = math.isfinite(metrics.loss) and math.isfinite(metrics.gradient_norm)
        if (self._policy.on_spike if is_finite else self._policy.on_nan) == "stop":
            return self._describe_spike(metrics) if is_finite else _describe_not_finite(metrics)
        if self._in_a_row >= self._policy.max_skipped:
            return UserError(
                field="run.max_skipped",
                value=self._policy.max_skipped,
                problem=f"steps in a row up to step {metrics.step} were left out, so training has stopped",
                hint="lower run.optimizer.lr, or look at the samples of these steps",
            )
        return None

    def _describe_spike(self, metrics: StepMetrics) -> UserError:
        return UserError(
            field=f"gradient_norm of step {metrics.step}",
            value=metrics.gradient_norm,
            problem=f"exceeds its median {self._policy.spike_factor:g} times, so training has stopped",
            hint="lower run.optimizer.lr, raise run.spike_factor, or use on_spike: skip",
        )


def _describe_not_finite(metrics: StepMetrics) -> UserError:
    name = "gradient_norm" if math.isfinite(metrics.loss) else "loss"
    return UserError(
        field=f"{name} of step {metrics.step}",
        value=getattr(metrics, name),
        problem="is not finite, so training has stopped",
        hint="lower run.optimizer.lr or run.optimizer.clip, use run.on_nan: skip, or look at the samples "
        "of this step",
    )
