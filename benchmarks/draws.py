"""Durations that vary as real ones do, drawn so that anyone who knows the seed can draw them again.

A draw is a pure function of the seed and of what is drawn for: no generator, no order of calls. So ranks
draw without talking to each other, a replay draws the same, and a planner, which has no seed, sees none.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Log-normal factors around durations; their mean is 1, so that plans stay right on average."""

    seed: int
    sigma: float = 0.15  # of the logarithm; 0 turns draws off

    def factor(self, *, module: str, kind: str, virtual_stage: int, microbatch: int, phase: int = 0) -> float:
        """What one phase takes, relative to what it should take."""
        named = f"{self.seed}/{module}/{kind}/{virtual_stage}/{microbatch}/{phase}"
        drawn = int.from_bytes(hashlib.blake2b(named.encode(), digest_size=8).digest(), "big") >> 11
        uniform = (drawn + 0.5) / (1 << 53)  # 53 bits: never 0, never 1
        return math.exp(self.sigma * _NORMAL.inv_cdf(uniform) - self.sigma**2 / 2)


MEANS = Draws(seed=0, sigma=0.0)  # as plans are made
