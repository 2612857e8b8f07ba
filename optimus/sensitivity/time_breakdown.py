"""Divides a played step of the mean GPU by what it is spent on, so that two plans can be told apart."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from optimus.ir.op import Kind, Lane
from optimus.ir.ranks import LLM
from optimus.planner.replaying import Replayed

# What people call the parts, in the order in which they are listed; bubbles last.
WORDS = {
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
BUSY = tuple(WORDS)[:5]
_LLM, _AGAIN, _ENCODER, _ENCODER_AGAIN, _OPTIMIZER = range(len(BUSY))


def spend(played: Replayed) -> dict[str, float]:
    """Seconds of the mean GPU by the names of WORDS; they sum to the step.

    Compute is as it ran: slower kernels and the slow-down under collectives are in it.
    """
    schedule, timeline = played.schedule, played.timeline
    compute = np.flatnonzero(schedule.lane == Lane.COMPUTE)
    kind = schedule.kind[compute]
    is_llm = np.array([name == LLM for name in schedule.modules])[schedule.module[compute]]
    again = kind == Kind.R
    part = np.where(is_llm, np.where(again, _AGAIN, _LLM), np.where(again, _ENCODER_AGAIN, _ENCODER))
    part = np.where(kind == Kind.FINISH, _OPTIMIZER, part)
    spent = (timeline.finish_s - timeline.start_s)[compute]
    sums = np.bincount(part, weights=spent, minlength=len(BUSY)) / schedule.num_devices
    busy = dict(zip(BUSY, sums.tolist(), strict=True))
    return {name: busy.get(name, getattr(played.bubbles, name, 0.0)) for name in WORDS}


def differences(plan: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """What `other` spends more than `plan`, by part; they sum to the difference of the steps."""
    return {name: other[name] - plan[name] for name in WORDS}
