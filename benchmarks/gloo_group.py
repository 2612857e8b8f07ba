"""A process group in Python whose bytes are carried by gloo: what links and rules it has, a subclass says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Work

PythonWork: Any = Work
_PythonGroup: Any = ProcessGroup  # a subclass in Python takes the place of a group and its backend


def make_loopback_device() -> Any:
    """Returns gloo's device for one host. Its thread wakes every 10 ms: all groups should share one."""
    gloo: Any = ProcessGroupGloo
    return gloo.create_device(hostname="127.0.0.1")


def make_gloo_backend(device: Any, options: Any, timeout: timedelta | None = None) -> Any:
    """Makes a gloo backend without a process group around it, for the options of a registered backend."""
    gloo: Any = ProcessGroupGloo
    own = gloo._Options()
    own._devices, own._timeout = [device], timeout or options.timeout
    return gloo(options.store, options.group_rank, options.group_size, own)


class GlooGroup(_PythonGroup):
    """Passes every collective to `collective`, which a subclass defines, with `send` and `recv`."""

    backend_name = ""

    def __init__(self, rank: int, size: int, make_carrier: Callable[[], Any]) -> None:
        super().__init__(rank, size)
        self._make_carrier, self.members = make_carrier, size
        if size > 1:  # a carrier costs threads, and most groups of one rank are never used
            self.carrier.rank()
        self._name = self.description = ""

    @cached_property
    def carrier(self) -> Any:
        """The backend of gloo that carries the bytes."""
        return self._make_carrier()

    def collective(self, kind: str, tensors: Sequence[Tensor], carry: Callable[[], Sequence[Any]]) -> Any:
        """Runs a collective; `carry` starts it over gloo, and `tensors` are the whole of what it moves."""
        raise NotImplementedError

    # ------------------------------------------------------------------ names

    def getBackendName(self) -> str:
        return self.backend_name

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self.description

    def setGroupDesc(self, description: str) -> None:
        self.description = description

    # ------------------------------------------------------------------ collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self.collective(
            "all-reduce",
            tensors,
            lambda: [self.carrier.allreduce([tensor], operation) for tensor in tensors],
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        whole = [part for parts in outputs for part in parts]
        return self.collective("all-gather", whole, lambda: [self.carrier.allgather(outputs, inputs)])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        pairs = list(zip(outputs, inputs, strict=True))
        return self.collective(
            "all-gather",
            outputs,
            lambda: [self.carrier._allgather_base(whole, part) for whole, part in pairs],
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [input], opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        options = () if opts is None else (opts,)
        whole = [part for parts in inputs for part in parts]
        return self.collective(
            "reduce-scatter", whole, lambda: [self.carrier.reduce_scatter(outputs, inputs, *options)]
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        options = () if opts is None else (opts,)
        pairs = list(zip(outputs, inputs, strict=True))
        return self.collective(
            "reduce-scatter",
            inputs,
            lambda: [self.carrier._reduce_scatter_base(part, whole, *options) for part, whole in pairs],
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        return self.collective(
            "all-to-all",
            [input],
            lambda: [self.carrier.alltoall_base(output, input, output_sizes, input_sizes)],
        )

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        root = opts.rootRank
        return self.collective(
            "broadcast", tensors, lambda: [self.carrier.broadcast(tensor, root) for tensor in tensors]
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        whole = outputs * self.members
        return self.collective("scatter", whole, lambda: [self.carrier.scatter(outputs, inputs, opts)])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        whole = inputs * self.members
        return self.collective("gather", whole, lambda: [self.carrier.gather(outputs, inputs, opts)])

    def barrier(self, opts: Any = None) -> Any:
        return self.collective("barrier", [], list)

    # before torch 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
