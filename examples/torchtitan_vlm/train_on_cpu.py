"""Starts torchtitan 0.3.0 on CPUs, which it does not support: for this example and its tests only.

On GPUs start `-m torchtitan.train` with the same arguments. torchtitan imports two packages that a run on
CPUs does not use, Triton for GPU kernels (1 GB) and `datasets` for its own data (180 MB with pyarrow): where
they are not installed, empty modules take their place.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import torch
import torch._utils
from torch import distributed as dist


class EmptyModule(ModuleType):
    """A module of which every name is None."""

    __path__ = ()

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _replace_missing(package: str, *modules: str) -> None:
    if find_spec(package) is None:
        sys.modules.update({name: EmptyModule(name) for name in modules})


_replace_missing("triton", "torchtitan.distributed.minimal_async_ep.kernels")
_replace_missing("datasets", "datasets", "datasets.distributed")

torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan would assume CUDA
torch._utils._get_device_module = lambda kind: getattr(torch, kind)
torch.cpu.get_device_name = lambda *_: "CPU"
torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 34)
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None
torch.cpu.memory_stats = lambda *_: {}
torch.cpu.current_device = lambda: 0
if not hasattr(dist, "set_timeout"):  # torchtitan calls it; torch 2.13 has no such function
    dist.set_timeout = lambda timeout, group=None: None
torch.set_num_threads(1)

if __name__ == "__main__":
    from torchtitan.train import main

    main()
