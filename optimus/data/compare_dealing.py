"""Compares ways of dealing a step's sequences and items, over batches drawn from lengths of a data set.

Every way is measured twice: for encoder pipelines, which wait for each other at the end of a step, and for
ranks of a trainer without a pipeline (FSDP, DDP), which wait for each other in every microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from optimus.data.dealing import deal_items, deal_microbatches, deal_sequences, sum_fullest_ranks
from optimus.ir.op import Floats

BATCHES = 20
SEED = 0
WAYS = {
    "drawn": "sequences as they come, with their items",
    "sequences": "whole sequences, over replicas, and alike ones into a microbatch of ranks",
    "items": "single items, over all pipelines or ranks",
}
FIELDS = ("fullest_pipeline", "fullest_rank", "padding")
Costs = Sequence[Sequence[float]]  # of the items of every sequence


@dataclass(frozen=True, kw_only=True)
class DealingResult:
    """Means over batches: the time of the fullest over that of the mean, and tokens run over real ones.

    Bins that must hold any microbatch run their capacity; bins of dealt items hold what they hold.
    """

    fullest_pipeline: float
    fullest_rank: float
    padding: float


def compare_dealing(
    costs: Costs,
    *,
    replicas: int,
    microbatches: int,
    sequences: int = 1,
    pieces: int = 1,
    batches: int = BATCHES,
    seed: int = SEED,
) -> dict[str, DealingResult]:
    """Draws batches of `sequences` per replica and microbatch, and deals each in every way.

    A replica has `pieces` encoder pipelines, and as a rank of another trainer it is one.
    """
    rng = np.random.default_rng(seed)
    size = replicas * microbatches * sequences
    measured: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for _ in range(batches):
        batch = [costs[number] for number in rng.integers(len(costs), size=size)]
        loads = [sum(items) for items in batch]
        mean = sum(loads) / (replicas * microbatches)
        if not mean:
            continue
        drawn = np.arange(size).reshape(replicas, microbatches, sequences).tolist()
        by_replica = [
            [[own[at] for at in places] for places in deal_sequences([loads[n] for n in own], microbatches)]
            for own in deal_sequences(loads, replicas)
        ]
        by_microbatch = deal_microbatches(loads, microbatches, replicas)
        pipelines = {"drawn": drawn, "sequences": by_replica}
        ranks: dict[str, Any] = {"drawn": list(zip(*drawn, strict=True)), "sequences": by_microbatch}
        for way, of_way in pipelines.items():
            fullest, padding = _measure_pipelines(batch, of_way, pieces, mean)
            waited = sum_fullest_ranks(loads, ranks[way]) / microbatches
            measured[way].append((fullest, waited / mean, padding))
        columns = deal_sequences(loads, microbatches)
        dealt = deal_items(_list_items(batch, columns), [range(replicas * pieces)] * microbatches)
        alike = [max(_fill(batch, chain(*ranks), replicas)) for ranks in by_microbatch]
        measured["items"].append((dealt.fullest_over_mean, sum(alike) / microbatches / mean, 1.0))
    return {
        way: DealingResult(**dict(zip(FIELDS, np.mean(of_way or [(1.0,) * 3], axis=0).tolist(), strict=True)))
        for way, of_way in measured.items()
    }


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
    loads: list[float] = deal_items(_list_items(batch, [microbatch]), [range(pieces)]).loads[0].tolist()
    return loads
