"""Builds the inputs and contexts of one rank's microbatches from samples, on the host before the step.

Rows of an encoder microbatch arrive at the LLM's entry stage on as many ranks as the encoder has
tensor-parallel ranks, a contiguous part on each. Rows of images that were dealt to another replica go to that
replica, to the same tensor-parallel rank. From there each row goes to the rank whose shard of the LLM's
sequence holds its position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimus.engine.batch_plan import BatchPlan, BinItem, count_padded_tokens
from optimus.engine.process_groups import build_tp_group, find_receiving_tp_ranks
from optimus.errors import UserError
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.model import Encoder, Model
from optimus.models.collectives import TpGroup
from optimus.models.microbatch_inputs import (
    SeamRoute,
    TensorMap,
    build_encoder_inputs,
    build_llm_inputs,
    find_row_positions,
)
from optimus.models.sample import ItemKeys, PlacedItem, Sample


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def list_needed_samples(plan: Plan, rank: int, table: BatchPlan) -> dict[int, ItemKeys]:
    """Returns the samples that a rank reads in a step, in that order, with the items that it encodes."""
    replica = plan.ranks.place(LLM, rank).dp % plan.dealing_replicas
    needed: dict[int, set[tuple[str, int]]] = {}
    for name, microbatch in _list_forwards(plan, rank):
        if name == LLM:
            for number in table.samples[replica][microbatch]:
                needed.setdefault(number, set())
        else:
            for item in table.bins[name][replica][microbatch]:
                needed.setdefault(item.sample, set()).add((name, item.index))
    return {number: frozenset(items) for number, items in needed.items()}


def _list_forwards(plan: Plan, rank: int) -> list[tuple[str, int]]:
    """Returns the modules and microbatches of which a rank runs a forward: encoders, then the LLM."""
    program = plan.programs[plan.ranks.class_of(rank)]
    forwards = program.rows[program.kind == OpKind.FORWARD][:, [0, 3]]
    return [(plan.names[module], mb) for module, mb in sorted(set(map(tuple, forwards.tolist())))]


class RankBatch:
    """Inputs and contexts of the microbatches of one rank in a step; `place` moves them to its device."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        rank: int,
        table: BatchPlan,
        read: Callable[[int, ItemKeys], Sample],
        *,
        seed: int,
        step: int | None,
        dtype: torch.dtype,
        place: TensorMap = _identity,
    ) -> None:
        self.model, self.plan, self.table, self._place = model, plan, table, place
        self._options: dict[str, Any] = {"seed": seed, "step": step, "dtype": dtype}
        self._samples: dict[int, Sample] = {}
        self._read, self._needed = read, list_needed_samples(plan, rank, table)
        self._microbatches: dict[tuple[str, int], tuple[tuple[Tensor, ...], Any]] = {}
        self._tp_groups = {name: build_tp_group(plan, name, rank) for name in plan.modules}
        self._replica = plan.ranks.place(LLM, rank).dp % plan.dealing_replicas
        self._begins_llm = plan.ranks.place(LLM, rank).pp == plan.ranks.entry_stage
        for name, microbatch in _list_forwards(plan, rank):
            build = self._build_llm if name == LLM else partial(self._build_encoder, name)
            self._microbatches[name, microbatch] = build(microbatch)
        self._samples.clear()

    def inputs(self, module: str, microbatch: int) -> tuple[Tensor, ...]:
        return self._microbatches[module, microbatch][0]

    def context(self, module: str, microbatch: int) -> Any:
        return self._microbatches[module, microbatch][1]

    def count_tokens(self, name: str, microbatch: int) -> int:
        """Returns the tokens that an encoder microbatch of this replica runs, padding included."""
        return self._padded(name, self.table.bins[name][self._replica][microbatch])

    # ------------------------------------------------------------------------ from samples

    def _sample(self, number: int) -> Sample:
        if number not in self._samples:
            self._samples[number] = self._read(number, self._needed[number])
        return self._samples[number]

    def _padded(self, name: str, items: Sequence[BinItem]) -> int:
        return count_padded_tokens(self.plan.modules[name], self.model.encoder(name).projector.merge, items)

    def _load_item(self, name: str, item: BinItem) -> PlacedItem:
        loaded = self._sample(item.sample).items[name][item.index]
        if loaded.tokens != item.tokens:
            raise UserError(
                field=f"data: item {item.index} of {name} in sample {item.sample}",
                value=loaded.tokens,
                problem=f"is its number of tokens, and the data set's sizes say {item.tokens}",
                hint="index the data set again",
            )
        return item.sample, item.index, loaded

    def _build_encoder(self, name: str, microbatch: int) -> tuple[tuple[Tensor, ...], Any]:
        encoder, tokens = self.model.encoder(name), self.count_tokens(name, microbatch)
        items = [self._load_item(name, item) for item in self.table.bins[name][self._replica][microbatch]]
        inputs, context = build_encoder_inputs(encoder, items, tokens, **self._options)
        rows = self._tp_groups[name].rows(tokens)
        return (self._place(inputs[rows]),), context.shard(rows).map(self._place)

    def _build_llm(self, microbatch: int) -> tuple[tuple[Tensor, ...], Any]:
        samples = [self._sample(number) for number in self.table.samples[self._replica][microbatch]]
        ids, context = build_llm_inputs(
            self.model.llm,
            samples,
            (),
            1.0 / max(1, self.table.labels),
            encoders=self.model.encoders,
            **self._options,
        )
        tp_group = self._tp_groups[LLM]
        if tp_group.size > 1:
            context = context.shard(tp_group.rows(len(ids)))
        if self._begins_llm:
            bins = self._list_bins(microbatch, samples)
            replicas = self._replica, self.plan.dealing_replicas
            routes = route_encoder_rows(bins, tp_group, *replicas, len(ids))
            context = replace(context, **routes._asdict())
        return (self._place(ids),), context.map(self._place)

    def _list_bins(self, microbatch: int, samples: Sequence[Sample]) -> list[BinRows]:
        """Returns the bins of the dealing group that feed an LLM microbatch, replica after replica."""
        first_rows = dict(
            zip(
                (sample.number for sample in samples),
                accumulate((sample.length for sample in samples), initial=0),
                strict=False,
            )
        )
        owners = {
            number: replica
            for replica, microbatches in enumerate(self.table.samples)
            for number in microbatches[microbatch]
        }
        length = sum(sample.length for sample in samples)
        return [
            self._bin_rows(encoder, replica, number, owners, first_rows, length)
            for replica in range(self.plan.dealing_replicas)
            for encoder in self.model.encoders
            for number in self.plan.modules[encoder.name].microbatches_of(microbatch)
        ]

    def _bin_rows(
        self,
        encoder: Encoder,
        replica: int,
        microbatch: int,
        owners: Mapping[int, int],
        first_rows: Mapping[int, int],
        length: int,
    ) -> BinRows:
        items, merge = self.table.bins[encoder.name][replica][microbatch], encoder.projector.merge
        count = self._padded(encoder.name, items) // merge
        owner = torch.full((count,), self.plan.dealing_replicas)
        targets = torch.full((count,), length)
        end = 0
        for item in items:
            begin, end = end, end + item.tokens // merge
            owner[begin:end] = owners[item.sample]
            if item.sample in first_rows:
                _, _, loaded = self._load_item(encoder.name, item)
                targets[begin:end] = first_rows[item.sample] + find_row_positions(encoder, loaded)
        return BinRows(
            replica=replica,
            holders=find_receiving_tp_ranks(self.plan, encoder.name, microbatch),
            owners=owner,
            targets=targets,
        )


# ---------------------------------------------------------------------------- routes of encoder rows


@dataclass(frozen=True, kw_only=True, eq=False)
class BinRows:
    """Output rows of one encoder microbatch that feeds an LLM microbatch, on any replica of the group."""

    replica: int  # that encodes it
    holders: range  # ranks in the LLM's tensor-parallel group at which the rows arrive
    owners: Tensor  # of every row: the replica that its sequence is on; past the last for padding
    targets: Tensor  # of this replica's rows: the position in its microbatch; past the end for others

    def part(self, rank: int) -> slice:
        """Returns the rows that arrive at a tensor-parallel rank: none, or a run of them."""
        if rank not in self.holders:
            return slice(0, 0)
        count = len(self.owners) // len(self.holders)
        begin = (rank - self.holders[0]) * count
        return slice(begin, begin + count)


class RowRoutes(NamedTuple):
    """Routes of one rank, as `LlmMicrobatchContext` has them."""

    deal: SeamRoute | None
    seam: SeamRoute | None
    targets: tuple[Tensor, ...]


def route_encoder_rows(
    bins: Sequence[BinRows], tp_group: TpGroup, replica: int, replicas: int, length: int
) -> RowRoutes:
    """Returns the routes of rows: to their replica, then to the rank of their position.

    `length` is that of the LLM microbatch, of which every rank of the tensor-parallel group holds a run.
    """
    deal = route_to_replicas(bins, tp_group.rank, replica, replicas) if replicas > 1 else None
    targets_by_rank = [
        torch.cat([_targets_on(each, rank, replica, replicas) for each in bins])
        if bins
        else torch.empty(0, dtype=torch.int64)
        for rank in range(tp_group.size)
    ]
    targets = targets_by_rank[tp_group.rank]
    own = [each for each in bins if each.replica == replica and tp_group.rank in each.holders]
    pieces = tuple(len(each.targets[each.part(tp_group.rank)]) for each in own)
    if tp_group.size == 1:
        split = targets.split(pieces) if deal is None else (targets,)
        return RowRoutes(deal, None, tuple(split))
    shard = length // tp_group.size
    received = [of_rank[(of_rank // shard) == tp_group.rank] for of_rank in targets_by_rank]
    seam = _route(
        torch.div(targets, shard, rounding_mode="floor"),  # past the last rank for padding
        tp_group.size,
        received=tuple(map(len, received)),
        pieces=pieces if deal is None else (len(targets),),
    )
    placed = torch.cat(received) - tp_group.rank * shard
    return RowRoutes(deal, seam, (placed,))


def route_to_replicas(bins: Sequence[BinRows], rank: int, replica: int, replicas: int) -> SeamRoute:
    """Returns the rows that a tensor-parallel rank exchanges with the same rank of other replicas."""
    own = [each.owners[each.part(rank)] for each in bins if each.replica == replica and rank in each.holders]
    received = [
        sum(int((each.owners[each.part(rank)] == replica).sum()) for each in bins if each.replica == sender)
        for sender in range(replicas)
    ]
    owners = torch.cat(own) if own else torch.empty(0, dtype=torch.int64)
    return _route(owners, replicas, received=tuple(received), pieces=tuple(map(len, own)))


def _route(
    destinations: Tensor, size: int, *, received: tuple[int, ...], pieces: tuple[int, ...]
) -> SeamRoute:
    """Returns a route of rows by their destinations; those past the last rank go nowhere."""
    sent = torch.bincount(destinations, minlength=size)[:size].tolist()
    order = torch.argsort(destinations, stable=True)
    return SeamRoute(pieces=pieces, leaving=order[: sum(sent)], sent=tuple(sent), received=received)


def _targets_on(each: BinRows, rank: int, replica: int, replicas: int) -> Tensor:
    """Returns the targets of a bin's rows at a rank of this replica, after those of others have left."""
    part = each.part(rank)
    if replicas == 1:
        return each.targets[part]
    return each.targets[part][each.owners[part] == replica]
