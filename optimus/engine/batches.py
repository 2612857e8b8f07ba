"""The data of one step as a rank needs it: inputs and contexts of its microbatches, made from samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from optimus.engine.batch_plan import BatchPlan
from optimus.engine.encoder_llm_routing import RoutedRows, holder_tp_ranks, route_rows
from optimus.engine.process_groups import tp_group_of
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.model import Encoder, Model
from optimus.models.kernels import NUMERICS, Numerics
from optimus.models.microbatch_inputs import SeamRoute, TensorMap, bin_targets, encoder_inputs, llm_inputs
from optimus.models.sample import PlacedItem, Sample


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class RankBatch:
    """Everything is made on the host before the step begins, for the ops of one rank, and `placed` there."""

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
        place: TensorMap = _as_it_is,
        numerics: Mapping[str, Numerics] = MappingProxyType({}),
    ) -> None:
        self.numerics = numerics
        self.model, self.plan, self.table, self.scale, self._place = model, plan, table, scale, place
        self._how: dict[str, Any] = {"seed": seed, "step": step, "dtype": dtype}
        self._samples: dict[int, Sample] = {}
        self._read = read
        self._made: dict[tuple[str, int], tuple[tuple[Tensor, ...], Any]] = {}
        self._tp_groups = {name: tp_group_of(plan, name, rank) for name in plan.modules}
        device = plan.ranks.class_of(rank)
        self._begins_llm = plan.ranks.stage_of(LLM, device) == 0
        program = plan.programs[device]
        forwards = program.rows[program.kind == OpKind.FORWARD][:, [0, 3]]
        for module, microbatch in sorted(set(map(tuple, forwards.tolist()))):
            name = plan.names[module]
            made = self._llm(microbatch) if name == LLM else self._encoder(name, microbatch)
            self._made[name, microbatch] = made
        self._samples.clear()

    def inputs(self, module: str, microbatch: int) -> tuple[Tensor, ...]:
        return self._made[module, microbatch][0]

    def context(self, module: str, microbatch: int) -> Any:
        return self._made[module, microbatch][1]

    # ------------------------------------------------------------------------ from samples

    def _sample(self, number: int) -> Sample:
        if number not in self._samples:
            self._samples[number] = self._read(number)
        return self._samples[number]

    def _items(self, name: str, microbatch: int) -> list[PlacedItem]:
        found = self.table.bins[name][microbatch]
        return [(sample, item, self._sample(sample).items[name][item]) for sample, item in found]

    def _encoder(self, name: str, microbatch: int) -> tuple[tuple[Tensor, ...], Any]:
        encoder = self.model.encoder(name)
        room = self.plan.modules[name].bin_tokens
        items, numerics = self._items(name, microbatch), self.numerics.get(name, NUMERICS)
        inputs, context = encoder_inputs(encoder, items, room, numerics=numerics, **self._how)
        rows = self._tp_groups[name].rows(room)
        return (self._place(inputs[rows]),), context.shard(rows).map(self._place)

    def _llm(self, microbatch: int) -> tuple[tuple[Tensor, ...], Any]:
        samples = [self._sample(number) for number in self.table.samples[microbatch]]
        pieces: list[RoutedRows] = []
        for encoder in self.model.encoders:
            pieces += self._pieces(encoder, microbatch, samples)
        ids, context = llm_inputs(
            self.model.llm,
            samples,
            [piece.targets for piece in pieces],
            self.scale,
            encoders=self.model.encoders,
            numerics=self.numerics.get(LLM, NUMERICS),
            **self._how,
        )
        tp_group = self._tp_groups[LLM]
        if tp_group.size > 1:
            context = context.shard(tp_group.rows(len(ids)), self._seam(pieces, len(ids)))
        return (self._place(ids),), context.map(self._place)

    def _seam(self, pieces: list[RoutedRows], length: int) -> SeamRoute | None:
        """Only the first stage looks at it."""
        return route_rows(pieces, self._tp_groups[LLM], length) if self._begins_llm else None

    def _pieces(self, encoder: Encoder, microbatch: int, samples: list[Sample]) -> list[RoutedRows]:
        """What feeds an LLM microbatch: the row that each of its rows replaces, and who holds it."""
        first_rows, rows = {}, 0
        for sample in samples:
            first_rows[sample.number] = rows
            rows += sample.length
        planned = self.plan.modules[encoder.name]
        name, found = encoder.name, []
        for piece in planned.microbatches_of(microbatch):
            items = self._items(name, piece)
            targets = bin_targets(encoder, items, planned.bin_tokens, first_rows, rows)
            found.append(RoutedRows(holders=holder_tp_ranks(self.plan, name, piece), targets=targets))
        return found
