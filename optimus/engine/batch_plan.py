"""Plans the batch of a step on the host, one step ahead: sequences to microbatches, items to encoder bins.

The sequences of a step are dealt to groups of replicas and there to microbatches so that all have the same
load of images and sounds; the items of a microbatch index are dealt over the encoder pipelines of the group
(`data.dealing`). Stage 0 of every replica plans from sizes alone and broadcasts the plan to its pipeline, so
that no size is ever read from a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.data.dealing import deal_items, deal_sequences, list_column_pipelines
from optimus.errors import UserError
from optimus.ir.plan import Plan, PlannedModule

COLUMNS = 6  # encoder, replica, its microbatch, sample, item, tokens


@dataclass(frozen=True, kw_only=True)
class SampleSizes:
    """Encoder tokens of every item of a sample, by encoder."""

    number: int
    items: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, order=True, slots=True)
class BinItem:
    """One item of an encoder microbatch: its sample's number, its index there, its encoder tokens."""

    sample: int
    index: int
    tokens: int


Bin = tuple[BinItem, ...]  # one encoder microbatch


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """One step of the replicas of a dealing group, in order."""

    samples: tuple[tuple[tuple[int, ...], ...], ...]  # numbers, by replica and LLM microbatch
    bins: Mapping[str, tuple[tuple[Bin, ...], ...]]  # by encoder, replica and encoder microbatch
    labels: int  # of the whole step, all groups together
    carried: int = 0  # samples of the whole step that an earlier one had no room for

    def to_tensor(self) -> Tensor:
        """Encodes the plan: labels, carried, the number of samples and all of them, then a row per item."""
        rows = [
            (encoder, replica, microbatch, item.sample, item.index, item.tokens)
            for encoder, of_encoder in enumerate(self.bins.values())
            for replica, bins in enumerate(of_encoder)
            for microbatch, items in enumerate(bins)
            for item in items
        ]
        numbers = [number for replica in self.samples for samples in replica for number in samples]
        flat = [self.labels, self.carried, len(numbers), *numbers, *chain.from_iterable(rows)]
        return torch.tensor(flat, dtype=torch.int64)

    @classmethod
    def from_tensor(cls, tensor: Tensor, plan: Plan) -> BatchPlan:
        labels, carried, count, *flat = tensor.tolist()
        replicas, numbers = plan.dealing_replicas, flat[:count]
        size = count // (replicas * plan.microbatches)
        runs = iter([tuple(numbers[at : at + size]) for at in range(0, len(numbers), size)])
        samples = tuple(tuple(next(runs) for _ in range(plan.microbatches)) for _ in range(replicas))
        bins: dict[str, list[list[list[BinItem]]]] = {
            name: [[[] for _ in module.pipelines] for _ in range(replicas)]
            for name, module in plan.encoders.items()
        }
        names = list(plan.encoders)
        for at in range(count, len(flat), COLUMNS):
            encoder, replica, microbatch, *item = flat[at : at + COLUMNS]
            bins[names[encoder]][replica][microbatch].append(BinItem(*item))
        return cls(
            samples=samples,
            bins={
                name: tuple(tuple(map(tuple, replica)) for replica in of_one) for name, of_one in bins.items()
            },
            labels=labels,
            carried=carried,
        )


def count_padded_tokens(module: PlannedModule, merge: int, items: Sequence[BinItem]) -> int:
    """Returns the tokens that a bin runs: whole merge groups on every TP rank, at least one."""
    unit = merge * module.layout.tp
    return max(1, -(-sum(item.tokens for item in items) // unit)) * unit


def plan_batch(
    plan: Plan, samples: Sequence[SampleSizes], group: int = 0, *, labels: int = 0, carried: int = 0
) -> BatchPlan:
    """Plans the step of one dealing group from the sizes of all samples of the step."""
    replicas, columns = plan.dealing_replicas, plan.microbatches
    groups = plan.ranks.llm.dp // replicas
    _refuse_large_items(plan, samples)
    loads = [_load(plan, sample) for sample in samples]
    own = sorted(deal_sequences(loads, groups)[group])
    dealt = deal_sequences([loads[place] for place in own], columns)
    by_column = [[samples[own[place]] for place in sorted(column)] for column in dealt]
    size, rest = divmod(len(by_column[0]), replicas)
    assert not rest, f"{len(by_column[0])} samples of a microbatch for {replicas} replicas"
    numbers = [[sample.number for sample in column] for column in by_column]
    return BatchPlan(
        samples=tuple(
            tuple(tuple(column[at * size : (at + 1) * size]) for column in numbers) for at in range(replicas)
        ),
        bins={name: _deal_items(plan, name, by_column) for name in plan.encoders},
        labels=labels,
        carried=carried,
    )


def _load(plan: Plan, sample: SampleSizes) -> float:
    """Returns the time of a sample's items in all encoders, relative to each other."""
    return sum(
        module.cost_of(tokens)
        for name, module in plan.encoders.items()
        for tokens in sample.items.get(name, ())
    )


def _deal_items(
    plan: Plan, name: str, columns: Sequence[Sequence[SampleSizes]]
) -> tuple[tuple[Bin, ...], ...]:
    """Returns the bins of an encoder by replica and microbatch; items of a bin are in the batch's order."""
    module, replicas = plan.modules[name], plan.dealing_replicas
    items = [
        [
            BinItem(sample.number, index, tokens)
            for sample in column
            for index, tokens in enumerate(sample.items.get(name, ()))
        ]
        for column in columns
    ]
    pipelines = list_column_pipelines(module.pipelines, len(columns), replicas)
    costs = [[module.cost_of(item.tokens) for item in column] for column in items]
    dealt = deal_items(costs, pipelines, locked=plan.locked)
    bins: list[list[list[BinItem]]] = [[[] for _ in module.pipelines] for _ in range(replicas)]
    places, pieces = iter(dealt.bins), module.microbatches_per_llm_microbatch
    for column, of_column in enumerate(items):
        for item in of_column:
            replica, piece = divmod(next(places), pieces)
            bins[replica][column * pieces + piece].append(item)
    return tuple(tuple(tuple(items) for items in replica) for replica in bins)


def _refuse_large_items(plan: Plan, samples: Sequence[SampleSizes]) -> None:
    """Raises if an item alone is more than memory was planned for."""
    for name, module in plan.encoders.items():
        for sample in samples:
            largest = max(sample.items.get(name, ()), default=0)
            if largest > module.bin_tokens:
                raise UserError(
                    field=f"items of {name} in sample {sample.number}",
                    problem=f"one has {largest} tokens, and the plan has room for {module.bin_tokens}",
                    hint="plan with the lengths of this data (workload.lengths), or leave such samples out",
                )


class BatchPlanBroadcast:
    """Broadcasts the plan of the next batch to a replica's ranks while this step runs, on a CPU group.

    Its length goes first: how many images a batch has, only the reader knows.
    """

    def __init__(self, plan: Plan, group: dist.ProcessGroup | None, *, reader: int) -> None:
        self.plan, self.group, self.reader = plan, group, reader
        self._works: list[dist.Work] = []
        self._length = torch.zeros(1, dtype=torch.int64)
        self._tensor: Tensor | None = None  # on the reader
        self._is_started = False

    def start(self, batch_plan: BatchPlan | None) -> None:
        """Starts a broadcast on every rank; only the reader has the plan."""
        self._is_started = True
        if batch_plan is not None:
            self._tensor = batch_plan.to_tensor()
            self._length.fill_(len(self._tensor))
        for tensor in (self._length, self._tensor):
            if self.group is not None and tensor is not None:
                self._works.append(dist.broadcast(tensor, self.reader, self.group, async_op=True))

    def wait(self) -> BatchPlan:
        """Returns the plan whose broadcast was started."""
        assert self._is_started, "start comes first"
        for work in self._works:
            work.wait()
        tensor = self._tensor
        if tensor is None:
            tensor = torch.empty(int(self._length), dtype=torch.int64)
            dist.broadcast(tensor, self.reader, self.group)
        self._works, self._tensor, self._is_started = [], None, False
        return BatchPlan.from_tensor(tensor, self.plan)
