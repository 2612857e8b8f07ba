"""Passes rows between distant layers of one rank beside the state of segments (deepstack).

A projector reads outputs of earlier encoder layers, and the rows that it makes of them are added behind the
first layers of the LLM. Gradients go back the same way: who reads rows in the forward runs its backward
before the one who gave them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(kw_only=True, eq=False)
class SideRows:
    """Rows of one microbatch and their gradients, by index; `targets` are those of an LLM's rows."""

    rows: dict[int, Tensor] = field(default_factory=dict)
    grads: dict[int, Tensor] = field(default_factory=dict)
    targets: Tensor | None = None


class GiveRows:
    """Gives the output of an encoder layer to the projector."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, x: Tensor, side: SideRows) -> Tensor:
        side.rows[self.index] = x.detach()
        return _Hooked.apply(x, self, side) if torch.is_grad_enabled() else x

    def backward(self, gradient: Tensor, side: SideRows) -> Tensor:
        given = side.grads.pop(self.index, None)
        return gradient if given is None else gradient + given


class AddRows:
    """Adds rows that the embedding received to the output of an LLM layer."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, x: Tensor, side: SideRows) -> Tensor:
        if side.targets is None:
            return x  # a microbatch without encoder outputs
        padded = functional.pad(x, (0, 0, 0, 1)).detach()
        added = padded.index_add_(0, side.targets, side.rows[self.index].to(x.dtype))[: x.shape[0]]
        return _Hooked.apply(x, self, side, added) if torch.is_grad_enabled() else added

    def backward(self, gradient: Tensor, side: SideRows) -> Tensor:
        if side.targets is not None:
            side.grads[self.index] = functional.pad(gradient, (0, 0, 0, 1))[side.targets]
        return gradient


class _Hooked(torch.autograd.Function):
    """The backward of a hook inside an autograd graph."""

    @staticmethod
    def forward(context: Any, x: Tensor, hook: Any, side: SideRows, output: Tensor | None = None) -> Tensor:
        context.hook, context.side = hook, side
        return x.view_as(x) if output is None else output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return context.hook.backward(gradient, context.side), None, None, None


def take_rows(x: Tensor, side: SideRows, index: int) -> Tensor:
    """Returns the output of an earlier layer; `x` is a later one."""
    rows: Tensor = _Take.apply(x, side, index)
    return rows


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, side: SideRows, index: int) -> Tensor:
        context.side, context.index = side, index
        return side.rows[index].clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, None, None]:
        context.side.grads[context.index] = gradient
        return None, None, None


def keep_rows(x: Tensor, rows: Tensor, targets: Tensor, side: SideRows) -> Tensor:
    """Keeps the rows for `AddRows`, whose width is that of `x`; returns `x`."""
    kept: Tensor = _Keep.apply(x, rows, targets, side)
    return kept


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, rows: Tensor, targets: Tensor, side: SideRows) -> Tensor:
        parts = rows.detach().split(x.shape[1], 1)
        side.rows, side.targets = dict(enumerate(parts)), targets
        context.side, context.count = side, len(parts)
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grads = context.side.grads
        return gradient, torch.cat([grads.pop(index) for index in range(context.count)], 1), None, None
