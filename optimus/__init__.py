"""Optimus plans multimodal LLM training: where time and memory go, under each known way to run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from optimus.job.read import find_job as find_job
    from optimus.job.read import load_job as load_job
    from optimus.job.read import make_job as make_job
    from optimus.search.compare import compare_systems as simulate

# Public verbs and where they live. They are loaded on first use: importing `optimus` costs nothing.
_VERBS = {
    "find_job": ("optimus.job.read", "find_job"),
    "load_job": ("optimus.job.read", "load_job"),
    "make_job": ("optimus.job.read", "make_job"),
    "simulate": ("optimus.search.compare", "compare_systems"),
}

__all__ = ["find_job", "load_job", "make_job", "simulate"]


def __getattr__(name: str) -> Any:
    if name not in _VERBS:
        raise AttributeError(f"module 'optimus' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _VERBS[name]
    return getattr(import_module(module), attribute)
