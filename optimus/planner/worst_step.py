"""Computes the encoder microbatches that a rank holds in a heavy step: p99 of steps drawn from the workload.

Items are dealt as in the engine, so that a pipeline is never far from the mean; what a step has more than
others, and what a pipeline is ahead, takes memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import NormalDist

import numpy as np

from optimus.cost.flops import fit_item_cost
from optimus.data.dealing import (
    choose_dealing_replicas,
    deal_items,
    deal_sequences,
    list_column_pipelines,
)
from optimus.ir.op import Floats, Ints
from optimus.job.job import Job

STEPS = 40  # drawn, of which a normal distribution is fitted for the quantile
SEED = 0
P99_SIGMAS = NormalDist().inv_cdf(0.99)
Column = list[int]  # sequences of the workload in one microbatch index of a dealing group


@dataclass(frozen=True, kw_only=True)
class BinShape:
    """How the items of a step are cut into the bins (microbatches) of an encoder's pipelines."""

    encoder: str
    replicas: int
    microbatches: int  # of the LLM
    pipelines: tuple[int, ...]  # which pipeline of a replica runs each encoder microbatch


@dataclass(frozen=True, kw_only=True, eq=False)
class ItemSizes:
    """Encoder tokens of the items of every sequence of a workload, and their costs."""

    tokens: tuple[tuple[int, ...], ...]
    costs: tuple[tuple[float, ...], ...]

    @property
    def are_alike(self) -> bool:
        """True if all sequences have the same items."""
        return len(set(self.tokens)) == 1

    @cached_property
    def mean_tokens(self) -> float:
        """Tokens of the mean sequence."""
        return sum(map(sum, self.tokens)) / len(self.tokens)


class DrawnSteps:
    """Steps drawn from a job's workload, and dealt to the first dealing group as the engine deals them."""

    def __init__(self, job: Job) -> None:
        self.workload = job.workload
        self._columns: dict[tuple[int, int], list[list[Column]]] = {}  # by groups and microbatches
        self.sizes: dict[str, ItemSizes] = {}
        for encoder in job.model.encoders:
            per_token, per_square = fit_item_cost(encoder)
            tokens = tuple(
                tuple(n * encoder.merge for n in sequence.lengths(encoder.name))
                for sequence in job.workload.sequences
            )
            costs = tuple(tuple(per_token * n + per_square * n * n for n in items) for items in tokens)
            self.sizes[encoder.name] = ItemSizes(tokens=tokens, costs=costs)

    @cached_property
    def drawn(self) -> Ints:
        """Sequences of the workload, by step."""
        size = STEPS, self.workload.sequences_per_step
        return np.random.default_rng(SEED).integers(len(self.workload.sequences), size=size)

    def columns(self, replicas: int, microbatches: int) -> list[list[Column]]:
        """Returns the columns of the first dealing group in every step; they are dealt once."""
        groups = replicas // choose_dealing_replicas(self.workload, replicas)
        if (groups, microbatches) not in self._columns:
            loads = np.array([sum(map(sum, of_all)) for of_all in zip(*self._all_costs, strict=True)])
            steps = []
            for drawn in self.drawn:
                own = drawn[sorted(deal_sequences(loads[drawn].tolist(), groups)[0])]
                dealt = deal_sequences(loads[own].tolist(), microbatches)
                steps.append([own[sorted(column)].tolist() for column in dealt])
            self._columns[groups, microbatches] = steps
        return self._columns[groups, microbatches]

    @property
    def _all_costs(self) -> list[tuple[tuple[float, ...], ...]]:
        return [sizes.costs for sizes in self.sizes.values()]

    def bin_tokens(self, shape: BinShape) -> Iterator[Floats]:
        """Yields for every step the tokens of all bins, column by column, replica after replica."""
        replicas = choose_dealing_replicas(self.workload, shape.replicas)
        pipelines = list_column_pipelines(shape.pipelines, shape.microbatches, replicas)
        sizes, width = self.sizes[shape.encoder], len(pipelines[0])
        for columns in self.columns(shape.replicas, shape.microbatches):
            items = [list(chain.from_iterable(sizes.costs[n] for n in column)) for column in columns]
            dealt = deal_items(items, pipelines)
            first_bins = np.repeat(np.arange(len(columns)) * width, list(map(len, items)))
            tokens = list(chain.from_iterable(sizes.tokens[n] for column in columns for n in column))
            bins = first_bins + np.array(dealt.bins, int)
            yield np.bincount(bins, tokens, len(columns) * width).astype(np.float64)

    def resident_bins_at_p99(self, shape: BinShape) -> Floats:
        """Returns by n the load, in mean bins, of a pipeline's fullest n bins in a row, at p99 of steps."""
        sizes, most = self.sizes[shape.encoder], max(Counter(shape.pipelines).values())
        if sizes.are_alike:
            return np.arange(most + 1, dtype=np.float64)
        bins = shape.replicas * len(shape.pipelines)
        mean = sizes.mean_tokens * self.workload.sequences_per_step / bins
        replicas = choose_dealing_replicas(self.workload, shape.replicas)
        places = _places_by_pipeline(list_column_pipelines(shape.pipelines, shape.microbatches, replicas))
        fullest = []
        for tokens in self.bin_tokens(shape):
            sums = np.cumsum(np.append(tokens, 0.0)[places] / mean, axis=1)
            sums = np.insert(sums, 0, 0.0, axis=1)
            fullest.append([(sums[:, n:] - sums[:, : most + 1 - n]).max() for n in range(most + 1)])
        quantile = np.mean(fullest, axis=0) + P99_SIGMAS * np.std(fullest, axis=0)
        return np.maximum(np.maximum.accumulate(quantile), np.arange(most + 1))


def _places_by_pipeline(pipelines: Sequence[Sequence[int]]) -> Ints:
    """Returns the places of every pipeline's bins in order; -1 where one has fewer than another."""
    places: dict[int, list[int]] = {}
    for place, pipeline in enumerate(chain.from_iterable(pipelines)):
        places.setdefault(pipeline, []).append(place)
    most = max(map(len, places.values()))
    return np.array([[*own, *[-1] * (most - len(own))] for own in places.values()])
