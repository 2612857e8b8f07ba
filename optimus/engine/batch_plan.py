"""Assigns images and sounds to encoder microbatches from their sizes, on the host, one step ahead.

Encoder microbatches are bins of a fixed number of tokens. The first stage of a replica plans a batch from the
sizes of its samples alone and broadcasts the plan to the replica's other ranks, so that no size is ever read
from a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.errors import UserError
from optimus.ir.plan import Plan
from optimus.job.workload import assign_to_emptiest_bins

COLUMNS = 4  # encoder, its microbatch, sample, item
Bin = tuple[tuple[int, int], ...]  # (sample, item) pairs of one encoder microbatch


@dataclass(frozen=True, kw_only=True)
class SampleSizes:
    """Encoder tokens of every item of a sample, by encoder."""

    number: int
    items: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """One step of one replica."""

    samples: tuple[tuple[int, ...], ...]  # numbers of the samples in every LLM microbatch
    bins: Mapping[str, tuple[Bin, ...]]  # by encoder and microbatch

    def to_tensor(self, max_items: int) -> Tensor:
        """Encodes the plan: samples of all microbatches, then one row per item, padded to `max_items`."""
        rows = [
            (encoder, microbatch, sample, item)
            for encoder, bins in enumerate(self.bins.values())
            for microbatch, items in enumerate(bins)
            for sample, item in items
        ]
        assert len(rows) <= max_items, f"{len(rows)} items in a batch plan for {max_items}"
        padding = [(-1,) * COLUMNS] * (max_items - len(rows))
        head = [sample for samples in self.samples for sample in samples]
        flat = [len(self.samples), *head, *(value for row in [*rows, *padding] for value in row)]
        return torch.tensor(flat, dtype=torch.int64)

    @classmethod
    def from_tensor(cls, tensor: Tensor, plan: Plan, max_items: int) -> BatchPlan:
        flat = tensor.tolist()
        count, body = flat[0], len(flat) - max_items * COLUMNS
        numbers, size = flat[1:body], (body - 1) // count
        samples = tuple(tuple(numbers[at * size : (at + 1) * size]) for at in range(count))
        bins: dict[str, list[list[tuple[int, int]]]] = {
            name: [[] for _ in range(plan.microbatches * module.microbatches_per_llm_microbatch)]
            for name, module in plan.encoders.items()
        }
        names = list(plan.encoders)
        for at in range(body, len(flat), COLUMNS):
            encoder, microbatch, sample, item = flat[at : at + COLUMNS]
            if encoder >= 0:
                bins[names[encoder]][microbatch].append((sample, item))
        return cls(samples=samples, bins={name: tuple(map(tuple, of_one)) for name, of_one in bins.items()})


def plan_batch(plan: Plan, samples: Sequence[SampleSizes]) -> BatchPlan:
    """Assigns samples to LLM microbatches in order, and their items in order to the emptiest bin of each."""
    size, rest = divmod(len(samples), plan.microbatches)
    assert not rest, f"{len(samples)} samples in {plan.microbatches} microbatches"
    microbatches = [samples[at * size : (at + 1) * size] for at in range(plan.microbatches)]
    bins = {}
    for name, module in plan.encoders.items():
        of_encoder: list[Bin] = []
        for microbatch in microbatches:
            of_encoder += _fill_bins(
                name, microbatch, module.microbatches_per_llm_microbatch, module.bin_tokens
            )
        bins[name] = tuple(of_encoder)
    numbers = tuple(tuple(sample.number for sample in microbatch) for microbatch in microbatches)
    return BatchPlan(samples=numbers, bins=bins)


def _fill_bins(name: str, samples: Sequence[SampleSizes], count: int, capacity: int) -> list[Bin]:
    items = [
        (sample.number, number, tokens)
        for sample in samples
        for number, tokens in enumerate(sample.items.get(name, ()))
    ]
    places, filled = assign_to_emptiest_bins([tokens for _, _, tokens in items], count)
    if max(filled) > capacity:
        raise UserError(
            field=f"items of {name} in samples {samples[0].number} to {samples[-1].number}",
            problem=f"make {max(filled)} tokens, and the plan has room for {capacity}",
            hint="plan with the lengths of this data (workload.lengths), or leave such samples out",
        )
    bins: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for (sample, number, _), place in zip(items, places, strict=True):
        bins[place].append((sample, number))
    return [tuple(items) for items in bins]


class BatchPlanBroadcast:
    """Broadcasts the plan of the next batch to a replica's ranks while this step runs, on a CPU group."""

    def __init__(self, plan: Plan, group: dist.ProcessGroup | None, *, reader: int, max_items: int) -> None:
        self.plan, self.group, self.reader, self.max_items = plan, group, reader, max_items
        self._tensor: Tensor | None = None
        self._work: dist.Work | None = None

    def start(self, batch_plan: BatchPlan | None, samples: int) -> None:
        """Starts a broadcast on every rank; only the reader has the plan. `samples` are one replica's."""
        if batch_plan is not None:
            self._tensor = batch_plan.to_tensor(self.max_items)
        else:
            self._tensor = torch.zeros(1 + samples + self.max_items * COLUMNS, dtype=torch.int64)
        if self.group is not None:
            self._work = dist.broadcast(self._tensor, self.reader, self.group, async_op=True)

    def wait(self) -> BatchPlan:
        """Returns the plan whose broadcast was started."""
        assert self._tensor is not None, "start comes first"
        if self._work is not None:
            self._work.wait()
        tensor, self._tensor, self._work = self._tensor, None, None
        return BatchPlan.from_tensor(tensor, self.plan, self.max_items)
