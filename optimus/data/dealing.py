"""Deals the items (images, clips) of a step over encoder pipelines so that all have the same load.

A gradient is a sum over items and labels, so any pipeline may encode any item, and the sequences of a batch
may come in any order. Sequences are dealt into columns, one per microbatch index over the replicas of a
dealing group, of equal load. Then the items of a column, heaviest first, go to the pipeline that is furthest
behind the mean, whichever replica it belongs to. A plan that prices every bin at the mean then holds for data
that varies.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import Any

import numpy as np

from optimus.compiled import njit_cached
from optimus.ir.op import Floats, Ints
from optimus.job.workload import Workload

SWAPS = 4  # at most, per pipeline
MAX_REPLICAS = 8  # that deal to each other: more make loads hardly more even
COMPILE_FROM_ITEMS = 32  # in a step: loading the compiled loops, 0.5 s, is not worth it for fewer


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
    of_items = np.fromiter(chain.from_iterable(costs), np.float64)
    of_bins = np.fromiter(chain.from_iterable(pipelines), np.int64)
    columns = _offsets(costs), _offsets(pipelines), 1 if locked else len(costs)
    loops = _compile_loops() if len(of_items) >= COMPILE_FROM_ITEMS else LOOPS
    give_items, even_totals, fill_bins = loops
    owner, turn = np.zeros((2, len(of_items)), np.int64)
    ahead = np.zeros((len(costs) // columns[-1], 1 + int(of_bins.max())))
    give_items(of_items, of_bins, *columns, owner, turn, ahead)
    even_totals(of_items, of_bins, *columns, owner, turn, ahead)
    bins, loads = fill_bins(of_items, of_bins, *columns[:2], owner, turn)
    return DealtItems(
        bins=tuple(bins.tolist()),
        loads=tuple(np.split(loads, columns[1][1:-1])),
        pipelines=tuple(map(tuple, pipelines)),
    )


def _offsets(columns: Sequence[Sequence[Any]]) -> Ints:
    return np.cumsum([0, *map(len, columns)])


def _give_items(
    costs: Floats,
    pipelines: Ints,
    item_offset: Ints,
    bin_offset: Ints,
    together: int,
    owner: Ints,
    turn: Ints,
    ahead: Floats,
) -> None:
    """Fills the pipeline of every item, its turn in the column, and how far pipelines end ahead of the mean.

    Columns are dealt `together` in blocks of so many.
    """
    for column in range(len(item_offset) - 1):
        block = column // together
        first, end = block * together, (block + 1) * together
        total = costs[item_offset[first] : item_offset[end]].sum()
        own = pipelines[bin_offset[column] : bin_offset[column + 1]]
        for pipeline in own:
            ahead[block, pipeline] -= total / (bin_offset[end] - bin_offset[first])
        begin = item_offset[column]
        heaviest_first = begin + np.argsort(-costs[begin : item_offset[column + 1]], kind="mergesort")
        for number, item in enumerate(heaviest_first):
            least = own[0]
            for pipeline in own:
                more = ahead[block, pipeline] - ahead[block, least]
                if more < 0 or (more == 0 and pipeline < least):
                    least = pipeline
            owner[item], turn[item] = least, number
            ahead[block, least] += costs[item]


def _even_totals(
    costs: Floats,
    pipelines: Ints,
    item_offset: Ints,
    bin_offset: Ints,
    together: int,
    owner: Ints,
    turn: Ints,
    ahead: Floats,
) -> None:
    """Evens totals: the fullest and the emptiest pipeline swap two items of one column, the last that helps.

    An item may go without another in return. The best swap of a column halves the gap; one that removes a
    quarter of it is taken.
    """
    turns = len(costs)
    for block in range(len(ahead)):
        swaps = SWAPS * ahead.shape[1]
        while swaps > 0:
            swaps -= 1
            fullest, emptiest = ahead[block].argmax(), ahead[block].argmin()
            gap = ahead[block, fullest] - ahead[block, emptiest]
            column, swapped = (block + 1) * together - 1, False
            while column >= block * together and not swapped:
                begin = item_offset[column]
                by_turn = begin + np.argsort(turn[begin : item_offset[column + 1]], kind="mergesort")
                more, less = by_turn[owner[by_turn] == fullest], by_turn[owner[by_turn] == emptiest]
                shared = (pipelines[bin_offset[column] : bin_offset[column + 1]] == emptiest).any()
                least, moved, one, two = np.inf, 0.0, -1, -1
                for gone in more if shared else more[:0]:
                    for place in range(len(less) + 1):
                        back = less[place] if place < len(less) else -1
                        load = costs[gone] - (costs[back] if back >= 0 else 0.0)
                        if abs(load - gap / 2) < least:
                            least, moved, one, two = abs(load - gap / 2), load, gone, back
                if moved > 0 and gap / 4 <= moved <= gap * 3 / 4:
                    owner[one], turn[one] = emptiest, turns
                    if two >= 0:
                        owner[two], turn[two] = fullest, turns
                    turns += 1
                    ahead[block, fullest] -= moved
                    ahead[block, emptiest] += moved
                    swapped = True
                column -= 1
            if not swapped:
                break


def _fill_bins(
    costs: Floats, pipelines: Ints, item_offset: Ints, bin_offset: Ints, owner: Ints, turn: Ints
) -> tuple[Ints, Floats]:
    """Returns the bin of every item in its column, and the loads: each to its pipeline's emptiest."""
    bins, loads = np.zeros(len(costs), np.int64), np.zeros(len(pipelines))
    for column in range(len(item_offset) - 1):
        begin, first = item_offset[column], bin_offset[column]
        own = pipelines[first : bin_offset[column + 1]]
        by_turn = begin + np.argsort(turn[begin : item_offset[column + 1]], kind="mergesort")
        for item in by_turn[np.argsort(-costs[by_turn], kind="mergesort")]:
            emptiest = -1
            for place in range(len(own)):
                if own[place] == owner[item] and (
                    emptiest < 0 or loads[first + place] < loads[first + emptiest]
                ):
                    emptiest = place
            bins[item] = emptiest
            loads[first + emptiest] += costs[item]
    return bins, loads


LOOPS: tuple[Callable[..., Any], ...] = (_give_items, _even_totals, _fill_bins)


@cache
def _compile_loops() -> tuple[Callable[..., Any], ...]:
    return tuple(map(njit_cached, LOOPS))
