"""What the engine takes from torch without torch having promised to keep it.

Written against torch 2.13; when another version needs something else, it is repaired here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Store, Work
from torch._subclasses.fake_tensor import FakeTensorMode

from optimus.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = [
    "FakeTensorMode",
    "PythonGroup",
    "PythonWork",
    "end_fsdp_forward",
    "fake_world",
    "fsdp_meshes",
    "gather_fsdp",
    "is_view",
    "keep_fsdp_gradients",
    "loopback_device",
    "make_gloo_backend",
    "on_storage_resize",
    "reduce_fsdp",
    "wait_fsdp",
]

PythonGroup: Any = ProcessGroup  # a subclass in Python takes the place of a group and its backend
PythonWork: Any = Work


def loopback_device() -> Any:
    """What gloo reaches processes of one host by. Its thread wakes every 10 ms: one is enough for all."""
    gloo: Any = ProcessGroupGloo
    return gloo.create_device(hostname="127.0.0.1")


def make_gloo_backend(device: Any, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo backend without a group around it."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [device], timeout
    return gloo(store, rank, size, options)


def is_view(tensor: Tensor) -> bool:
    """Whether it shares the memory of another tensor that autograd knows."""
    found: bool = tensor._is_view()
    return found


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """This process as one rank of a world where nobody else is: what it sends and sums ends at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # makes the backend known

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def on_storage_resize(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """While it is open, `tell` gets every storage behind a `resize_`, of which no dispatch mode hears."""
    kind: Any = torch.UntypedStorage
    resize = kind.resize_  # of the class that it is made from

    def told(storage: torch.UntypedStorage, size: int) -> Any:
        found = resize(storage, size)
        tell(storage)
        return found

    kind.resize_ = told
    try:
        yield
    finally:
        del kind.resize_


# ---------------------------------------------------------------------------- FSDP2, without its hooks


def fsdp_meshes(module: FSDPModule) -> list[Tensor]:
    """Ranks over which a module's own parameters are sharded; none if it has no parameters of its own."""
    groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", None)
    if groups is None:
        raise UserError(
            field="torch",
            value=torch.__version__,
            problem="has another FSDP2 than this version of Optimus knows",
            hint="use torch 2.13, or modules that are not sharded",
        )
    return [group.mesh_info.mesh.mesh for group in groups]


def gather_fsdp(module: FSDPModule) -> Any:
    """Launches the gather of a module's own parameters, also if they are still whole from before."""
    state: Any = module._get_fsdp_state()
    state._lazy_init()
    module.reshard()
    return module.unshard(async_op=True)


def keep_fsdp_gradients(module: FSDPModule) -> None:
    """Gradients that were added to whole parameters become part of what will be reduced."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def reduce_fsdp(module: FSDPModule) -> None:
    """Sums a module's own gradients over replicas, zeros where this one had none; gives whole parameters up.

    On GPUs it launches the sum; gloo's is over when this returns.
    """
    for group in reversed(module._get_fsdp_state()._fsdp_param_groups):
        group.wait_for_unshard()  # where nothing ran
        for parameter in group.fsdp_params:
            whole = parameter.unsharded_param
            if whole.requires_grad and whole.grad is None and parameter.unsharded_accumulated_grad is None:
                wide = parameter.reduce_dtype or whole.dtype
                parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=wide)
        group.reduce_grads, group.reshard_after_backward = True, True
        group.post_backward()
        group.reduce_grads, group.reshard_after_backward = False, False


def wait_fsdp(module: FSDPModule) -> None:
    """Until its reduced gradients are there."""
    state: Any = module._get_fsdp_state()
    for group in state._fsdp_param_groups:
        group.finalize_backward()
    state._comm_ctx.reduce_scatter_states.clear()
    state._comm_ctx.post_forward_order.clear()


def end_fsdp_forward(module: FSDPModule) -> None:
    """After forwards without a backward: parameters in parts again, and nothing noted of what ran."""
    state: Any = module._get_fsdp_state()
    state._lazy_init()
    for group in state._fsdp_param_groups:
        group.wait_for_unshard()  # where nothing ran
    module.reshard()
    for group in state._fsdp_param_groups:
        group._post_forward_indices.clear()
    state._comm_ctx.post_forward_order.clear()
