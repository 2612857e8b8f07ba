"""Simulates a plan, its floor and the best other system under equal noise: how much speed-up survives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from optimus.errors import UserError, one_of
from optimus.ir.op import Schedule
from optimus.ir.plan import Plan
from optimus.planner.compare import Comparison
from optimus.protocols import SystemCandidate
from optimus.schedule.noisy_replay import (
    NOISE_LEVELS,
    DurationNoise,
    ModulePlacement,
    NoisyDurations,
    PriorityStreamReplay,
)
from optimus.schedule.plan_schedule import build_plan_schedule
from optimus.schedule.simulator import simulate_schedule

SEEDS = 8
STATIC, TWO_STREAM = "static", "two-stream"
POLICIES = (STATIC, TWO_STREAM)
Steps = tuple[float, ...]  # seconds of a step, by seed


@dataclass(frozen=True, kw_only=True)
class StepsUnderNoise:
    """Steps under one noise level, with the same seeds for all systems."""

    noise: DurationNoise
    floor_s: Steps
    other_s: Steps  # empty without another system
    ours_s: Mapping[str, Steps]  # by policy

    def over_floor(self, policy: str) -> float:
        """Returns the mean step over that of an equally noisy floor."""
        return fmean(self.ours_s[policy]) / fmean(self.floor_s)

    def speedup(self, policy: str) -> float | None:
        """Returns the mean step of the other system over ours; None without another system."""
        return fmean(self.other_s) / fmean(self.ours_s[policy]) if self.other_s else None


@dataclass(frozen=True, kw_only=True)
class NoiseStudy:
    """Steps and speed-up of a plan under noise, level by level."""

    against: str | None  # the system that the speed-up is over
    claimed_speedup: float | None  # of the plan without noise
    levels: tuple[StepsUnderNoise, ...]

    def lost_points(self, policy: str, level: StepsUnderNoise) -> float | None:
        """Returns the percentage points of speed-up lost; negative if noise hurts the other system more."""
        speedup = level.speedup(policy)
        if speedup is None or self.claimed_speedup is None:
            return None
        return 100 * (self.claimed_speedup - speedup)


def simulate_under_noise(
    plan: Plan,
    comparison: Comparison,
    *,
    against: str | None = None,
    levels: Sequence[DurationNoise] = NOISE_LEVELS,
    seeds: int = SEEDS,
) -> NoiseStudy:
    """Simulates a plan of `comparison` under every noise level, in both order policies.

    `static` keeps the plan's order on every lane; `two-stream` gives the LLM's kernels priority. The floor
    and the other system, by default the fastest that fits and was compared, have one stream.
    """
    ours, other = comparison.systems[plan.strategy], _other(plan, comparison, against)
    policies = _Policies(plan, ours.full_schedule)
    floor = _simulator(plan, comparison.llm_only.candidate)
    others = None if other is None else _simulator(plan, comparison.systems[other].candidate)
    return NoiseStudy(
        against=other,
        claimed_speedup=None if other is None else comparison.systems[other].step_s / plan.claims.step_s,
        levels=tuple(
            StepsUnderNoise(
                noise=noise,
                floor_s=floor(noise, seeds),
                other_s=() if others is None else others(noise, seeds),
                ours_s={policy: policies.steps_s(policy, noise, seeds) for policy in POLICIES},
            )
            for noise in levels
        ),
    )


def _other(plan: Plan, comparison: Comparison, against: str | None) -> str | None:
    """Returns the name of the system to compare with."""
    skipped = "llm-only", plan.strategy
    steps = {
        name: system.step_s
        for name, system in comparison.systems.items()
        if system.fits and name not in skipped
    }
    if against is not None and against not in steps:
        raise UserError(
            field="against",
            value=against,
            problem="was not compared, or does not fit",
            hint=f"use {one_of(steps)}" if steps else "compare with another system",
        )
    return against or min(steps, key=lambda name: steps[name], default=None)


class _Policies:
    """A plan's schedule, simulated under either order policy."""

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self._plan, self._kernels = plan, NoisyDurations(schedule, ModulePlacement.of_plan(plan))
        streams = build_plan_schedule(plan, plan.programs, ordered=False)
        self._streams = PriorityStreamReplay(streams, slowdown=plan.slowdown, launch_s=plan.launch_s)

    def steps_s(self, policy: str, noise: DurationNoise, seeds: int) -> Steps:
        if policy == STATIC:
            return _static_steps(self._plan, self._kernels, noise, seeds)
        drawn = (self._kernels.draw_seconds(noise, seed) for seed in range(seeds))
        return tuple(self._streams.simulate(duration_s).step_s for duration_s in drawn)


def _simulator(plan: Plan, other: SystemCandidate) -> Callable[[DurationNoise, int], Steps]:
    """Returns a function that simulates another system, on the plan's GPUs and hosts.

    Devices of a system that is no plan are stages.
    """
    result = other.search_result()
    if result is None:
        schedule = other.simulated()[0]
        places = ModulePlacement.of_pipeline(schedule)
    else:
        schedule, places = result.filled.lowered.schedule, ModulePlacement.of_plan(result.plan)
    kernels = NoisyDurations(schedule, places)
    return lambda noise, seeds: _static_steps(plan, kernels, noise, seeds)


def _static_steps(plan: Plan, kernels: NoisyDurations, noise: DurationNoise, seeds: int) -> Steps:
    drawn = (kernels.draw_schedule(noise, seed) for seed in range(seeds))
    return tuple(
        simulate_schedule(noisy, slowdown=plan.slowdown, launch_s=plan.launch_s).step_s for noisy in drawn
    )
