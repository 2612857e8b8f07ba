"""Dropout whose masks are a function of what is dropped, never of where or in which order it is computed.

Rows carry a key, made on the host from (seed, step, sample, item, row); a key, the site in the model and the
column are hashed to the bits of an element. Integers wrap alike on every device, so masks are equal bitwise.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

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


def kept(keys: Tensor, width: int, site: int, share: float) -> Tensor:
    """Which elements of rows stay. `share` is that of dropped ones, `site` a hash of a place in the model."""
    bits = (mixed(keys ^ site)[:, None] + _columns(width, keys.device)).mul_(_FIRST)
    bits.bitwise_xor_(bits >> 32).mul_(_SECOND)  # its upper bits depend on all of row and column
    return bits >= int((share - 0.5) * 2.0**64)


@lru_cache(maxsize=64)
def _columns(width: int, device: torch.device) -> Tensor:
    return mixed(torch.arange(width, device=device) * _GOLDEN)


def dropout(rows: Tensor, keys: Tensor | None, site: int, share: float) -> Tensor:
    """Rows with some elements dropped and the others scaled up; as they are without keys."""
    if keys is None:
        return rows
    mask = kept(keys, int(rows.shape[-1]), site, share)
    return torch.where(mask, rows, 0.0) * (1.0 / (1.0 - share))
