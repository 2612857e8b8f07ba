"""Sections for the ranks of `bench gpu` that fail in several ways, or do not."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.gpu_ranks import Place


def works(place: Place) -> dict[str, Any]:
    place.tell((1, 1))
    return {"ranks": place.gathered(place.rank)}


def fails(place: Place) -> dict[str, Any]:
    """On one rank; the others wait for it."""
    if place.rank == 1:
        raise ZeroDivisionError("no such kernel")
    place.settle()
    return {}


def dies(place: Place) -> dict[str, Any]:
    """Without a word, as after an abort of NCCL."""
    if place.rank == 1:
        os._exit(3)
    place.settle()
    return {}


def hangs(place: Place) -> dict[str, Any]:
    time.sleep(600)
    return {}


def finds_nothing(place: Place) -> dict[str, Any]:
    """Nothing that JSON could hold."""
    return {"share": float("nan")}
