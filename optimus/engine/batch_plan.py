"""Which images and sounds each encoder microbatch works on, and where their rows go: known before the step.

Encoder microbatches are bins of a fixed number of tokens. A table is made from the sizes of samples alone, by
whoever reads them, and given to every rank of the replica one step ahead, so that nothing about sizes is ever
asked of a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.errors import UserError
from optimus.ir.plan import Plan
from optimus.job.workload import deal

COLUMNS = 4  # encoder, its microbatch, sample, item


@dataclass(frozen=True, kw_only=True)
class SampleSizes:
    """What a table needs to know of a sample: encoder tokens of every item, by encoder."""

    number: int
    items: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """One step of one replica."""

    samples: tuple[tuple[int, ...], ...]  # numbers of the samples in every LLM microbatch
    bins: Mapping[str, tuple[tuple[tuple[int, int], ...], ...]]  # (sample, item) in every encoder microbatch

    def to_tensor(self, rows: int) -> Tensor:
        """As whole numbers: the samples of all microbatches, then one row per item, padded to `rows`."""
        found = [
            (encoder, microbatch, sample, item)
            for encoder, bins in enumerate(self.bins.values())
            for microbatch, items in enumerate(bins)
            for sample, item in items
        ]
        assert len(found) <= rows, f"{len(found)} items in a table of {rows}"
        padding = [(-1,) * COLUMNS] * (rows - len(found))
        head = [sample for samples in self.samples for sample in samples]
        flat = [len(self.samples), *head, *(value for row in [*found, *padding] for value in row)]
        return torch.tensor(flat, dtype=torch.int64)

    @classmethod
    def from_tensor(cls, given: Tensor, plan: Plan, rows: int) -> BatchPlan:
        flat = given.tolist()
        count, body = flat[0], len(flat) - rows * COLUMNS
        numbers, size = flat[1:body], (body - 1) // count
        samples = tuple(tuple(numbers[at * size : (at + 1) * size]) for at in range(count))
        bins: dict[str, list[list[tuple[int, int]]]] = {
            name: [[] for _ in range(plan.microbatches * module.pieces)]
            for name, module in plan.encoders.items()
        }
        names = list(plan.encoders)
        for at in range(body, len(flat), COLUMNS):
            encoder, microbatch, sample, item = flat[at : at + COLUMNS]
            if encoder >= 0:
                bins[names[encoder]][microbatch].append((sample, item))
        return cls(samples=samples, bins={name: tuple(map(tuple, of_one)) for name, of_one in bins.items()})


def plan_batch(plan: Plan, samples: Sequence[SampleSizes]) -> BatchPlan:
    """Samples in order to microbatches; the items of each, in order, to the piece that has least."""
    size, rest = divmod(len(samples), plan.microbatches)
    assert not rest, f"{len(samples)} samples in {plan.microbatches} microbatches"
    parts = [samples[at * size : (at + 1) * size] for at in range(plan.microbatches)]
    bins = {}
    for name, module in plan.encoders.items():
        found: list[tuple[tuple[int, int], ...]] = []
        for part in parts:
            found += _bins_of(name, part, module.pieces, module.bin_tokens)
        bins[name] = tuple(found)
    return BatchPlan(samples=tuple(tuple(s.number for s in part) for part in parts), bins=bins)


def _bins_of(
    name: str, samples: Sequence[SampleSizes], pieces: int, room: int
) -> list[tuple[tuple[int, int], ...]]:
    items = [
        (sample.number, number, tokens)
        for sample in samples
        for number, tokens in enumerate(sample.items.get(name, ()))
    ]
    places, filled = deal([tokens for _, _, tokens in items], pieces)
    if max(filled) > room:
        raise UserError(
            field=f"items of {name} in samples {samples[0].number} to {samples[-1].number}",
            problem=f"make {max(filled)} tokens, and the plan has room for {room}",
            hint="plan with the lengths of this data (workload.lengths), or leave such samples out",
        )
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(pieces)]
    for (sample, number, _), place in zip(items, places, strict=True):
        dealt[place].append((sample, number))
    return [tuple(own) for own in dealt]


class BatchPlanExchange:
    """Gives the table of the next step to every rank of a replica while this step runs, on a CPU group."""

    def __init__(self, plan: Plan, group: dist.ProcessGroup | None, *, reader: int, rows: int) -> None:
        self.plan, self.group, self.reader, self.rows = plan, group, reader, rows
        self._given: Tensor | None = None
        self._work: dist.Work | None = None

    def start(self, table: BatchPlan | None, samples: int) -> None:
        """Everybody calls it; only the reader has the table. `samples` are those of one replica's step."""
        if table is not None:
            self._given = table.to_tensor(self.rows)
        else:
            self._given = torch.zeros(1 + samples + self.rows * COLUMNS, dtype=torch.int64)
        if self.group is not None:
            self._work = dist.broadcast(self._given, self.reader, self.group, async_op=True)

    def take(self) -> BatchPlan:
        """The table that was started."""
        assert self._given is not None, "start comes first"
        if self._work is not None:
            self._work.wait()
        found, self._given, self._work = self._given, None, None
        return BatchPlan.from_tensor(found, self.plan, self.rows)
