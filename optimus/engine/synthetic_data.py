"""Makes synthetic samples with the lengths of a workload: a number is the same sample on every rank."""

from __future__ import annotations

from collections.abc import Iterator
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
from optimus.models.microbatch_inputs import fits_positions, position_grid_sides
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
            name: tuple(
                prod(grid) for count in sequence.lengths(name) for grid in make_item_grids(encoder, count)
            )
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
            labels[at : at + count] = IGNORE_INDEX
            for grid in make_item_grids(self._encoders[name], count):
                made[name].append(_item(self._encoders[name], grid, at, generator))
                at += prod(grid) // self._encoders[name].projector.merge
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


def _item(encoder: Encoder, grid: tuple[int, ...], offset: int, generator: torch.Generator) -> SampleItem:
    inputs: Tensor = torch.randn(prod(grid), encoder.patch_inputs, generator=generator)
    return SampleItem(offset=offset, grid=grid, inputs=inputs)


def make_item_grids(encoder: Encoder, llm_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Returns the grid of an item of so many LLM tokens, or of its tiles if it exceeds learned positions."""
    grid = make_patch_grid(encoder, llm_tokens)
    if fits_positions(encoder, grid):
        return (grid,)
    return tuple(_tiles(encoder, llm_tokens)) or (grid,)


def _tiles(encoder: Encoder, llm_tokens: int) -> Iterator[tuple[int, ...]]:
    """Yields grids within an encoder's learned positions, largest first; none if they hold no LLM token."""
    tall, wide = _merged_grid(encoder)
    *sides, width = position_grid_sides(encoder)
    most_rows, most_columns = prod(sides) // tall, width // wide
    while llm_tokens and most_rows and most_columns:
        columns = min(llm_tokens, most_columns)
        rows = min(llm_tokens // columns, most_rows)
        yield (rows * tall, columns * wide) if sides else (columns * wide,)
        llm_tokens -= rows * columns


def make_patch_grid(encoder: Encoder, llm_tokens: int) -> tuple[int, ...]:
    """Returns a grid of encoder tokens, as square as possible, that becomes so many LLM tokens."""
    tall, wide = _merged_grid(encoder)
    if encoder.modality == "audio":
        return (llm_tokens * wide,)
    rows = _largest_divisor_up_to_root(llm_tokens)
    return rows * tall, llm_tokens // rows * wide


def _merged_grid(encoder: Encoder) -> tuple[int, int]:
    """Returns the rows and columns of encoder tokens that become one LLM token."""
    merge = encoder.projector.merge
    tall = 1 if encoder.modality == "audio" else _largest_divisor_up_to_root(merge)
    return tall, merge // tall


def _largest_divisor_up_to_root(number: int) -> int:
    return next(side for side in range(isqrt(number), 0, -1) if number % side == 0)
