"""Batches drawn from a workload, dealt to replicas and microbatches: the load of encoder microbatches."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np

from optimus.cost.flops import forward_flops
from optimus.ir.op import Floats, Ints
from optimus.job.job import Job
from optimus.job.model import Encoder
from optimus.job.workload import Load, Workload, deal
from optimus.planner.batch_assignment import BatchAssignment, EncoderBins

BATCHES = 100
SEED = 0
DEALINGS = {
    "drawn": "sequences as they come",
    "sorted": "each replica's microbatches by encoder load, heaviest at the end the schedule prefers",
    "matched": "each replica's heaviest microbatches where the schedule has most room",
    "reordered": "sequences of the whole batch so that loads are even, over replicas first; then matched",
}
Slots = Sequence[Sequence[Ints]]  # by replica and microbatch: places of sequences in the batch


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderItems:
    """What the images (or clips) of every sequence of a workload cost one encoder.

    Compute is forward FLOPs, which hold a part linear in tokens and attention's squares; traffic is tokens.
    """

    lengths: tuple[tuple[int, ...], ...]  # tokens of the items, by sequence
    flops: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, workload: Workload, encoder: Encoder) -> EncoderItems:
        merge = encoder.projector.merge
        lengths = tuple(tuple(n * merge for n in each.lengths(encoder.name)) for each in workload.sequences)
        known = {n: _flops(encoder, n) for n in set(chain.from_iterable(lengths))}
        return cls(lengths=lengths, flops=tuple(tuple(known[n] for n in items) for items in lengths))

    @cached_property
    def totals(self) -> Floats:
        """FLOPs and tokens of every sequence, two rows."""
        return np.array([[sum(items) for items in self.flops], [sum(items) for items in self.lengths]], float)

    @cached_property
    def means(self) -> Floats:
        """FLOPs and tokens of the mean sequence; 1 where there is nothing, so that shares of it are 0."""
        means = self.totals.mean(axis=1)
        return np.where(means > 0, means, 1.0)


def _flops(encoder: Encoder, tokens: int) -> float:
    return forward_flops(encoder, Load(tokens=tokens, squares=float(tokens) ** 2))


@dataclass(frozen=True, kw_only=True, eq=False)
class Batches:
    """The same batches for every system: `drawn[b]` are places in `workload.sequences`."""

    workload: Workload
    items: Mapping[str, EncoderItems]
    drawn: Ints
    loads: Floats = field(repr=False)  # of every sequence of the workload: all encoders, the mean's is 1

    def __len__(self) -> int:
        return len(self.drawn)

    @property
    def are_even(self) -> bool:
        """Every sequence is like every other: one batch stands for all."""
        return len(set(self.workload.sequences)) == 1


def draw_batches(job: Job, *, count: int = BATCHES, seed: int = SEED) -> Batches:
    """`count` batches, each of a step's sequences, drawn with replacement."""
    workload = job.workload
    items = {encoder.name: EncoderItems.of(workload, encoder) for encoder in job.model.encoders}
    size = count, workload.sequences_per_step
    drawn = np.random.default_rng(seed).integers(len(workload.sequences), size=size)
    flops = sum((each.totals[0] for each in items.values()), start=np.zeros(len(workload.sequences)))
    return Batches(workload=workload, items=items, drawn=drawn, loads=flops / max(float(flops.mean()), 1e-30))


# ---------------------------------------------------------------- dealing


def deal_batch(loads: Floats, feeding: BatchAssignment, dealing: str, order: Sequence[int] = ()) -> Slots:
    """Sequences of a batch by replica and microbatch; `order`: where the heaviest microbatch goes, ..."""
    replicas = np.array_split(np.arange(len(loads)), feeding.replicas)
    slots = [np.array_split(own, feeding.microbatches) for own in replicas]
    if dealing == "drawn":
        return slots
    assert dealing in DEALINGS, dealing
    dealt = _evenly(loads, slots) if dealing == "reordered" else slots
    return [_placed(loads, own, order) for own in dealt]


def _placed(loads: Floats, own: Sequence[Ints], order: Sequence[int]) -> Sequence[Ints]:
    """A replica's microbatches with their contents, the heaviest at the first place of `order`."""
    heaviest = sorted(range(len(own)), key=lambda m: -float(loads[own[m]].sum()))
    found = list(own)
    for place, microbatch in zip(order, heaviest, strict=True):
        found[place] = own[microbatch]
    return found


def _evenly(loads: Floats, slots: Slots) -> Slots:
    """Longest first, each to the replica that has least, there to the microbatch that has; sizes stay."""
    filled: list[list[list[int]]] = [[[] for _ in own] for own in slots]
    inside = [[(0.0, place) for place, microbatch in enumerate(own) if len(microbatch)] for own in slots]
    replicas = [(0.0, replica) for replica, own in enumerate(inside) if own]
    for sequence in np.argsort(-loads, kind="stable").tolist():
        load, (total, replica) = float(loads[sequence]), heapq.heappop(replicas)
        own, (least, place) = inside[replica], heapq.heappop(inside[replica])
        filled[replica][place].append(sequence)
        if len(filled[replica][place]) < len(slots[replica][place]):
            heapq.heappush(own, (least + load, place))
        if own:
            heapq.heappush(replicas, (total + load, replica))
    return [[np.array(sorted(microbatch), int) for microbatch in own] for own in filled]


# ---------------------------------------------------------------- loads

COMPUTE, TOKENS = 0, 1


def find_loads(batches: Batches, batch: int, slots: Slots, feeding: BatchAssignment) -> dict[str, Floats]:
    """Of every encoder: (compute or tokens, replica, encoder microbatch), 1 where it is as was priced.

    One replica stands for all where their microbatches are encoded together or wait for each other; one
    microbatch for all where a replica's are encoded together.
    """
    drawn = batches.drawn[batch]
    found = {}
    for name, bins in feeding.encoders.items():
        items = batches.items[name]
        loads = _SHARING[bins.sharing](items, [[drawn[m] for m in own] for own in slots], bins)
        loads = loads / (items.means[:, None, None] * max(bins.priced_sequences, 1e-30))
        found[name] = loads.max(axis=1, keepdims=True) if feeding.locked else loads
    return found


def _dealt(items: EncoderItems, sequences: Ints, bins: int, *, longest_first: bool) -> Floats:
    """FLOPs and tokens of each bin when whole items are dealt, each to the bin that has least."""
    if bins == 1:
        whole: Floats = items.totals[:, sequences].sum(axis=1, keepdims=True)
        return whole
    chosen = sequences.tolist()
    lengths = [n for sequence in chosen for n in items.lengths[sequence]]
    flops = [cost for sequence in chosen for cost in items.flops[sequence]]
    if longest_first:
        order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
        lengths, flops = [lengths[place] for place in order], [flops[place] for place in order]
    places, filled = deal(lengths, bins)
    return np.array([np.bincount(np.array(places, int), flops, bins), filled])


def _pieces(items: EncoderItems, dealt: Slots, bins: EncoderBins) -> Floats:
    """In the order in which they come, as the engine deals them."""
    rows = [
        np.concatenate([_dealt(items, m, bins.bins, longest_first=False) for m in own], axis=1)
        for own in dealt
    ]
    return np.stack(rows, axis=1)


def _busiest(items: EncoderItems, dealt: Slots, bins: EncoderBins) -> Floats:
    """The fullest rank of a stage; longest first, which is the best that simple dealing does."""
    rows = [
        np.stack([_dealt(items, m, bins.bins, longest_first=True).max(axis=1) for m in own], axis=1)
        for own in dealt
    ]
    return np.stack(rows, axis=1)


def _replica(items: EncoderItems, dealt: Slots, bins: EncoderBins) -> Floats:
    """The fullest group of a replica, over all its microbatches."""
    rows = [_dealt(items, np.concatenate(own), bins.bins, longest_first=True).max(axis=1) for own in dealt]
    return np.stack(rows, axis=1)[:, :, None]


def _all(items: EncoderItems, dealt: Slots, bins: EncoderBins) -> Floats:
    """Each microbatch of all replicas together."""
    columns = [np.concatenate([own[m] for own in dealt]) for m in range(len(dealt[0]))]
    return np.stack([items.totals[:, m].sum(axis=1) for m in columns], axis=1)[:, None, :]


_SHARING: Mapping[str, Callable[[EncoderItems, Slots, EncoderBins], Floats]] = {
    "pieces": _pieces,
    "busiest": _busiest,
    "replica": _replica,
    "all": _all,
}
