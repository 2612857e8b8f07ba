"""A tensor-parallel group of which only one rank is there: its compute is real, and nothing travels.

Rows of others are this rank's own once more, so that numbers stay ordinary; they mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from optimus.models.collectives import AsyncCollective, TpGroup


class LocalTpGroup(TpGroup):
    """A share of layers whose exchanges are over at once."""

    def all_gather(self, part: Tensor) -> AsyncCollective:
        rows = part.detach()
        return AsyncCollective(None, lambda: rows.repeat(self.size, *(1,) * (rows.dim() - 1)))

    def all_gather_into(self, whole: Tensor, part: Tensor) -> AsyncCollective:
        own = part.shape[0]
        for place in range(self.size):
            whole[place * own : (place + 1) * own] = part
        return AsyncCollective(None, lambda: whole)

    def reduce_scatter(self, parts: Tensor) -> AsyncCollective:
        rows = parts.detach()[self.rows(len(parts))]
        return AsyncCollective(None, rows.clone)

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> AsyncCollective:
        came = rows.new_zeros(sum(received), *rows.shape[1:])
        return AsyncCollective(None, lambda: came)
