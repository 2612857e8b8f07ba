"""Made-up samples with the lengths of a workload: the same sample for the same number, on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isqrt, prod

import torch
from torch import Tensor

from optimus.engine.batch_plan import SampleSizes
from optimus.job.job import Job
from optimus.job.model import Encoder
from optimus.job.workload import PackedSequence
from optimus.models.dropout import hash64
from optimus.models.sample import IGNORE_INDEX, Item, Sample


@dataclass(frozen=True, kw_only=True)
class SyntheticDataset:
    """Samples drawn from a job's workload; sample n of the run has always the same contents."""

    job: Job
    seed: int = 0

    @cached_property
    def _encoders(self) -> dict[str, Encoder]:
        return {encoder.name: encoder for encoder in self.job.model.encoders}

    def _sequence(self, number: int) -> PackedSequence:
        sequences = self.job.workload.sequences
        return sequences[hash64("sequence", self.seed, number) % len(sequences)]

    def sizes(self, number: int) -> SampleSizes:
        """What a batch table needs, without making the sample."""
        sequence = self._sequence(number)
        items = {
            name: tuple(prod(patch_grid(encoder, tokens)) for tokens in sequence.lengths(name))
            for name, encoder in self._encoders.items()
        }
        return SampleSizes(number=number, items=items)

    def labels(self, number: int) -> int:
        """Labels that are asked for in a sample: its text tokens."""
        return self._room(self._sequence(number))

    def _room(self, sequence: PackedSequence) -> int:
        """Text that fills a sequence up to its packed length."""
        taken = sum(sum(sequence.lengths(name)) for name in self._encoders)
        return self.job.workload.sequence_tokens - taken

    def sample(self, number: int) -> Sample:
        """Text in equal parts around the items, of all encoders in turn."""
        sequence, length = self._sequence(number), self.job.workload.sequence_tokens
        generator = torch.Generator().manual_seed(hash64("sample", self.seed, number) & (2**63 - 1))
        vocabulary = self.job.model.llm.vocab
        tokens = torch.randint(vocabulary, (length,), generator=generator)
        labels = torch.randint(vocabulary, (length,), generator=generator)
        order = [(name, count) for name in self._encoders for count in sequence.lengths(name)]
        text, at, items = self._room(sequence), 0, {name: list[Item]() for name in self._encoders}
        for place, (name, count) in enumerate(order):
            at += text * (place + 1) // (len(order) + 1) - text * place // (len(order) + 1)
            items[name].append(self._item(self._encoders[name], count, at, generator))
            labels[at : at + count] = IGNORE_INDEX
            at += count
        return Sample(
            number=number,
            tokens=tokens,
            labels=labels,
            items={name: tuple(found) for name, found in items.items()},
        )

    def _item(self, encoder: Encoder, count: int, offset: int, generator: torch.Generator) -> Item:
        grid = patch_grid(encoder, count)
        inputs: Tensor = torch.randn(prod(grid), encoder.patch_inputs, generator=generator)
        return Item(offset=offset, grid=grid, inputs=inputs)


def patch_grid(encoder: Encoder, llm_tokens: int) -> tuple[int, ...]:
    """A grid of encoder tokens that become so many LLM tokens, as square as it can be."""
    merge = encoder.projector.merge
    if encoder.modality == "audio":
        return (llm_tokens * merge,)
    height = next(side for side in range(isqrt(llm_tokens), 0, -1) if llm_tokens % side == 0)
    tall = next(side for side in range(isqrt(merge), 0, -1) if merge % side == 0)
    return (height * tall, llm_tokens // height * (merge // tall))
