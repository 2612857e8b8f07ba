"""Counts the bytes of ranks that really run, for comparing dry runs with; prints one JSON line a case."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch
from engine_cases import CP, TP, Case
from engine_worker import everybody, play
from torch import distributed as dist

from optimus.engine.config import TrainingConfig
from optimus.engine.memory_tracker import measure_step_memory
from optimus.engine.process_groups import make_process_groups
from optimus.engine.rank_trainer import RankTrainer
from optimus.models.collectives import TpGroup

TRAINING = TrainingConfig(dtype="bfloat16")
TIMES = 8  # a thread of gloo may hold a tensor a moment longer than it is needed: seldom in all of them


class _AtOnce:
    """Sends end before anything else is done, as those of a dry run do: gloo takes all of a small tensor."""

    def add(self, work: dist.Work, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        work.wait()

    def release_completed(self) -> None: ...

    def wait(self) -> None: ...


def count(case: Case, rank: int) -> dict[str, Any]:
    groups, uses = make_process_groups(case.plan, rank, timeout_s=30), []
    scatters = patch.object(TpGroup, "_uses_all_to_all", False)  # as all but gloo do
    with patch("optimus.engine.p2p._PendingSends", _AtOnce), scatters:
        for _ in range(TIMES):  # of new trainers: what a first step makes, such as tables, others find
            one = RankTrainer(
                case.job,
                case.plan,
                TRAINING,
                groups,
                dtype=torch.bfloat16,
                device=torch.device("cpu"),
            )
            if one.optimizer is not None and one.optimizer.adamw is not None:
                one.optimizer.adamw.step()
            uses.append(measure_step_memory(one, one.batch(0))[1])
    return {"ranks": everybody(list(map(asdict, uses)))}


if __name__ == "__main__":
    for case in (*TP, *CP):
        if case.name in sys.argv[1:]:
            print(json.dumps({"name": case.name, **play(case, count)}), flush=True)  # noqa: T201
