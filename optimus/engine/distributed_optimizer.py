"""ZeRO-1 as Megatron's distributed optimizer: parameters whole while a step runs, masters and optimizer state
in equal parts on the replicas of the module.

A bucket is one flat buffer of parameters in the type they compute in, one of gradients in the type of the
masters, and this rank's part of both. One all-gather at the beginning of a step makes the parameters whole,
one reduce-scatter at its end sums the gradients; both are launched by lines of the program, and nothing
computes on what they bring before it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from optimus.engine.buckets import check_types, views_of
from optimus.models.collectives import all_gather_single, reduce_scatter_single


class ShardedBucket:
    """Some parameters of a module, whole here; `master` is the part that this replica keeps and updates.

    Gradients are added up in the type of the masters, which is at least float32: weight-gradient phases find
    them in `grad`.
    """

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        check_types(parameters)
        self.parameters, self.group = list(parameters), group
        parts = 1 if group is None else dist.get_world_size(group)
        self._place = 0 if group is None else dist.get_rank(group)
        like = self.parameters[0]
        wide = torch.promote_types(like.dtype, torch.float32)
        size = -(-sum(parameter.numel() for parameter in self.parameters) // parts)
        self._whole = torch.zeros(size * parts, dtype=like.dtype, device=like.device)
        self.gradients = torch.zeros(size * parts, dtype=wide, device=like.device)
        self._place_parameters(wide)
        self.offset = self._place * size
        mine = slice(self.offset, self.offset + size)
        self._part = self._whole[mine]  # sent from where it is received
        self.master = nn.Parameter(self._part.to(wide, copy=True))
        self.master.grad = self.gradients[mine]  # and summed where it lies
        self._gathers: dist.Work | None = None
        self._reduces: dist.Work | None = None

    def _place_parameters(self, wide: torch.dtype) -> None:
        """Parameters become views of the flat buffer, and may have wider gradients."""
        self.grad_views = views_of(self.gradients, self.parameters)
        places = views_of(self._whole, self.parameters)
        for parameter, place in zip(self.parameters, places, strict=True):
            place.copy_(parameter.detach())
            parameter.data = place
            parameter.grad = None
            parameter.grad_dtype = wide

    @property
    def gathers(self) -> bool:
        return self.group is not None

    @property
    def summed(self) -> Tensor:
        assert self.master.grad is not None
        return self.master.grad

    def to_dtensor(self, part: Tensor) -> Tensor:
        """Masters, or one of an optimizer's moments of them, of all replicas as one: for checkpoints to come.

        Flat and without padding, so another number of replicas can read it. It shares memory with `part`.
        """
        count = sum(parameter.numel() for parameter in self.parameters)
        begin = self._place * len(part)
        mine = part.detach()[: max(0, count - begin)]
        if self.group is None:
            return mine
        mesh = DeviceMesh.from_group(self.group, part.device.type)
        return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=(count,), stride=(1,))

    def reset(self) -> None:
        self.gradients.zero_()
        for parameter, view in zip(self.parameters, self.grad_views, strict=True):
            parameter.grad = view

    def gather(self) -> None:
        self._part.copy_(self.master.detach())
        if self.group is not None:
            self._gathers = all_gather_single(self._whole, self._part, self.group, async_op=True)

    def wait_gathered(self) -> None:
        if self._gathers is not None:
            self._gathers.wait()
            self._gathers = None

    def reduce(self) -> None:
        if self.group is not None:
            self._reduces = reduce_scatter_single(
                self.summed, self.gradients, dist.ReduceOp.SUM, self.group, async_op=True
            )

    def wait_reduced(self) -> None:
        if self._reduces is not None:
            self._reduces.wait()
            self._reduces = None
