"""Deals images and sounds of a step's microbatches over the encoder pipelines of several replicas.

Every replica passes its own batches. Hosts exchange sizes, items of one microbatch index go by cost to the
encoder pipelines of all replicas of a dealing group, and pixels travel to the replica that encodes them.
Rows come back inside the step (`DealtRows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.data.dealing import deal_items, list_column_pipelines
from optimus.engine.process_groups import connect_group
from optimus.engine.rank_batch import BinRows, route_to_replicas
from optimus.engine.stage_profile import StageInputs
from optimus.engine.stage_segments import DealtRows
from optimus.errors import UserError
from optimus.hf.inputs import MicrobatchInputs
from optimus.hf.split import SplitModel
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM

GRID = "grid_thw"


@dataclass(frozen=True, order=True, slots=True)
class DealtItem:
    """One item of a microbatch: the replica that reads it, its index there, its input and output rows."""

    replica: int
    index: int
    inputs: int
    rows: int


Bins = list[list[list[DealtItem]]]  # by replica and encoder microbatch
RowShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]  # of an item's row, by argument


class ItemDealer:
    """Deals the inputs of encoders inside the dealing group of this rank's replica."""

    def __init__(self, split: SplitModel, plan: Plan, device: torch.device | str) -> None:
        self.split, self.plan = split, plan
        place, ranks, size = plan.ranks.place(LLM, dist.get_rank()), plan.ranks, plan.dealing_replicas
        first = place.dp - place.dp % size
        members = [ranks.rank_of(place.pp, first + other, place.cp, place.tp) for other in range(size)]
        self.replica = place.dp % size
        group = dist.new_group(members, use_local_synchronization=True)
        self._group, self._device = connect_group(group, device, all_to_all=True), device

    def deal(
        self, batches: Sequence[MicrobatchInputs]
    ) -> tuple[dict[str, list[StageInputs | None]], list[dict[str, DealtRows]]]:
        """Returns the inputs of this replica's encoder microbatches, and the ways of rows by microbatch."""
        inputs: dict[str, list[StageInputs | None]] = {}
        ways: list[dict[str, DealtRows]] = [{} for _ in batches]
        for name in self.plan.encoders:
            items = [self._list_items(name, batch.encoders[name]) for batch in batches]
            bins = self._assign(name, items)
            inputs[name] = self._exchange(name, [batch.encoders[name] for batch in batches], bins)
            for microbatch, way in enumerate(ways):
                way[name] = self._route(name, bins, microbatch)
        return inputs, ways

    def _list_items(self, name: str, inputs: StageInputs | None) -> list[DealtItem]:
        if inputs is None:
            return []
        lengths = [1] * len(inputs.args[0])
        if GRID in inputs.kwargs:
            lengths = inputs.kwargs[GRID].prod(-1).tolist()
        for key, value in inputs.kwargs.items():
            if isinstance(value, Tensor) and len(value) != len(lengths):
                raise UserError(
                    field="dealing_replicas",
                    value=self.plan.dealing_replicas,
                    problem=f"deals single items of {name}, and {key} has no row for each of them",
                    hint="use dealing_replicas=1 with this model",
                )
        items, begin, last = list[DealtItem](), 0, len(self.split.encoders[name]) - 1
        for index, length in enumerate(lengths):
            one = _take(inputs, slice(begin, begin + length), slice(index, index + 1))
            rows = self.split.shapes[name](last, one)[0][0]
            items.append(DealtItem(self.replica, index, length, rows))
            begin += length
        return items

    def _assign(self, name: str, items: Sequence[Sequence[DealtItem]]) -> Bins:
        """Deals the items of all replicas, the same on each: every column over its bins in the group."""
        module, replicas = self.plan.modules[name], self.plan.dealing_replicas
        of_replicas: list[Any] = [None] * replicas
        dist.all_gather_object(of_replicas, items, self._group)
        columns = [
            [item for replica in column for item in replica] for column in zip(*of_replicas, strict=True)
        ]
        pipelines = list_column_pipelines(module.pipelines, len(columns), replicas)
        costs = [[module.cost_of(item.inputs) for item in column] for column in columns]
        places, pieces = iter(deal_items(costs, pipelines).bins), module.microbatches_per_llm_microbatch
        bins: Bins = [[[] for _ in module.pipelines] for _ in range(replicas)]
        for microbatch, column in enumerate(columns):
            for item in column:
                replica, piece = divmod(next(places), pieces)
                bins[replica][microbatch * pieces + piece].append(item)
        return bins

    # ------------------------------------------------------------------------ pixels

    def _exchange(
        self, name: str, batches: Sequence[StageInputs | None], bins: Bins
    ) -> list[StageInputs | None]:
        """Sends the items of this replica to those that encode them; returns the inputs of its own bins."""
        pieces = self.plan.modules[name].microbatches_per_llm_microbatch
        leaving: list[list[StageInputs]] = [
            [
                _take_item(batches[at // pieces], item)
                for at, of_bin in enumerate(of_replica)
                for item in of_bin
                if item.replica == self.replica
            ]
            for of_replica in bins
        ]
        arriving = [
            [
                (at, item)
                for at, of_bin in enumerate(bins[self.replica])
                for item in of_bin
                if item.replica == r
            ]
            for r in range(len(bins))
        ]
        of_replicas: list[Any] = [None] * len(bins)
        mine = [describe_rows(each) for each in batches if each is not None]
        dist.all_gather_object(of_replicas, mine, self._group)
        rows = merge_rows(name, [each for of_replica in of_replicas for each in of_replica])
        if rows is None:
            return [None] * len(bins[self.replica])
        received = {
            key: self._send(key, leaving, arriving, shape, dtype) for key, (shape, dtype) in rows.items()
        }
        flat = [pair for of_replica in arriving for pair in of_replica]
        parts: dict[str, list[Tensor]] = {
            key: list(tensor.split([item.inputs if key == "" else 1 for _, item in flat]))
            for key, tensor in received.items()
        }
        found: list[StageInputs | None] = []
        for at in range(len(bins[self.replica])):
            chosen = [place for place, (other, _) in enumerate(flat) if other == at]
            joined = {key: torch.cat([of_key[p] for p in chosen]) for key, of_key in parts.items() if chosen}
            found.append(StageInputs(args=(joined.pop(""),), kwargs=joined) if chosen else None)
        return found

    def _send(
        self,
        key: str,
        leaving: Sequence[Sequence[StageInputs]],
        arriving: Sequence[Sequence[tuple[int, DealtItem]]],
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        """Exchanges one tensor of all items: the first input, whose key is empty, or a keyword."""
        sent = [[each.args[0] if key == "" else each.kwargs[key] for each in of_one] for of_one in leaving]
        rows = [item for of_one in sent for item in of_one]
        device = rows[0].device if rows else self._device
        outgoing = torch.cat(rows) if rows else torch.empty(0, *shape, dtype=dtype, device=device)
        counts = [sum(item.inputs if key == "" else 1 for _, item in of_one) for of_one in arriving]
        incoming = torch.empty(sum(counts), *shape, dtype=dtype, device=device)
        as_bytes = dtype == torch.bool  # which gloo does not send
        dist.all_to_all_single(
            incoming.view(torch.uint8) if as_bytes else incoming,
            outgoing.contiguous().view(torch.uint8) if as_bytes else outgoing.contiguous(),
            counts,
            [sum(map(len, of_one)) for of_one in sent],
            group=self._group,
        )
        return incoming

    # ------------------------------------------------------------------------ rows

    def _route(self, name: str, bins: Bins, microbatch: int) -> DealtRows:
        """Returns the way of rows of one LLM microbatch: from the bins of all replicas to their own."""
        feeding = [
            (replica, of_replica[at])
            for replica, of_replica in enumerate(bins)
            for at in self.plan.modules[name].microbatches_of(microbatch)
        ]
        rows = [
            BinRows(
                replica=replica,
                holders=range(1),
                owners=torch.tensor([i.replica for i in items for _ in range(i.rows)], dtype=torch.int64),
                targets=torch.empty(0, dtype=torch.int64),
            )
            for replica, items in feeding
        ]
        route = route_to_replicas(rows, 0, self.replica, len(bins))
        came = [item for _, items in feeding for item in items if item.replica == self.replica]
        index = torch.tensor([item.index for item in came for _ in range(item.rows)], dtype=torch.int64)
        return DealtRows(route=route, order=torch.argsort(index, stable=True))


def _take(inputs: StageInputs, rows: slice, items: slice) -> StageInputs:
    kwargs = {key: value[items] for key, value in inputs.kwargs.items() if isinstance(value, Tensor)}
    return StageInputs(args=(inputs.args[0][rows],), kwargs=kwargs)


def _take_item(inputs: StageInputs | None, item: DealtItem) -> StageInputs:
    assert inputs is not None, "an item of a microbatch without any"
    grid = inputs.kwargs.get(GRID)
    begin = item.index if grid is None else int(grid[: item.index].prod(-1).sum())
    return _take(inputs, slice(begin, begin + item.inputs), slice(item.index, item.index + 1))


def describe_rows(inputs: StageInputs) -> RowShapes:
    """Returns shape of a row and dtype of the first input, whose key is empty, and of keywords."""
    tensors = {"": inputs.args[0], **inputs.kwargs}
    return {
        key: (tuple(tensor.shape[1:]), tensor.dtype)
        for key, tensor in tensors.items()
        if isinstance(tensor, Tensor)
    }


def merge_rows(name: str, microbatches: Sequence[RowShapes]) -> RowShapes | None:
    """Returns the rows of all microbatches of a dealing group, None without any; raises if they differ."""
    for rows in microbatches:
        if rows != microbatches[0]:
            raise UserError(
                field="dealing_replicas",
                problem=f"joins inputs of {name} of several batches, whose items have sizes "
                f"{list(microbatches[0].values())} and {list(rows.values())}",
                hint="let the processor pad all batches to one size, or use dealing_replicas=1",
            )
    return microbatches[0] if microbatches else None
