"""Times variants of a step in turn, and compares their medians.

Variants alternate, in reversed order every other round. A repetition during which other processes took more
than a few per cent of the machine is repeated.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.ranks import host_barrier
from benchmarks.report import VariantTime

MAX_FOREIGN_SHARE = 0.06  # of the machine's CPU time: a repetition with more by other processes is repeated
MAX_ATTEMPTS = 4  # at one repetition
BOOTSTRAP_DRAWS = 2000

Step = Callable[[], Tensor | None]
Losses = Mapping[str, tuple[float, float]]  # loss and sum of squares (or norm) of gradients, by variant


# ---------------------------------------------------------------------------- timing, on every rank


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds of every repetition that counts, by variant, as rank 0 measured them."""

    seconds: Mapping[str, list[float]]
    losses: Losses
    dropped: int
    kept: int  # disturbed repetitions that count because no attempt was better
    foreign_share: float  # median share of other processes in the repetitions that count

    def describe(self) -> str:
        """Says how quiet the machine was."""
        share = f"other processes took {100 * self.foreign_share:.1f} % (median) of what counts"
        dropped = f"{self.dropped} repetitions dropped for more than {100 * MAX_FOREIGN_SHARE:.0f} %"
        kept = f", {self.kept} kept in spite of it" if self.kept else ""
        return f"{share}; {dropped}{kept}"


def alternate(
    steps: Mapping[str, Step],
    rounds: int,
    on_round: Callable[[int], None],
    losses: Losses,
    *,
    host_group: dist.ProcessGroup | None = None,
    synchronize: Callable[[], None] = lambda: None,
    attempts: int = MAX_ATTEMPTS,
) -> Timings:
    """Times every variant once a round, all ranks together.

    `host_group` is a group for CPU tensors, by default the default group. `synchronize` waits for the device.
    A disturbed repetition is attempted up to `attempts` times.
    """
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    shares, dropped, kept = [], 0, 0
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            for attempt in range(attempts):
                duration_s, share = _repetition(steps[name], host_group, synchronize)
                if share <= MAX_FOREIGN_SHARE or attempt == attempts - 1:
                    break
                dropped += 1
            seconds[name].append(duration_s)
            shares.append(share)
            kept += share > MAX_FOREIGN_SHARE
        on_round(number + 1)
    return Timings(seconds=seconds, losses=losses, dropped=dropped, kept=kept, foreign_share=median(shares))


def _repetition(
    step: Step, host_group: dist.ProcessGroup | None, synchronize: Callable[[], None]
) -> tuple[float, float]:
    """Returns rank 0's seconds from a common begin to a common end, and the share of other processes."""
    host_barrier(host_group)
    cpu_s, machine_s, begin = time.process_time(), machine_cpu_s(), time.perf_counter()
    step()
    synchronize()
    host_barrier(host_group)
    duration_s = time.perf_counter() - begin
    ranks_s = torch.tensor([time.process_time() - cpu_s], dtype=torch.float64)
    machine_s = machine_cpu_s() - machine_s
    dist.all_reduce(ranks_s, group=host_group)
    share = max(0.0, machine_s - float(ranks_s)) / (duration_s * (os.cpu_count() or 1))
    measured = torch.tensor([duration_s, share], dtype=torch.float64)
    dist.broadcast(measured, 0, group=host_group)
    return float(measured[0]), float(measured[1])


def machine_cpu_s() -> float:
    """Returns the CPU seconds of all processes since this machine started, by /proc/stat."""
    with Path("/proc/stat").open() as file:
        fields = [int(word) for word in file.readline().split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def total_loss(loss: Tensor | None, device: torch.device | str = "cpu") -> float:
    """Returns the sum of the losses of all ranks."""
    total = torch.zeros(1, device=device) if loss is None else loss.reshape(1).float().clone()
    dist.all_reduce(total)
    return float(total)


# ---------------------------------------------------------------------------- comparing


def check_losses(losses: Losses, ours: str) -> None:
    """Asserts that all variants compute the same loss and gradients; otherwise their times say nothing."""
    unequal = unequal_losses(losses, ours, tolerance=1e-3)
    assert not unequal, "; ".join(unequal)


def unequal_losses(losses: Losses, ours: str, *, tolerance: float) -> list[str]:
    """Describes every variant whose loss or gradients differ from ours by more than `tolerance`."""
    return [
        f"{what} of {name}: {theirs}, ours {expected}"
        for name, values in losses.items()
        for what, theirs, expected in zip(("loss", "gradients"), values, losses[ours], strict=True)
        if not abs(theirs - expected) <= tolerance * abs(expected)
    ]


def variant_times(seconds: Mapping[str, list[float]], ours: str) -> dict[str, VariantTime]:
    """Returns medians, and ratios to ours with their 95 % intervals."""
    times = {}
    for name, theirs in seconds.items():
        low, high = bootstrap(theirs, seconds[ours])
        times[name] = VariantTime(
            step_s=median(theirs),
            over_ours=median(their / our for their, our in zip(theirs, seconds[ours], strict=True)),
            over_ours_low=low,
            over_ours_high=high,
        )
    return times


def bootstrap(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the median ratio of a round, over rounds drawn with replacement.

    Ratios are taken within a round because the speed of a shared machine drifts by more than the difference
    between variants.
    """
    rng = random.Random(0)
    ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(BOOTSTRAP_DRAWS))
    return medians[int(0.025 * BOOTSTRAP_DRAWS)], medians[int(0.975 * BOOTSTRAP_DRAWS)]
