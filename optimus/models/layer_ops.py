"""Defines ops of a transformer layer: segments with a hand-written backward over others' parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from optimus.models.attention import apply_rotary, apply_rotary_backward
from optimus.models.deepstack import AddRows, GiveRows
from optimus.models.dropout import Dropout
from optimus.models.kernels import LinearKernels, Norm, add_bias_gradient, linear_backward
from optimus.models.segment import Gradients, ManualBackwardSegment, NeedsGrad, State, WeightGradStore

SideHook = GiveRows | AddRows | None  # what a layer does with its output besides passing it on
RESIDUAL_ADD = ("residual_add",)  # no kernel of plans: it runs where the collective before it has ended


class PreNorm(ManualBackwardSegment):
    """Normalizes the residual stream: (x) to (x, normed)."""

    has_recomputable = True

    def __init__(self, norm: Norm, kernels: tuple[str, ...]) -> None:
        super().__init__()
        self.norm, self.kernels = norm, kernels

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        (x,) = state
        return x, self.norm(x)

    def forward_saving(self, state: State, context: Any, weight_grads: WeightGradStore) -> tuple[State, Any]:
        (x,) = state
        rows = x.detach()
        normed, values = self.norm.forward_saving(rows)
        weight_grads.mark_recomputable(normed, self.norm, rows)
        return (x, normed), values

    def backward(
        self, values: Any, gradients: Gradients, needs_grad: NeedsGrad, weight_grads: WeightGradStore
    ) -> Gradients:
        residual_grad, normed_grad = gradients
        if normed_grad is None:
            return (residual_grad,)
        x_grad = self.norm.backward(values, normed_grad, needs_input_grad=needs_grad[0])
        if x_grad is None or residual_grad is None:
            return (residual_grad if x_grad is None else x_grad,)
        return (x_grad.add_(residual_grad),)


class _LinearOp(ManualBackwardSegment):
    """Base class of ops around one linear map."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, linear: LinearKernels, kernels: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.linear, self.kernels = linear, kernels

    def linear_forward(self, rows: Tensor) -> Tensor:
        return self.linear.forward(rows, self.weight, self.bias)

    def linear_backward(
        self, gradient: Tensor, rows: Tensor, weight_grads: WeightGradStore, *, needs_input_grad: bool
    ) -> Tensor | None:
        weight, bias, kernels = self.weight, self.bias, self.linear
        return linear_backward(
            gradient, rows, weight, bias, weight_grads, kernels, needs_input_grad=needs_input_grad
        )


class QkvLinear(_LinearOp):
    """Computes attention heads with rotary positions: (x, normed) to (x, queries, keys, values).

    With `joins_kv`, keys and values are the heads of one tensor, which context-parallel ranks gather.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        linear: LinearKernels,
        kernels: tuple[str, ...],
        *,
        heads: Sequence[int],  # number of query, key and value heads
        norms: tuple[Norm, Norm] | None,  # of query and key heads
        joins_kv: bool = False,
    ) -> None:
        super().__init__(weight, bias, linear, kernels)
        self._heads, self._total_heads, self._joins_kv = list(heads), sum(heads), joins_kv
        self.norms = nn.ModuleList(norms or ())

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        x, normed = state
        queries, keys, values = self._split_heads(self.linear_forward(normed))
        if self.norms:
            queries, keys = (norm(rows) for norm, rows in zip(self.norms, (queries, keys), strict=True))
        return x, *self._rotated(queries, keys, values, context)

    def forward_saving(self, state: State, context: Any, weight_grads: WeightGradStore) -> tuple[State, Any]:
        x, normed = state
        queries, keys, values = self._split_heads(self.linear_forward(normed))
        norm_values: tuple[Any, ...] = ()
        if self.norms:
            (queries, query_values), (keys, key_values) = (
                norm.forward_saving(rows) for norm, rows in zip(self.norms, (queries, keys), strict=True)
            )
            norm_values = query_values, key_values
        saved = normed.detach(), norm_values, context.rotary
        return (x, *self._rotated(queries, keys, values, context)), saved

    def backward(
        self, values: Any, gradients: Gradients, needs_grad: NeedsGrad, weight_grads: WeightGradStore
    ) -> Gradients:
        normed, norm_values, rotary = values
        residual_grad, *head_grads = gradients
        if self._joins_kv and head_grads[1] is not None:
            head_grads[1:] = head_grads[1].chunk(2, 1)
        assert all(gradient is not None for gradient in head_grads), "attention reads all heads"
        if rotary is not None:
            head_grads[:2] = [apply_rotary_backward(gradient, rotary) for gradient in head_grads[:2]]
        for index, (norm, saved) in enumerate(zip(self.norms, norm_values, strict=True)):
            head_grads[index] = norm.backward(saved, head_grads[index], needs_input_grad=True)
        gradient = torch.cat(head_grads, 1).flatten(1)
        normed_grad = self.linear_backward(gradient, normed, weight_grads, needs_input_grad=needs_grad[1])
        return residual_grad, normed_grad

    def _split_heads(self, rows: Tensor) -> tuple[Tensor, ...]:
        heads: tuple[Tensor, ...] = rows.view(rows.shape[0], self._total_heads, -1).split_with_sizes(
            self._heads, 1
        )
        return heads

    def _rotated(self, queries: Tensor, keys: Tensor, values: Tensor, context: Any) -> tuple[Tensor, ...]:
        if context.rotary is not None:
            queries, keys = apply_rotary(queries, context.rotary), apply_rotary(keys, context.rotary)
        if self._joins_kv:
            return queries, torch.cat((keys, values), 1)
        # The clone keeps the values alone alive; a view would keep the rows of queries and keys too.
        return queries, keys, values if context.rotary is None else values.clone()


class PartialLinear(_LinearOp):
    """Multiplies by this rank's shard of a row-parallel weight: (x, rows) to (x, partial sum)."""

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        x, rows = state
        return x, self.linear_forward(rows)

    def forward_saving(self, state: State, context: Any, weight_grads: WeightGradStore) -> tuple[State, Any]:
        return self.forward(state, context), state[1].detach()

    def backward(
        self, values: Any, gradients: Gradients, needs_grad: NeedsGrad, weight_grads: WeightGradStore
    ) -> Gradients:
        residual_grad, gradient = gradients
        assert gradient is not None
        return residual_grad, self.linear_backward(
            gradient, values, weight_grads, needs_input_grad=needs_grad[1]
        )


class MlpUp(_LinearOp):
    """Runs linear (gate and up in one when gated) and activation of an MLP: (x, normed) to (x, h)."""

    has_recomputable = True

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        linear: LinearKernels,
        kernels: tuple[str, ...],
        *,
        gated: bool,
        gelu: str,
    ) -> None:
        super().__init__(weight, bias, linear, kernels)
        self._gated, self._gelu = gated, gelu

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        x, normed = state
        rows = self.linear_forward(normed)
        return x, SwiGlu.apply(rows) if self._gated else self._activation(rows)

    def forward_saving(self, state: State, context: Any, weight_grads: WeightGradStore) -> tuple[State, Any]:
        x, normed = state
        rows = self.linear_forward(normed)
        h = self._activation(rows)
        weight_grads.mark_recomputable(h, self._activation, rows)
        return (x, h), (normed.detach(), rows)

    def backward(
        self, values: Any, gradients: Gradients, needs_grad: NeedsGrad, weight_grads: WeightGradStore
    ) -> Gradients:
        (normed, rows), (residual_grad, gradient) = values, gradients
        assert gradient is not None
        if self._gated:
            inner = _swiglu_backward(gradient, rows)
        else:
            inner = torch.ops.aten.gelu_backward.default(gradient, rows, approximate=self._gelu)
        return residual_grad, self.linear_backward(
            inner, normed, weight_grads, needs_input_grad=needs_grad[1]
        )

    def _activation(self, rows: Tensor) -> Tensor:
        return swiglu(rows) if self._gated else functional.gelu(rows, approximate=self._gelu)


class ResidualAdd(ManualBackwardSegment):
    """Adds rows that were summed over ranks, with bias and dropout, to the residual stream: (x, rows) to (x).

    It saves no rows, so that it may run wherever they arrive.
    """

    kernels = RESIDUAL_ADD
    saves_nothing = True

    def __init__(self, bias: nn.Parameter | None, dropout: Dropout, side: SideHook = None) -> None:
        super().__init__()
        self.bias, self._dropout, self._side = bias, dropout, side

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        x, rows = state
        rows = rows if self.bias is None else rows + self.bias
        x = x + self._dropout(rows, context.dropout_keys)
        return (x if self._side is None else self._side(x, context.side),)

    def forward_saving(self, state: State, context: Any, weight_grads: WeightGradStore) -> tuple[State, Any]:
        return self.forward(state, context), (context.dropout_keys, self._side and context.side)

    def backward(
        self, values: Any, gradients: Gradients, needs_grad: NeedsGrad, weight_grads: WeightGradStore
    ) -> Gradients:
        (keys, side), (gradient,) = values, gradients
        assert gradient is not None
        gradient = gradient if self._side is None else self._side.backward(gradient, side)
        rows_grad = self._dropout(gradient, keys)
        if self.bias is not None and self.bias.requires_grad:
            add_bias_gradient(self.bias, rows_grad)
        return gradient if needs_grad[0] else None, rows_grad if needs_grad[1] else None


class LinearResidualAdd(_LinearOp):
    """Adds a product, with dropout, to the residual stream: (x, rows) to (x)."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        linear: LinearKernels,
        kernels: tuple[str, ...],
        dropout: Dropout,
        side: SideHook = None,
    ) -> None:
        super().__init__(weight, bias, linear, kernels)
        self._dropout, self._side = dropout, side

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        x, rows = state
        x = x + self._dropout(self.linear_forward(rows), context.dropout_keys)
        return (x if self._side is None else self._side(x, context.side),)

    def forward_saving(self, state: State, context: Any, weight_grads: WeightGradStore) -> tuple[State, Any]:
        saved = state[1].detach(), context.dropout_keys, self._side and context.side
        return self.forward(state, context), saved

    def backward(
        self, values: Any, gradients: Gradients, needs_grad: NeedsGrad, weight_grads: WeightGradStore
    ) -> Gradients:
        (rows, keys, side), (gradient,) = values, gradients
        assert gradient is not None
        gradient = gradient if self._side is None else self._side.backward(gradient, side)
        inner = self._dropout(gradient, keys)
        residual_grad = gradient if needs_grad[0] else None
        return residual_grad, self.linear_backward(inner, rows, weight_grads, needs_input_grad=needs_grad[1])


def swiglu(rows: Tensor) -> Tensor:
    """Returns silu(gate) * up of rows whose first half is the gate."""
    gate, up = rows.chunk(2, -1)
    return functional.silu(gate) * up


def _swiglu_backward(gradient: Tensor, rows: Tensor) -> Tensor:
    """Returns the gradient of the rows; it reads nothing else and works in place, since rows are wide."""
    gate, up = rows.chunk(2, -1)
    rows_grad = torch.empty_like(rows)
    gate_grad, up_grad = rows_grad.chunk(2, -1)
    torch.mul(gradient, functional.silu(gate), out=up_grad)
    torch.mul(gradient, up, out=gate_grad)
    torch.ops.aten.silu_backward.grad_input(gate_grad, gate, grad_input=gate_grad)
    return rows_grad


class SwiGlu(torch.autograd.Function):
    """`swiglu` inside an autograd graph."""

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        context.save_for_backward(rows)
        return swiglu(rows)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return _swiglu_backward(gradient, *context.saved_tensors)
