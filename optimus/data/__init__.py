"""Data sets, and the assignment of their sequences and items to microbatches and encoder pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optimus.data.balanced_sampler import BalancedBatchSampler as BalancedBatchSampler
    from optimus.data.dealt_encoder import DealtEncoder as DealtEncoder

# Public names and their modules, imported on first use: most modules here need no torch.
_PUBLIC = {
    "BalancedBatchSampler": "optimus.data.balanced_sampler",
    "DealtEncoder": "optimus.data.dealt_encoder",
}

__all__ = ["BalancedBatchSampler", "DealtEncoder"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'optimus.data' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)
