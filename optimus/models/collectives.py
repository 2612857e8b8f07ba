"""Collectives over rows, launched now and waited for later, each by what its backend does best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

# torch 2.13 has new names and warns about the old ones, which are all that earlier versions have.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AsyncCollective:
    """A collective on its way; what it reads and writes lives until it has landed."""

    __slots__ = ("_kept", "_take", "_work")

    def __init__(self, work: dist.Work | None, take: Callable[[], Any], *kept: Tensor) -> None:
        self._work, self._take, self._kept = work, take, kept

    def wait(self) -> Any:
        """What it brings, when it is there: on a GPU compute waits for that, the host does not."""
        if self._work is not None:
            self._work.wait()
        for tensor in self._kept:
            if tensor.is_cuda:  # it may have been launched from another stream
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self._take()

    def then(self, take: Callable[[Any], Any]) -> AsyncCollective:
        """The same flight, landing as what is made of what it brings."""
        before = self._take
        self._take = lambda: take(before())
        return self


def _options(kind: type) -> Any:
    """Of a collective that is not waited for at once; those of a sum are a sum's."""
    found = kind()
    found.asyncOp = True
    return found


def _named(name: str, older: str) -> str:
    return name if hasattr(dist.ProcessGroup, name) else older


# What `dist` calls when it has checked its arguments, which takes a host longer than the call itself: a
# divided layer makes ten of them for every microbatch.
_GATHER = _named("all_gather_single", "_allgather_base"), _options(c10d.AllgatherOptions)
_SUM = _named("reduce_scatter_single", "_reduce_scatter_base"), _options(c10d.ReduceScatterOptions)
_EXCHANGE = _named("all_to_all_single", "alltoall_base"), _options(c10d.AllToAllOptions)


def all_gather_rows(part: Tensor, group: dist.ProcessGroup) -> AsyncCollective:
    """Rows of all ranks in order."""
    part = part.detach().contiguous()
    return all_gather_rows_into(part.new_empty(part.shape[0] * group.size(), *part.shape[1:]), part, group)


def all_gather_rows_into(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> AsyncCollective:
    """Rows of all ranks in order, into `whole`."""
    name, options = _GATHER
    return AsyncCollective(getattr(group, name)(whole, part, options), lambda: whole, part, whole)


def reduce_scatter_rows(parts: Tensor, group: dist.ProcessGroup, *, by_all_to_all: bool) -> AsyncCollective:
    """The sum over ranks, of which each gets its own rows; or `by_all_to_all` of rows, each sums its own."""
    parts, size = parts.detach().contiguous(), group.size()
    if by_all_to_all:
        name, options = _EXCHANGE
        came = torch.empty_like(parts)
        work = getattr(group, name)(came, parts, [], [], options)
        return AsyncCollective(work, lambda: came.unflatten(0, (size, -1)).sum(0), parts, came)
    name, options = _SUM
    mine = parts.new_empty(parts.shape[0] // size, *parts.shape[1:])
    return AsyncCollective(getattr(group, name)(mine, parts, options), lambda: mine, parts, mine)


def all_to_all_rows(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> AsyncCollective:
    """So many rows to every rank, in order, and so many from every rank."""
    rows, (name, options) = rows.detach().contiguous(), _EXCHANGE
    came = rows.new_empty(sum(received), *rows.shape[1:])
    work = getattr(group, name)(came, rows, list(received), list(sent), options)
    return AsyncCollective(work, lambda: came, rows, came)
