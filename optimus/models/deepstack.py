"""Passes rows between distant layers beside the state of segments (deepstack).

A projector reads outputs of earlier encoder layers, and the rows that it makes of them are added behind the
first layers of the LLM. Gradients go back the same way: who reads rows in the forward runs its backward
before the one who gave them. Between stages, rows travel behind the state, and their gradients behind its
gradient (`SegmentedChunk`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from optimus.job.model import Encoder, Llm


@dataclass(kw_only=True, eq=False)
class SideRows:
    """Rows of one microbatch and their gradients, by index; each has the shape of the state."""

    rows: dict[int, Tensor] = field(default_factory=dict)
    grads: dict[int, Tensor] = field(default_factory=dict)

    def take(self, indices: Sequence[int], like: Tensor) -> tuple[Tensor, ...]:
        """Removes and returns rows; those of a microbatch without encoder outputs are zeros."""
        rows = [self.rows.pop(index, None) for index in indices]
        return tuple(torch.zeros_like(like) if each is None else each for each in rows)

    def take_grads(self, indices: Sequence[int]) -> tuple[Tensor | None, ...]:
        """Removes and returns gradients, None where there is none."""
        return tuple(self.grads.pop(index, None) for index in indices)


def list_passed_rows(module: Encoder | Llm, boundary: int, deepstack: int = 0) -> tuple[int, ...]:
    """Returns the indices of rows that travel between layer `boundary` of a module and the one before it.

    Layers are numbered with the module's two ends. Rows of an encoder go from their layer to the projector,
    the `deepstack` rows of an LLM from the embedding to their layer.
    """
    if not 0 < boundary < module.stack.layers + 2:
        return ()
    if isinstance(module, Llm):
        return tuple(range(boundary - 1, deepstack))
    return tuple(index for index, layer in enumerate(module.deepstack_layers) if layer + 1 < boundary)


class GiveRows:
    """Gives the output of an encoder layer to the projector."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, x: Tensor, side: SideRows) -> Tensor:
        side.rows[self.index] = x.detach()
        return _Hooked.apply(x, self, side) if torch.is_grad_enabled() else x

    def backward(self, gradient: Tensor, side: SideRows) -> Tensor:
        side.rows.pop(self.index, None)  # of a recomputation
        given = side.grads.pop(self.index, None)
        return gradient if given is None else gradient + given


class AddRows:
    """Adds rows that the embedding received to the output of an LLM layer."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, x: Tensor, side: SideRows) -> Tensor:
        rows = side.rows.get(self.index)
        if rows is None:
            return x  # a microbatch without encoder outputs
        added = x.detach() + rows
        return _Hooked.apply(x, self, side, added) if torch.is_grad_enabled() else added

    def backward(self, gradient: Tensor, side: SideRows) -> Tensor:
        if side.rows.pop(self.index, None) is not None:
            side.grads[self.index] = gradient
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
        return side.rows.pop(index).clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, None, None]:
        context.side.grads[context.index] = gradient
        return None, None, None


def keep_rows(x: Tensor, rows: Tensor, targets: Tensor, side: SideRows) -> Tensor:
    """Puts rows at their targets and keeps them for `AddRows`; returns `x`, of which they are multiples.

    Rows with a target past the end are dropped.
    """
    kept: Tensor = _Keep.apply(x, rows, targets, side)
    return kept


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, rows: Tensor, targets: Tensor, side: SideRows) -> Tensor:
        parts = rows.detach().to(x.dtype).split(x.shape[1], 1)
        for index, part in enumerate(parts):
            side.rows[index] = x.new_zeros(x.shape[0] + 1, x.shape[1]).index_copy_(0, targets, part)[:-1]
        context.side, context.targets, context.count = side, targets, len(parts)
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        parts = [functional.pad(context.side.grads.pop(i), (0, 0, 0, 1)) for i in range(context.count)]
        return gradient, torch.cat([part[context.targets] for part in parts], 1), None, None
