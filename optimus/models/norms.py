"""Norms over the columns of rows."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional


class Norm(nn.Module):
    """LayerNorm with a bias, or RMSNorm without one."""

    def __init__(self, kind: Literal["layernorm", "rmsnorm"], width: int, eps: float, **where: Any) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.ones(width, **where))
        self.bias = nn.Parameter(torch.zeros(width, **where)) if kind == "layernorm" else None

    def forward(self, rows: Tensor) -> Tensor:
        shape = tuple(self.weight.shape)
        if self.kind == "layernorm":
            return functional.layer_norm(rows, shape, self.weight, self.bias, self.eps)
        if rows.is_cuda:
            return functional.rms_norm(rows, shape, self.weight, self.eps)
        found: Tensor = _RmsNorm.apply(rows, self.weight, self.eps)
        return found


class _RmsNorm(torch.autograd.Function):
    """As torch's kernel for GPUs, and unlike its formula for CPUs: a backward needs the rows and no copy."""

    @staticmethod
    def forward(context: Any, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        context.save_for_backward(rows, weight, scale)
        return (wide * scale).to(rows.dtype) * weight

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows, weight, scale = context.saved_tensors
        normed = rows.to(scale.dtype, copy=True).mul_(scale)
        wide = gradient.to(scale.dtype, copy=True)  # both are changed in place: they are large
        own = (wide * normed).flatten(0, -2).sum(0) if context.needs_input_grad[1] else None
        inner = wide.mul_(weight.to(scale.dtype))
        shared = (inner * normed).mean(-1, keepdim=True)
        found = inner.sub_(normed.mul_(shared)).mul_(scale)
        return found.to(rows.dtype), None if own is None else own.to(weight.dtype), None
