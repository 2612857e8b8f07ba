"""Shards parameters, gradients and masters over a module's replicas: ZeRO-1, 2 and 3.

A bucket has one flat buffer of parameters in the dtype of compute, one of gradients in the dtype of the
masters, and this rank's shard of both. An all-gather replicates the parameters, a reduce-scatter sums the
gradients. Lines of the program launch both, and no op computes with the result before it is waited for.

A bucket of a step is gathered at its beginning and reduced at its end (ZeRO-1). One that is gathered for a
microbatch or an op holds no memory for parameters in between (ZeRO-3); one that is reduced in every
microbatch holds none for gradients, and adds up its shard (ZeRO-2 and 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.engine.buckets import check_one_dtype, view_as_params
from optimus.ir.plan import Span
from optimus.models.collectives import all_gather_single, reduce_scatter_single


class FrozenBucket:
    """Parameters of a module; `master` is the shard that this replica keeps.

    They are sharded like trained ones if they are not gathered for the whole step, and never reduced.
    """

    reduces_microbatches = False

    def __init__(
        self,
        parameters: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        gathered_per: Span = Span.STEP,
    ) -> None:
        check_one_dtype(parameters)
        self.parameters, self.group = list(parameters), group
        self.reshards = gathered_per > Span.STEP
        replicas = 1 if group is None else dist.get_world_size(group)
        like = self.parameters[0]
        size = -(-sum(parameter.numel() for parameter in self.parameters) // replicas)
        self.shard_offset = size * (0 if group is None else dist.get_rank(group))
        self._shard = slice(self.shard_offset, self.shard_offset + size)
        self.param_buffer = torch.zeros(size * replicas, dtype=like.dtype, device=like.device)
        self._param_shard = self.param_buffer[self._shard]  # the all-gather is in place
        views = view_as_params(self.param_buffer, self.parameters)
        for parameter, view in zip(self.parameters, views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.master = self._param_shard.to(self._master_dtype, copy=True)
        self._gather_work: dist.Work | None = None
        self.free_parameters()

    @property
    def _master_dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    @property
    def is_sharded(self) -> bool:
        return self.group is not None

    def shard_runs(self) -> Iterator[tuple[Tensor, int, Tensor]]:
        """Yields parameters of which this replica keeps a part, where it begins, and its values."""
        at, end_offset = 0, self.shard_offset + len(self.master)
        for parameter in self.parameters:
            low, high = max(self.shard_offset, at), min(end_offset, at + parameter.numel())
            if low < high:
                yield parameter, low - at, self.master[low - self.shard_offset : high - self.shard_offset]
            at += parameter.numel()

    def gather(self) -> None:
        if self.reshards:
            _allocate(self.param_buffer)
        self._param_shard.copy_(self.master)
        if self.group is not None:
            self._gather_work = all_gather_single(
                self.param_buffer, self._param_shard, self.group, async_op=True
            )

    def wait_gathered(self) -> None:
        if self._gather_work is not None:
            self._gather_work.wait()
            self._gather_work = None

    def free_parameters(self) -> None:
        """Frees the memory of parameters that are not gathered for the whole step."""
        if self.reshards:
            _free(self.param_buffer)

    def begin_gradients(self) -> None:
        """Does nothing: there are none."""

    def reduce(self) -> None:
        """Does nothing: there are no gradients."""

    def wait_reduced(self) -> None:
        """Does nothing: there are no gradients."""


class ShardedBucket(FrozenBucket):
    """Trained parameters of a module; `master` is the shard that this replica keeps and updates.

    Gradients accumulate in the dtype of the masters, which is at least float32; weight-gradient phases find
    them in `grad`. `reduced_grad` is this replica's shard of their sum.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        gathered_per: Span = Span.STEP,
        reduced_per: Span = Span.STEP,
    ) -> None:
        super().__init__(parameters, group, gathered_per)
        self.reduces_microbatches = reduced_per == Span.MICROBATCH
        self.grad_buffer = torch.zeros_like(self.param_buffer, dtype=self._master_dtype)
        self._grad_shard = self.grad_buffer[self._shard]  # the reduce-scatter is in place
        self.grad_views = view_as_params(self.grad_buffer, self.parameters)
        for parameter in self.parameters:
            parameter.grad = None
            parameter.grad_dtype = self._master_dtype
        self.reduced_grad = self._grad_shard
        if self.reduces_microbatches:
            self.reduced_grad = torch.zeros_like(self._grad_shard)
            _free(self.grad_buffer)
        self._reduce_work: dist.Work | None = None
        self._is_reducing = False

    @property
    def _master_dtype(self) -> torch.dtype:
        return torch.promote_types(self.parameters[0].dtype, torch.float32)

    def local_grad(self, parameter: Tensor) -> Tensor:
        assert len(self.parameters) == 1 and self.parameters[0] is parameter
        return self.reduced_grad

    def begin_step(self) -> None:
        (self.reduced_grad if self.reduces_microbatches else self.grad_buffer).zero_()
        for parameter, view in zip(self.parameters, self.grad_views, strict=True):
            parameter.grad = view

    def end_step(self) -> None:
        """Does nothing: the optimizer reads `reduced_grad`."""

    def begin_gradients(self) -> None:
        """Starts the gradients of a microbatch at zero."""
        if self.reduces_microbatches:
            _allocate(self.grad_buffer)
            self.grad_buffer.zero_()

    def reduce(self) -> None:
        self._is_reducing = True
        if self.group is not None:
            self._reduce_work = reduce_scatter_single(
                self._grad_shard, self.grad_buffer, dist.ReduceOp.SUM, self.group, async_op=True
            )

    def wait_reduced(self) -> None:
        if self._reduce_work is not None:
            self._reduce_work.wait()
            self._reduce_work = None
        if self.reduces_microbatches and self._is_reducing:
            self.reduced_grad.add_(self._grad_shard)
            _free(self.grad_buffer)
        self._is_reducing = False


def _allocate(buffer: Tensor) -> None:
    buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())


def _free(buffer: Tensor) -> None:
    buffer.untyped_storage().resize_(0)
