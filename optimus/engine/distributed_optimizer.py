"""Shards optimizer state over a module's replicas: ZeRO-1, as Megatron's distributed optimizer.

Parameters stay replicated during a step. A bucket has one flat buffer of parameters in the dtype of compute,
one of gradients in the dtype of the masters, and this rank's shard of both. One all-gather at the beginning
of a step replicates the parameters, one reduce-scatter at its end sums the gradients. Lines of the program
launch both, and no op computes with the result before it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from optimus.engine.buckets import check_one_dtype, view_as_params
from optimus.models.collectives import all_gather_single, reduce_scatter_single

CLIP_EPS = 1e-6  # added to the norm that divides, as torch.nn.utils.clip_grad_norm_ does


class ShardedBucket:
    """Parameters of a module, replicated; `master` is the shard that this replica keeps and updates.

    Gradients accumulate in the dtype of the masters, which is at least float32; weight-gradient phases find
    them in `grad`.
    """

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        check_one_dtype(parameters)
        self.parameters, self.group = list(parameters), group
        replicas = 1 if group is None else dist.get_world_size(group)
        self._replica = 0 if group is None else dist.get_rank(group)
        like = self.parameters[0]
        master_dtype = torch.promote_types(like.dtype, torch.float32)
        size = -(-sum(parameter.numel() for parameter in self.parameters) // replicas)
        self._param_buffer = torch.zeros(size * replicas, dtype=like.dtype, device=like.device)
        self.grad_buffer = torch.zeros(size * replicas, dtype=master_dtype, device=like.device)
        self._flatten_parameters(master_dtype)
        self.shard_offset = self._replica * size
        shard = slice(self.shard_offset, self.shard_offset + size)
        self._param_shard = self._param_buffer[shard]  # the all-gather is in place
        self.master = nn.Parameter(self._param_shard.to(master_dtype, copy=True))
        self.master.grad = self.grad_buffer[shard]  # and so is the reduce-scatter
        self._gather_work: dist.Work | None = None
        self._reduce_work: dist.Work | None = None

    def _flatten_parameters(self, grad_dtype: torch.dtype) -> None:
        """Makes parameters views of the flat buffer, with gradients of a wider dtype."""
        self.grad_views = view_as_params(self.grad_buffer, self.parameters)
        views = view_as_params(self._param_buffer, self.parameters)
        for parameter, view in zip(self.parameters, views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = None
            parameter.grad_dtype = grad_dtype

    @property
    def is_sharded(self) -> bool:
        return self.group is not None

    @property
    def reduced_grad(self) -> Tensor:
        assert self.master.grad is not None
        return self.master.grad

    def to_dtensor(self, shard: Tensor) -> Tensor:
        """Returns masters, or a moment of the optimizer, of all replicas as one DTensor, for checkpoints.

        It is flat and without padding, so that another number of replicas can read it, and shares the memory
        of `shard`.
        """
        count = sum(parameter.numel() for parameter in self.parameters)
        unpadded = shard.detach()[: max(0, count - self._replica * len(shard))]
        if self.group is None:
            return unpadded
        mesh = DeviceMesh.from_group(self.group, shard.device.type)
        return DTensor.from_local(unpadded, mesh, [Shard(0)], run_check=False, shape=(count,), stride=(1,))

    def local_grad(self, parameter: Tensor) -> Tensor:
        assert len(self.parameters) == 1 and self.parameters[0] is parameter
        return self.reduced_grad

    def begin_step(self) -> None:
        self.grad_buffer.zero_()
        for parameter, view in zip(self.parameters, self.grad_views, strict=True):
            parameter.grad = view

    def end_step(self) -> None:
        """Does nothing: the optimizer reads `master.grad`."""

    def gather(self) -> None:
        self._param_shard.copy_(self.master.detach())
        if self.group is not None:
            self._gather_work = all_gather_single(
                self._param_buffer, self._param_shard, self.group, async_op=True
            )

    def wait_gathered(self) -> None:
        if self._gather_work is not None:
            self._gather_work.wait()
            self._gather_work = None

    def reduce(self) -> None:
        if self.group is not None:
            self._reduce_work = reduce_scatter_single(
                self.reduced_grad, self.grad_buffer, dist.ReduceOp.SUM, self.group, async_op=True
            )

    def wait_reduced(self) -> None:
        if self._reduce_work is not None:
            self._reduce_work.wait()
            self._reduce_work = None


class DistributedOptimizer:
    """Clips by one norm over the gradients of all modules, then steps AdamW on this rank's masters.

    Every rank must have one, even without buckets: the norm is summed over all ranks. `norm_grads` are the
    gradients that enter the norm on this rank; each gradient of the model enters it on one rank. `clip` is
    the largest norm; 0 does not clip. The host reads nothing from the device.
    """

    def __init__(
        self,
        buckets: Sequence[ShardedBucket],
        norm_grads: Sequence[Tensor],
        *,
        learning_rate: float,
        weight_decay: float,
        clip: float = 0.0,
        device: torch.device,
    ) -> None:
        self.buckets, self._norm_grads, self.clip, self._device = buckets, norm_grads, clip, device
        masters = [bucket.master for bucket in self.buckets]
        self.adamw = (
            torch.optim.AdamW(masters, lr=learning_rate, weight_decay=weight_decay, fused=True)
            if masters
            else None
        )
        self.grad_norm: Tensor | None = None  # of the last step, before clipping

    def step(self) -> None:
        """Updates masters from reduced gradients; they are gathered when the next step begins."""
        self.grad_norm = self._total_norm()
        if self.clip:
            scale = torch.clamp(self.clip / (self.grad_norm + CLIP_EPS), max=1.0)
            for bucket in self.buckets:
                bucket.reduced_grad.mul_(scale)
        if self.adamw is not None:
            self.adamw.step()

    def _total_norm(self) -> Tensor:
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in self._norm_grads]
        squares = [norm.square() for norm in norms]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        total = total.to(self._device)
        dist.all_reduce(total)
        return total.sqrt()
