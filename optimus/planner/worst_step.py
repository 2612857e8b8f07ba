"""Computes the encoder microbatches that a rank holds in a heavy step: p99 of steps drawn from the workload.

Sequences and items are dealt as in the engine. What a step has more than others, and what a pipeline is ahead
of the mean, takes memory.
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
from optimus.data.dealing import deal_evenly, deal_items, list_column_pipelines
from optimus.ir.op import Floats, Ints
from optimus.job.job import Job

STEPS = 40  # drawn, of which a normal distribution is fitted for the quantile
SEED = 0
ALONE_SAMPLED = 3  # replicas, where each encodes the items of its own sequences
P99_SIGMAS = NormalDist().inv_cdf(0.99)
Column = list[int]  # sequences of the workload in one microbatch index of a dealing group


@dataclass(frozen=True, kw_only=True)
class BinShape:
    """How the items of a step are cut into the bins (microbatches) of an encoder's pipelines."""

    encoder: str
    replicas: int
    microbatches: int  # of the LLM
    pipelines: tuple[int, ...]  # which pipeline of a replica runs each encoder microbatch
    dealing_replicas: int  # that encode each other's items
    locked: bool = False  # replicas wait for each other in every microbatch

    @property
    def groups(self) -> int:
        """Groups of replicas that deal to each other."""
        return self.replicas // self.dealing_replicas

    @property
    def sampled_groups(self) -> int:
        """Groups that stand for all: the first, which get the heaviest sequences."""
        return min(self.groups, 1 if self.dealing_replicas > 1 else ALONE_SAMPLED)


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
    def most_tokens(self) -> int:
        """Tokens of the largest sequence."""
        return max(map(sum, self.tokens))

    @cached_property
    def mean_tokens(self) -> float:
        """Tokens of the mean sequence."""
        return sum(map(sum, self.tokens)) / len(self.tokens)


class DrawnSteps:
    """Steps drawn from a job's workload, and dealt to the first replicas as the engine deals them."""

    def __init__(self, job: Job) -> None:
        self.workload = job.workload
        self._groups: dict[int, list[list[list[int]]]] = {}  # by number of groups
        self._columns: dict[tuple[int, int, int], list[list[list[Column]]]] = {}
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

    @cached_property
    def _loads(self) -> Floats:
        """Load of every sequence of the workload."""
        of_all = [sizes.costs for sizes in self.sizes.values()]
        return np.array([sum(map(sum, costs)) for costs in zip(*of_all, strict=True)])

    def columns(self, shape: BinShape) -> list[list[list[Column]]]:
        """Returns the columns of the sampled groups in every step; they are dealt once."""
        key = shape.groups, shape.sampled_groups, shape.microbatches
        if key not in self._columns:
            self._columns[key] = [
                [self._deal(group, shape.microbatches) for group in groups[: key[1]]]
                for groups in self._dealt_to_groups(shape.groups)
            ]
        return self._columns[key]

    def _dealt_to_groups(self, groups: int) -> list[list[list[int]]]:
        """Returns the sequences of every group in every step."""
        if groups not in self._groups:
            self._groups[groups] = [self._deal(drawn, groups) for drawn in self.drawn.tolist()]
        return self._groups[groups]

    def _deal(self, sequences: Sequence[int], parts: int) -> list[list[int]]:
        dealt = deal_evenly(self._loads[sequences].tolist(), parts)
        return [[sequences[place] for place in part] for part in dealt]

    def bin_tokens(self, shape: BinShape) -> Iterator[Floats]:
        """Yields for every step the tokens of all bins by sampled group: by column, replica after replica."""
        pipelines = list_column_pipelines(shape.pipelines, shape.microbatches, shape.dealing_replicas)
        sizes, width = self.sizes[shape.encoder], len(pipelines[0])
        for groups in self.columns(shape):
            by_group = []
            for columns in groups:
                items = [list(chain.from_iterable(sizes.costs[n] for n in column)) for column in columns]
                first_bins = np.repeat(np.arange(len(columns)) * width, list(map(len, items)))
                tokens = list(chain.from_iterable(sizes.tokens[n] for column in columns for n in column))
                dealt = deal_items(items, pipelines, locked=shape.locked).bins if width > 1 else 0
                bins = first_bins + np.array(dealt, int)
                by_group.append(np.bincount(bins, tokens, len(columns) * width))
            yield np.array(by_group, np.float64)

    def most_resident_bins(self, shape: BinShape) -> Floats:
        """Returns a bound on `resident_bins_at_p99`: every bin with all items of the heaviest sequences."""
        sizes, width = self.sizes[shape.encoder], len(shape.pipelines) // shape.microbatches
        most = 1 + max(Counter(shape.pipelines).values())
        if sizes.are_alike:
            return np.arange(most, dtype=np.float64)
        heaviest = float(width * shape.dealing_replicas * sizes.most_tokens / sizes.mean_tokens)
        return np.arange(most, dtype=np.float64) * heaviest

    def resident_bins_at_p99(self, shape: BinShape) -> Floats:
        """Returns by n the load, in mean bins, of a pipeline's fullest n bins in a row, at p99 of steps."""
        sizes, most = self.sizes[shape.encoder], max(Counter(shape.pipelines).values())
        if sizes.are_alike:
            return np.arange(most + 1, dtype=np.float64)
        bins = shape.replicas * len(shape.pipelines)
        mean = sizes.mean_tokens * self.workload.sequences_per_step / bins
        by_column = list_column_pipelines(shape.pipelines, shape.microbatches, shape.dealing_replicas)
        places = _places_by_pipeline(by_column)
        fullest = []
        for tokens in self.bin_tokens(shape):
            sums = np.cumsum(np.pad(tokens, ((0, 0), (0, 1)))[:, places] / mean, axis=2)
            sums = np.insert(sums, 0, 0.0, axis=2)
            fullest.append([(sums[..., n:] - sums[..., : most + 1 - n]).max() for n in range(most + 1)])
        quantile = np.mean(fullest, axis=0) + P99_SIGMAS * np.std(fullest, axis=0)
        bounded = np.minimum(np.maximum.accumulate(quantile), self.most_resident_bins(shape))
        return np.maximum(bounded, np.arange(most + 1))


def _places_by_pipeline(pipelines: Sequence[Sequence[int]]) -> Ints:
    """Returns the places of every pipeline's bins in order; -1 where one has fewer than another."""
    places: dict[int, list[int]] = {}
    for place, pipeline in enumerate(chain.from_iterable(pipelines)):
        places.setdefault(pipeline, []).append(place)
    most = max(map(len, places.values()))
    return np.array([[*own, *[-1] * (most - len(own))] for own in places.values()])
