"""Modules that a user brings wrapped: by DDP, or sharded by FSDP2.

DDP is taken off: the plan's own lines reduce what its hooks would have. FSDP2 stays, as a container: lines of
the program gather its parameters for the whole step and reduce its gradients, its hooks do neither. What is
frozen is gathered once, before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from optimus.engine.buckets import Bucket
from optimus.engine.replicated_buckets import ReplicatedBucket
from optimus.engine.torch_private import fsdp_meshes, gather_fsdp, keep_fsdp_gradients, reduce_fsdp, wait_fsdp
from optimus.errors import UserError
from optimus.models.segment import Gradients, ModuleSegment


def unwrap_ddp(module: nn.Module) -> nn.Module:
    """What DDP was put around, or the module itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def reject_wrapped(module: nn.Module, field: str) -> None:
    """A module that must be as it was made."""
    if any(isinstance(part, FSDPModule | DistributedDataParallel) for part in module.modules()):
        raise UserError(
            field=field,
            problem="is wrapped by DDP or FSDP2, and does not run on this rank or is part of another module",
            hint="wrap whole stages and blocks, and those only that the plan has on this rank",
        )


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """All that FSDP2 shards in a module, itself first."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def disable_fsdp_hooks(module: nn.Module, field: str, replicas: Sequence[int]) -> None:
    """From now on nothing but lines of a program gathers and reduces what is sharded in a module."""
    parts = fsdp_modules(module)
    for part in parts:
        for mesh in fsdp_meshes(part):
            over, wanted = mesh.tolist(), list(replicas)
            if over != wanted:
                raise UserError(
                    field=field,
                    problem=f"is sharded over the ranks {over}, and the plan's replicas are {wanted}",
                    hint="give fully_shard the mesh that replica_mesh makes",
                )
        part.set_requires_gradient_sync(False, recurse=False)
        part.set_reshard_after_forward(False, recurse=False)
        part.set_reshard_after_backward(False, recurse=False)
        part.set_gradient_divide_factor(1.0)  # losses are scaled
        part.set_force_sum_reduction_for_comms(True)
        part.set_is_last_backward(False)
        part.set_reduce_scatter_max_input_buffers(len(parts))  # or compute would wait for the one before


class FsdpBlock(ModuleSegment):
    """A block whose parameters FSDP2 swaps for whole ones while a step runs."""

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def add_gradients(self, parameters: Sequence[Tensor], gradients: Gradients) -> None:
        super().add_gradients(parameters, gradients)
        for part in fsdp_modules(self.module):
            keep_fsdp_gradients(part)  # in the type in which they are reduced


class FsdpBucket:
    """Modules of a stage or block that FSDP2 shards, as one bucket: see `buckets.Bucket`."""

    offset = 0
    gathers = True

    def __init__(self, parameters: Sequence[Tensor], modules: Sequence[FSDPModule]) -> None:
        self.parameters, self._modules = list(parameters), list(modules)
        # FSDP2 waits for gloo: in the last line, where ranks wait anyway and in one order.
        self._blocks = self.parameters[0].device.type == "cpu"
        self._gathers: list[Any] = []

    @property
    def summed(self) -> Tensor:
        """Of this rank's parts."""
        found = [p.grad for p in self.parameters if p.grad is not None]
        return torch.cat([(g.to_local() if isinstance(g, DTensor) else g).flatten() for g in found])

    def reset(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def gather(self) -> None:
        self._gathers = [gather_fsdp(module) for module in self._modules]

    def wait_gathered(self) -> None:
        for handle in self._gathers:
            if handle is not None:
                handle.wait()
        self._gathers = []

    def reduce(self) -> None:
        if not self._blocks:
            self._sum()

    def wait_reduced(self) -> None:
        if self._blocks:
            self._sum()
        for module in self._modules:
            wait_fsdp(module)

    def _sum(self) -> None:
        for module in self._modules:
            reduce_fsdp(module)


def make_block(module: nn.Module) -> ModuleSegment:
    """A module as a segment, sharded or not."""
    return FsdpBlock(module) if fsdp_modules(module) else ModuleSegment(module)


def make_bucket(
    modules: Sequence[FSDPModule], parameters: Sequence[Tensor], group: dist.ProcessGroup | None
) -> Bucket:
    """What FSDP2 shards it gathers and reduces; all else is whole everywhere."""
    sharded = [isinstance(parameter, DTensor) for parameter in parameters]
    if not any(sharded):
        return ReplicatedBucket(parameters, group)
    if not all(sharded):
        raise UserError(
            field="parameters",
            problem="of one stage or block are sharded by FSDP2 only in part",
            hint="call fully_shard on the whole stage or block, too",
        )
    mine = {id(parameter) for parameter in parameters}
    return FsdpBucket(parameters, [part for part in modules if mine & set(map(id, part.parameters()))])
