"""Wraps the parts of torch that the engine uses and torch does not promise to keep.

Written against torch 2.13; changes for another version belong here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from optimus.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = [
    "FakeTensorMode",
    "accumulate_fsdp_grads",
    "default_store",
    "fake_process_group",
    "find_fsdp_mesh_ranks",
    "on_storage_resize",
    "reduce_fsdp_grads",
    "reshard_fsdp_after_forward",
    "unshard_fsdp_params",
    "wait_fsdp_grads",
]


def default_store() -> dist.Store:
    """Returns the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


@contextmanager
def fake_process_group(rank: int, world: int) -> Iterator[None]:
    """Makes this process one rank of a fake world, in which collectives and sends complete at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def on_storage_resize(callback: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Calls back with every storage after its `resize_`, which no dispatch mode intercepts."""
    storage_type: Any = torch.UntypedStorage
    resize = storage_type.resize_  # inherited

    def resize_and_call(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        callback(storage)
        return result

    storage_type.resize_ = resize_and_call
    try:
        yield
    finally:
        del storage_type.resize_


# ---------------------------------------------------------------------------- FSDP2, without its hooks


def find_fsdp_mesh_ranks(module: FSDPModule) -> list[Tensor]:
    """Returns the ranks that shard a module's own parameters; none if it has no parameters of its own."""
    groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", None)
    if groups is None:
        raise UserError(
            field="torch",
            value=torch.__version__,
            problem="has another FSDP2 than this version of Optimus knows",
            hint="use torch 2.13, or modules that are not sharded",
        )
    return [group.mesh_info.mesh.mesh for group in groups]


def unshard_fsdp_params(module: FSDPModule) -> Any:
    """Launches the all-gather of a module's own parameters, even if they are still unsharded."""
    state: Any = module._get_fsdp_state()
    state._lazy_init()
    module.reshard()
    return module.unshard(async_op=True)


def accumulate_fsdp_grads(module: FSDPModule) -> None:
    """Moves gradients of unsharded parameters into the buffers that will be reduced."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def reduce_fsdp_grads(module: FSDPModule) -> None:
    """Reduce-scatters a module's own gradients, zeros where this rank has none, and reshards its parameters.

    On GPUs it launches the collective; over gloo it returns when the collective has completed.
    """
    for group in reversed(module._get_fsdp_state()._fsdp_param_groups):
        group.wait_for_unshard()  # if no op ran
        for parameter in group.fsdp_params:
            full = parameter.unsharded_param
            if full.requires_grad and full.grad is None and parameter.unsharded_accumulated_grad is None:
                dtype = parameter.reduce_dtype or full.dtype
                parameter.unsharded_accumulated_grad = torch.zeros_like(full, dtype=dtype)
        group.reduce_grads, group.reshard_after_backward = True, True
        group.post_backward()
        group.reduce_grads, group.reshard_after_backward = False, False


def wait_fsdp_grads(module: FSDPModule) -> None:
    """Waits until a module's reduced gradients have arrived."""
    state: Any = module._get_fsdp_state()
    for group in state._fsdp_param_groups:
        group.finalize_backward()
    state._comm_ctx.reduce_scatter_states.clear()
    state._comm_ctx.post_forward_order.clear()


def reshard_fsdp_after_forward(module: FSDPModule) -> None:
    """Reshards a module after forwards without a backward, and clears FSDP2's record of them."""
    state: Any = module._get_fsdp_state()
    state._lazy_init()
    for group in state._fsdp_param_groups:
        group.wait_for_unshard()  # if no op ran
    module.reshard()
    for group in state._fsdp_param_groups:
        group._post_forward_indices.clear()
    state._comm_ctx.post_forward_order.clear()
