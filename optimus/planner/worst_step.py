"""Computes the encoder microbatches that a rank holds in a heavy step: p99 of steps drawn from the workload.

Items are dealt as in the engine, so that a pipeline is never far from the mean; what a step has more than
others, and what a pipeline is ahead, takes memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from statistics import NormalDist

import numpy as np

from optimus.data.dealing import choose_dealing_replicas, deal_items, deal_sequences
from optimus.ir.op import Floats
from optimus.job.workload import Workload

STEPS = 40  # drawn, of which a normal distribution is fitted for the quantile
SEED = 0
P99_SIGMAS = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True, kw_only=True)
class BinShape:
    """How the items of a step are cut into the bins (microbatches) of an encoder's pipelines."""

    encoder: str
    replicas: int
    microbatches: int  # of the LLM
    pieces: int  # bins of an LLM microbatch
    pipelines: int  # of a replica


def resident_bins_at_p99(workload: Workload, shape: BinShape) -> Floats:
    """Returns by n the load, in mean bins, of the fullest n bins in a row of a pipeline, at p99 of steps."""
    lengths = [sequence.lengths(shape.encoder) for sequence in workload.sequences]
    totals = np.array([sum(items) for items in lengths], float)
    most = shape.microbatches * shape.pieces // shape.pipelines
    if len(set(lengths)) == 1 or not most:
        return np.arange(max(1, most) + 1, dtype=np.float64)
    replicas = choose_dealing_replicas(workload, shape.replicas)
    bins = shape.replicas * shape.microbatches * shape.pieces
    mean = float(totals.mean()) * workload.sequences_per_step / bins
    owners = [
        [
            replica * shape.pipelines + (column * shape.pieces + piece) % shape.pipelines
            for replica in range(replicas)
            for piece in range(shape.pieces)
        ]
        for column in range(shape.microbatches)
    ]
    rng, fullest = np.random.default_rng(SEED), np.zeros((STEPS, most + 1))
    for step in range(STEPS):
        drawn = rng.integers(len(lengths), size=workload.sequences_per_step)
        own = drawn[deal_sequences(totals[drawn].tolist(), shape.replicas // replicas)[0]]
        columns = deal_sequences(totals[own].tolist(), shape.microbatches)
        items = [list(chain.from_iterable(lengths[own[place]] for place in column)) for column in columns]
        dealt = deal_items([[float(n) for n in column] for column in items], owners)
        by_pipeline: list[list[float]] = [[0.0] for _ in range(replicas * shape.pipelines)]
        for pipelines, loads in zip(owners, dealt.loads, strict=True):
            for pipeline, load in zip(pipelines, loads.tolist(), strict=True):
                by_pipeline[pipeline].append(by_pipeline[pipeline][-1] + load / mean)
        sums = np.array([ahead[: most + 1] for ahead in by_pipeline])
        fullest[step] = [(sums[:, n:] - sums[:, : most + 1 - n]).max() for n in range(most + 1)]
    quantile = fullest.mean(axis=0) + P99_SIGMAS * fullest.std(axis=0)
    return np.maximum(np.maximum.accumulate(quantile), np.arange(most + 1))
