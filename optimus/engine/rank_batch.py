"""Builds the inputs and contexts of one rank's microbatches from samples, on the host before the step.

Rows of an encoder microbatch arrive at LLM stage 0 on as many ranks as the encoder has tensor-parallel ranks,
a contiguous part on each. From there each row goes to the rank whose shard of the LLM's sequence holds its
position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from optimus.engine.batch_plan import BatchPlan
from optimus.engine.process_groups import build_tp_group, find_receiving_tp_ranks
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
    find_llm_row_targets,
)
from optimus.models.sample import PlacedItem, Sample


def _identity(tensor: Tensor) -> Tensor:
    return tensor


class RankBatch:
    """Inputs and contexts of the microbatches of one rank in a step; `place` moves them to its device."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        rank: int,
        table: BatchPlan,
        read: Callable[[int], Sample],
        *,
        scale: float,
        seed: int,
        step: int,
        dtype: torch.dtype,
        place: TensorMap = _identity,
    ) -> None:
        self.model, self.plan, self.table, self.scale, self._place = model, plan, table, scale, place
        self._options: dict[str, Any] = {"seed": seed, "step": step, "dtype": dtype}
        self._samples: dict[int, Sample] = {}
        self._read = read
        self._microbatches: dict[tuple[str, int], tuple[tuple[Tensor, ...], Any]] = {}
        self._tp_groups = {name: build_tp_group(plan, name, rank) for name in plan.modules}
        device = plan.ranks.class_of(rank)
        self._begins_llm = plan.ranks.stage_of(LLM, device) == 0
        program = plan.programs[device]
        forwards = program.rows[program.kind == OpKind.FORWARD][:, [0, 3]]
        for module, microbatch in sorted(set(map(tuple, forwards.tolist()))):
            name = plan.names[module]
            build = self._build_llm if name == LLM else partial(self._build_encoder, name)
            self._microbatches[name, microbatch] = build(microbatch)
        self._samples.clear()

    def inputs(self, module: str, microbatch: int) -> tuple[Tensor, ...]:
        return self._microbatches[module, microbatch][0]

    def context(self, module: str, microbatch: int) -> Any:
        return self._microbatches[module, microbatch][1]

    # ------------------------------------------------------------------------ from samples

    def _sample(self, number: int) -> Sample:
        if number not in self._samples:
            self._samples[number] = self._read(number)
        return self._samples[number]

    def _items(self, name: str, microbatch: int) -> list[PlacedItem]:
        pairs = self.table.bins[name][microbatch]
        return [(sample, item, self._sample(sample).items[name][item]) for sample, item in pairs]

    def _build_encoder(self, name: str, microbatch: int) -> tuple[tuple[Tensor, ...], Any]:
        encoder = self.model.encoder(name)
        capacity = self.plan.modules[name].bin_tokens
        items = self._items(name, microbatch)
        inputs, context = build_encoder_inputs(encoder, items, capacity, **self._options)
        rows = self._tp_groups[name].rows(capacity)
        return (self._place(inputs[rows]),), context.shard(rows).map(self._place)

    def _build_llm(self, microbatch: int) -> tuple[tuple[Tensor, ...], Any]:
        samples = [self._sample(number) for number in self.table.samples[microbatch]]
        routed: list[RoutedEncoderRows] = []
        for encoder in self.model.encoders:
            routed += self._routed_rows(encoder, microbatch, samples)
        ids, context = build_llm_inputs(
            self.model.llm,
            samples,
            [rows.targets for rows in routed],
            self.scale,
            encoders=self.model.encoders,
            **self._options,
        )
        tp_group = self._tp_groups[LLM]
        if tp_group.size > 1:
            context = context.shard(tp_group.rows(len(ids)), self._seam(routed, len(ids)))
        return (self._place(ids),), context.map(self._place)

    def _seam(self, routed: list[RoutedEncoderRows], length: int) -> SeamRoute | None:
        """Returns the route of encoder rows, which only the LLM's first stage reads."""
        return route_encoder_rows(routed, self._tp_groups[LLM], length) if self._begins_llm else None

    def _routed_rows(
        self, encoder: Encoder, microbatch: int, samples: list[Sample]
    ) -> list[RoutedEncoderRows]:
        """Returns for each encoder microbatch of an LLM microbatch its rows' positions and holders."""
        first_rows, rows = {}, 0
        for sample in samples:
            first_rows[sample.number] = rows
            rows += sample.length
        planned = self.plan.modules[encoder.name]
        name, routed = encoder.name, []
        for encoder_microbatch in planned.microbatches_of(microbatch):
            items = self._items(name, encoder_microbatch)
            targets = find_llm_row_targets(encoder, items, planned.bin_tokens, first_rows, rows)
            holders = find_receiving_tp_ranks(self.plan, name, encoder_microbatch)
            routed.append(RoutedEncoderRows(holders=holders, targets=targets))
        return routed


# ---------------------------------------------------------------------------- routes of encoder rows


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedEncoderRows:
    """Rows of one encoder microbatch: the ranks that hold them, and their positions in the LLM's sequence."""

    holders: range  # ranks in the LLM's tensor-parallel group
    targets: Tensor  # the sequence length for padding, which goes nowhere


def route_encoder_rows(
    microbatches: Sequence[RoutedEncoderRows], tp_group: TpGroup, length: int
) -> SeamRoute:
    """Returns the rows that one rank sends and receives; `length` is that of the sequence."""
    shard = length // tp_group.size
    targets_by_rank = [_concatenated_targets(microbatches, rank) for rank in range(tp_group.size)]
    targets = targets_by_rank[tp_group.rank]
    receivers = torch.div(targets, shard, rounding_mode="floor")  # past the last rank for padding
    order = torch.argsort(receivers, stable=True)
    sent = [int((receivers == rank).sum()) for rank in range(tp_group.size)]
    received = [of_rank[(of_rank // shard) == tp_group.rank] for of_rank in targets_by_rank]
    return SeamRoute(
        pieces=tuple(len(part) for part in _targets_on(microbatches, tp_group.rank)),
        leaving=order[: sum(sent)],
        sent=tuple(sent),
        received=tuple(len(of_rank) for of_rank in received),
        targets=torch.cat(received) - tp_group.rank * shard,
    )


def _targets_on(microbatches: Sequence[RoutedEncoderRows], rank: int) -> list[Tensor]:
    """Returns the targets of the rows that a rank holds, by microbatch."""
    targets = []
    for rows in microbatches:
        if rank in rows.holders:
            count = len(rows.targets) // len(rows.holders)
            begin = (rank - rows.holders[0]) * count
            targets.append(rows.targets[begin : begin + count])
    return targets


def _concatenated_targets(microbatches: Sequence[RoutedEncoderRows], rank: int) -> Tensor:
    targets = _targets_on(microbatches, rank)
    return torch.cat(targets) if targets else torch.empty(0, dtype=torch.int64)
