"""Computes the loss of held-out batches between two steps, with the forward lines of the program only.

Held-out samples have the numbers -1, -2 and so on, which no step trains on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from optimus.engine.batch_plan import BatchPlan
from optimus.engine.rank_trainer import RankTrainer


def evaluate(
    rank: RankTrainer,
    share_plan: Callable[[Callable[[], BatchPlan]], BatchPlan],
    reading: Callable[[], AbstractContextManager[None]],
) -> tuple[Tensor, int]:
    """Returns this rank's part of the loss of all labels of held-out batches, and their number.

    Every rank calls it. `share_plan` gives the plan of a batch, which one rank of a pipeline makes, to all of
    it. Samples are read inside `reading`. Nothing is dropped, saved for a backward, or changed.
    """
    total, labels = torch.zeros((), dtype=torch.float64, device=rank.device), 0
    for number in range(rank.config.eval_batches):
        batch_plan = share_plan(partial(rank.eval_batch_plan, number))
        with reading():
            batch = rank.batch(None, batch_plan)
        loss = rank.executor.eval(batch)
        if loss is not None:
            total += loss * batch_plan.labels  # losses of a batch are divided by its labels
        labels += batch_plan.labels
    return total, labels
