"""Runs modules that a user has wrapped in DDP or sharded with FSDP2.

DDP is unwrapped: lines of the program reduce what its hooks would have. FSDP2 stays as a container: lines of
the program gather its parameters for the whole step and reduce its gradients, and its hooks do neither.
Frozen modules are gathered once, before the first step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from optimus.engine.buckets import ReplicatedBucket
from optimus.engine.torch_private import (
    accumulate_fsdp_grads,
    find_fsdp_mesh_ranks,
    reduce_fsdp_grads,
    reshard_fsdp_after_forward,
    unshard_fsdp_params,
    wait_fsdp_grads,
)
from optimus.errors import UserError
from optimus.models.segment import Gradients, ModuleSegment
from optimus.protocols import ParamBucket

# Segments change nothing in place, so that views are as good as other outputs.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def unwrap_ddp(module: nn.Module) -> nn.Module:
    """Returns the module inside DDP, or the module itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def reject_wrapped_modules(module: nn.Module, field: str) -> None:
    """Raises if DDP or FSDP2 wraps a module or a part of it."""
    if any(isinstance(part, FSDPModule | DistributedDataParallel) for part in module.modules()):
        raise UserError(
            field=field,
            problem="is wrapped by DDP or FSDP2, and does not run on this rank or is part of another module",
            hint="wrap whole stages and blocks, and those only that the plan has on this rank",
        )


def list_fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Returns the modules that FSDP2 shards within a module, itself first."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def disable_fsdp_hooks(module: nn.Module, field: str, replicas: Sequence[int]) -> None:
    """Leaves gathering and reducing to lines of a program; raises if the mesh is not the plan's replicas."""
    parts = list_fsdp_modules(module)
    for part in parts:
        for mesh in find_fsdp_mesh_ranks(part):
            ranks, planned = mesh.tolist(), list(replicas)
            if ranks != planned:
                raise UserError(
                    field=field,
                    problem=f"is sharded over the ranks {ranks}, and the plan's replicas are {planned}",
                    hint="give fully_shard the mesh that replica_mesh makes",
                )
        part.set_requires_gradient_sync(False, recurse=False)
        part.set_reshard_after_forward(False, recurse=False)
        part.set_reshard_after_backward(False, recurse=False)
        part.set_gradient_divide_factor(1.0)  # losses are scaled
        part.set_force_sum_reduction_for_comms(True)
        part.set_is_last_backward(False)
        part.set_reduce_scatter_max_input_buffers(len(parts))  # or compute would wait for the previous one


@contextmanager
def unshard_all(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Gathers everything that FSDP2 shards in some modules, so that one rank can run them alone.

    All replicas enter it together.
    """
    parts = [part for module in modules for part in list_fsdp_modules(module)]
    for part in parts:
        part.set_requires_gradient_sync(False, recurse=False)
        part.set_reshard_after_forward(False, recurse=False)
        part.set_reshard_after_backward(False, recurse=False)
        part.unshard()
    yield
    for part in parts:
        reshard_fsdp_after_forward(part)


class FsdpSegment(ModuleSegment):
    """A module whose sharded parameters FSDP2 replaces by unsharded ones during a step."""

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def add_gradients(self, parameters: Sequence[Tensor], gradients: Gradients) -> None:
        super().add_gradients(parameters, gradients)
        for part in list_fsdp_modules(self.module):
            accumulate_fsdp_grads(part)  # in the dtype in which they are reduced


class FsdpBucket:
    """Modules of a stage or block that FSDP2 shards, as one `protocols.ParamBucket`."""

    shard_offset = 0
    is_sharded = True

    def __init__(self, parameters: Sequence[Tensor], modules: Sequence[FSDPModule]) -> None:
        self.parameters, self._modules = list(parameters), list(modules)
        # Over gloo FSDP2's reduce-scatter blocks, so it runs in the last line, where ranks wait anyway.
        self._reduce_blocks = self.parameters[0].device.type == "cpu"
        self._gather_handles: list[Any] = []
        self._earlier: list[Tensor | None] = []  # gradients of earlier steps

    @property
    def reduced_grad(self) -> Tensor:
        """The gradients of this rank's shards."""
        return torch.cat([self.local_grad(p).flatten() for p in self.parameters if p.grad is not None])

    def local_grad(self, parameter: Tensor) -> Tensor:
        assert isinstance(parameter.grad, DTensor)
        return parameter.grad.to_local()

    def begin_step(self) -> None:
        """Sets aside what earlier steps left in `grad`: tied gradients of this step are summed without it."""
        self._earlier = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def end_step(self) -> None:
        for parameter, earlier in zip(self.parameters, self._earlier, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)
        self._earlier = []

    def gather(self) -> None:
        self._gather_handles = [unshard_fsdp_params(module) for module in self._modules]

    def wait_gathered(self) -> None:
        for handle in self._gather_handles:
            if handle is not None:
                handle.wait()
        self._gather_handles = []

    def reduce(self) -> None:
        if not self._reduce_blocks:
            self._launch_reduce()

    def wait_reduced(self) -> None:
        if self._reduce_blocks:
            self._launch_reduce()
        for module in self._modules:
            wait_fsdp_grads(module)

    def free_parameters(self) -> None:
        """Does nothing: FSDP2 decides when."""

    def begin_gradients(self) -> None:
        """Does nothing: gradients are reduced once a step."""

    def _launch_reduce(self) -> None:
        for module in self._modules:
            reduce_fsdp_grads(module)


def make_module_segment(module: nn.Module) -> ModuleSegment:
    """Makes a segment of a module, sharded or not."""
    return FsdpSegment(module) if list_fsdp_modules(module) else ModuleSegment(module)


def make_param_bucket(
    modules: Sequence[FSDPModule], parameters: Sequence[Tensor], group: dist.ProcessGroup | None
) -> ParamBucket:
    """Makes an `FsdpBucket` of parameters that FSDP2 shards, and a `ReplicatedBucket` of others."""
    sharded = [isinstance(parameter, DTensor) for parameter in parameters]
    if not any(sharded):
        return ReplicatedBucket(parameters, group)
    if not all(sharded):
        raise UserError(
            field="parameters",
            problem="of one stage or block are sharded by FSDP2 only in part",
            hint="call fully_shard on the whole stage or block, too",
        )
    ids = {id(parameter) for parameter in parameters}
    return FsdpBucket(parameters, [part for part in modules if ids & set(map(id, part.parameters()))])
