"""Replays the bytes that are alive on every device class, line by line."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optimus.ir.op import Ints, OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.verify.buckets import list_gradient_lifetimes, list_parameter_lifetimes
from optimus.verify.expected_program import ExpectedProgram, PlanLines, check_line_coverage
from optimus.verify.waits import WaitDerivation

ALIVE = ("llm_activations", "encoder_activations", "seam", "gathered", "logits")
LOGITS = ALIVE.index("logits")


@dataclass(frozen=True, kw_only=True)
class _PeakBytes:
    """Peak bytes of one device class by component, and the bytes left at the end."""

    peak: dict[str, int]
    line: int  # first at which the sum peaks
    left: int
    lowest: int  # below 0 if bytes are freed before they are allocated


def replay_peak_bytes(derived: WaitDerivation) -> list[_PeakBytes]:
    """Returns the peak of every device class. Bytes that a line frees are alive while it runs."""
    allocated, freed_by = _changes(derived)
    return [
        _alive(derived.lines, device, allocated, freed_by) for device in range(len(derived.lines.first) - 1)
    ]


def replay_live_bytes(plan: Plan, device: int) -> Ints:
    """Returns the bytes alive while each line of a class runs, by component; the plan must be valid."""
    lines, expected = PlanLines(plan), ExpectedProgram(plan)
    broken = next(iter(check_line_coverage(lines, expected)), None)
    assert broken is None, broken
    derived = WaitDerivation(lines, expected)
    allocated, freed_by = _changes(derived)
    mine = slice(int(derived.lines.first[device]), int(derived.lines.first[device + 1]))
    alive: Ints = (
        np.cumsum(allocated[:, mine], axis=1) - np.cumsum(freed_by[:, mine], axis=1) + freed_by[:, mine]
    ).T
    return alive


def _changes(derived: WaitDerivation) -> tuple[Ints, Ints]:
    """Returns the bytes that every line allocates, and those it frees, by component."""
    lines = derived.lines
    allocated = np.zeros((len(ALIVE), len(lines)), np.int64)
    freed_by = np.zeros_like(allocated)
    for where, _, rows in lines.all_blocks():
        if where.kind == OpKind.FORWARD:
            device, name, _, chunk = where
            planned = lines.plan.modules[name].chunks[derived.virtual(device, name, chunk)]
            component = 0 if name == LLM else 1
            ends = [
                lines.at(device, name, kind, chunk)
                for kind in (OpKind.WEIGHT_GRAD, OpKind.BACKWARD, OpKind.INPUT_GRAD)
            ]
            last = next((block for block in ends if block.size), rows)
            allocated[component, rows[:, 0]] += planned.saved_activation_bytes
            freed_by[component, last[:, -1]] += planned.saved_activation_bytes
            loss_read_by = next((block for block in reversed(ends) if block.size), rows)
            allocated[LOGITS, rows[:, 0]] += planned.logits_bytes
            freed_by[LOGITS, loss_read_by[:, -1]] += planned.logits_bytes
            input_grads = ends[2]
            if input_grads.size and ends[0].size:
                allocated[component, input_grads[:, 0]] += planned.recomputed_bytes
                freed_by[component, last[:, -1]] += planned.recomputed_bytes
            if name == LLM and derived.virtual(device, name, chunk) == lines.plan.entry:
                _add_seam(derived, device, rows, allocated[2], freed_by[2])
    for device in range(len(lines.first) - 1):
        _add_gathered(derived, device, allocated[3], freed_by[3])
    return allocated, freed_by


def _add_gathered(derived: WaitDerivation, device: int, allocated: Ints, freed_by: Ints) -> None:
    """Adds parameters that are gathered for less than a step, and gradients reduced in every microbatch."""
    for each in list_parameter_lifetimes(derived, device):
        allocated[each.begin] += each.bytes
        freed_by[each.end] += each.bytes
    finish = int(derived.lines.first[device + 1]) - 1
    for lifetimes, at_most in list_gradient_lifetimes(derived, device):
        ends = [each.begin - 1 for each in lifetimes[at_most:]] + [finish] * at_most
        for each, end in zip(lifetimes, ends, strict=False):
            allocated[each.begin] += each.bytes
            freed_by[end] += each.bytes


def _add_seam(derived: WaitDerivation, device: int, forward: Ints, allocated: Ints, freed_by: Ints) -> None:
    """Adds encoder rows at the LLM's entry, alive from their arrival to the end of the forward they feed."""
    for name, module in derived.plan.encoders.items():
        for arrived, microbatches in derived.arrivals(name, device, last=True):
            np.add.at(allocated, arrived[:, -1], module.seam_bytes)
            np.add.at(
                freed_by,
                forward[microbatches // module.microbatches_per_llm_microbatch, -1],
                module.seam_bytes,
            )


def _alive(lines: PlanLines, device: int, allocated: Ints, freed_by: Ints) -> _PeakBytes:
    mine = slice(int(lines.first[device]), int(lines.first[device + 1]))
    if mine.start == mine.stop:
        return _PeakBytes(peak=dict.fromkeys(ALIVE, 0), line=mine.start, left=0, lowest=0)
    freed = np.cumsum(freed_by[:, mine], axis=1)
    after = np.cumsum(allocated[:, mine], axis=1) - freed
    during = after + freed_by[:, mine]
    at = int(np.argmax(during.sum(axis=0)))
    peak = dict(zip(ALIVE, during[:, at].tolist(), strict=True))
    return _PeakBytes(peak=peak, line=mine.start + at, left=int(after[:, -1].sum()), lowest=int(after.min()))
