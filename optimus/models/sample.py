"""Defines training samples with images and sounds, and the order of an item's tokens in an encoder.

Items come in raster order. In an encoder the rows of a merge group are adjacent, the groups of a window are
adjacent and so are the windows of a frame: windows are spans of attention, and the projector merges by
reshaping. The LLM reads merged tokens in raster order again: `TokenOrder.output_index` is the way back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from math import isqrt, prod
from types import MappingProxyType

import torch
from torch import Tensor

from optimus.errors import UserError
from optimus.job.model import Encoder

ItemKeys = frozenset[tuple[str, int]]  # encoders, and indices of a sample's items for them
IGNORE_INDEX = -100  # label of a row without loss; every negative label counts as this one


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleItem:
    """One image, video or sound of a sample.

    `grid` is (height, width) in patches, (frames, height, width) for a video, or (frames,) for a sound.
    """

    offset: int  # position of its first LLM token in the sample
    grid: tuple[int, ...]
    inputs: Tensor  # (tokens, patch_inputs), in raster order; no rows where they were not asked for
    seconds_per_frame: float = 1.0  # of a video: time between two frames of its grid
    frame_offsets: tuple[int, ...] = ()  # of a video with text between frames: `offset` of each

    @property
    def tokens(self) -> int:
        """Number of encoder tokens."""
        return prod(self.grid)

    def find_positions(self, tokens: Tensor) -> Tensor:
        """Returns the positions in the sample of LLM tokens that are numbered inside the item."""
        if not self.frame_offsets:
            return self.offset + tokens
        length = len(tokens) // len(self.frame_offsets)
        return torch.tensor(self.frame_offsets)[tokens // length] + tokens % length


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One sequence of a batch. Labels are already shifted: row i predicts `labels[i]`."""

    number: int  # among all samples of the run; dropout masks depend on it
    tokens: Tensor  # int64 (length,); ids at the positions of encoder tokens are ignored
    labels: Tensor  # int64 (length,), IGNORE_INDEX where there is no loss
    items: Mapping[str, tuple[SampleItem, ...]] = field(default_factory=lambda: MappingProxyType({}))
    documents: tuple[int, ...] = ()  # lengths of packed documents; empty: the sample is one document
    skipped: tuple[str, ...] = ()  # why documents of it have no labels: their files turned out broken

    @property
    def length(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def spans(self) -> tuple[int, ...]:
        """Lengths of the runs of rows that attend to themselves."""
        return self.documents or (self.length,)


def pack_samples(samples: Sequence[Sample], *, number: int, length: int) -> Sample:
    """Concatenates samples into one of `length`: attention keeps to each, positions restart.

    The rest is padding, a document without labels.
    """
    starts = [0, *accumulate(sample.length for sample in samples)]
    rest = length - starts.pop()
    if rest < 0:
        raise UserError(
            field="samples",
            value=length - rest,
            problem=f"are more tokens than the {length} of a sequence",
            hint="pack fewer, as optimus.data.packing does, or a longer sequence",
        )
    items: dict[str, tuple[SampleItem, ...]] = {}
    for sample, start in zip(samples, starts, strict=True):
        for encoder, of_sample in sample.items.items():
            moved = (
                replace(
                    item,
                    offset=start + item.offset,
                    frame_offsets=tuple(start + offset for offset in item.frame_offsets),
                )
                for item in of_sample
            )
            items[encoder] = (*items.get(encoder, ()), *moved)
    padding = torch.zeros(rest, dtype=torch.int64)
    return Sample(
        number=number,
        tokens=torch.cat([*(sample.tokens for sample in samples), padding]),
        labels=torch.cat([*(sample.labels for sample in samples), padding + IGNORE_INDEX]),
        items=items,
        documents=(*(span for sample in samples for span in sample.spans), *((rest,) if rest else ())),
        skipped=tuple(reason for sample in samples for reason in sample.skipped),
    )


PlacedItem = tuple[int, int, SampleItem]  # number of its sample, index of the item in it, the item


def list_placed_items(sample: Sample, encoder: str) -> list[PlacedItem]:
    """Returns the items of a sample that one encoder reads, as bins hold them."""
    return [(sample.number, index, item) for index, item in enumerate(sample.items.get(encoder, ()))]


# ---------------------------------------------------------------------------------------- token order


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenOrder:
    """Order of one item's rows in a bin, and their way back to LLM tokens."""

    raster_index: Tensor  # of every row
    coordinates: Tensor  # (rows, 2) height and width of every row; (rows, 1) for a sound
    spans: tuple[int, ...]  # one per frame
    window_spans: tuple[int, ...]
    output_index: Tensor  # of every merged row: its index among the LLM tokens of the item
    output_grid: tuple[int, ...]  # of the LLM tokens: (frames, height, width), or (tokens,)


def compute_encoder_token_order(encoder: Encoder, grid: tuple[int, ...]) -> TokenOrder:
    """Returns the order in which an encoder reads the tokens of an item with this grid."""
    merge, window_tokens = encoder.projector.merge, encoder.stack.attention.window_tokens
    if encoder.modality == "audio":
        return _sound_order(encoder.name, grid, merge, window_tokens)
    return _image_order(encoder.name, grid, merge, window_tokens)


@lru_cache(maxsize=4096)
def _sound_order(name: str, grid: tuple[int, ...], merge: int, window_tokens: int | None) -> TokenOrder:
    if len(grid) != 1 or grid[0] % merge:
        raise _grid_error(name, grid, f"is not (frames,) with a multiple of {merge} frames")
    (frames,) = grid
    window = window_tokens or frames
    order = torch.arange(frames)
    return TokenOrder(
        raster_index=order,
        coordinates=order[:, None],
        spans=(frames,),
        window_spans=tuple(min(window, frames - start) for start in range(0, frames, window)),
        output_index=torch.arange(frames // merge),
        output_grid=(frames // merge,),
    )


@lru_cache(maxsize=4096)
def _image_order(name: str, grid: tuple[int, ...], merge: int, window_tokens: int | None) -> TokenOrder:
    side = _square_side(f"model.{name}.projector.merge", merge, multiple=1)
    if len(grid) not in (2, 3) or grid[-2] % side or grid[-1] % side:
        raise _grid_error(name, grid, f"is not (height, width) in multiples of {side}")
    frames, height, width = grid if len(grid) == 3 else (1, *grid)
    window = max(height, width)
    if window_tokens:
        field_name = f"model.{name}.stack.attention.window_tokens"
        window = _square_side(field_name, window_tokens, multiple=side)
    window_spans, order = [], []
    for top in range(0, height, window):
        for left in range(0, width, window):
            rows, columns = min(window, height - top), min(window, width - left)
            window_spans.append(rows * columns)
            for group in range(rows * columns // merge):
                y, x = top + group // (columns // side) * side, left + group % (columns // side) * side
                order += [(y + down) * width + x + right for down in range(side) for right in range(side)]
    frame = torch.tensor(order)
    upper_left = frame[::merge]  # of every merge group
    merged = upper_left // width // side * (width // side) + upper_left % width // side
    starts = torch.arange(frames)[:, None]
    coordinates = torch.stack((frame // width, frame % width), 1)
    return TokenOrder(
        raster_index=(starts * height * width + frame).flatten(),
        coordinates=coordinates.repeat(frames, 1),
        spans=(height * width,) * frames,
        window_spans=tuple(window_spans) * frames,
        output_index=(starts * (height * width // merge) + merged).flatten(),
        output_grid=(frames, height // side, width // side),
    )


def _square_side(field_name: str, tokens: int, *, multiple: int) -> int:
    side = isqrt(tokens)
    if side * side == tokens and side % multiple == 0:
        return side
    nearest = max(1, round(tokens**0.5 / multiple)) * multiple
    raise UserError(
        field=field_name,
        value=tokens,
        problem=f"is not the square of a multiple of {multiple}, and the tokens of an image form a grid",
        hint=f"use {nearest * nearest}",
    )


def _grid_error(name: str, grid: tuple[int, ...], problem: str) -> UserError:
    return UserError(
        field=f"grid of an item of {name}",
        value=grid,
        problem=problem,
        hint="resize or pad the item before it is cut into tokens",
    )
