"""Everything that Optimus takes from torch without torch having promised to keep it.

Written against torch 2.13; when another version needs something else, it is repaired here.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Store, Work

__all__ = [
    "PythonGroup",
    "PythonWork",
    "all_gather_single",
    "gloo_on_loopback",
    "is_view",
    "reduce_scatter_single",
]

PythonGroup: Any = ProcessGroup  # a subclass in Python takes the place of a group and its backend
PythonWork: Any = Work


def gloo_on_loopback(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo backend without a group around it, between processes of one host."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return gloo(store, rank, size, options)


# torch 2.13 has new names and warns about the old ones, which are all that earlier versions have.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def is_view(tensor: Tensor) -> bool:
    """Whether it shares the memory of another tensor that autograd knows."""
    found: bool = tensor._is_view()
    return found
