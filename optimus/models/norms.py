"""Norms over the columns of rows."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from optimus.models.segment import add_gradient


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

    def forward_saving(self, rows: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The same, and what `gradient` needs, where no graph is made."""
        shape = self.weight.shape
        if self.kind == "layernorm":
            found, *kept = torch.native_layer_norm(rows, shape, self.weight, self.bias, self.eps)
        elif rows.is_cuda:
            found, *kept = torch.ops.aten._fused_rms_norm.default(rows, shape, self.weight, self.eps)
        else:
            found, *kept = _rms_norm(rows, self.weight, self.eps)
        return found, (rows, *kept)

    def backward(self, kept: tuple[Tensor, ...], gradient: Tensor, *, wanted: bool) -> Tensor | None:
        """Of the rows, if it is wanted; those of the parameters are added to them."""
        rows, *rest = kept
        shape, own = self.weight.shape, self.weight.requires_grad
        aten, mask = torch.ops.aten, [wanted, own]
        found: tuple[Tensor | None, ...]
        if self.kind == "layernorm":
            of_both = aten.native_layer_norm_backward.default
            found = of_both(gradient, rows, shape, *rest, self.weight, self.bias, [*mask, own])
        elif rows.is_cuda:
            found = aten._fused_rms_norm_backward.default(gradient, rows, shape, *rest, self.weight, mask)
        else:
            found = _rms_norm_gradient(gradient, rows, self.weight, rest[0], own=own)
        for parameter, of_parameter in zip((self.weight, self.bias), found[1:], strict=False):
            if parameter is not None and of_parameter is not None:
                add_gradient(parameter, of_parameter)
        return found[0] if wanted else None


def _rms_norm(rows: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As torch's kernel for GPUs, and unlike its formula for CPUs: a backward needs the rows and no copy."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(rows.dtype) * weight, scale


def _rms_norm_gradient(
    gradient: Tensor, rows: Tensor, weight: Tensor, scale: Tensor, *, own: bool
) -> tuple[Tensor, Tensor | None]:
    normed = rows.to(scale.dtype, copy=True).mul_(scale)
    wide = gradient.to(scale.dtype, copy=True)  # both are changed in place: they are large
    of_weight = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype) if own else None
    inner = wide.mul_(weight.to(scale.dtype))
    shared = (inner * normed).mean(-1, keepdim=True)
    return inner.sub_(normed.mul_(shared)).mul_(scale).to(rows.dtype), of_weight


class _RmsNorm(torch.autograd.Function):
    """For those who want a graph."""

    @staticmethod
    def forward(context: Any, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        found, scale = _rms_norm(rows, weight, eps)
        context.save_for_backward(rows, weight, scale)
        return found

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        found = _rms_norm_gradient(gradient, *context.saved_tensors, own=context.needs_input_grad[1])
        return *found, None
