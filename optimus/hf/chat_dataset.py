"""Loads samples of an indexed chat data set through the model's processor; implements `protocols.Dataset`.

Sizes and labels come from the index, so every rank knows those of all samples without a file. A sample that
cannot be loaded as it was indexed keeps its sizes, with zeros instead of pixels and without labels, so that
ranks need not tell each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isqrt, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimus.data.chat_format import ChatSample, parse_chat_sample
from optimus.data.chat_source import ChatSource
from optimus.data.jsonl_file import SkippedSample, SkipReason
from optimus.data.media_headers import MediaFolder, decode_image
from optimus.data.sample_index import SampleIndex
from optimus.data.token_counts import ChatTokens, TokenCounter
from optimus.engine.batch_plan import SampleSizes
from optimus.engine.synthetic_data import make_patch_grid
from optimus.errors import UserError, one_of
from optimus.hf.own_layers import FAMILY_MAPS
from optimus.job.hf_config import read_hf_config
from optimus.job.model import Encoder, Model
from optimus.models.sample import IGNORE_INDEX, Sample, SampleItem


@dataclass(frozen=True, kw_only=True)
class ChatDataset:
    """Samples of a data set that its index says can be used, by number."""

    file: ChatSource  # those samples alone
    index: SampleIndex
    folder: MediaFolder
    model_dir: Path

    @classmethod
    def open(
        cls, file: ChatSource, index: SampleIndex, *, folder: MediaFolder, model_dir: Path
    ) -> ChatDataset:
        """Opens the data set of an index; refuses a family whose inputs no test compares."""
        model = read_hf_config(model_dir / "config.json")
        if model.family not in FAMILY_MAPS:
            raise UserError(
                field="model.family",
                value=model.family,
                problem="has data that can be indexed, but no test compares its inputs with transformers",
                hint=f"compared are {one_of(sorted(FAMILY_MAPS))}",
            )
        return cls(file=file.select(index.numbers), index=index, folder=folder, model_dir=model_dir)

    def __len__(self) -> int:
        return len(self.index)

    def sizes(self, number: int) -> SampleSizes:
        """Returns the encoder tokens of a sample's items, from the index."""
        lengths = self.index.lengths[number].items
        items = {
            encoder.name: tuple(tokens * encoder.projector.merge for tokens in lengths[encoder.name])
            for encoder in self._model.encoders
        }
        return SampleSizes(number=number, items=items)

    def labels(self, number: int) -> int:
        """Returns how many tokens of the assistant a sample has, from the index."""
        return self.index.lengths.labels[number]

    def sample(self, number: int) -> Sample:
        """Loads a sample; without pixels and labels if it is not as it was indexed."""
        try:
            return self._load(number)
        except SkippedSample as skipped:
            return self._make_empty(number, f"line {self.file.lines[number]}: {skipped}")

    # ------------------------------------------------------------------------ as it is

    @cached_property
    def _model(self) -> Model:
        return read_hf_config(self.model_dir / "config.json")

    @cached_property
    def _counter(self) -> TokenCounter:
        return TokenCounter(self.model_dir)

    def _load(self, number: int) -> Sample:
        chat = parse_chat_sample(self.file.read(number))
        tokens = self._counter.tokenize(chat, self.folder)
        lengths = self.index.lengths[number]
        (encoder,) = self._model.encoders
        texts = sum(token not in self._counter.item_ids for token in tokens.ids)
        if (texts, tuple(tokens.item_lengths)) != (lengths.text, lengths.items[encoder.name]):
            raise SkippedSample(SkipReason.CHANGED, "it has other lengths")
        if tokens.labels != lengths.labels:
            raise SkippedSample(SkipReason.CHANGED, "it has other answers")
        ids, answers, offsets = self._expand(tokens)
        labels = torch.where(answers, ids, IGNORE_INDEX)
        items = tuple(
            SampleItem(offset=offset, grid=grid, inputs=patches)
            for offset, (grid, patches) in zip(offsets, self._decode(encoder, chat, tokens), strict=True)
        )
        return Sample(
            number=number,
            tokens=ids,
            labels=torch.cat((labels[1:], torch.tensor([IGNORE_INDEX]))),
            items={encoder.name: items},
        )

    def _expand(self, tokens: ChatTokens) -> tuple[Tensor, Tensor, list[int]]:
        """Returns all ids, which of them are answers, and the position of every item."""
        counts = torch.ones(len(tokens.ids), dtype=torch.int64)
        places = [place for place, token in enumerate(tokens.ids) if token in self._counter.item_ids]
        counts[places] = torch.tensor(tokens.item_lengths, dtype=torch.int64)
        begins = counts.cumsum(0) - counts
        ids = torch.tensor(tokens.ids).repeat_interleave(counts)
        answers = torch.tensor(tokens.is_answer).repeat_interleave(counts)
        return ids, answers, begins[places].tolist()

    def _decode(
        self, encoder: Encoder, chat: ChatSample, tokens: ChatTokens
    ) -> list[tuple[tuple[int, ...], Tensor]]:
        """Returns grid and patches of every image."""
        if not chat.media:
            return []
        images = [decode_image(self.folder.find(item.path)) for item in chat.media]
        try:
            output = self._counter.processor.image_processor(images=images, return_tensors="pt")
        except Exception as error:  # of the processor, on hostile pixels
            raise SkippedSample(SkipReason.PROCESSOR, f"{type(error).__name__}: {error}") from None
        items = list(split_patches(encoder, output))
        merged = [prod(grid) // encoder.projector.merge for grid, _ in items]
        if merged != tokens.item_lengths:
            raise SkippedSample(SkipReason.CHANGED, "its images have other sizes")
        return items

    # ------------------------------------------------------------------------ broken

    def _make_empty(self, number: int, reason: str) -> Sample:
        """Returns a sample of the indexed lengths that trains nothing."""
        lengths, position, items = self.index.lengths[number], 0, dict[str, tuple[SampleItem, ...]]()
        for encoder in self._model.encoders:
            of_encoder = []
            for length in lengths.items[encoder.name]:
                grid = make_patch_grid(encoder, length)
                zeros = torch.zeros(prod(grid), encoder.patch_inputs)
                of_encoder.append(SampleItem(offset=position, grid=grid, inputs=zeros))
                position += length
            items[encoder.name] = tuple(of_encoder)
        return Sample(
            number=number,
            tokens=torch.zeros(lengths.tokens, dtype=torch.int64),
            labels=torch.full((lengths.tokens,), IGNORE_INDEX),
            items=items,
            skipped=(reason,),
        )


def split_patches(encoder: Encoder, output: Any) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yields grid and patches, in raster order, of every image that an image processor has prepared."""
    pixels: Tensor = output["pixel_values"]
    if "image_grid_thw" not in output:  # (images, channels, rows, columns)
        side = isqrt(encoder.patch_inputs // pixels.shape[1])
        for image in pixels:
            patches = image.unflatten(1, (-1, side)).unflatten(3, (-1, side)).permute(1, 3, 0, 2, 4)
            yield tuple(patches.shape[:2]), patches.flatten(2).flatten(0, 1)
        return
    side, begin = isqrt(encoder.projector.merge), 0
    for frames, height, width in output["image_grid_thw"].tolist():  # rows of a merge group are adjacent
        assert frames == 1, "an image has one frame"
        rows = pixels[begin : begin + height * width]
        groups = rows.reshape(height // side, width // side, side, side, -1)
        yield (height, width), groups.transpose(1, 2).reshape(height * width, -1)
        begin += height * width
