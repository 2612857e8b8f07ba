"""Plays steps of several variants on a paced rank, in turn, and says how late the host was in each."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import distributed as dist

from benchmarks.paced_backend import PacedNetwork
from benchmarks.pacing import PacedClock

DISTURBED_SHARE = 0.005  # of a step; a rank whose host was later than that, beyond what it could catch up
ATTEMPTS = 4  # at a step until one is not disturbed
LONG_S = 30.0  # of the host: steps that take longer are not repeated


class Playable(Protocol):
    """Something that can be played step by step on this rank."""

    def prepare(self) -> None: ...

    def play(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of one rank. The start is ideal and the same everywhere, the end is real."""

    start_s: float
    end_s: float
    given_up_s: float


def play_step(clock: PacedClock, play: Callable[[], None]) -> Step:
    """All ranks start together: when the last of them is there, whenever each of them hears of it."""
    dist.barrier()
    last = torch.tensor(clock.now(), dtype=torch.float64)
    dist.all_reduce(last, dist.ReduceOp.MAX)
    start_s = last.item()
    clock.restart(start_s)
    play()
    return Step(start_s=start_s, end_s=clock.now(), given_up_s=clock.given_up_s)


def step_s(steps: list[Step]) -> float:
    """From the common start until the last rank is done."""
    return max(step.end_s for step in steps) - min(step.start_s for step in steps)


def is_disturbed(steps: list[Step]) -> bool:
    """Whether some rank was later than it could catch up, by more than a small share of the step."""
    return max(step.given_up_s for step in steps) > DISTURBED_SHARE * step_s(steps)


def play_rounds(
    network: PacedNetwork,
    variants: Mapping[str, Playable],
    rounds: Mapping[str, int],
    after: Callable[[str], None],
) -> dict[str, list[Step]]:
    """Variants alternate, in reversed order every other round; disturbed steps are repeated, and kept."""
    for variant in variants.values():
        variant.prepare()
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would be lateness of the host
    found: dict[str, list[Step]] = {name: [] for name in variants}
    for number in range(max(rounds.values())):
        names = [name for name in variants if number < rounds[name]]
        for name in reversed(names) if number % 2 else names:
            for _ in range(ATTEMPTS):
                step = play_step(network.clock, variants[name].play)
                found[name].append(step)
                after(name)
                if dist.get_rank() == 0:
                    network.tell(name)
                if not _worth_repeating(step, network.clock.slow):
                    break
    gc.enable()
    return found


def _worth_repeating(step: Step, slow: float) -> bool:
    """Whether some rank was disturbed in a short step: the same answer on every rank."""
    told = torch.tensor([step.given_up_s, step.end_s, -step.start_s], dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    given_up_s, end_s, start_s = told.tolist()
    taken_s = end_s + start_s
    return bool(taken_s * slow < LONG_S and given_up_s > DISTURBED_SHARE * taken_s)
