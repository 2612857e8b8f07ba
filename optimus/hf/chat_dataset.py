"""Loads samples of an indexed chat data set through the model's processor; implements `protocols.Dataset`.

Sizes and labels come from the index, so every rank knows those of all samples without a file. A sample that
cannot be loaded as it was indexed keeps its sizes, with zeros instead of pixels and without labels, so that
ranks need not tell each other. For that, every rank decodes all images of its samples, but runs the image
processor only on those that it encodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

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
from optimus.hf.image_patches import Grid, ImagePatches
from optimus.hf.own_layers import FAMILY_MAPS
from optimus.job.hf_config import read_hf_config
from optimus.job.model import Encoder, Model
from optimus.models.sample import IGNORE_INDEX, ItemKeys, Sample, SampleItem


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

    def sample(self, number: int, items: ItemKeys | None = None) -> Sample:
        """Loads a sample; without pixels and labels if it is not as it was indexed."""
        try:
            return self._load(number, items)
        except SkippedSample as skipped:
            return self._make_empty(number, items, f"line {self.file.lines[number]}: {skipped}")

    # ------------------------------------------------------------------------ as it is

    @cached_property
    def _model(self) -> Model:
        return read_hf_config(self.model_dir / "config.json")

    @cached_property
    def _counter(self) -> TokenCounter:
        return TokenCounter(self.model_dir)

    @cached_property
    def _patches(self) -> ImagePatches:
        (encoder,) = self._model.encoders
        return ImagePatches(encoder, self._counter.processor.image_processor)

    def _load(self, number: int, keys: ItemKeys | None) -> Sample:
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
            for offset, (grid, patches) in zip(
                offsets, self._decode(encoder, chat, tokens, keys), strict=True
            )
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
        self, encoder: Encoder, chat: ChatSample, tokens: ChatTokens, keys: ItemKeys | None
    ) -> list[tuple[Grid, Tensor]]:
        """Returns the grid of every image, and the patches of those in `keys`."""
        images = [decode_image(self.folder.find(item.path)) for item in chat.media]
        grids = [
            None if _is_needed(encoder, index, keys) else self._patches.find_grid(image.height, image.width)
            for index, image in enumerate(images)
        ]
        cut = iter(
            self._patches.cut([image for image, grid in zip(images, grids, strict=True) if grid is None])
        )
        none = torch.empty(0, encoder.patch_inputs)
        items = [next(cut) if grid is None else (grid, none) for grid in grids]
        merged = [prod(grid) // encoder.projector.merge for grid, _ in items]
        if merged != tokens.item_lengths:
            raise SkippedSample(SkipReason.CHANGED, "its images have other sizes")
        return items

    # ------------------------------------------------------------------------ broken

    def _make_empty(self, number: int, keys: ItemKeys | None, reason: str) -> Sample:
        """Returns a sample of the indexed lengths that trains nothing."""
        lengths, position, items = self.index.lengths[number], 0, dict[str, tuple[SampleItem, ...]]()
        for encoder in self._model.encoders:
            of_encoder = []
            for index, length in enumerate(lengths.items[encoder.name]):
                grid = make_patch_grid(encoder, length)
                rows = prod(grid) if _is_needed(encoder, index, keys) else 0
                zeros = torch.zeros(rows, encoder.patch_inputs)
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


def _is_needed(encoder: Encoder, index: int, keys: ItemKeys | None) -> bool:
    return keys is None or (encoder.name, index) in keys
