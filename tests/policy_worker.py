"""Trains with a broken batch, a broken loss and a spike among the steps; prints one JSON line a case."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from engine_cases import SHARDED, TP_SHARDED, Case
from engine_worker import OPTIMIZER, RankRun, everybody, limits, play, worst
from one_process import OneProcess
from torch import Tensor

from optimus.engine.synthetic_data import SyntheticDataset
from optimus.models.sample import ItemKeys, Sample

STEPS = 12
NAN_BATCH, LOSS_STEP, SPIKE_STEP = 2, 4, 11  # nine steps are applied before the spike
SPIKE = 100.0


class BrokenDataset(SyntheticDataset):
    """One image of one batch is NaN."""

    def sample(self, number: int, items: ItemKeys | None = None) -> Sample:
        sample = super().sample(number, items)
        if number // self.job.workload.sequences_per_step != NAN_BATCH:
            return sample
        broken = {
            name: tuple(replace(item, inputs=item.inputs * math.nan) for item in of_encoder)
            for name, of_encoder in sample.items.items()
        }
        return replace(sample, items=broken)


def train(case: Case, rank: int) -> dict[str, Any]:
    """Returns which steps were left out, whether they changed masters or moments, and the parameters."""
    run = RankRun(case, rank, dataset=BrokenDataset(job=case.job, seed=case.seed))
    optimizer = run.built.optimizer
    assert optimizer is not None
    optimizer._spike_factor = 10.0
    run.trains = True
    step_of_optimizer = optimizer.step
    now = 0

    def step(loss: Tensor | None) -> None:
        if now == LOSS_STEP and loss is not None:
            loss = torch.full_like(loss, math.inf)
        if now == SPIKE_STEP:
            for bucket in optimizer.buckets:
                bucket.reduced_grad.mul_(SPIKE)
        step_of_optimizer(loss)

    patch.object(optimizer, "step", step).start()
    left_out, changed, norms = [], [], []
    for now in range(STEPS):
        before = state(run)
        run.play(now)
        norm, is_left_out = optimizer.read_outcome()
        norms.append(norm)
        if is_left_out:
            left_out.append(now)
            changed.append(any(not torch.equal(a, b) for a, b in zip(before, state(run), strict=True)))
    counts = [] if optimizer.adamw is None else [float(s["step"]) for s in optimizer.adamw.state.values()]
    gathered, by_rank = everybody(run.learned()), everybody((left_out, any(changed), counts))
    if rank:
        return {}
    one, data = OneProcess(case.job.model, seed=case.seed), SyntheticDataset(job=case.job, seed=case.seed)
    batches = [[data.sample(number) for number in run.numbers(step)] for step in range(STEPS)]
    skipped = (NAN_BATCH, LOSS_STEP, SPIKE_STEP)
    one.train(batches, clip=case.clip, config=OPTIMIZER, left_out=skipped)
    trained = {name: p.detach() for name, p in one.parameters().items() if p.requires_grad}
    return {
        "left_out": [of_rank[0] for of_rank in by_rank],
        "changed": any(of_rank[1] for of_rank in by_rank),
        "counts": sorted({count for of_rank in by_rank for count in of_rank[2]}),
        "parameters": worst(gathered, trained, run),
        "finite_norms": [step for step, norm in enumerate(norms) if math.isfinite(norm)],
    }


def state(run: RankRun) -> list[Tensor]:
    """Copies masters and moments; step 2 is behind the first, so that there are moments."""
    optimizer = run.built.optimizer
    assert optimizer is not None
    states = [] if optimizer.adamw is None else optimizer.adamw.state.values()
    moments = [value.clone() for of in states for value in of.values()]
    return [*(bucket.master.clone() for bucket in optimizer.buckets), *moments]


if __name__ == "__main__":
    cases = {case.name: case for case in (*SHARDED, *TP_SHARDED)}
    for name in sys.argv[1:]:
        with limits(cases[name]):
            found = play(cases[name], partial(train))
        print(json.dumps({"name": name, **found}), flush=True)  # noqa: T201
