"""Fits factors of a user's own stack and cluster to a few measured steps, and tests them on each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimus.cost.assumptions import Assumptions
from optimus.ir.op import Floats
from optimus.job.job import Job
from optimus.planner.forked import compute_by_key
from optimus.sensitivity.accuracy import GroupAccuracy, find_recipe

# Logarithms of the factors are about normal: with what deviation is assumed. Kernels of other clusters take
# 1.0 to 1.4 times ours, traffic under real conditions 1.0 to 1.65 times; a step of its own 3 %.
FACTORS = {"efficiency": 0.2, "traffic_scale": 0.4}
STEP_DEVIATION = 0.03
DIFFERENCE = 0.05  # of a logarithm, for derivatives
ROUNDS = 2  # of Newton's method, with the derivatives of the first

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class CalibratedStep:
    """A measured step beside those that are predicted."""

    measured_s: float
    before_s: float  # by the preset alone
    after_s: float  # with the fitted factors
    left_out_s: float  # with factors fitted to the other steps; of a single one by the preset


@dataclass(frozen=True, kw_only=True)
class CalibratedStack:
    """Assumptions with fitted factors, and how far off they are."""

    assumptions: Assumptions
    steps: tuple[CalibratedStep, ...]

    def accuracy(self, which: str) -> GroupAccuracy:
        """Returns the errors of the steps `before_s`, `after_s` or `left_out_s`."""
        return GroupAccuracy.of(which, [getattr(each, which) / each.measured_s - 1 for each in self.steps])


def calibrate_stack(
    jobs: Sequence[Job],
    measured_s: Sequence[float],
    assumptions: Assumptions,
    *,
    cores: int = 1,
    progress: Progress = lambda name, done, total: None,
) -> CalibratedStack:
    """Fits the factors to measured steps of jobs, each with its recipe as `today`.

    Every step is off by chance, and factors are not far from 1: the most probable ones are taken. What the
    steps do not tell stays as it was.
    """
    response = StackResponse(jobs, assumptions, cores=cores, progress=progress)
    wanted: Floats = np.log(measured_s)
    logs: Floats = np.zeros(len(FACTORS))
    predicted = response.before
    for done in range(ROUNDS):
        logs = fit_factors(response.slopes, wanted - predicted + response.slopes @ logs)
        predicted = response.predict(logs, 1 + len(FACTORS) + done)
    left = wanted - predicted + response.slopes @ logs  # what the factors have to explain
    others = [np.arange(len(jobs)) != place for place in range(len(jobs))]
    left_out = [
        predicted[place] + response.slopes[place] @ (fit_factors(response.slopes[kept], left[kept]) - logs)
        for place, kept in enumerate(others)
    ]
    columns = (np.asarray(measured_s), *(np.exp(each) for each in (response.before, predicted, left_out)))
    return CalibratedStack(
        assumptions=with_factors(assumptions, logs),
        steps=tuple(
            CalibratedStep(measured_s=measured, before_s=before, after_s=after, left_out_s=without)
            for measured, before, after, without in zip(*(column.tolist() for column in columns), strict=True)
        ),
    )


class StackResponse:
    """Logarithms of the predicted steps of jobs, and how they change with those of the factors."""

    def __init__(
        self,
        jobs: Sequence[Job],
        assumptions: Assumptions,
        *,
        cores: int = 1,
        progress: Progress = lambda name, done, total: None,
    ) -> None:
        self._jobs, self._assumptions = jobs, assumptions
        self._cores, self._progress = cores, progress
        self.before: Floats = self.predict(np.zeros(len(FACTORS)), 0)
        changes = [
            self.predict(DIFFERENCE * direction, 1 + place) - self.before
            for place, direction in enumerate(np.eye(len(FACTORS)))
        ]
        self.slopes: Floats = np.stack(changes, axis=1) / DIFFERENCE

    def predict(self, logs: Floats, done: int) -> Floats:
        """Simulates all steps with the factors of these logarithms, after `done` times."""
        assumed, count = with_factors(self._assumptions, logs), len(self._jobs)
        total = (1 + len(FACTORS) + ROUNDS) * count
        steps_s = compute_by_key(
            lambda place: find_recipe(self._jobs[place], assumed).simulated()[1].step_s,
            {place: float(job.workload.sequences_per_step) for place, job in enumerate(self._jobs)},
            cores=self._cores,
            report=lambda place: self._progress(self._jobs[place].name, done * count + place, total),
        )
        predicted: Floats = np.log([steps_s[place] for place in range(count)])
        return predicted


def with_factors(assumptions: Assumptions, logs: Floats) -> Assumptions:
    """Returns the assumptions with each factor multiplied, given as logarithms."""
    changed = {
        name: getattr(assumptions, name) * float(factor)
        for name, factor in zip(FACTORS, np.exp(logs), strict=True)
    }
    return replace(assumptions, **changed)


def fit_factors(slopes: Floats, left: Floats) -> Floats:
    """Returns the most probable logarithms of factors if `slopes` times them should be `left`."""
    deviations = np.array(list(FACTORS.values()))
    precision = slopes.T @ slopes / STEP_DEVIATION**2 + np.diag(deviations**-2.0)
    solved: Floats = np.linalg.solve(precision, slopes.T @ left / STEP_DEVIATION**2).astype(np.float64)
    return solved
