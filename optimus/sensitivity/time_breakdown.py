"""Breaks the step of the mean GPU down by what the time is spent on, and describes how two steps differ."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor, log10

import numpy as np

from optimus.ir.op import Lane, OpKind
from optimus.ir.ranks import LLM
from optimus.planner.plan_replay import ReplayedPlan

# Labels of the parts in the order of tables; bubbles last.
LABELS = {
    "llm_compute": "LLM compute",
    "llm_recompute": "LLM recomputation",
    "encoder_compute": "encoder compute",
    "encoder_recompute": "encoder recomputation",
    "optimizer": "optimizer",
    "pp_warmup": "pipeline warm-up",
    "pp_cooldown": "pipeline cool-down",
    "pp_other": "other pipeline waits",
    "tp": "tensor-parallel waits",
    "dp_all_gather": "waits for parameters (DP)",
    "dp_reduce_scatter": "waits for gradients (DP)",
}
# Causes that are summed in a sentence; all others keep their labels.
MERGED_LABELS = {
    "pp_warmup": "pipeline warm-up and cool-down",
    "pp_cooldown": "pipeline warm-up and cool-down",
    "tp": "tensor-parallel waits",
    "dp_all_gather": "data-parallel waits",
    "dp_reduce_scatter": "data-parallel waits",
}
MIN_SHOWN_SHARE = 0.05  # of the largest part
MIN_DIGITS, MAX_DIGITS, EQUAL_STEP_DIGITS = 2, 6, 3
BUSY = tuple(LABELS)[:5]
_LLM, _LLM_RECOMPUTE, _ENCODER, _ENCODER_RECOMPUTE, _OPTIMIZER = range(len(BUSY))


def break_down_step(replayed: ReplayedPlan) -> dict[str, float]:
    """Returns seconds of the mean GPU by the keys of LABELS; they sum to the step.

    Compute includes the slow-down under collectives.
    """
    schedule, timeline = replayed.schedule, replayed.timeline
    compute = np.flatnonzero(schedule.lane == Lane.COMPUTE)
    kind = schedule.kind[compute]
    is_llm = np.array([name == LLM for name in schedule.modules])[schedule.module[compute]]
    recompute = kind == OpKind.RECOMPUTE
    part = np.where(
        is_llm, np.where(recompute, _LLM_RECOMPUTE, _LLM), np.where(recompute, _ENCODER_RECOMPUTE, _ENCODER)
    )
    part = np.where(kind == OpKind.OPTIMIZER, _OPTIMIZER, part)
    spent = (timeline.finish_s - timeline.start_s)[compute]
    sums = np.bincount(part, weights=spent, minlength=len(BUSY)) / schedule.num_devices
    busy = dict(zip(BUSY, sums.tolist(), strict=True))
    return {name: busy.get(name, getattr(replayed.bubbles, name, 0.0)) for name in LABELS}


def subtract_breakdowns(plan: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Returns what `other` spends more than `plan`, by part; the parts sum to the difference of the steps."""
    return {name: other[name] - plan[name] for name in LABELS}


def describe_step_difference(
    plan_s: float,
    other_s: float,
    differences_s: Mapping[str, float],
    *,
    not_hidden_s: tuple[float, float] | None,
    equal: bool,
) -> str:
    """Describes in one sentence how a layout's step compares with the plan's, and where the time goes.

    `not_hidden_s` is what encoders add to the LLM's step, in the plan and in the layout.
    """
    total, share = other_s - plan_s, abs(other_s / plan_s - 1)
    digits = EQUAL_STEP_DIGITS if equal else _digits(total)
    step, plan_step = f"{other_s:.{digits}f} s", f"the plan's {plan_s:.{digits}f} s"
    if equal:
        words = f"{step}, as long as {plan_step}"
    elif total > 0:
        words = f"{step}, {share:.1%} slower than {plan_step}".replace("%", " %")
    else:
        words = f"{step}, {share:.1%} less than {plan_step}: the plan's search missed it".replace("%", " %")
    parts = _parts(differences_s, total)
    words += f": {', '.join(f'{value:+.{digits}f} s {name}' for name, value in parts)}" if parts else ""
    if not_hidden_s is None or equal:
        return words
    before, here = not_hidden_s
    return (
        f"{words}; encoders add {here:.{digits}f} s to the LLM's step here, {before:.{digits}f} s in the plan"
    )


def _parts(differences_s: Mapping[str, float], total: float) -> list[tuple[str, float]]:
    """Returns the parts above MIN_SHOWN_SHARE: contributions first, opposite ones last."""
    parts: dict[str, float] = {}
    for name, value in differences_s.items():
        label = MERGED_LABELS.get(name, LABELS[name])
        parts[label] = parts.get(label, 0.0) + value
    least = MIN_SHOWN_SHARE * max(map(abs, parts.values()), default=0.0)
    shown = [(label, value) for label, value in parts.items() if value and abs(value) >= least]
    return sorted(shown, key=lambda part: -part[1] if total > 0 else part[1])


def _digits(value: float) -> int:
    """Returns the decimals that show two significant digits of `value`."""
    return min(MAX_DIGITS, max(MIN_DIGITS, 1 - floor(log10(abs(value)))))
