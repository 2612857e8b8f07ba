"""Drops elements by masks that depend on the sample and the position in the model, not on the rank.

Rows carry a key, computed on the host from (seed, step, sample, item, row). Key, site in the model and column
are hashed to the bits of an element. Integers wrap alike on every device, so that masks are bitwise equal.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

# Increment and multipliers of splitmix64, as signed integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def hash64(*words: object) -> int:
    """Returns 64 signed bits that depend on all words, equal in every process."""
    digest = blake2b("\0".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shift_right(numbers: Tensor, bits: int) -> Tensor:
    """Shifts logically: zeros come in."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def splitmix64(numbers: Tensor) -> Tensor:
    """Applies the finalizer of splitmix64, a bijection of int64 whose values look random."""
    numbers = (numbers ^ _shift_right(numbers, 30)) * _FIRST
    numbers = (numbers ^ _shift_right(numbers, 27)) * _SECOND
    return numbers ^ _shift_right(numbers, 31)


def make_dropout_keys(rows: Tensor, *, seed: int, step: int, sample: int, item: int = -1) -> Tensor:
    """Returns the keys of rows of a sample (item -1), or of encoder tokens of one of its items."""
    return splitmix64(rows * _GOLDEN + hash64("rows", seed, step, sample, item))


class Dropout:
    """Drops a share of the elements of rows at one site of a model, and scales up the others.

    The bits of an element are the upper ones of the product of its row's key and a hash of site and column:
    few kernels, since a host launches them twice in every layer.
    """

    def __init__(self, site: str, share: float) -> None:
        self._site, self._share = hash64("site", site), share
        self._columns: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, rows: Tensor, keys: Tensor | None) -> Tensor:
        """Returns the rows after dropout; unchanged without keys. It is linear: its backward is itself."""
        if keys is None:
            return rows
        if rows.requires_grad and torch.is_grad_enabled():
            with_graph: Tensor = _DropoutFunction.apply(rows, keys, self)
            return with_graph
        mask, scale = self.keep_mask(keys, rows.shape[-1]), 1.0 / (1.0 - self._share)
        dropped: Tensor = torch.ops.aten.native_dropout_backward.default(rows, mask, scale)
        return dropped

    def keep_mask(self, keys: Tensor, width: int) -> Tensor:
        """Returns which elements of rows stay."""
        columns = self._columns.get((width, keys.device))
        if columns is None:
            numbers = torch.arange(width, device=keys.device) * _GOLDEN + self._site
            # Odd factors: the product of one with uniform keys is uniform.
            columns = self._columns[width, keys.device] = splitmix64(numbers) | 1
        return keys.unsqueeze(1) * columns >= int((self._share - 0.5) * 2.0**64)


class _DropoutFunction(torch.autograd.Function):
    """Dropout inside an autograd graph; it saves the keys, where torch saves rows and mask."""

    @staticmethod
    def forward(context: Any, rows: Tensor, keys: Tensor, dropout: Dropout) -> Tensor:
        context.save_for_backward(keys)
        context.dropout = dropout
        return dropout(rows, keys)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (keys,) = context.saved_tensors
        return context.dropout(gradient, keys), None, None
