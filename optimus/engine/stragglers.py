"""Names ranks that are slower than they should be, from the seconds in which each was busy.

A rank is compared with the ranks that run the same program (its data-parallel replicas), and with its own
past, in proportion to all ranks: a step that is slow for everybody makes nobody a straggler.
"""

from __future__ import annotations

import math
import socket
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median

import torch
from torch import distributed as dist

from optimus.errors import escape_unprintable
from optimus.ir.plan import Plan
from optimus.models.collectives import all_gather_single

WINDOW = 10  # steps, of which the median counts
WINDOWS = 3  # more slow ones than others, before a rank is named
PAST = 50  # windows
SLOW = 1.5  # times as busy as the ranks it is compared with


class StragglerFinder:
    """Finds slow ranks from the busy seconds of all ranks; `programs` says which program each rank runs."""

    def __init__(self, programs: Sequence[int]) -> None:
        self._programs = programs
        # Of windows in which a rank was not slow: its seconds over those of the usual rank.
        self._past = [deque[float](maxlen=PAST) for _ in programs]
        self._slow_windows = [0] * len(programs)
        self._named: set[int] = set()  # until they are as fast as others again

    def find(self, busy_s: Sequence[float]) -> list[tuple[int, float]]:
        """Takes seconds of a usual step of a window; returns ranks that became slow, and by what factor."""
        usual = max(median(busy_s), 1e-9)
        by_program: dict[int, list[float]] = {}
        for program, seconds in sorted(zip(self._programs, busy_s, strict=True)):
            by_program.setdefault(program, []).append(seconds)
        found = []
        for rank, seconds in enumerate(busy_s):
            share = seconds / usual
            slower = max(
                seconds / max(_median_of_others(by_program[self._programs[rank]], seconds), 1e-9),
                share / median(self._past[rank]) if self._past[rank] else 0.0,
            )
            if slower <= SLOW:
                self._past[rank].append(share)
            change = 1 if slower > SLOW else -1
            self._slow_windows[rank] = min(max(0, self._slow_windows[rank] + change), WINDOWS)
            if self._slow_windows[rank] == WINDOWS and rank not in self._named:
                self._named.add(rank)
                found.append((rank, slower))
            elif not self._slow_windows[rank]:
                self._named.discard(rank)
        return found


def _median_of_others(ordered: Sequence[float], value: float) -> float:
    """Returns the median without one occurrence of `value`, or infinity if there are no others."""
    place, count = bisect_left(ordered, value), len(ordered) - 1
    if not count:
        return math.inf
    middle = [number + (number >= place) for number in ((count - 1) // 2, count // 2)]
    return sum(ordered[number] for number in middle) / 2


class StragglerWatch:
    """Shares the busy seconds of this rank with all ranks once in a window: its median, not its hiccups."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        world = plan.ranks.world
        self._finder = StragglerFinder([plan.ranks.class_of(rank) for rank in range(world)])
        self._device, self._busy_s = device, list[float]()
        self._hosts: list[str] = [""] * world
        if device.type == "cpu":
            dist.all_gather_object(self._hosts, socket.gethostname())

    def add(self, busy_s: float) -> None:
        """Adds a step; the first rank warns of ranks that became slow. All ranks call it.

        The host of a GPU waits for no op, so that its seconds say nothing: there nobody is named.
        """
        if self._device.type != "cpu":
            return
        self._busy_s.append(busy_s)
        if len(self._busy_s) < WINDOW:
            return
        mine = torch.tensor([median(self._busy_s)], dtype=torch.float64, device=self._device)
        of_ranks = torch.empty(len(self._hosts), dtype=torch.float64, device=self._device)
        all_gather_single(of_ranks, mine)
        self._busy_s.clear()
        if dist.get_rank() != 0:
            return
        for rank, slower in self._finder.find(of_ranks.tolist()):
            host = escape_unprintable(self._hosts[rank])
            sys.stderr.write(
                f"warning: rank {rank} on {host} is slow: {slower:.1f} times as busy as it should be, "
                f"for {WINDOW * WINDOWS} steps\n"
            )
