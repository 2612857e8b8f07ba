"""Arranges the ops of a plan in a grid: a column per device class, a row per step of dependent ops."""

from __future__ import annotations

import numpy as np

from optimus.ir.op import Ints, OpKind, OpName
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.verify.expected_lines import ExpectedLines, PlanLines, check_coverage
from optimus.verify.time_replay import followers
from optimus.verify.waits import Derivation, chained

Grid = list[list[OpName | None]]


def op_grid(plan: Plan, *, aligned: bool = True) -> Grid:
    """Returns the rows of a grid in which every F, B, I and W takes one row, below all it waits for.

    An op of several phases is placed by its first. Rows align the classes only if the plan holds the rules
    of coverage and deadlock; without `aligned`, the op in row n is the n-th of its class.
    """
    lines = PlanLines(plan)
    phases = lines.kind <= OpKind.WEIGHT_GRAD
    first = phases & (lines.place == 0)
    before, after = chained(lines.device, phases)
    if aligned:
        expected = ExpectedLines(plan)
        broken = next(iter(check_coverage(lines, expected)), None)
        assert broken is None, broken
        waits = Derivation(lines, expected).derive()
        before, after = np.concatenate([before, waits.before]), np.concatenate([after, waits.after])
    step = _longest_path(first, before, after)
    grid: Grid = [[None] * len(plan.programs) for _ in range(int(step.max(initial=0)))]
    for line in np.flatnonzero(first).tolist():
        module = plan.names[lines.module[line]]
        chunk, microbatch = int(lines.chunk[line]), int(lines.microbatch[line])
        name = OpName(OpKind(lines.kind[line]), chunk, microbatch, "" if module == LLM else module)
        grid[step[line] - 1][lines.device[line]] = name
    return grid


def _longest_path(counted: Ints, before: Ints, after: Ints) -> Ints:
    """Returns how many counted lines the longest chain up to each line has."""
    count = len(counted)
    offset, following, pending = followers(count, before, after)
    length = counted.astype(np.int64).tolist()
    weight = list(length)
    free = [line for line, waiting in enumerate(pending) if not waiting]
    for line in free:  # grows
        for follower in following[offset[line] : offset[line + 1]]:
            length[follower] = max(length[follower], length[line] + weight[follower])
            pending[follower] -= 1
            if not pending[follower]:
                free.append(follower)
    assert len(free) == count, "lines wait in a cycle"
    return np.array(length, np.int64)
