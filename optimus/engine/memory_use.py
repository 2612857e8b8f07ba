"""What a rank's tensors took in a step beside what its plan says, by component and line by line."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import numpy as np
from torch import Tensor

from optimus.engine.config import MemoryUse
from optimus.engine.memory_tracker import MemoryTracker, states_of, total_bytes
from optimus.engine.rank_trainer import RankTrainer
from optimus.ir.plan import Plan
from optimus.protocols import Batch
from optimus.verify.memory_replay import ACTIVATIONS, bytes_along

BESIDE = ("working", "logits")  # planned as always there, and counted with whoever makes them
STATES = ("parameters", "gradients", "optimizer")


def count_step(rank: RankTrainer, batch: Batch) -> tuple[Tensor | None, MemoryUse]:
    """Runs one step, slower than others; returns its loss and the bytes it took."""
    executor, parameters = rank.executor, rank.parameters
    assert rank.optimizer is not None
    states = states_of(parameters, rank.optimizer)
    state_tensors = chain.from_iterable(states.values())
    with executor.side_stream.inline(), MemoryTracker(executor, state_tensors) as counter:
        loss = executor.step(batch)
    held = {name: total_bytes(tensors) for name, tensors in states.items()}
    dtype = str(parameters[0].dtype).removeprefix("torch.")
    return loss, _compared(executor.plan, executor.groups.rank, counter, held, dtype)


def _compared(
    plan: Plan, rank: int, counter: MemoryTracker, states: Mapping[str, int], dtype: str
) -> MemoryUse:
    device = plan.ranks.class_of(rank)
    alive, fixed = bytes_along(plan, device), plan.memory[device].fixed
    beside = sum(fixed[name] for name in BESIDE)
    planned = {name: fixed[name] for name in STATES}
    most = counter.most
    kept = counter.kept.sum(axis=1)
    before = np.concatenate([[0], kept[:-1]])
    over = most - alive.sum(axis=1) - beside
    own = dict(zip(ACTIVATIONS, counter.kept.max(axis=0).tolist(), strict=True))
    return MemoryUse(
        rank=rank,
        planned={
            **planned,
            **dict(zip(ACTIVATIONS, alive.max(axis=0).tolist(), strict=True)),
            "working": beside,
        },
        counted={**states, **own, "working": int((most - np.maximum(before, kept)).max())},
        planned_peak=sum(planned.values()) + int(alive.sum(axis=1).max()) + beside,
        counted_peak=sum(states.values()) + int(most.max()),
        dtype=dtype,
        lines_over=int((over > 0).sum()),
        most_over=max(0, int(over.max())),
        peak_line=int(most.argmax()),
    )
