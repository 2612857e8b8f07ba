"""Counts the bytes of cases beside their plans; prints one JSON line a case."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from engine_cases import MEASURED, WINDOWED, Case
from engine_worker import RankRun, everybody, play

from optimus.engine.memory_use import count_step
from optimus.engine.optimizer import Optimizer


def count(case: Case, rank: int) -> dict[str, Any]:
    run = RankRun(case, rank)
    run.learns = True
    run.play(0)  # the optimizer makes its state
    assert isinstance(run.optimizer, Optimizer)
    _, use = count_step(run.executor, run.batch(1), list(run.model.parameters.values()), run.optimizer)
    return {"ranks": everybody({**asdict(use), "error": use.error})}


def main(names: list[str]) -> None:
    """All cases, or those that are named."""
    for case in (*MEASURED, *WINDOWED):
        if not names or case.name.removeprefix("measured: ") in names:
            print(json.dumps({"name": case.name, **play(case, count)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
