"""Runs asynchronous collectives over rows of a group's ranks, and shards parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

# torch 2.13 renames these functions and warns about the old names, the only ones that earlier versions have.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def has_streams(device: torch.device) -> bool:
    """Returns whether work on a device is queued on streams while the host goes on."""
    return bool(device.type == "cuda")


class AsyncCollective:
    """A collective in flight; it keeps the tensors that it reads and writes alive until it is waited for."""

    __slots__ = ("_result", "_tensors", "_work")

    def __init__(self, work: dist.Work | None, result: Callable[[], Any], *tensors: Tensor) -> None:
        self._work, self._result, self._tensors = work, result, tensors

    def wait(self) -> Any:
        """Returns the result; on a GPU the compute stream waits for it, the host does not."""
        if self._work is not None:
            self._work.wait()
        for tensor in self._tensors:
            if has_streams(tensor.device):  # the collective may have been launched from another stream
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self._result()

    def then(self, function: Callable[[Any], Any]) -> AsyncCollective:
        """Applies `function` to the result when it is waited for."""
        result = self._result
        self._result = lambda: function(result())
        return self


def _async_options(kind: type) -> Any:
    options = kind()  # of a reduction: a sum
    options.asyncOp = True
    return options


def _method_name(name: str, older: str) -> str:
    return name if hasattr(dist.ProcessGroup, name) else older


# The methods that functions of `dist` call after checking their arguments. The checks take a host longer than
# the call, and a tensor-parallel layer launches ten collectives for every microbatch.
_ALL_GATHER = _method_name("all_gather_single", "_allgather_base"), _async_options(c10d.AllgatherOptions)
_REDUCE_SCATTER = (
    _method_name("reduce_scatter_single", "_reduce_scatter_base"),
    _async_options(c10d.ReduceScatterOptions),
)
_ALL_TO_ALL = _method_name("all_to_all_single", "alltoall_base"), _async_options(c10d.AllToAllOptions)


@dataclass(frozen=True, kw_only=True, eq=False)
class TpGroup:
    """A rank's position in a tensor- or context-parallel group, or among replicas, and their collectives.

    With sequence parallelism, each rank of a tensor-parallel group holds a run of the rows between segments.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None  # needed to run, not to build

    def rows(self, count: int) -> slice:
        """Returns this rank's rows of a sequence of `count`."""
        assert count % self.size == 0, f"{count} rows for {self.size} ranks"
        length = count // self.size
        return slice(self.rank * length, (self.rank + 1) * length)

    def all_gather(self, rows: Tensor) -> AsyncCollective:
        """Gathers the rows of all ranks in order."""
        rows = rows.detach().contiguous()
        return self.all_gather_into(rows.new_empty(rows.shape[0] * self.size, *rows.shape[1:]), rows)

    def all_gather_into(self, output: Tensor, rows: Tensor) -> AsyncCollective:
        """Gathers the rows of all ranks into a tensor that exists."""
        name, options = _ALL_GATHER
        work = getattr(self._process_group, name)(output, rows, options)
        return AsyncCollective(work, lambda: output, rows, output)

    def reduce_scatter(self, rows: Tensor) -> AsyncCollective:
        """Sums over the ranks, of which each gets its own rows."""
        rows = rows.detach().contiguous()
        if self._uses_all_to_all:
            name, options = _ALL_TO_ALL
            received = torch.empty_like(rows)
            work = getattr(self._process_group, name)(received, rows, [], [], options)
            return AsyncCollective(
                work, lambda: received.unflatten(0, (self.size, -1)).sum(0), rows, received
            )
        name, options = _REDUCE_SCATTER
        output = rows.new_empty(rows.shape[0] // self.size, *rows.shape[1:])
        work = getattr(self._process_group, name)(output, rows, options)
        return AsyncCollective(work, lambda: output, rows, output)

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> AsyncCollective:
        """Sends so many rows to every rank, in order, and receives so many from every rank."""
        rows, (name, options) = rows.detach().contiguous(), _ALL_TO_ALL
        output = rows.new_empty(sum(received), *rows.shape[1:])
        work = getattr(self._process_group, name)(output, rows, list(received), list(sent), options)
        return AsyncCollective(work, lambda: output, rows, output)

    @cached_property
    def _uses_all_to_all(self) -> bool:
        """Tells whether a reduce-scatter is an all-to-all and a local sum: gloo's own takes twice as long."""
        return bool(dist.get_backend(self._process_group) == "gloo")

    @property
    def _process_group(self) -> dist.ProcessGroup:
        assert self.group is not None, "a group that was built without processes cannot run"
        return self.group


NO_TP = TpGroup()


@dataclass(frozen=True, kw_only=True)
class ParamSplit:
    """Shards of a parameter along one dimension; every rank gets equally many units of each block.

    Where the units do not divide evenly, the shards of the last ranks end in zeros: heads and columns of
    zeros change no result and get no gradient.
    """

    dim: int
    blocks: tuple[tuple[int, int], ...]  # number of units and length of a unit, for each block

    def shard_length(self, size: int) -> int:
        """Returns the length of a shard along the dimension."""
        return sum(_units_per_rank(units, size) * length for units, length in self.blocks)

    def shard(self, parameter: Tensor, rank: int, size: int) -> Tensor:
        """Returns the shard of one rank."""
        pieces = []
        lengths = [units * length for units, length in self.blocks]
        for block, (units, length) in zip(parameter.split(lengths, self.dim), self.blocks, strict=True):
            count = _units_per_rank(units, size)
            begin, end = (min(index * count, units) for index in (rank, rank + 1))
            pieces.append(block.narrow(self.dim, begin * length, (end - begin) * length))
            padding = list(parameter.shape)
            padding[self.dim] = (count - (end - begin)) * length
            pieces.append(parameter.new_zeros(padding))
        return torch.cat(pieces, self.dim)

    def shard_runs(self, rank: int, size: int) -> list[tuple[int, int, int]]:
        """Returns the runs of one rank's shard: first index of the parameter, of the shard, and length."""
        runs, block_start, at = [], 0, 0
        for units, length in self.blocks:
            count = _units_per_rank(units, size)
            begin, end = (min(index * count, units) for index in (rank, rank + 1))
            runs.append((block_start + begin * length, at, (end - begin) * length))
            block_start, at = block_start + units * length, at + count * length
        return runs

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Returns the parameter from the shards of all ranks in order."""
        lengths = [_units_per_rank(units, len(shards)) * length for units, length in self.blocks]
        pieces = [shard.split(lengths, self.dim) for shard in shards]
        blocks = [
            torch.cat(block, self.dim).narrow(self.dim, 0, units * length)
            for block, (units, length) in zip(zip(*pieces, strict=True), self.blocks, strict=True)
        ]
        return torch.cat(blocks, self.dim)


def _units_per_rank(units: int, size: int) -> int:
    return -(-units // size)
