"""How the tokens of an image or sound stand in a bin: what is merged or shares a window stands together.

Inputs come in raster order. Merge groups are consecutive rows, windows consecutive groups, frames of a video
consecutive windows, so that windows are spans and the projector merges by reshaping. The LLM wants merged
tokens in raster order again: `output_tokens` says where each goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt, prod

import torch
from torch import Tensor

from optimus.errors import UserError
from optimus.job.model import Encoder


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrangement:
    """The rows of one item in a bin."""

    order: Tensor  # raster index of every row
    coordinates: Tensor  # (rows, 2) height and width of every row; (rows, 1) for a sound
    spans: tuple[int, ...]  # one per frame
    window_spans: tuple[int, ...]
    output_tokens: Tensor  # of every merged row: its place among the LLM's tokens of this item
    output_grid: tuple[int, ...]  # of the LLM's tokens: (frames, height, width), or (tokens,)


def arrange(encoder: Encoder, grid: tuple[int, ...]) -> Arrangement:
    """Rows of an item with this grid of tokens."""
    attention = encoder.stack.attention
    if encoder.modality == "audio":
        return _arrange_sound(encoder.name, grid, encoder.projector.merge, attention.window_tokens)
    return _arrange_image(encoder.name, grid, encoder.projector.merge, attention.window_tokens)


def output_rows(encoder: Encoder, grid: tuple[int, ...]) -> int:
    """LLM tokens of an item with this grid."""
    return prod(grid) // encoder.projector.merge


@lru_cache(maxsize=4096)
def _arrange_sound(name: str, grid: tuple[int, ...], merge: int, window_tokens: int | None) -> Arrangement:
    if len(grid) != 1 or grid[0] % merge:
        raise _grid_error(name, grid, f"is not (frames,) with a multiple of {merge} frames")
    (frames,) = grid
    window = window_tokens or frames
    order = torch.arange(frames)
    return Arrangement(
        order=order,
        coordinates=order[:, None],
        spans=(frames,),
        window_spans=tuple(min(window, frames - start) for start in range(0, frames, window)),
        output_tokens=torch.arange(frames // merge),
        output_grid=(frames // merge,),
    )


@lru_cache(maxsize=4096)
def _arrange_image(name: str, grid: tuple[int, ...], merge: int, window_tokens: int | None) -> Arrangement:
    side = _side(f"model.{name}.projector.merge", merge, 1)
    if len(grid) not in (2, 3) or grid[-2] % side or grid[-1] % side:
        raise _grid_error(name, grid, f"is not (height, width) in multiples of {side}")
    frames, height, width = grid if len(grid) == 3 else (1, *grid)
    window = max(height, width)
    if window_tokens:
        window = _side(f"model.{name}.stack.attention.window_tokens", window_tokens, side)
    spans, order = [], []
    for top in range(0, height, window):
        for left in range(0, width, window):
            rows, columns = min(window, height - top), min(window, width - left)
            spans.append(rows * columns)
            for group in range(rows * columns // merge):
                y, x = top + group // (columns // side) * side, left + group % (columns // side) * side
                order += [(y + down) * width + x + right for down in range(side) for right in range(side)]
    one = torch.tensor(order)
    first = one[::merge]  # upper left token of every group
    merged = first // width // side * (width // side) + first % width // side
    starts = torch.arange(frames)[:, None]
    coordinates = torch.stack((one // width, one % width), 1)
    return Arrangement(
        order=(starts * height * width + one).flatten(),
        coordinates=coordinates.repeat(frames, 1),
        spans=(height * width,) * frames,
        window_spans=tuple(spans) * frames,
        output_tokens=(starts * (height * width // merge) + merged).flatten(),
        output_grid=(frames, height // side, width // side),
    )


def _side(field: str, tokens: int, multiple: int) -> int:
    side = isqrt(tokens)
    if side * side == tokens and side % multiple == 0:
        return side
    near = max(1, round(tokens**0.5 / multiple)) * multiple
    raise UserError(
        field=field,
        value=tokens,
        problem=f"is not a square of a multiple of {multiple}, and tokens of an image stand in a grid",
        hint=f"use {near * near}",
    )


def _grid_error(name: str, grid: tuple[int, ...], problem: str) -> UserError:
    return UserError(
        field=f"grid of an item of {name}",
        value=grid,
        problem=problem,
        hint="resize or pad the item before it is cut into tokens",
    )
