"""Prints how far off published steps are if factors are fitted to a few of the same source.

`python tests/calibration_figures.py [COUNT]`: for every source and stack, factors are fitted to COUNT (3) of
its steps, for each such choice, and predict the others: median and p90 of their errors, before and after.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from itertools import combinations

import numpy as np

from optimus.cost.assumptions import Assumptions, get_preset
from optimus.job.measured_runs import MeasuredRun, load_measured_runs
from optimus.sensitivity.calibrate import StackResponse, fit_factors

MIN_RUNS = 5
MAX_CHOICES = 500
DENSE = "dense"


def assumptions_of(run: MeasuredRun) -> Assumptions:
    return replace(
        get_preset(run.preset),
        fused_attention=run.fused_attention,
        gather_copies=run.gather_copies is not False,
    )


def main(count: int = 3) -> None:
    groups: dict[tuple[str, str, Assumptions], list[MeasuredRun]] = defaultdict(list)
    for run in load_measured_runs():
        if run.split != "untuned" and run.kind == DENSE:
            groups[run.source, run.gpu, assumptions_of(run)].append(run)
    every: list[list[float]] = [[], []]
    for (source, gpu, assumptions), runs in groups.items():
        if len(runs) < MIN_RUNS:
            continue
        response = StackResponse([run.job for run in runs], assumptions, cores=2)
        left = np.log([run.step_s for run in runs]) - response.before
        choices = list(combinations(range(len(runs)), count))
        random = np.random.default_rng(0)
        picked = random.permutation(len(choices))[:MAX_CHOICES]
        before, after, factors = [], [], []
        for place in picked:
            chosen = list(choices[place])
            others = [at for at in range(len(runs)) if at not in chosen]
            logs = fit_factors(response.slopes[chosen], left[chosen])
            factors.append(logs)
            before += np.expm1(-left[others]).tolist()
            after += np.expm1(response.slopes[others] @ logs - left[others]).tolist()
        every[0] += np.expm1(-left).tolist()
        every[1] += np.random.default_rng(0).choice(after, len(runs)).tolist()
        sizes = [np.abs(errors) for errors in (before, after)]
        shown = " ".join(f"{100 * np.median(s):5.1f} {100 * np.quantile(s, 0.9):5.1f}" for s in sizes)
        mean = np.exp(np.median(factors, axis=0))
        name = f"{source} {gpu} {assumptions.name}{'' if assumptions.fused_attention else ' unfused'}"
        bias = f"{100 * np.mean(before):+5.1f} {100 * np.mean(after):+5.1f}"
        print(f"{name:40} {len(runs):3} runs {shown} bias {bias} factors {mean.round(2)}", flush=True)  # noqa: T201
    for errors, name in zip(every, ("before", "after"), strict=True):
        size = np.abs(errors)
        print(f"all, {name}: median {100 * np.median(size):.1f} p90 {100 * np.quantile(size, 0.9):.1f}")  # noqa: T201


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
