"""Counts the bytes of cases beside their plans; prints one JSON line a case."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

from engine_cases import MEASURED, WINDOWED, Case
from engine_worker import RankRun, everybody, play

from optimus.engine.memory_tracker import measure_step_memory
from optimus.engine.p2p import _PendingSends
from optimus.models.segment import Segment


def count(case: Case, rank: int) -> dict[str, Any]:
    run = RankRun(case, rank)
    run.trains = True
    run.play(0)  # the optimizer makes its state
    _, use = measure_step_memory(run.built, run.batch(1))
    return {"ranks": everybody({**asdict(use), "error": use.error})}


def main(names: list[str]) -> None:
    """All cases, or those that are named; or one with an engine that keeps too much."""
    if names == ["leaks"]:
        (case,) = (case for case in MEASURED if case.name == "measured: interleaved")
        plants: dict[str, Any] = {
            "sound": nullcontext(),
            "outputs": patch.object(Segment, "release_outputs", lambda self, saved: None),
            "sent": patch.object(_PendingSends, "release_completed", lambda self: None),
        }
        for name, planted in plants.items():
            with planted:
                print(json.dumps({"name": name, **play(case, count)}), flush=True)  # noqa: T201
        return
    for case in (*MEASURED, *WINDOWED):
        if not names or case.name.removeprefix("measured: ") in names:
            print(json.dumps({"name": case.name, **play(case, count)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
