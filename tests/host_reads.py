"""Notices whatever makes the host wait for a device: reading values, or sizes that depend on values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Ops of ATen, by name without overload, that give the host a value or make a size out of values.
READS = frozenset(
    (
        *(
            "_local_scalar_dense",
            "item",
            "is_nonzero",
            "equal",
            "allclose",
            "bincount",
            "histc",
            "multinomial",
        ),
        *("nonzero", "nonzero_numpy", "argwhere", "masked_select", "masked_scatter", "tensor_split"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
        "_linalg_check_errors",
    )
)
INDEXING = frozenset(["index", "index_put", "index_put_", "_index_put_impl_", "index_fill", "index_select"])
# Methods that read without any op of ATen where the tensor is already on the host.
METHODS = frozenset(
    (
        *("tolist", "numpy", "item", "cpu", "cuda", "is_nonzero", "equal"),
        *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__", "__contains__"),
    )
)
MASKS = (torch.bool, torch.uint8)


class HostRead(AssertionError):
    """An op that a step must not contain."""


def why_it_reads(name: str, overload: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What is wrong with an op of ATen; empty if nothing is."""
    if name in READS:
        return "reads a value on the host"
    if name in ("lift_fresh", "lift_fresh_copy"):
        return "brings values from the host"
    if name == "repeat_interleave" and overload.startswith(("Tensor", "self_Tensor")):
        return "" if kwargs.get("output_size") is not None else "makes a size out of values"
    if name in INDEXING:
        indices = args[1] if len(args) > 1 else kwargs.get("indices")
        listed = indices if isinstance(indices, (list, tuple)) else [indices]
        masks = [index for index in listed if isinstance(index, Tensor) and index.dtype in MASKS]
        return "indexes by a mask, which counts it on the host" if masks else ""
    if name in ("_to_copy", "to", "copy_", "copy", "_copy_from"):
        return _crosses(args, kwargs)
    return ""


def _crosses(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    devices = {tensor.device for tensor in args if isinstance(tensor, Tensor)}
    if kwargs.get("device") is not None:
        devices.add(torch.device(kwargs["device"]))
    return "copies between devices" if len(devices) > 1 else ""


class _Ops(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, tell: Callable[[str, str], None]) -> None:
        super().__init__()
        self.tell, self.count = tell, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.count += 1
        packet = func.overloadpacket.__name__
        why = why_it_reads(packet, func._overloadname, args, kwargs)
        if why:
            self.tell(str(func), why)
        return func(*args, **kwargs)


class _Methods(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, tell: Callable[[str, str], None]) -> None:
        super().__init__()
        self.tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in METHODS:
            self.tell(f"Tensor.{name}", "reads a value on the host")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[Callable[[], int]]:
    """Raises `HostRead` on the first; yields a function that counts all ops seen so far."""

    def tell(name: str, why: str) -> None:
        raise HostRead(f"{name} {why}")

    ops = _Ops(tell)
    with _Methods(tell), ops:
        yield lambda: ops.count
