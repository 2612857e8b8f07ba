"""Makes synthetic samples with the lengths of a workload: a number is the same sample on every rank."""

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
from optimus.models.sample import IGNORE_INDEX, ItemKeys, Sample, SampleItem


@dataclass(frozen=True, kw_only=True)
class SyntheticDataset:
    """Random samples of a job's workload; implements `protocols.Dataset`."""

    job: Job
    seed: int = 0

    def sizes(self, number: int) -> SampleSizes:
        """Returns the sizes of a sample's items, without making the sample."""
        sequence = self._sequence(number)
        items = {
            name: tuple(prod(make_patch_grid(encoder, tokens)) for tokens in sequence.lengths(name))
            for name, encoder in self._encoders.items()
        }
        return SampleSizes(number=number, items=items)

    def labels(self, number: int) -> int:
        """Returns the number of labels of a sample: its text tokens."""
        return self._text_tokens(self._sequence(number))

    def sample(self, number: int, items: ItemKeys | None = None) -> Sample:
        """Makes a sample: text in equal parts around the items, encoder after encoder."""
        sequence, length = self._sequence(number), self.job.workload.sequence_tokens
        generator = torch.Generator().manual_seed(hash64("sample", self.seed, number) & (2**63 - 1))
        vocabulary = self.job.model.llm.vocab
        tokens = torch.randint(vocabulary, (length,), generator=generator)
        labels = torch.randint(vocabulary, (length,), generator=generator)
        order = [(name, count) for name in self._encoders for count in sequence.lengths(name)]
        text, at, made = (
            self._text_tokens(sequence),
            0,
            {name: list[SampleItem]() for name in self._encoders},
        )
        for place, (name, count) in enumerate(order):
            at += text * (place + 1) // (len(order) + 1) - text * place // (len(order) + 1)
            made[name].append(_item(self._encoders[name], count, at, generator))
            labels[at : at + count] = IGNORE_INDEX
            at += count
        by_encoder = {name: tuple(of_encoder) for name, of_encoder in made.items()}
        return Sample(number=number, tokens=tokens, labels=labels, items=by_encoder)

    @cached_property
    def _encoders(self) -> dict[str, Encoder]:
        return {encoder.name: encoder for encoder in self.job.model.encoders}

    def _sequence(self, number: int) -> PackedSequence:
        sequences = self.job.workload.sequences
        return sequences[hash64("sequence", self.seed, number) % len(sequences)]

    def _text_tokens(self, sequence: PackedSequence) -> int:
        """Returns the text tokens that fill a sequence up to its packed length."""
        encoder_tokens = sum(sum(sequence.lengths(name)) for name in self._encoders)
        return self.job.workload.sequence_tokens - encoder_tokens


def _item(encoder: Encoder, count: int, offset: int, generator: torch.Generator) -> SampleItem:
    grid = make_patch_grid(encoder, count)
    inputs: Tensor = torch.randn(prod(grid), encoder.patch_inputs, generator=generator)
    return SampleItem(offset=offset, grid=grid, inputs=inputs)


def make_patch_grid(encoder: Encoder, llm_tokens: int) -> tuple[int, ...]:
    """Returns a grid of encoder tokens, as square as possible, that becomes so many LLM tokens."""
    merge = encoder.projector.merge
    if encoder.modality == "audio":
        return (llm_tokens * merge,)
    height = next(side for side in range(isqrt(llm_tokens), 0, -1) if llm_tokens % side == 0)
    tall = next(side for side in range(isqrt(merge), 0, -1) if merge % side == 0)
    return (height * tall, llm_tokens // height * (merge // tall))
