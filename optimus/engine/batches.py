"""The data of one step as a rank needs it: inputs and contexts of its microbatches, made from samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from optimus.engine.batch_table import BatchTable
from optimus.job.model import Encoder, Model
from optimus.models.context import bin_targets, encoder_inputs, llm_inputs
from optimus.models.numerics import NUMERICS, Numerics
from optimus.models.sample import Placed, Sample
from optimus.program.plan import Plan, Verb
from optimus.program.ranks import LLM


class SampleBatch:
    """Everything is made on the host before the step begins, for the ops of one device class."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        device_class: int,
        table: BatchTable,
        read: Callable[[int], Sample],
        *,
        scale: float,
        seed: int,
        step: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        numerics: Mapping[str, Numerics] = MappingProxyType({}),
    ) -> None:
        self.numerics = numerics
        self.model, self.plan, self.table, self.scale, self.device = model, plan, table, scale, device
        self._how: dict[str, Any] = {"seed": seed, "step": step, "dtype": dtype}
        self._samples: dict[int, Sample] = {}
        self._read = read
        self._made: dict[tuple[str, int], tuple[tuple[Tensor, ...], Any]] = {}
        program = plan.programs[device_class]
        forwards = program.rows[program.verb == Verb.F][:, [0, 3]]
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

    def _items(self, name: str, microbatch: int) -> list[Placed]:
        found = self.table.bins[name][microbatch]
        return [(sample, item, self._sample(sample).items[name][item]) for sample, item in found]

    def _encoder(self, name: str, microbatch: int) -> tuple[tuple[Tensor, ...], Any]:
        encoder = self.model.encoder(name)
        room = self.plan.modules[name].bin_tokens
        items, numerics = self._items(name, microbatch), self.numerics.get(name, NUMERICS)
        inputs, context = encoder_inputs(encoder, items, room, numerics=numerics, **self._how)
        return (inputs.to(self.device, non_blocking=True),), context.to(self.device)

    def _llm(self, microbatch: int) -> tuple[tuple[Tensor, ...], Any]:
        samples = [self._sample(number) for number in self.table.samples[microbatch]]
        targets: list[Tensor] = []
        for encoder in self.model.encoders:
            targets += self._targets(encoder, microbatch, samples)
        ids, context = llm_inputs(
            self.model.llm,
            samples,
            targets,
            self.scale,
            encoders=self.model.encoders,
            numerics=self.numerics.get(LLM, NUMERICS),
            **self._how,
        )
        return (ids.to(self.device, non_blocking=True),), context.to(self.device)

    def _targets(self, encoder: Encoder, microbatch: int, samples: list[Sample]) -> list[Tensor]:
        """Of every piece that feeds an LLM microbatch: the row that each of its rows replaces."""
        first_rows, rows = {}, 0
        for sample in samples:
            first_rows[sample.number] = rows
            rows += sample.length
        planned = self.plan.modules[encoder.name]
        pieces = range(microbatch * planned.pieces, (microbatch + 1) * planned.pieces)
        return [
            bin_targets(encoder, self._items(encoder.name, piece), planned.bin_tokens, first_rows, rows)
            for piece in pieces
        ]
