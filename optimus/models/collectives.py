"""Collectives over rows, launched now and waited for later, each by what its backend does best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

# torch 2.13 has new names and warns about the old ones, which are all that earlier versions have.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Flight:
    """A collective on its way; what it reads and writes lives until it has landed."""

    __slots__ = ("_kept", "_take", "_work")

    def __init__(self, work: dist.Work | None, take: Callable[[], Any], *kept: Tensor) -> None:
        self._work, self._take, self._kept = work, take, kept

    def land(self) -> Any:
        """What it brings, when it is there: on a GPU compute waits for that, the host does not."""
        if self._work is not None:
            self._work.wait()
        for tensor in self._kept:
            if tensor.is_cuda:  # it may have been launched from another stream
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self._take()

    def then(self, take: Callable[[Any], Any]) -> Flight:
        """The same flight, landing as what is made of what it brings."""
        before = self._take
        self._take = lambda: take(before())
        return self


def gather_rows(part: Tensor, group: dist.ProcessGroup) -> Flight:
    """Rows of all ranks in order."""
    part = part.detach().contiguous()
    count = part.shape[0] * dist.get_world_size(group)
    return fill_rows(part.new_empty(count, *part.shape[1:]), part, group)


def fill_rows(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Flight:
    """Rows of all ranks in order, into `whole`."""
    return Flight(all_gather_single(whole, part, group, async_op=True), lambda: whole, part, whole)


def sum_rows(parts: Tensor, group: dist.ProcessGroup) -> Flight:
    """The sum over ranks, of which each gets its own rows."""
    parts = parts.detach().contiguous()
    size = dist.get_world_size(group)
    if dist.get_backend(group) == "gloo":  # whose reduce-scatter takes twice as long as this
        came = torch.empty_like(parts)
        work = dist.all_to_all_single(came, parts, group=group, async_op=True)
        return Flight(work, lambda: came.unflatten(0, (size, -1)).sum(0), parts, came)
    mine = parts.new_empty(parts.shape[0] // size, *parts.shape[1:])
    work = reduce_scatter_single(mine, parts, dist.ReduceOp.SUM, group, async_op=True)
    return Flight(work, lambda: mine, parts, mine)


def exchange_rows(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Flight:
    """So many rows to every rank, in order, and so many from every rank."""
    rows = rows.detach().contiguous()
    came = rows.new_empty(sum(received), *rows.shape[1:])
    work = dist.all_to_all_single(came, rows, list(received), list(sent), group=group, async_op=True)
    return Flight(work, lambda: came, rows, came)
