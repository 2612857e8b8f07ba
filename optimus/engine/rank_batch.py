"""Builds the inputs and contexts of one rank's microbatches from samples, on the host before the step.

Rows of an encoder microbatch arrive at the LLM's entry stage on as many ranks as the encoder has
tensor-parallel ranks, a contiguous part on each. Rows of images that were dealt to another replica go to that
replica, to the same tensor- and context-parallel rank. From there each row goes to the tensor-parallel rank,
then to the context-parallel one, whose shard of the LLM's sequence holds its position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from optimus.engine.batch_plan import BatchPlan, BinItem, count_padded_tokens
from optimus.engine.process_groups import (
    build_cp_group,
    build_tp_group,
    find_receiving_cp_rank,
    find_receiving_tp_ranks,
)
from optimus.errors import UserError
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.model import Encoder, Model
from optimus.models.collectives import TpGroup
from optimus.models.context_parallel import ContextShare, split_sequences
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
        self._cp_group = build_cp_group(plan, LLM, rank)
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
        tp_group, cp_group = self._tp_groups[LLM], self._cp_group
        places = RowPlaces.contiguous(len(ids), tp_group.size)
        if cp_group.size > 1:
            lengths = [sample.length for sample in samples]
            share = split_sequences(lengths, context.spans, cp_group.rank, cp_group.size)
            ids, context = ids[share.rows], context.split_context(share)
            places = RowPlaces.split(share, tp_group.size, cp_group.size)
        if tp_group.size > 1:
            context = context.shard(tp_group.rows(len(ids)))
        if self._begins_llm:
            bins = self._list_bins(microbatch, samples)
            replicas = self._replica, self.plan.dealing_replicas
            routes, targets = route_encoder_rows(bins, places, tp_group, cp_group, *replicas)
            context = replace(context, routes=routes, targets=targets)
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
            context=find_receiving_cp_rank(self.plan, encoder.name, microbatch),
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
    context: int = 0  # rank in the LLM's context-parallel group at which the rows arrive

    def part(self, rank: int, context: int = 0) -> slice:
        """Returns the rows that arrive at a tensor- and context-parallel rank: none, or a run of them."""
        if rank not in self.holders or context != self.context:
            return slice(0, 0)
        count = len(self.owners) // len(self.holders)
        begin = (rank - self.holders[0]) * count
        return slice(begin, begin + count)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowPlaces:
    """Ranks that hold the rows of an LLM microbatch; each tensor has an entry past the end, for no rank."""

    tp: Tensor  # tensor-parallel rank of each row
    cp: Tensor  # context-parallel rank of each row
    index: Tensor  # of each row on its rank

    @classmethod
    def contiguous(cls, length: int, tp: int) -> RowPlaces:
        """Returns the places of rows of which every tensor-parallel rank holds a run."""
        return cls._of(torch.zeros(length, dtype=torch.int64), torch.arange(length), length // tp, tp, 1)

    @classmethod
    def split(cls, share: ContextShare, tp: int, cp: int) -> RowPlaces:
        """Returns the places of rows that context-parallel ranks share, each in runs of its tp ranks."""
        length = len(share.in_order) // cp
        return cls._of(share.in_order // length, share.in_order % length, length // tp, tp, cp)

    @classmethod
    def _of(cls, context: Tensor, row: Tensor, shard: int, tp: int, cp: int) -> RowPlaces:
        return cls(tp=_padded(row // shard, tp), cp=_padded(context, cp), index=_padded(row % shard, shard))


def _padded(values: Tensor, past_end: int) -> Tensor:
    return torch.cat([values, values.new_tensor([past_end])])


Routes = dict[str, SeamRoute]  # by axis, as `LlmMicrobatchContext` has them


def route_encoder_rows(
    bins: Sequence[BinRows],
    places: RowPlaces,
    tp_group: TpGroup,
    cp_group: TpGroup,
    replica: int,
    replicas: int,
) -> tuple[Routes, tuple[Tensor, ...]]:
    """Returns the routes of rows, to their replica and to the rank of their position, and their targets."""
    rank, context, routes = tp_group.rank, cp_group.rank, Routes()
    held = [
        [_targets_on(bins, t, c, replica, replicas) for t in range(tp_group.size)]
        for c in range(cp_group.size)
    ]
    pieces = tuple(len(rows) for rows in _own_rows(bins, rank, context, replica))
    if replicas > 1:
        routes["deal"] = route_to_replicas(bins, rank, replica, replicas, context)
        pieces = (len(held[context][rank]),)
    if tp_group.size > 1:
        routes["tp"] = _route(held[context], places.tp, rank, pieces)
        held = [[_arriving(of_context, places.tp, t) for t in range(tp_group.size)] for of_context in held]
        pieces = (len(held[context][rank]),)
    if cp_group.size > 1:
        column = [of_context[rank] for of_context in held]
        routes["cp"] = _route(column, places.cp, context, pieces)
        held[context][rank] = _arriving(column, places.cp, context)
        pieces = (len(held[context][rank]),)
    return routes, places.index[held[context][rank]].split(pieces)


def route_to_replicas(
    bins: Sequence[BinRows], rank: int, replica: int, replicas: int, context: int = 0
) -> SeamRoute:
    """Returns the rows that a rank exchanges with the same rank of other replicas."""
    held = [torch.cat([_NO_ROWS, *_own_rows(bins, rank, context, sender)]) for sender in range(replicas)]
    pieces = tuple(len(rows) for rows in _own_rows(bins, rank, context, replica))
    return _route(held, torch.arange(replicas + 1), replica, pieces)


def _own_rows(bins: Sequence[BinRows], rank: int, context: int, replica: int) -> list[Tensor]:
    """Returns the owners of rows that arrive at a rank of a replica, by bin."""
    arriving = (each for each in bins if each.replica == replica and each.context == context)
    return [each.owners[each.part(rank, context)] for each in arriving if rank in each.holders]


def _route(held: Sequence[Tensor], places: Tensor, rank: int, pieces: tuple[int, ...]) -> SeamRoute:
    """Returns one rank's route of rows by their places; those past the last rank go nowhere."""
    destinations = places[held[rank]]
    sent = torch.bincount(destinations, minlength=len(held))[: len(held)].tolist()
    return SeamRoute(
        pieces=pieces,
        leaving=torch.argsort(destinations, stable=True)[: sum(sent)],
        sent=tuple(sent),
        received=tuple(int((places[rows] == rank).sum()) for rows in held),
    )


def _arriving(held: Sequence[Tensor], places: Tensor, rank: int) -> Tensor:
    """Returns the targets of the rows that a rank receives, from all ranks in order."""
    return torch.cat([rows[places[rows] == rank] for rows in held])


_NO_ROWS = torch.empty(0, dtype=torch.int64)


def _targets_on(bins: Sequence[BinRows], rank: int, context: int, replica: int, replicas: int) -> Tensor:
    """Returns the targets of rows at a rank of this replica, after those of other replicas have left."""
    targets = [_NO_ROWS]
    for each in bins:
        part = each.part(rank, context)
        owned = each.owners[part] == replica if replicas > 1 else slice(None)
        targets.append(each.targets[part][owned])
    return torch.cat(targets)
