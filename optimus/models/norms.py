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
        return functional.rms_norm(rows, shape, self.weight, self.eps)
