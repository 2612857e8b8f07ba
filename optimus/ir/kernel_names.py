"""Names the kernels of a layer: the cost model prices them, plans list them, segments of models run them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from optimus.ir.op import OpKind


class KernelName(StrEnum):
    """Kernels and collectives of a layer and of a module's ends."""

    NORM1 = "norm1"
    LATENT = "latent"  # compressed queries, keys and values
    QKV = "qkv"
    ATTENTION = "attention"
    OUT = "out"
    NORM2 = "norm2"
    UP = "up"
    DOWN = "down"
    ROUTER = "router"
    EXPERTS = "experts"
    PATCHES = "patches"
    PROJECTOR = "projector"
    EMBEDDING = "embedding"
    HEAD = "head"
    HEAD_NORM = "head.norm"
    CHEAP = "cheap"  # norms and the non-linearity of a layer, recomputed together
    GATHER1 = "gather1"  # input of QKV, over the TP group
    SCATTER1 = "scatter1"  # output of attention
    GATHER2 = "gather2"  # input of the MLP
    SCATTER2 = "scatter2"  # output of the MLP
    CONTEXT = "context"  # keys and values, over the CP group
    DISPATCH = "dispatch"  # tokens to experts
    COMBINE = "combine"  # tokens back from experts
    SEAM = "seam"  # encoder outputs at LLM stage 0

    @property
    def dgrad(self) -> str:
        """Name of the input gradient's kernel."""
        return f"{self}.dgrad"

    @property
    def wgrad(self) -> str:
        """Name of the weight gradient's kernel."""
        return f"{self}.wgrad"

    @property
    def gather(self) -> str:
        """Name of an all-gather for this kernel."""
        return f"{self}.gather"

    @property
    def scatter(self) -> str:
        """Name of a reduce-scatter for this kernel."""
        return f"{self}.scatter"


REGATHERS = (KernelName.QKV.gather, KernelName.UP.gather)  # of inputs, for weight gradients

NamedPhase = tuple[str, OpKind | None]


def recomputed_kernels(phases: Iterable[NamedPhase]) -> tuple[str, ...]:
    """Returns the names of the phases that compute a forward again, each once."""
    return tuple(dict.fromkeys(name for name, kind in phases if kind == OpKind.RECOMPUTE))


def repeats_gathers(phases: Iterable[NamedPhase]) -> bool:
    """Returns whether a phase gathers the input of a column-parallel linear a second time."""
    return any(kind == OpKind.LAUNCH and name in REGATHERS for name, kind in phases)
