"""Plays many variants of a schedule at once: compiled loops leave the interpreter's lock to others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from optimus.environment import usable_cores

MOST_THREADS = 8  # each holds the arrays of one schedule, up to 100 MB for the largest jobs

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
    """`function` of every item, in order; the answers do not depend on how many threads there are."""
    with ThreadPoolExecutor(min(usable_cores(), MOST_THREADS)) as pool:
        coming = [pool.submit(function, item) for item in items]
        try:
            for each in coming:
                yield each.result()
        finally:  # whoever stops reading, or is interrupted, waits for those that run, not for all
            for each in coming:
                each.cancel()
