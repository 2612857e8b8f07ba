"""Plays a plan, its floor and the best other system under equal noise: how much of the speed-up survives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from optimus.errors import UserError, one_of
from optimus.ir.op import Schedule
from optimus.ir.plan import Plan
from optimus.planner.compare import Comparison
from optimus.schedule.dependencies import couple
from optimus.schedule.noise import LEVELS, Noise, NoisyKernels, Places
from optimus.schedule.priority_streams import TwoStreams
from optimus.schedule.simulate import evaluate

SEEDS = 8
STATIC, TWO_STREAM = "static", "two-stream"
POLICIES = (STATIC, TWO_STREAM)
Steps = tuple[float, ...]  # seconds of a step, by seed


@dataclass(frozen=True, kw_only=True)
class Level:
    """Steps under one noise, the same seeds for all."""

    noise: Noise
    floor_s: Steps
    other_s: Steps  # none without another system
    ours_s: Mapping[str, Steps]  # by policy

    def over_floor(self, policy: str) -> float:
        """Mean step over that of an equally noisy floor."""
        return fmean(self.ours_s[policy]) / fmean(self.floor_s)

    def speedup(self, policy: str) -> float | None:
        """Mean step of the other system over ours; None without another system."""
        return fmean(self.other_s) / fmean(self.ours_s[policy]) if self.other_s else None


@dataclass(frozen=True, kw_only=True)
class UnderNoise:
    """What noise leaves of a plan, level by level."""

    against: str | None  # the system that the speed-up is over
    claimed_speedup: float | None  # of the plan as it stands: in its own order, without noise
    levels: tuple[Level, ...]

    def lost_points(self, policy: str, level: Level) -> float | None:
        """Hundredths of the claimed speed-up that are gone; less than none if noise hurts the other more."""
        speedup = level.speedup(policy)
        if speedup is None or self.claimed_speedup is None:
            return None
        return 100 * (self.claimed_speedup - speedup)


def under_noise(
    plan: Plan,
    comparison: Comparison,
    *,
    against: str | None = None,
    levels: Sequence[Noise] = LEVELS,
    seeds: int = SEEDS,
) -> UnderNoise:
    """Plays a plan of `comparison` again under every noise, in both policies.

    `static` keeps the plan's order on every lane; `two-stream` lets the LLM's kernels go first. The floor and
    the other system, by default the fastest that fits and was compared, have one stream.
    """
    ours, other = comparison.systems[plan.strategy], _other(plan, comparison, against)
    played = _Policies(plan, ours.schedule)
    floor = _steps_of(plan, comparison.floor.schedule())
    others = None if other is None else _steps_of(plan, comparison.systems[other].schedule)
    return UnderNoise(
        against=other,
        claimed_speedup=None if other is None else comparison.systems[other].step_s / plan.claims.step_s,
        levels=tuple(
            Level(
                noise=noise,
                floor_s=floor(noise, seeds),
                other_s=() if others is None else others(noise, seeds),
                ours_s={policy: played.steps_s(policy, noise, seeds) for policy in POLICIES},
            )
            for noise in levels
        ),
    )


def _other(plan: Plan, comparison: Comparison, asked: str | None) -> str | None:
    """The system to compare with."""
    skipped = "llm-only", plan.strategy
    steps = {
        name: system.step_s
        for name, system in comparison.systems.items()
        if system.fits and name not in skipped
    }
    if asked is not None and asked not in steps:
        raise UserError(
            field="against",
            value=asked,
            problem="was not compared, or does not fit",
            hint=f"use {one_of(steps)}" if steps else "compare with another system",
        )
    return asked or min(steps, key=lambda name: steps[name], default=None)


class _Policies:
    """A plan's schedule, to be played in either policy."""

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self._plan, self._kernels = plan, NoisyKernels(schedule, Places.of_plan(plan))
        streams = couple(plan, plan.programs, ordered=False)
        self._streams = TwoStreams(streams, slowdown=plan.slowdown, launch_s=plan.launch_s)

    def steps_s(self, policy: str, noise: Noise, seeds: int) -> Steps:
        if policy == STATIC:
            return _static_steps(self._plan, self._kernels, noise, seeds)
        drawn = (self._kernels.durations(noise, seed) for seed in range(seeds))
        return tuple(self._streams.play(duration_s).step_s for duration_s in drawn)


def _steps_of(plan: Plan, schedule: Schedule) -> Callable[[Noise, int], Steps]:
    """Steps of a system whose devices are stages, on the same GPUs and hosts as the plan."""
    kernels = NoisyKernels(schedule, Places.of_pipeline(schedule))
    return lambda noise, seeds: _static_steps(plan, kernels, noise, seeds)


def _static_steps(plan: Plan, kernels: NoisyKernels, noise: Noise, seeds: int) -> Steps:
    drawn = (kernels.drawn(noise, seed) for seed in range(seeds))
    return tuple(evaluate(each, slowdown=plan.slowdown, launch_s=plan.launch_s).step_s for each in drawn)
