"""Clock, links and drawn durations of ranks that sleep instead of computing.

Ranks keep *ideal* time: the time of a host without overhead. Computing and waiting advance it, and then the
rank sleeps until real time has caught up. Host overhead makes a rank late, and its next sleep is shorter by
as much; lateness beyond a bound is not caught up and counts. All ranks of a host read one clock, so ideal
times can be sent with messages.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any


class PacedClock:
    """Ideal time of one rank, in seconds of the host's monotonic clock divided by `time_scale`.

    A `time_scale` above 1 is slow motion, for hosts whose cores cannot wake all ranks in time. The clock
    belongs to the thread that made it. Work of another thread, in a copy of its context, has an ideal time of
    its own that starts when the copy was made.
    """

    def __init__(
        self,
        *,
        time_scale: float = 1.0,
        catch_up_s: float = 0.03,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.time_scale, self._catch_up_s = time_scale, catch_up_s / time_scale
        self._host_s, self._sleep = now, sleep
        self._owner, self._ideal = threading.get_ident(), ContextVar[float]("ideal_s")
        self.restart()

    def now(self) -> float:
        """Returns real time in seconds of this clock."""
        return self._host_s() / self.time_scale

    @property
    def ideal_s(self) -> float:
        return self._ideal.get()

    @property
    def lost_s(self) -> float:
        """Lateness since the last restart that exceeded the bound: the disturbance by the host."""
        return self._lost_s

    def restart(self, ideal_s: float | None = None) -> None:
        """Sets ideal time to real time or to `ideal_s`, and forgets lost time."""
        self._ideal.set(self.now() if ideal_s is None else ideal_s)
        self._lost_s = 0.0

    def compute(self, duration_s: float) -> None:
        """Advances ideal time by `duration_s`; real work since the last call is part of it."""
        self.wait_until(self.ideal_s + duration_s)

    def wait_until(self, ideal_s: float) -> None:
        """Waits for an event at this ideal time, which may have passed."""
        ideal_s = max(self.ideal_s, ideal_s)
        self._ideal.set(ideal_s)
        left_s = ideal_s - self.now()
        if left_s > 0:
            self._sleep(left_s * self.time_scale)
        too_late_s = self.now() - ideal_s - self._catch_up_s
        if too_late_s > 0 and threading.get_ident() == self._owner:
            self._ideal.set(ideal_s + too_late_s)
            self._lost_s += too_late_s

    def has_passed(self, ideal_s: float) -> bool:
        return self.now() >= ideal_s


def _nbytes(tensor: Any) -> float:
    return float(tensor.nbytes)


@dataclass(frozen=True, kw_only=True)
class PacedLink:
    """Latency and bandwidth between the ranks of a group; tiny tensors may stand for large ones.

    A transfer takes latency plus bytes over bandwidth. Transfers are serialized: on `lane`, if one is named,
    over all groups of a rank that name it; else per group and destination (messages) or per group
    (collectives).
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    bytes_scale: float = 1.0
    size_of: Callable[[Any], float] = _nbytes  # bytes of a tensor, before `bytes_scale`
    lane: str | None = None

    def message_s(self, tensor: Any) -> float:
        return self.latency_s + self._bytes(tensor) / self.bandwidth_bytes_per_s

    def collective_s(self, tensors: Sequence[Any], *, ranks: int, passes: int = 1) -> float:
        """Returns the seconds of a ring: one pass to gather or scatter, two to all-reduce."""
        if ranks == 1:
            return 0.0
        moved = passes * (ranks - 1) / ranks * sum(map(self._bytes, tensors))
        return self.latency_s + moved / self.bandwidth_bytes_per_s

    def broadcast_s(self, tensors: Sequence[Any], *, ranks: int) -> float:
        """Returns the seconds of a broadcast pipelined along a chain."""
        if ranks == 1:
            return 0.0
        return self.latency_s + sum(map(self._bytes, tensors)) / self.bandwidth_bytes_per_s

    def _bytes(self, tensor: Any) -> float:
        return self.bytes_scale * self.size_of(tensor)


_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Log-normal factors of durations, with mean 1 so that plans are right on average.

    A factor is a pure function of the seed and of the phase it is for. So ranks draw without communicating, a
    replay draws the same factors, and a planner, which has no seed, sees none.
    """

    seed: int
    sigma: float = 0.15  # of the logarithm; 0 turns draws off

    def factor(self, *, module: str, kind: str, virtual_stage: int, microbatch: int, phase: int = 0) -> float:
        """Returns the duration of one phase over its mean."""
        named = f"{self.seed}/{module}/{kind}/{virtual_stage}/{microbatch}/{phase}"
        drawn = int.from_bytes(hashlib.blake2b(named.encode(), digest_size=8).digest(), "big") >> 11
        uniform = (drawn + 0.5) / (1 << 53)  # 53 bits: never 0, never 1
        return math.exp(self.sigma * _NORMAL.inv_cdf(uniform) - self.sigma**2 / 2)


MEANS = Draws(seed=0, sigma=0.0)  # no variation, as planners assume
