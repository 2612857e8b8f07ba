"""Compares ways of dealing a step's sequences and items, over batches drawn from lengths of a data set.

Every way is measured twice: for encoder pipelines, which wait for each other at the end of a step, and for
ranks of a trainer without a pipeline (FSDP, DDP), which wait for each other in every microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain

import numpy as np

from optimus.data.dealing import deal_items, deal_microbatches, deal_sequences, sum_fullest_ranks
from optimus.ir.op import Floats

BATCHES = 20
LEAST_BATCHES = 2
MAX_SEQUENCES = 65_536  # of all batches, if there are more than the least
SEED = 0
WAYS = {
    "drawn": "sequences as they come, each with its items",
    "sequences": "whole sequences over replicas and microbatches (BalancedBatchSampler)",
    "items": "single items over ranks or encoder pipelines (DealtEncoder)",
    "both": "sequences first, then single items",
}
Costs = Sequence[Sequence[float]]  # of the items of every sequence
Progress = Callable[[str, int, int], None]  # name, batches done, batches in total


@dataclass(frozen=True, kw_only=True)
class DealingResult:
    """Means over batches: the time of the fullest over that of the mean, and tokens run over real ones.

    Bins that must hold any microbatch run their capacity; bins of dealt items hold what they hold.
    """

    fullest_pipeline: float
    fullest_rank: float
    padding: float


def count_batches(size: int) -> int:
    """Returns how many batches of a size are drawn: large ones differ less."""
    return max(LEAST_BATCHES, min(BATCHES, MAX_SEQUENCES // size))


def compare_dealing(
    costs: Costs,
    *,
    replicas: int,
    microbatches: int,
    sequences: int = 1,
    pieces: int = 1,
    batches: int = BATCHES,
    seed: int = SEED,
    progress: Progress | None = None,
) -> dict[str, DealingResult]:
    """Draws batches of `sequences` per replica and microbatch, and deals each in every way.

    A replica has `pieces` encoder pipelines, and as a rank of another trainer it is one.
    """
    rng = np.random.default_rng(seed)
    shape = (replicas, microbatches, sequences)
    measured: dict[str, list[DealingResult]] = {way: [] for way in WAYS}
    for number in range(batches):
        batch = [costs[n] for n in rng.integers(len(costs), size=math.prod(shape))]
        if any(batch):
            for way, result in _deal_batch(batch, shape, pieces).items():
                measured[way].append(result)
        if progress is not None:
            progress("batches", number + 1, batches)
    return {way: _mean(results) for way, results in measured.items()}


def _deal_batch(batch: Costs, shape: tuple[int, int, int], pieces: int) -> dict[str, DealingResult]:
    """Measures all ways of one batch."""
    replicas, microbatches, _ = shape
    loads = [sum(items) for items in batch]
    mean = sum(loads) / (replicas * microbatches)
    drawn = np.arange(len(batch)).reshape(shape)
    by_replica = [
        [[own[at] for at in places] for places in deal_sequences([loads[n] for n in own], microbatches)]
        for own in deal_sequences(loads, replicas)
    ]
    drawn_ranks = drawn.swapaxes(0, 1).tolist()  # by microbatch
    dealt_ranks = deal_microbatches(loads, microbatches, replicas)
    drawn_columns = [list(chain(*ranks)) for ranks in drawn_ranks]
    dealt_columns = deal_sequences(loads, microbatches)

    def measure(pipelines: Places, ranks: Places) -> DealingResult:
        fullest, padding = _measure_pipelines(batch, pipelines, pieces, mean)
        waited = sum_fullest_ranks(loads, ranks) / microbatches / mean
        return DealingResult(fullest_pipeline=fullest, fullest_rank=waited, padding=padding)

    def measure_items(columns: Sequence[Sequence[int]], ranks: Places) -> DealingResult:
        dealt = deal_items(_list_items(batch, columns), [range(replicas * pieces)] * microbatches)
        waited = sum(max(_fill(batch, chain(*each), replicas)) for each in ranks) / microbatches / mean
        return DealingResult(fullest_pipeline=dealt.fullest_over_mean, fullest_rank=waited, padding=1.0)

    return {
        "drawn": measure(drawn.tolist(), drawn_ranks),
        "sequences": measure(by_replica, dealt_ranks),
        "items": measure_items(drawn_columns, drawn_ranks),
        "both": measure_items(dealt_columns, dealt_ranks),
    }


def _mean(results: Sequence[DealingResult]) -> DealingResult:
    names = [field.name for field in fields(DealingResult)]
    return DealingResult(
        **{name: float(np.mean([getattr(each, name) for each in results] or [1.0])) for name in names}
    )


Places = Sequence[Sequence[Sequence[int]]]  # numbers of sequences: by replica and microbatch, or reversed


def _measure_pipelines(batch: Costs, replicas: Places, pieces: int, mean: float) -> tuple[float, float]:
    """Returns the fullest pipeline over the mean, and what bins of one capacity run over real tokens."""
    bins: Floats = np.array(
        [[max(_fill(batch, microbatch, pieces)) for microbatch in replica] for replica in replicas]
    )
    return float(bins.mean(axis=1).max() * pieces / mean), float(bins.max() * pieces / mean)


def _list_items(batch: Costs, columns: Iterable[Iterable[int]]) -> list[list[float]]:
    return [[cost for number in column for cost in batch[number]] for column in columns]


def _fill(batch: Costs, microbatch: Iterable[int], pieces: int) -> Sequence[float]:
    """Returns the loads of bins for the items of some sequences, dealt longest first."""
    if pieces == 1:
        return [sum(sum(batch[number]) for number in microbatch)]
    loads: list[float] = deal_items(_list_items(batch, [microbatch]), [range(pieces)]).loads[0].tolist()
    return loads
