"""Draws batches from a workload, deals them to replicas and microbatches, and sums the encoder loads."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np

from optimus.cost.flops import forward_flops
from optimus.data.dealing import deal_microbatches
from optimus.ir.op import Floats, Ints
from optimus.job.job import Job
from optimus.job.model import Encoder
from optimus.job.workload import TokenLoad, Workload, assign_to_emptiest_bins
from optimus.planner.batch_assignment import BatchAssignment, EncoderBins

BATCHES = 100
SEED = 0
DEALINGS = {
    "drawn": "sequences as they come",
    "sorted": "each replica's microbatches by encoder load, heaviest at the end the schedule prefers",
    "matched": "each replica's heaviest microbatches where the schedule has most room",
    "reordered": "sequences of the whole batch so that loads are even, over replicas first; then matched",
    "items": "sequences so that microbatches are even, then single items over the encoders of some replicas",
}
Slots = Sequence[Sequence[Ints]]  # by replica and microbatch: places of sequences in the batch


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderItemCosts:
    """Cost of the images (or clips) of every sequence of a workload for one encoder.

    Compute is measured in forward FLOPs (linear in tokens plus attention's squares), traffic in tokens.
    """

    lengths: tuple[tuple[int, ...], ...]  # tokens of the items, by sequence
    flops: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, workload: Workload, encoder: Encoder) -> EncoderItemCosts:
        merge = encoder.merge
        lengths = tuple(
            tuple(n * merge for n in sequence.lengths(encoder.name)) for sequence in workload.sequences
        )
        flops = {n: _flops(encoder, n) for n in set(chain.from_iterable(lengths))}
        return cls(lengths=lengths, flops=tuple(tuple(flops[n] for n in items) for items in lengths))

    @cached_property
    def totals(self) -> Floats:
        """FLOPs and tokens of every sequence, as two rows."""
        return np.array([[sum(items) for items in self.flops], [sum(items) for items in self.lengths]], float)

    @cached_property
    def means(self) -> Floats:
        """FLOPs and tokens of the mean sequence; 1 where there are no items, so that shares of it are 0."""
        means = self.totals.mean(axis=1)
        return np.where(means > 0, means, 1.0)


def _flops(encoder: Encoder, tokens: int) -> float:
    return forward_flops(encoder, TokenLoad(tokens=tokens, squares=float(tokens) ** 2))


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawnBatches:
    """Drawn batches, the same for every system: `drawn[b]` are indices into `workload.sequences`."""

    workload: Workload
    items: Mapping[str, EncoderItemCosts]
    drawn: Ints
    loads: Floats = field(repr=False)  # of every sequence of the workload: all encoders, the mean's is 1

    def __len__(self) -> int:
        return len(self.drawn)

    @property
    def are_even(self) -> bool:
        """True if all sequences are equal, so that one batch represents all."""
        return len(set(self.workload.sequences)) == 1


def draw_batches(job: Job, *, count: int = BATCHES, seed: int = SEED) -> DrawnBatches:
    """Draws `count` batches of a step's sequences, with replacement."""
    workload = job.workload
    items = {encoder.name: EncoderItemCosts.of(workload, encoder) for encoder in job.model.encoders}
    size = count, workload.sequences_per_step
    drawn = np.random.default_rng(seed).integers(len(workload.sequences), size=size)
    flops = sum((encoder.totals[0] for encoder in items.values()), start=np.zeros(len(workload.sequences)))
    return DrawnBatches(
        workload=workload, items=items, drawn=drawn, loads=flops / max(float(flops.mean()), 1e-30)
    )


# ---------------------------------------------------------------- dealing


def deal_batch_to_replicas(
    loads: Floats, assignment: BatchAssignment, dealing: str, order: Sequence[int] = ()
) -> Slots:
    """Deals a batch to replicas and microbatches; `order` lists positions, heaviest first."""
    replicas = np.array_split(np.arange(len(loads)), assignment.replicas)
    slots = [np.array_split(replica, assignment.microbatches) for replica in replicas]
    if dealing == "drawn":
        return slots
    assert dealing in DEALINGS, dealing
    if dealing == "reordered" and assignment.locked:
        return _locked_evenly(loads, slots)
    dealt = _evenly(loads, slots) if dealing == "reordered" else slots
    return [_placed(loads, replica, order) for replica in dealt]


def _placed(loads: Floats, microbatches: Sequence[Ints], order: Sequence[int]) -> Sequence[Ints]:
    """Reorders a replica's microbatches, the heaviest to the first position of `order`."""
    heaviest = sorted(range(len(microbatches)), key=lambda m: -float(loads[microbatches[m]].sum()))
    placed = list(microbatches)
    for position, microbatch in zip(order, heaviest, strict=True):
        placed[position] = microbatches[microbatch]
    return placed


def _locked_evenly(loads: Floats, slots: Slots) -> Slots:
    """Deals alike sequences into one microbatch, since replicas wait for each other in every one."""
    replicas, microbatches = len(slots), len(slots[0])
    if len(loads) % (replicas * microbatches):
        return _evenly(loads, slots)
    dealt = deal_microbatches(loads.tolist(), microbatches, replicas)
    return [[np.array(microbatch[replica], int) for microbatch in dealt] for replica in range(replicas)]


def _evenly(loads: Floats, slots: Slots) -> Slots:
    """Deals longest first to the least loaded replica and microbatch, keeping the sizes of microbatches."""
    filled: list[list[list[int]]] = [[[] for _ in replica] for replica in slots]
    open_bins = [
        [(0.0, place) for place, microbatch in enumerate(replica) if len(microbatch)] for replica in slots
    ]
    replicas = [(0.0, replica) for replica, bins in enumerate(open_bins) if bins]
    for sequence in np.argsort(-loads, kind="stable").tolist():
        load, (total, replica) = float(loads[sequence]), heapq.heappop(replicas)
        bins, (least, place) = open_bins[replica], heapq.heappop(open_bins[replica])
        filled[replica][place].append(sequence)
        if len(filled[replica][place]) < len(slots[replica][place]):
            heapq.heappush(bins, (least + load, place))
        if bins:
            heapq.heappush(replicas, (total + load, replica))
    return [[np.array(sorted(microbatch), int) for microbatch in replica] for replica in filled]


# ---------------------------------------------------------------- loads

COMPUTE, TOKENS = 0, 1


def sum_encoder_loads(
    batches: DrawnBatches, batch: int, slots: Slots, assignment: BatchAssignment
) -> dict[str, Floats]:
    """Returns each encoder's loads (compute or tokens, replica, encoder microbatch), 1 where as priced.

    There is one replica where the replicas' microbatches are encoded together or wait for each other, and
    one microbatch where a replica's are encoded together.
    """
    drawn = batches.drawn[batch]
    by_encoder = {}
    for name, bins in assignment.encoders.items():
        items = batches.items[name]
        loads = _SHARING[bins.sharing](items, [[drawn[m] for m in replica] for replica in slots], bins)
        loads = loads / (items.means[:, None, None] * max(bins.priced_sequences, 1e-30))
        by_encoder[name] = loads.max(axis=1, keepdims=True) if assignment.locked else loads
    return by_encoder


def _dealt(items: EncoderItemCosts, sequences: Ints, bins: int) -> Floats:
    """Returns FLOPs and tokens of each bin, with every item dealt to the least loaded bin."""
    if bins == 1:
        whole: Floats = items.totals[:, sequences].sum(axis=1, keepdims=True)
        return whole
    chosen = sequences.tolist()
    lengths = [n for sequence in chosen for n in items.lengths[sequence]]
    flops = [cost for sequence in chosen for cost in items.flops[sequence]]
    places, filled = assign_to_emptiest_bins(lengths, bins)
    return np.array([np.bincount(np.array(places, int), flops, bins), filled])


def _pieces(items: EncoderItemCosts, dealt: Slots, bins: EncoderBins) -> Floats:
    """Returns loads of encoder microbatches, items dealt in the order of the batch, as the engine does."""
    rows = [np.concatenate([_dealt(items, m, bins.bins) for m in replica], axis=1) for replica in dealt]
    return np.stack(rows, axis=1)


def _all(items: EncoderItemCosts, dealt: Slots, bins: EncoderBins) -> Floats:
    """Returns loads of each microbatch over all replicas together."""
    columns = [np.concatenate([replica[m] for replica in dealt]) for m in range(len(dealt[0]))]
    return np.stack([items.totals[:, m].sum(axis=1) for m in columns], axis=1)[:, None, :]


_SHARING: Mapping[str, Callable[[EncoderItemCosts, Slots, EncoderBins], Floats]] = {
    "pieces": _pieces,
    "all": _all,
}
