"""Times steps of variants on paced ranks, in turn, and measures how late the host was in each."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch
from torch import distributed as dist

from benchmarks.paced_backend import PacedNetwork
from benchmarks.paced_clock import PacedClock
from benchmarks.report import VariantTime

DISTURBED_SHARE = 0.005  # of a step: a rank whose host lost more makes the step a disturbed one
MAX_ATTEMPTS = 4  # at a step until one is not disturbed
MAX_REPEATED_S = 30.0  # of the host: longer steps are not repeated


class Steppable(Protocol):
    """A variant on this rank."""

    def prepare(self) -> None:
        """Runs a step in which only transfers take time: ranks connect."""

    def step(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One step of one rank. The start is ideal and the same on all ranks, the end is real."""

    start_s: float
    end_s: float
    lost_s: float


def run_step(clock: PacedClock, step: Callable[[], None]) -> StepTime:
    """Runs a step that starts, in ideal time, on all ranks when the last of them is here."""
    dist.barrier()
    last = torch.tensor(clock.now(), dtype=torch.float64)
    dist.all_reduce(last, dist.ReduceOp.MAX)
    start_s = last.item()
    clock.restart(start_s)
    step()
    return StepTime(start_s=start_s, end_s=clock.now(), lost_s=clock.lost_s)


def step_s(ranks: list[StepTime]) -> float:
    """Returns the seconds from the common start until the last rank is done."""
    return max(rank.end_s for rank in ranks) - min(rank.start_s for rank in ranks)


def is_disturbed(ranks: list[StepTime]) -> bool:
    """Tells if the host of some rank lost more than a small share of the step."""
    return max(rank.lost_s for rank in ranks) > DISTURBED_SHARE * step_s(ranks)


def run_rounds(
    network: PacedNetwork,
    variants: Mapping[str, Steppable],
    rounds: Mapping[str, int],
    after_step: Callable[[str], None],
) -> dict[str, list[StepTime]]:
    """Alternates variants, reversed every other round; repeats disturbed steps, and keeps them."""
    for variant in variants.values():
        variant.prepare()
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would delay the host
    times: dict[str, list[StepTime]] = {name: [] for name in variants}
    for number in range(max(rounds.values())):
        names = [name for name in variants if number < rounds[name]]
        for name in reversed(names) if number % 2 else names:
            for _ in range(MAX_ATTEMPTS):
                time = run_step(network.clock, variants[name].step)
                times[name].append(time)
                after_step(name)
                if dist.get_rank() == 0:
                    network.report(name)
                if not _is_worth_repeating(time, network.clock.time_scale):
                    break
    gc.enable()
    return times


def _is_worth_repeating(time: StepTime, time_scale: float) -> bool:
    """Tells if some rank was disturbed in a short step; the answer is the same on every rank."""
    worst = torch.tensor([time.lost_s, time.end_s, -time.start_s], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    lost_s, end_s, minus_start_s = worst.tolist()
    duration_s = end_s + minus_start_s
    return bool(duration_s * time_scale < MAX_REPEATED_S and lost_s > DISTURBED_SHARE * duration_s)


def counted_s(steps: list[list[StepTime]]) -> list[float]:
    """Returns the seconds of undisturbed steps; of all steps, if all were disturbed."""
    undisturbed = [step_s(ranks) for ranks in steps if not is_disturbed(ranks)]
    return undisturbed or [step_s(ranks) for ranks in steps]


def variant_time(steps: list[list[StepTime]], predicted_s: float, ours_s: float) -> VariantTime:
    """Returns the median of the steps that count, and its error over the prediction."""
    seconds = counted_s(steps)
    middle_s = median(seconds)
    return VariantTime(
        step_s=middle_s,
        over_ours=middle_s / ours_s,
        step_low_s=min(seconds),
        step_high_s=max(seconds),
        predicted_s=predicted_s,
        error=middle_s / predicted_s - 1,
        steps=len(seconds),
        disturbed=sum(map(is_disturbed, steps)),
    )
