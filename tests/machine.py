"""How fast this machine is just now, so that a bound in seconds means the same on a slower or busier one."""

from __future__ import annotations

import statistics
import time

YARDSTICK_S = 0.012  # of the work below, on the machine where the bounds were set, when nothing disturbed it


def allowed_s(seconds: float) -> float:
    """What takes so long where the bounds were set may take so long here and now: more, never less.

    It takes a tenth of a second: of many short cases, ask for those that took longer than the bound.
    """
    return seconds * max(1.0, statistics.median(_yardstick_s() for _ in range(9)) / YARDSTICK_S)


def _yardstick_s() -> float:
    """Dictionaries, tuples and numbers, as most of our code has them."""
    begin_s, found = time.perf_counter(), dict[tuple[int, int], float]()
    for number in range(40_000):
        key = number % 97, number % 89
        found[key] = found.get(key, 0.0) + number * 0.5
    assert len(found) == 97 * 89
    return time.perf_counter() - begin_s
