"""What a model computes with beyond its dimensions: constants of its family, and replaceable kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from optimus.models.attention import AttentionKernel, attend_by_spans
from optimus.models.linear import TORCH, LinearKernels


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Constants that a job's model does not name, since they cost no time."""

    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_sections: tuple[int, ...] = ()  # rotary frequencies per axis (time, height, width); none: one axis
    gelu: Literal["none", "tanh"] = "none"  # the approximation of a plain MLP's non-linearity
    dropout: float = 0.1  # share of elements dropped where the stack says dropout


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The products of segments; replace them by faster ones where there are some."""

    linear: LinearKernels = TORCH
    attention: AttentionKernel = attend_by_spans


NUMERICS, KERNELS = Numerics(), Kernels()
