"""Deals the items (images, clips) of a step over encoder pipelines so that all have the same load.

A gradient is a sum over items and labels, so any pipeline may encode any item, and the sequences of a batch
may come in any order. Sequences are dealt into columns, one per microbatch index over the replicas of a
dealing group, of equal load. Then the items of a column, heaviest first, go to the pipeline that is furthest
behind the mean, whichever replica it belongs to. A plan that prices every bin at the mean then holds for data
that varies.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import inf

import numpy as np

from optimus.ir.op import Floats, Ints
from optimus.job.workload import Workload

SWAPS = 4  # at most, per pipeline
MAX_REPLICAS = 8  # that deal to each other: more make loads hardly more even


@dataclass(frozen=True, kw_only=True, eq=False)
class DealtItems:
    """The bin of every item of a step, and the loads that follow.

    Column m has the bins `pipelines[m]`, each of the encoder pipeline whose number stands there.
    """

    bins: tuple[int, ...]  # by item: its bin in the column of its sequence
    loads: tuple[Floats, ...]  # by column: of every bin
    pipelines: tuple[tuple[int, ...], ...]

    @cached_property
    def mean_bin(self) -> float:
        """Load of a bin if all were equal."""
        return float(sum(loads.sum() for loads in self.loads)) / sum(map(len, self.loads))

    @property
    def fullest_over_mean(self) -> float:
        """Load of the fullest pipeline over that of its bins at the mean."""
        return float(max(self._totals / self._counts)) / self.mean_bin if self.mean_bin else 1.0

    @property
    def lag_bins(self) -> float:
        """Largest load of a pipeline beyond the mean after any column, in mean bins."""
        if not self.mean_bin:
            return 0.0
        ahead, worst = np.zeros(len(self._totals)), 0.0
        for pipelines, loads in zip(self.pipelines, self.loads, strict=True):
            np.add.at(ahead, list(pipelines), loads / self.mean_bin - 1)
            worst = max(worst, float(ahead.max()))
        return worst

    @cached_property
    def _totals(self) -> Floats:
        totals = np.zeros(1 + max(max(of_column) for of_column in self.pipelines))
        for pipelines, loads in zip(self.pipelines, self.loads, strict=True):
            np.add.at(totals, list(pipelines), loads)
        return totals

    @cached_property
    def _counts(self) -> Ints:
        return np.bincount([pipeline for of_column in self.pipelines for pipeline in of_column])


def choose_dealing_replicas(workload: Workload, replicas: int) -> int:
    """Returns how many replicas deal items to each other: none do where all sequences are alike."""
    items = {sequence.items for sequence in workload.sequences}
    return max(n for n in range(1, MAX_REPLICAS + 1) if replicas % n == 0) if len(items) > 1 else 1


def deal_sequences(loads: Sequence[float], columns: int) -> list[list[int]]:
    """Deals sequences into columns of equally many, heaviest first to the least loaded with room."""
    room, rest = divmod(len(loads), columns)
    assert not rest, f"{len(loads)} sequences in {columns} columns"
    dealt: list[list[int]] = [[] for _ in range(columns)]
    open_columns = [(0.0, column) for column in range(columns)]
    for sequence in np.argsort(-np.asarray(loads, float), kind="stable").tolist():
        load, column = open_columns[0]
        dealt[column].append(sequence)
        if len(dealt[column]) < room:
            heapq.heapreplace(open_columns, (load + loads[sequence], column))
        else:
            heapq.heappop(open_columns)
    return dealt


def deal_evenly(loads: Sequence[float], parts: int, *, multiple_of: int = 1) -> list[list[int]]:
    """Deals sequences into parts of equal load, each in order; where they do not divide, some get fewer."""
    missing = -len(loads) % (parts * multiple_of)
    dealt = deal_sequences([*loads, *[0.0] * missing], parts)
    return [[place for place in sorted(part) if place < len(loads)] for part in dealt]


def deal_microbatches(loads: Sequence[float], microbatches: int, ranks: int) -> list[list[list[int]]]:
    """Deals sequences over microbatches and ranks that wait for each other in every microbatch.

    Batches of equally many sequences are made alike in load, and those most alike share a microbatch, the
    heaviest first. The sum over microbatches of the fullest rank is never more than in the order given.
    """
    cells = microbatches * ranks
    drawn = np.arange(len(loads)).reshape(cells, -1).tolist()
    return min(
        (_group_batches(loads, batches, ranks) for batches in (drawn, deal_sequences(loads, cells))),
        key=lambda dealt: sum_fullest_ranks(loads, dealt),
    )


def sum_fullest_ranks(loads: Sequence[float], microbatches: Sequence[Sequence[Sequence[int]]]) -> float:
    """Returns the sum over microbatches of the load of the fullest rank."""
    return sum(max(sum(loads[n] for n in rank) for rank in microbatch) for microbatch in microbatches)


def _group_batches(loads: Sequence[float], batches: list[list[int]], ranks: int) -> list[list[list[int]]]:
    """Returns batches by microbatch and rank: alike ones together, each to the rank with the least so far."""
    fills = [sum(loads[n] for n in batch) for batch in batches]
    by_load = sorted(range(len(batches)), key=fills.__getitem__, reverse=True)
    totals, dealt = [0.0] * ranks, []
    for begin in range(0, len(batches), ranks):
        by_rank = dict(zip(sorted(range(ranks), key=totals.__getitem__), by_load[begin:], strict=False))
        for rank, batch in by_rank.items():
            totals[rank] += fills[batch]
        dealt.append([batches[by_rank[rank]] for rank in range(ranks)])
    return dealt


def list_column_pipelines(pipelines: Sequence[int], columns: int, replicas: int) -> list[list[int]]:
    """Returns the encoder pipeline of every bin of every column, replica after replica.

    `pipelines` are those of one replica's encoder microbatches, equally many for each column.
    """
    own, pieces = 1 + max(pipelines), len(pipelines) // columns
    return [
        [replica * own + pipeline for replica in range(replicas) for pipeline in pipelines[at : at + pieces]]
        for at in range(0, len(pipelines), pieces)
    ]


def deal_items(
    costs: Sequence[Sequence[float]], pipelines: Sequence[Sequence[int]], *, locked: bool = False
) -> DealtItems:
    """Deals the items of every column, heaviest first, to the pipeline that is furthest behind the mean.

    `costs[m]` are those of column m's items, in the order of the batch. A pipeline with several bins in a
    column fills them evenly. At the end items are swapped inside columns until totals are even. Where
    pipelines are `locked`, all wait for the fullest in every column, and each column is dealt by itself.
    """
    assert len(costs) == len(pipelines), f"{len(costs)} columns of items, and {len(pipelines)} of bins"
    if locked and len(costs) > 1:
        alone = [deal_items([items], [own]) for items, own in zip(costs, pipelines, strict=True)]
        return DealtItems(
            bins=tuple(chain.from_iterable(each.bins for each in alone)),
            loads=tuple(loads for each in alone for loads in each.loads),
            pipelines=tuple(map(tuple, pipelines)),
        )
    count = 1 + max(max(of_column) for of_column in pipelines)
    mean = sum(map(sum, costs)) / sum(map(len, pipelines))
    ahead = [0.0] * count  # of the mean, by pipeline
    owned: list[dict[int, list[int]]] = []  # by column and pipeline: items
    for of_column, of_items in zip(pipelines, costs, strict=True):
        for pipeline in of_column:
            ahead[pipeline] -= mean
        heap = [(ahead[pipeline], pipeline) for pipeline in dict.fromkeys(of_column)]
        heapq.heapify(heap)
        owned.append({pipeline: [] for _, pipeline in heap})
        for item in sorted(range(len(of_items)), key=of_items.__getitem__, reverse=True):
            load, pipeline = heap[0]
            heapq.heapreplace(heap, (load + of_items[item], pipeline))
            owned[-1][pipeline].append(item)
        for load, pipeline in heap:
            ahead[pipeline] = load
    _swap_items(costs, owned, ahead)
    bins: list[int] = []
    loads = []
    for of_column, of_items, of_pipelines in zip(pipelines, costs, owned, strict=True):
        places, filled = _fill_bins(of_column, of_items, of_pipelines)
        bins += places
        loads.append(np.array(filled))
    return DealtItems(bins=tuple(bins), loads=tuple(loads), pipelines=tuple(map(tuple, pipelines)))


def _swap_items(
    costs: Sequence[Sequence[float]], owned: Sequence[dict[int, list[int]]], ahead: list[float]
) -> None:
    """Evens totals: the fullest and the emptiest pipeline swap two items of one column, the last that helps.

    The best swap of a column halves the gap; one that removes a quarter of it is taken.
    """
    for _ in range(SWAPS * len(ahead)):
        fullest, emptiest = ahead.index(max(ahead)), ahead.index(min(ahead))
        gap = ahead[fullest] - ahead[emptiest]
        for of_items, of_pipelines in zip(reversed(costs), reversed(owned), strict=True):
            more, less = of_pipelines.get(fullest), of_pipelines.get(emptiest)
            if more is None or less is None:
                continue
            moved, one, two = _choose_swap(of_items, more, less, gap / 2)
            if moved > 0 and gap / 4 <= moved <= gap * 3 / 4:
                more.remove(one)
                less.append(one)
                if two >= 0:
                    less.remove(two)
                    more.append(two)
                ahead[fullest] -= moved
                ahead[emptiest] += moved
                break
        else:
            return


def _choose_swap(
    costs: Sequence[float], more: Sequence[int], less: Sequence[int], wanted: float
) -> tuple[float, int, int]:
    """Returns the load that a swap moves, the item that goes, and that which comes back (-1: none).

    Of all swaps, the one whose load is closest to what is wanted; the first of several.
    """
    returned = [*((two, costs[two]) for two in less), (-1, 0.0)]
    least, chosen = inf, (0.0, 0, 0)
    for one in more:
        cost = costs[one]
        for two, back in returned:
            off = abs(cost - back - wanted)
            if off < least:
                least, chosen = off, (cost - back, one, two)
    return chosen


def _fill_bins(
    pipelines: Sequence[int], costs: Sequence[float], owned: Mapping[int, Sequence[int]]
) -> tuple[list[int], list[float]]:
    """Returns the bin of every item of a column and every bin's load: each to its pipeline's emptiest."""
    filled, places = [0.0] * len(pipelines), [0] * len(costs)
    if len(owned) == len(pipelines):  # one bin each
        for place, pipeline in enumerate(pipelines):
            filled[place] = sum(costs[item] for item in owned[pipeline])
            for item in owned[pipeline]:
                places[item] = place
        return places, filled
    own_bins: dict[int, list[int]] = {}
    for number, pipeline in enumerate(pipelines):
        own_bins.setdefault(pipeline, []).append(number)
    for pipeline, items in owned.items():
        own = own_bins[pipeline]
        for item in sorted(items, key=costs.__getitem__, reverse=True) if len(own) > 1 else items:
            place = min(own, key=filled.__getitem__) if len(own) > 1 else own[0]
            filled[place] += costs[item]
            places[item] = place
    return places, filled
