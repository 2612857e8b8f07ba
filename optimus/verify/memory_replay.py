"""Replays the bytes that are alive on every device class, line by line."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optimus.ir.op import Ints, OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.verify.expected_lines import ExpectedLines, PlanLines, check_coverage
from optimus.verify.waits import Derivation

ACTIVATIONS = ("llm_activations", "encoder_activations", "seam")


@dataclass(frozen=True, kw_only=True)
class LiveBytes:
    """Bytes on one device class when most of them are alive, by component; and what stays at the end."""

    peak: dict[str, int]
    line: int  # the first at which the sum is largest
    left: int
    lowest: int  # below 0 if something is freed before it is there


def replay_bytes(derived: Derivation) -> list[LiveBytes]:
    """The peak of every device class. What a line frees is still there while it runs."""
    comes, goes = _changes(derived)
    return [_alive(derived.lines, device, comes, goes) for device in range(len(derived.lines.first) - 1)]


def bytes_along(plan: Plan, device: int) -> Ints:
    """Of one device class of a plan that holds: what is alive while each line runs, by component."""
    lines, asked = PlanLines(plan), ExpectedLines(plan)
    broken = next(iter(check_coverage(lines, asked)), None)
    assert broken is None, broken
    derived = Derivation(lines, asked)
    comes, goes = _changes(derived)
    mine = slice(int(derived.lines.first[device]), int(derived.lines.first[device + 1]))
    found: Ints = (np.cumsum(comes[:, mine], axis=1) - np.cumsum(goes[:, mine], axis=1) + goes[:, mine]).T
    return found


def _changes(derived: Derivation) -> tuple[Ints, Ints]:
    """Bytes that every line begins to keep, and those it ends to keep, by component."""
    lines = derived.lines
    comes = np.zeros((len(ACTIVATIONS), len(lines)), np.int64)
    goes = np.zeros_like(comes)
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
            comes[component, rows[:, 0]] += planned.saved_activation_bytes
            goes[component, last[:, -1]] += planned.saved_activation_bytes
            again = ends[2]
            if again.size and ends[0].size:
                comes[component, again[:, 0]] += planned.recomputed_bytes
                goes[component, last[:, -1]] += planned.recomputed_bytes
            if name == LLM and chunk == 0 and lines.plan.ranks.coordinates(device)[0] == 0:
                _add_seam(derived, device, rows, comes[2], goes[2])
    return comes, goes


def _add_seam(derived: Derivation, device: int, forward: Ints, comes: Ints, goes: Ints) -> None:
    """Rows of encoders wait at LLM stage 0, from their arrival to the end of the forward that they feed."""
    for name, module in derived.plan.encoders.items():
        for arrived, microbatches in derived.arrivals(name, device, last=True):
            np.add.at(comes, arrived[:, -1], module.seam_bytes)
            fed = microbatches // module.microbatches_per_llm_microbatch
            np.add.at(goes, forward[fed, -1], module.seam_bytes)


def _alive(lines: PlanLines, device: int, comes: Ints, goes: Ints) -> LiveBytes:
    mine = slice(int(lines.first[device]), int(lines.first[device + 1]))
    if mine.start == mine.stop:
        return LiveBytes(peak=dict.fromkeys(ACTIVATIONS, 0), line=mine.start, left=0, lowest=0)
    freed = np.cumsum(goes[:, mine], axis=1)
    after = np.cumsum(comes[:, mine], axis=1) - freed
    during = after + goes[:, mine]
    at = int(np.argmax(during.sum(axis=0)))
    peak = dict(zip(ACTIVATIONS, during[:, at].tolist(), strict=True))
    return LiveBytes(peak=peak, line=mine.start + at, left=int(after[:, -1].sum()), lowest=int(after.min()))
