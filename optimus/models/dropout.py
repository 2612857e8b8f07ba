"""Dropout whose masks are a function of what is dropped, never of where or in which order it is computed.

Rows carry a key, made on the host from (seed, step, sample, item, row); a key, the site in the model and the
column are hashed to the bits of an element. Integers wrap alike on every device, so masks are equal bitwise.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # splitmix64: its step and its two factors, as signed integers
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def hashed(*words: object) -> int:
    """64 signed bits that depend on all words."""
    digest = blake2b("\0".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """A logical shift to the right."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def mixed(numbers: Tensor) -> Tensor:
    """The finaliser of splitmix64: a bijection of int64 that looks random."""
    numbers = (numbers ^ _shifted(numbers, 30)) * _FIRST
    numbers = (numbers ^ _shifted(numbers, 27)) * _SECOND
    return numbers ^ _shifted(numbers, 31)


def row_keys(rows: Tensor, *, seed: int, step: int, sample: int, item: int = -1) -> Tensor:
    """Keys of rows of a sample (item -1), or of an encoder's tokens of one of its items."""
    return mixed(rows * _GOLDEN + hashed("rows", seed, step, sample, item))


class Dropout:
    """Drops a share of the elements of rows at one place of a model, and scales up the others.

    An element's bits are the upper ones of a product of its row's key and a hash of site and column: few
    operations, since a host issues them for every join of every layer.
    """

    def __init__(self, site: str, share: float) -> None:
        self._site, self._share = hashed("site", site), share
        self._columns: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, rows: Tensor, keys: Tensor | None) -> Tensor:
        """As they are without keys. It is linear, so that its gradient is what it makes of a gradient."""
        if keys is None:
            return rows
        if rows.requires_grad and torch.is_grad_enabled():
            graphed: Tensor = _Dropped.apply(rows, keys, self)
            return graphed
        mask = self.kept(keys, rows.shape[-1])
        found: Tensor = torch.ops.aten.native_dropout_backward.default(rows, mask, 1.0 / (1.0 - self._share))
        return found

    def kept(self, keys: Tensor, width: int) -> Tensor:
        """Which elements of rows stay."""
        columns = self._columns.get((width, keys.device))
        if columns is None:
            numbers = torch.arange(width, device=keys.device) * _GOLDEN + self._site
            # Odd: then a product with it is uniform where keys are.
            columns = self._columns[width, keys.device] = mixed(numbers) | 1
        return keys.unsqueeze(1) * columns >= int((self._share - 0.5) * 2.0**64)


class _Dropped(torch.autograd.Function):
    """For those who want a graph: it keeps the keys, where torch would keep rows and mask."""

    @staticmethod
    def forward(context: Any, rows: Tensor, keys: Tensor, dropout: Dropout) -> Tensor:
        context.save_for_backward(keys)
        context.dropout = dropout
        return dropout(rows, keys)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (keys,) = context.saved_tensors
        return context.dropout(gradient, keys), None, None
