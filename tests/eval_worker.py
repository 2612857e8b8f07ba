"""Evaluates between steps of training; prints one JSON line a case."""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from engine_cases import CP_SHARDED, DEALT, SHARDED, TP_SHARDED, Case
from engine_worker import EVAL_BATCHES, OPTIMIZER, RankRun, everybody, limits, play
from one_process import OneProcess
from torch import Tensor
from torch import distributed as dist

from optimus.engine.batch_plan import BatchPlan
from optimus.engine.evaluation import evaluate

STEPS = 4


def live_bytes() -> int:
    """Counts the storages of all tensors of this process, each once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def evaluated(run: RankRun) -> float:
    def share_plan(make: Callable[[], BatchPlan]) -> BatchPlan:
        return make()  # every rank makes the same

    total, labels = evaluate(run.built, share_plan, nullcontext)
    dist.all_reduce(total)
    return float(total) / labels


def train(case: Case, rank: int, *, evaluates: bool) -> tuple[RankRun, list[float], list[int], str]:
    """Returns losses of evaluations after every step but the first, bytes they leave, and all weights."""
    run = RankRun(case, rank)
    run.trains = True
    losses, left, digest = [], [], hashlib.sha256()
    for step in range(STEPS):
        run.play(step)
        if evaluates and step:
            losses.append(evaluated(run))  # the executor holds on to the last batch
            before = live_bytes()
            evaluated(run)
            left.append(live_bytes() - before)
    run.learned()
    for parameter in run.model.parameters.values():
        digest.update(parameter.detach().numpy().tobytes())
    return run, losses, left, digest.hexdigest()


def compare(case: Case, rank: int) -> dict[str, Any]:
    run, losses, left, digest = train(case, rank, evaluates=True)
    _, _, _, without = train(case, rank, evaluates=False)
    same, left_by_rank = everybody(digest == without), everybody(left)
    if rank:
        return {}
    expected = []
    one = OneProcess(case.job.model, seed=case.seed)
    held_out = [run.data.sample(-1 - at) for at in range(EVAL_BATCHES * case.job.workload.sequences_per_step)]
    batches = [[run.data.sample(number) for number in run.numbers(step)] for step in range(STEPS)]
    for steps in range(2, STEPS + 1):
        one = OneProcess(case.job.model, seed=case.seed)
        one.train(batches[:steps], clip=case.clip, config=OPTIMIZER)
        expected.append(one.evaluate(held_out))
    pairs = zip(losses, expected, strict=True)
    return {
        "difference": max(abs(ours - right) / right for ours, right in pairs),
        "losses": losses,
        "same": same,
        "left": left_by_rank,
    }


if __name__ == "__main__":
    cases = {case.name: case for case in (*SHARDED, *TP_SHARDED, *CP_SHARDED, *DEALT)}
    for name in sys.argv[1:]:
        with limits(cases[name]):
            found = play(cases[name], partial(compare))
        print(json.dumps({"name": name, **found}), flush=True)  # noqa: T201
