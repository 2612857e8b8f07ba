"""Rotary positions: tables made on the host, and the rotation of query and key heads by them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Rotary = tuple[Tensor, Tensor]  # cosines and sines, (n, 1, head_dim / 2) each


def _frequencies(count: int, theta: float) -> Tensor:
    return theta ** (-torch.arange(count, dtype=torch.float64) / count)


def _table(angles: Tensor, dtype: torch.dtype) -> Rotary:
    return angles.cos()[:, None].to(dtype), angles.sin()[:, None].to(dtype)


def sequence_table(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype, sections: Sequence[int] = ()
) -> Rotary:
    """Of positions (n,); or, with sections, of positions (axes, n): section i turns by axis i."""
    frequencies = _frequencies(head_dim // 2, theta)
    if not sections:
        return _table(positions.double()[:, None] * frequencies, dtype)
    assert sum(sections) == head_dim // 2, f"sections {sections} for {head_dim // 2} frequencies"
    axes = torch.arange(len(sections)).repeat_interleave(torch.tensor(sections))
    return _table(positions.double()[axes].T * frequencies, dtype)


def grid_table(coordinates: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Of coordinates (n, 2): half of the angles turn by height, half by width."""
    frequencies = _frequencies(head_dim // 4, theta)
    angles = coordinates.double()[:, :, None] * frequencies
    return _table(angles.flatten(1), dtype)


def rotate(heads: Tensor, rotary: Rotary) -> Tensor:
    """(n, heads, dim), every pair (i, i + dim / 2) turned by its angle."""
    cosines, sines = rotary
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


def rotate_back(heads: Tensor, rotary: Rotary) -> Tensor:
    """By the same angles the other way, which is the gradient of turning."""
    cosines, sines = rotary
    return rotate(heads, (cosines, -sines))
