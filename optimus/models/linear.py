"""A linear map whose weight gradient can be computed later, and the kernels it is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from optimus.models.segment import WeightGradStore

WIDENED_ROWS = 512  # of which copies in a wider type are made at a time


def _input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    return gradient @ weight


def _add_weight_gradient(weight: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    """Adds `gradient` transposed times `inputs` to the weight's gradient, which may be of a wider type.

    Then the product is not rounded to the type of its factors: GPUs add up in the wider one anyway.
    """
    if weight.grad is None:
        weight.grad = gradient.T @ inputs
        return
    wide = weight.grad.dtype
    if wide == gradient.dtype or weight.grad.is_cuda:
        _add_product(weight, gradient, inputs)
    else:
        for left, right in zip(gradient.split(WIDENED_ROWS), inputs.split(WIDENED_ROWS), strict=True):
            weight.grad.addmm_(left.T.to(wide), right.to(wide))


def _add_product(weight: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    """The same as one kernel, which GPUs have for types of different width."""
    assert weight.grad is not None
    if weight.grad.dtype == gradient.dtype:
        weight.grad.addmm_(gradient.T, inputs)
    else:
        torch.addmm(weight.grad, gradient.T, inputs, out_dtype=weight.grad.dtype, out=weight.grad)


@dataclass(frozen=True, kw_only=True)
class LinearKernels:
    """The three products of a linear map over rows; replace them by faster ones where there are some."""

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor] = functional.linear
    input_gradient: Callable[[Tensor, Tensor], Tensor] = _input_gradient
    add_weight_gradient: Callable[[Tensor, Tensor, Tensor], None] = _add_weight_gradient


TORCH = LinearKernels()
ON_GPUS = LinearKernels(add_weight_gradient=_add_product)  # for tensors that stand for those of a GPU


class _DeferringLinear(torch.autograd.Function):
    """Rows times weight; the backward gives the input's gradient and leaves the rest in `weight_grads`."""

    @staticmethod
    def forward(
        context: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_grads: WeightGradStore,
        kernels: LinearKernels,
    ) -> Tensor:
        context.save_for_backward(rows, weight, bias)
        context.weight_grads, context.kernels = weight_grads, kernels
        return kernels.forward(rows, weight, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        rows, weight, bias = context.saved_tensors
        # Detached: what made the rows may lead back to the list itself, a circle that nobody would free.
        weight_grads, kernels, wanted = context.weight_grads, context.kernels, context.needs_input_grad[0]
        found = linear_gradient(gradient, rows.detach(), weight, bias, weight_grads, kernels, wanted=wanted)
        return found, None, None, None, None


def linear_gradient(
    gradient: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_grads: WeightGradStore,
    kernels: LinearKernels,
    *,
    wanted: bool,
) -> Tensor | None:
    """Of the rows, if it is wanted; those of weight and bias go to `weight_grads`."""
    if weight.requires_grad:
        weight_grads.add(partial(kernels.add_weight_gradient, weight, gradient, rows))
    if bias is not None and bias.requires_grad:
        weight_grads.add(partial(add_bias_gradient, bias, gradient))
    return kernels.input_gradient(gradient, weight) if wanted else None


def add_bias_gradient(bias: Tensor, gradient: Tensor) -> None:
    """Summed in the type in which a bias adds up its gradients."""
    if bias.grad is None:
        bias.grad = gradient.sum(0)
    else:
        bias.grad.add_(gradient.sum(0, dtype=bias.grad.dtype))


def linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_grads: WeightGradStore | None = None,
    kernels: LinearKernels = TORCH,
) -> Tensor:
    """Maps rows (n, in) to rows (n, out); with `weight_grads` the backward defers the weight gradient."""
    if weight_grads is None:
        return kernels.forward(rows, weight, bias)
    found: Tensor = _DeferringLinear.apply(rows, weight, bias, weight_grads, kernels)
    return found


class _DeferringEmbedding(torch.autograd.Function):
    """Rows of a table; the backward leaves the table's gradient in `weight_grads`."""

    @staticmethod
    def forward(
        context: Any, ids: Tensor, table: Tensor, weight_grads: WeightGradStore, first: int | None
    ) -> Tensor:
        context.save_for_backward(ids, table)
        context.weight_grads, context.first = weight_grads, first
        return _rows_of(table, ids, first)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ids, table = context.saved_tensors
        context.weight_grads.add(partial(_add_table_gradient, table, gradient, ids, context.first))
        return None, None, None, None


def _rows_of(table: Tensor, ids: Tensor, first: int | None) -> Tensor:
    if first is None:
        return functional.embedding(ids, table)
    here, mine = _own(table, ids, first)
    return functional.embedding(mine, table).mul_(here[..., None])


def _own(table: Tensor, ids: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Which ids stand in a table that begins with `first`, and where; anywhere for the others."""
    mine, last = ids - first, table.shape[0] - 1
    return (mine >= 0) & (mine <= last), mine.clamp(0, last)


def _add_table_gradient(table: Tensor, gradient: Tensor, ids: Tensor, first: int | None) -> None:
    if table.grad is None:
        table.grad = torch.zeros_like(table)
    rows, ids, wide = gradient.reshape(-1, gradient.shape[-1]), ids.reshape(-1), table.grad.dtype
    here, mine = (None, ids) if first is None else _own(table, ids, first)
    for begin in range(0, len(rows), WIDENED_ROWS):
        some = slice(begin, begin + WIDENED_ROWS)
        widened = rows[some].to(wide, copy=here is not None)
        if here is not None:
            widened.mul_(here[some, None])
        table.grad.index_add_(0, mine[some], widened)


def embedding(
    ids: Tensor, table: Tensor, *, first: int | None = None, weight_grads: WeightGradStore | None = None
) -> Tensor:
    """Rows of `table`; with `weight_grads` its gradient waits there after the backward.

    A table that is a part of one begins with the id `first`; ids that are not in it give zeros.
    """
    if weight_grads is None:
        return _rows_of(table, ids, first)
    found: Tensor = _DeferringEmbedding.apply(ids, table, weight_grads, first)
    return found


class Linear(nn.Module):
    """Parameters of a linear map, used through `linear`; their values come by name, see build.py."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **where))
        self.bias = nn.Parameter(torch.empty(outputs, **where)) if bias else None

    def forward(
        self, rows: Tensor, weight_grads: WeightGradStore | None = None, kernels: LinearKernels = TORCH
    ) -> Tensor:
        return linear(rows, self.weight, self.bias, weight_grads=weight_grads, kernels=kernels)
