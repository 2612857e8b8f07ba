"""How tensor parallelism divides a parameter over ranks, and how its parts make it up again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ParamSplit:
    """Blocks along one dimension, of which every rank gets equally many units.

    Where units do not go round, the last ranks hold zeros: heads and columns of zeros change no result, and
    get no gradient.
    """

    dim: int
    blocks: tuple[tuple[int, int], ...]  # of each: how many units, and how long one is

    def length(self, size: int) -> int:
        """Of a part, along the dimension."""
        return sum(_share(units, size) * unit for units, unit in self.blocks)

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """What a rank holds."""
        found = []
        lengths = [units * unit for units, unit in self.blocks]
        for block, (units, unit) in zip(whole.split(lengths, self.dim), self.blocks, strict=True):
            share = _share(units, size)
            begin, end = (min(place * share, units) for place in (rank, rank + 1))
            found.append(block.narrow(self.dim, begin * unit, (end - begin) * unit))
            shape = list(whole.shape)
            shape[self.dim] = (share - (end - begin)) * unit
            found.append(whole.new_zeros(shape))
        return torch.cat(found, self.dim)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The parameter from the parts of all ranks, in order."""
        lengths = [_share(units, len(parts)) * unit for units, unit in self.blocks]
        cut = [part.split(lengths, self.dim) for part in parts]
        blocks = [
            torch.cat(of_all, self.dim).narrow(self.dim, 0, units * unit)
            for of_all, (units, unit) in zip(zip(*cut, strict=True), self.blocks, strict=True)
        ]
        return torch.cat(blocks, self.dim)


def _share(units: int, size: int) -> int:
    return -(-units // size)
