"""Times variants in turn: reversed every other round, disturbed repetitions again, all ranks together."""

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

from benchmarks.communicators import meet
from benchmarks.result import VariantTime

FOREIGN_SHARE = 0.06  # of both cores: more by other processes, and a repetition does not count
MOST_REPEATS = 4  # of one repetition
DRAWS = 2000  # of the bootstrap

Step = Callable[[], Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What one rank 0 measured: seconds of every repetition that counts, by variant."""

    seconds: Mapping[str, list[float]]
    losses: Mapping[str, tuple[float, float]]  # and the sum of squares of gradients
    dropped: int
    kept: int  # repetitions that count although they were disturbed: no better one came
    foreign: float  # median share of other processes in what counts

    @property
    def words(self) -> str:
        """How quiet it was."""
        share = f"other processes took {100 * self.foreign:.1f} % (median) of what counts"
        dropped = f"{self.dropped} repetitions dropped for more than {100 * FOREIGN_SHARE:.0f} %"
        kept = f", {self.kept} kept in spite of it" if self.kept else ""
        return f"{share}; {dropped}{kept}"


def alternate(
    steps: Mapping[str, Step],
    rounds: int,
    tell: Callable[[int], None],
    losses: Mapping[str, tuple[float, float]],
    *,
    host: dist.ProcessGroup | None = None,
    settle: Callable[[], None] = lambda: None,
    repeats: int = MOST_REPEATS,
) -> Timed:
    """Every variant once a round; what rank 0 measured counts.

    Ranks meet in `host`, a group for tensors of the CPU: the default group, if left out. `settle` returns
    when a device has done what it was given. A disturbed repetition is one of `repeats` at most.
    """
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    foreign, dropped, kept = [], 0, 0
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            for attempt in range(repeats):
                took, share = _repetition(steps[name], host, settle)
                if share <= FOREIGN_SHARE or attempt == repeats - 1:
                    break
                dropped += 1
            seconds[name].append(took)
            foreign.append(share)
            kept += share > FOREIGN_SHARE
        tell(number + 1)
    return Timed(seconds=seconds, losses=losses, dropped=dropped, kept=kept, foreign=median(foreign))


def total_loss(loss: Tensor | None, device: torch.device | str = "cpu") -> float:
    """Of all ranks."""
    total = torch.zeros(1, device=device) if loss is None else loss.reshape(1).float().clone()
    dist.all_reduce(total)
    return float(total)


def _repetition(
    step: Step, host: dist.ProcessGroup | None, settle: Callable[[], None]
) -> tuple[float, float]:
    """Seconds from when all begin until all are done, and the share of other processes; rank 0's of both."""
    meet(host)
    own, busy, begin = time.process_time(), busy_s(), time.perf_counter()
    step()
    settle()
    meet(host)
    took = time.perf_counter() - begin
    spent = torch.tensor([time.process_time() - own], dtype=torch.float64)
    busy = busy_s() - busy
    dist.all_reduce(spent, group=host)
    share = max(0.0, busy - float(spent)) / (took * (os.cpu_count() or 1))
    found = torch.tensor([took, share], dtype=torch.float64)
    dist.broadcast(found, 0, group=host)
    return float(found[0]), float(found[1])


def busy_s() -> float:
    """CPU seconds of all processes of this machine since it started; of a kernel that counts them."""
    with Path("/proc/stat").open() as file:
        fields = [int(word) for word in file.readline().split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def check_losses(losses: Mapping[str, tuple[float, float]], ours: str) -> None:
    """All variants compute the same loss and gradients, or their times say nothing."""
    unequal = unequal_losses(losses, ours, tolerance=1e-3)
    assert not unequal, "; ".join(unequal)


def unequal_losses(losses: Mapping[str, tuple[float, float]], ours: str, *, tolerance: float) -> list[str]:
    """Which variants compute something else than ours, and what."""
    return [
        f"{what} of {name}: {theirs}, ours {own}"
        for name, found in losses.items()
        for what, theirs, own in zip(("loss", "gradients"), found, losses[ours], strict=True)
        if not abs(theirs - own) <= tolerance * abs(own)
    ]


def variant_times(seconds: Mapping[str, list[float]], ours: str) -> dict[str, VariantTime]:
    """Medians, and how sure the ratios are."""
    found = {}
    for name, theirs in seconds.items():
        low, high = bootstrap(theirs, seconds[ours])
        found[name] = VariantTime(
            step_s=median(theirs),
            over_ours=median(their / our for their, our in zip(theirs, seconds[ours], strict=True)),
            over_ours_low=low,
            over_ours_high=high,
        )
    return found


def bootstrap(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float]:
    """95 % of the median ratio of a round, over rounds drawn with replacement.

    The speed of a shared machine drifts by more than what is compared; within a round it has less time to.
    """
    chance = random.Random(0)
    ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
    found = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return found[int(0.025 * DRAWS)], found[int(0.975 * DRAWS)]
