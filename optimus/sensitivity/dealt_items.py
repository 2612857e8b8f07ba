"""Deals single items of drawn batches over the encoders of several replicas, and sums the loads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from optimus.data.dealing import DealtItems, deal_evenly, deal_items, list_column_pipelines
from optimus.ir.op import Floats, Ints
from optimus.planner.batch_assignment import BatchAssignment, EncoderBins
from optimus.sensitivity.drawn_batches import COMPUTE, DrawnBatches, EncoderItemCosts

MAX_DEALT_GROUPS = 8  # of replicas, in a batch: sequences are dealt to groups first, so that all are alike
Columns = Sequence[Ints]  # sequences of the workload, by microbatch index, over all replicas of a group


def sum_dealt_item_loads(batches: DrawnBatches, batch: int, assignment: BatchAssignment) -> dict[str, Floats]:
    """Returns loads as `sum_encoder_loads` does, with items dealt inside groups of replicas.

    Sequences are dealt to groups and there to columns, one per microbatch index, of equal load. Then items of
    a column go to any encoder of the group.
    """
    drawn = batches.drawn[batch]
    loads = batches.loads[drawn]
    count, columns = assignment.replicas // assignment.dealing_replicas, assignment.microbatches
    by_group = deal_evenly(loads.tolist(), count, multiple_of=columns)
    if not assignment.locked:  # else all groups wait for the slowest, whichever it is
        by_group = by_group[:MAX_DEALT_GROUPS]
    groups = [[drawn[own][c] for c in deal_evenly(loads[own].tolist(), columns)] for own in by_group]
    by_encoder = {}
    for name, bins in assignment.encoders.items():
        items = batches.items[name]
        priced = items.means[:, None, None] * max(bins.priced_sequences, 1e-30)
        own_loads = np.concatenate([_sum_loads(items, group, bins, assignment) for group in groups], axis=1)
        by_encoder[name] = (_slowest(own_loads) if assignment.locked else own_loads) / priced
    return by_encoder


def _sum_loads(
    items: EncoderItemCosts, columns: Columns, bins: EncoderBins, assignment: BatchAssignment
) -> Floats:
    """Returns FLOPs and tokens by replica and encoder microbatch of one group."""
    replicas = assignment.dealing_replicas
    if bins.sharing == "all":
        return np.stack([items.totals[:, column].sum(axis=1) for column in columns], axis=1)[:, None, :]
    pipelines = list_column_pipelines(bins.pipelines, len(columns), replicas)
    loads = _sum_bins(items, columns, pipelines, locked=assignment.locked)
    by_replica = loads.reshape(2, len(columns), replicas, bins.bins).swapaxes(1, 2)
    return by_replica.reshape(2, replicas, len(columns) * bins.bins)


def _sum_bins(
    items: EncoderItemCosts, columns: Columns, pipelines: Sequence[Sequence[int]], *, locked: bool
) -> Floats:
    """Returns FLOPs and tokens of the bins of every column."""
    flops = [list(chain.from_iterable(items.flops[n] for n in column.tolist())) for column in columns]
    dealt: DealtItems = deal_items(flops, pipelines, locked=locked)
    loads, begin = np.empty((2, len(columns), len(pipelines[0]))), 0
    for place, column in enumerate(columns):
        lengths = list(chain.from_iterable(items.lengths[n] for n in column.tolist()))
        bins = np.array(dealt.bins[begin : begin + len(lengths)], int)
        begin += len(lengths)
        loads[:, place] = dealt.loads[place], np.bincount(bins, lengths, loads.shape[2])
    return loads


def _slowest(loads: Floats) -> Floats:
    """Returns, as those of one replica, the loads of the replica with the most compute in every bin."""
    slowest = loads[COMPUTE].argmax(axis=0)
    return loads[:, slowest, np.arange(len(slowest))][:, None, :]
