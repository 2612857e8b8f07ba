"""The clock of a rank that sleeps instead of computing, and the links between such ranks.

Ranks keep *ideal* time: what a clock would show on a host that costs nothing. Computing and waiting move it
on, and then the rank sleeps until real time is there too. Host overhead makes a rank late, and its next sleep
is shorter by as much; what is more than a bound is not caught up and counts, as it would anywhere. All ranks
of a host read one clock, so ideal times travel with messages and mean the same everywhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


class PacedClock:
    """Ideal time of one rank, in seconds of the host's monotonic clock, or in *slow motion*: so many of those
    are one of its own, on hosts whose cores could not wake all ranks in time.

    The thread that made it keeps it. Work that another thread does beside it, in a copy of its context, has a
    time of its own, which begins when that copy was made.
    """

    def __init__(
        self,
        *,
        slow: float = 1.0,
        catch_up_s: float = 0.03,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.slow, self._catch_up_s, self._host_s, self._sleep = slow, catch_up_s / slow, now, sleep
        self._keeper, self._ideal = threading.get_ident(), ContextVar[float]("ideal_s")
        self.restart()

    def now(self) -> float:
        """Real time, as fast as this clock goes."""
        return self._host_s() / self.slow

    @property
    def ideal_s(self) -> float:
        return self._ideal.get()

    @property
    def given_up_s(self) -> float:
        """Lateness since the last restart that was too much to catch up: how disturbed the host was."""
        return self._given_up_s

    def restart(self, ideal_s: float | None = None) -> None:
        """Forgets how late it was, what ran before was not to be paced; it is now, or as late as is said."""
        self._ideal.set(self.now() if ideal_s is None else ideal_s)
        self._given_up_s = 0.0

    def compute(self, duration_s: float) -> None:
        """Computes, in ideal time, for so long; real work done before this call is part of it."""
        self.reach(self.ideal_s + duration_s)

    def reach(self, ideal_s: float) -> None:
        """Waits for an event at this ideal time, which may be over."""
        ideal_s = max(self.ideal_s, ideal_s)
        self._ideal.set(ideal_s)
        left_s = ideal_s - self.now()
        if left_s > 0:
            self._sleep(left_s * self.slow)
        too_late_s = self.now() - ideal_s - self._catch_up_s
        if too_late_s > 0 and threading.get_ident() == self._keeper:
            self._ideal.set(ideal_s + too_late_s)
            self._given_up_s += too_late_s

    def is_over(self, ideal_s: float) -> bool:
        return self.now() >= ideal_s


def _plain_size(tensor: Any) -> float:
    return float(tensor.nbytes)


@dataclass(frozen=True, kw_only=True)
class Link:
    """How fast ranks of a group reach each other. Tiny tensors may stand for large ones.

    A transfer takes latency plus bytes over bandwidth, and one follows the other: on the lane, if one is
    named, which all groups of a rank that name it share; else per group and destination (messages) or per
    group (collectives).
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    bytes_scale: float = 1.0
    size_of: Callable[[Any], float] = _plain_size  # bytes of a tensor, before they are scaled
    lane: str | None = None

    def message_s(self, tensor: Any) -> float:
        return self.latency_s + self._bytes(tensor) / self.bandwidth_bytes_per_s

    def collective_s(self, tensors: list[Any], *, ranks: int, passes: int = 1) -> float:
        """Along a ring: what is gathered, scattered (one pass) or reduced (two), less a rank's own share."""
        if ranks == 1:
            return 0.0
        moved = passes * (ranks - 1) / ranks * sum(map(self._bytes, tensors))
        return self.latency_s + moved / self.bandwidth_bytes_per_s

    def broadcast_s(self, tensors: list[Any], *, ranks: int) -> float:
        """Pipelined along a chain."""
        if ranks == 1:
            return 0.0
        return self.latency_s + sum(map(self._bytes, tensors)) / self.bandwidth_bytes_per_s

    def _bytes(self, tensor: Any) -> float:
        return self.bytes_scale * self.size_of(tensor)
