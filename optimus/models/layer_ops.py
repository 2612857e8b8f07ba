"""What a transformer layer consists of, each part a formula over its parameters, or its share of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from optimus.models.dropout import Dropout
from optimus.models.linear import LinearKernels, add_bias_gradient, linear_gradient
from optimus.models.manual_backward import ManualBackwardSegment
from optimus.models.norms import Norm
from optimus.models.rotary import rotate, rotate_back
from optimus.models.segment import Gradients, State, WeightGradStore

JOIN = ("join",)  # no kernel of a plan: it runs where the exchange before it has ended


class Normed(ManualBackwardSegment):
    """(x) to (x, normed)."""

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
        self, values: Any, given: Gradients, needs: tuple[bool, ...], weight_grads: WeightGradStore
    ) -> Gradients:
        beside, gradient = given
        if gradient is None:
            return (beside,)
        found = self.norm.backward(values, gradient, wanted=needs[0])
        return (_sum(found, beside),)


class Product(ManualBackwardSegment):
    """A formula around one linear map."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, linear: LinearKernels, kernels: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.linear, self.kernels = linear, kernels

    def product(self, rows: Tensor) -> Tensor:
        return self.linear.forward(rows, self.weight, self.bias)

    def product_gradient(
        self, gradient: Tensor, rows: Tensor, weight_grads: WeightGradStore, *, wanted: bool
    ) -> Tensor | None:
        return linear_gradient(
            gradient, rows, self.weight, self.bias, weight_grads, self.linear, wanted=wanted
        )


class Heads(Product):
    """(x, normed) to (x, queries, keys, values), heads turned by their positions."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        linear: LinearKernels,
        kernels: tuple[str, ...],
        *,
        counts: Sequence[int],  # of query, key and value heads
        norms: tuple[Norm, Norm] | None,  # of queries and keys
    ) -> None:
        super().__init__(weight, bias, linear, kernels)
        self._counts, self._total = list(counts), sum(counts)
        self.norms = nn.ModuleList(norms or ())

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        x, normed = state
        queries, keys, values = self._cut(self.product(normed))
        if self.norms:
            queries, keys = (norm(rows) for norm, rows in zip(self.norms, (queries, keys), strict=True))
        return x, *_turned(queries, keys, values, context)

    def forward_saving(self, state: State, context: Any, weight_grads: WeightGradStore) -> tuple[State, Any]:
        x, normed = state
        queries, keys, values = self._cut(self.product(normed))
        of_norms: tuple[Any, ...] = ()
        if self.norms:
            (queries, of_queries), (keys, of_keys) = (
                norm.forward_saving(rows) for norm, rows in zip(self.norms, (queries, keys), strict=True)
            )
            of_norms = of_queries, of_keys
        return (x, *_turned(queries, keys, values, context)), (normed.detach(), of_norms, context.rotary)

    def backward(
        self, values: Any, given: Gradients, needs: tuple[bool, ...], weight_grads: WeightGradStore
    ) -> Gradients:
        normed, of_norms, rotary = values
        beside, *heads = given
        assert all(rows is not None for rows in heads), "attention reads all heads"
        if rotary is not None:
            heads[:2] = [rotate_back(rows, rotary) for rows in heads[:2]]
        for place, (norm, kept) in enumerate(zip(self.norms, of_norms, strict=True)):
            heads[place] = norm.backward(kept, heads[place], wanted=True)
        gradient = torch.cat(heads, 1).flatten(1)
        return beside, self.product_gradient(gradient, normed, weight_grads, wanted=needs[1])

    def _cut(self, rows: Tensor) -> tuple[Tensor, ...]:
        heads = rows.view(rows.shape[0], self._total, -1)
        found: tuple[Tensor, ...] = heads.split_with_sizes(self._counts, 1)
        return found


def _turned(queries: Tensor, keys: Tensor, values: Tensor, context: Any) -> tuple[Tensor, Tensor, Tensor]:
    if context.rotary is None:
        return queries, keys, values
    # Cloned: or all of the rows would be kept beside what was turned (as they are where heads are normed).
    return rotate(queries, context.rotary), rotate(keys, context.rotary), values.clone()


class Multiplied(Product):
    """(x, rows) to (x, product), of which every rank has a part of the sum."""

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        x, rows = state
        return x, self.product(rows)

    def forward_saving(self, state: State, context: Any, weight_grads: WeightGradStore) -> tuple[State, Any]:
        return self.forward(state, context), state[1].detach()

    def backward(
        self, values: Any, given: Gradients, needs: tuple[bool, ...], weight_grads: WeightGradStore
    ) -> Gradients:
        beside, gradient = given
        assert gradient is not None
        return beside, self.product_gradient(gradient, values, weight_grads, wanted=needs[1])


class Widened(Product):
    """(x, normed) to (x, h): the MLP's first matrix (gate above up when gated), the non-linearity."""

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
        rows = self.product(normed)
        return x, Gated.apply(rows) if self._gated else self._nonlinear(rows)

    def forward_saving(self, state: State, context: Any, weight_grads: WeightGradStore) -> tuple[State, Any]:
        x, normed = state
        rows = self.product(normed)
        h = self._nonlinear(rows)
        weight_grads.mark_recomputable(h, self._nonlinear, rows)
        return (x, h), (normed.detach(), rows)

    def backward(
        self, values: Any, given: Gradients, needs: tuple[bool, ...], weight_grads: WeightGradStore
    ) -> Gradients:
        (normed, rows), (beside, gradient) = values, given
        assert gradient is not None
        if self._gated:
            inner = gated_gradient(gradient, rows)
        else:
            inner = torch.ops.aten.gelu_backward.default(gradient, rows, approximate=self._gelu)
        return beside, self.product_gradient(inner, normed, weight_grads, wanted=needs[1])

    def _nonlinear(self, rows: Tensor) -> Tensor:
        return gated(rows) if self._gated else functional.gelu(rows, approximate=self._gelu)


class Join(ManualBackwardSegment):
    """(x, rows) to (x): rows that were summed over ranks are added to the residual stream.

    It keeps no rows, and may run wherever they arrive.
    """

    kernels = JOIN
    saves_nothing = True

    def __init__(self, bias: nn.Parameter | None, dropout: Dropout) -> None:
        super().__init__()
        self.bias, self._dropout = bias, dropout

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        x, rows = state
        rows = rows if self.bias is None else rows + self.bias
        return (x + self._dropout(rows, context.keys),)

    def forward_saving(self, state: State, context: Any, weight_grads: WeightGradStore) -> tuple[State, Any]:
        return self.forward(state, context), context.keys

    def backward(
        self, values: Any, given: Gradients, needs: tuple[bool, ...], weight_grads: WeightGradStore
    ) -> Gradients:
        (gradient,) = given
        assert gradient is not None
        rows = self._dropout(gradient, values)
        if self.bias is not None and self.bias.requires_grad:
            add_bias_gradient(self.bias, rows)
        return gradient if needs[0] else None, rows if needs[1] else None


class Joined(Product):
    """(x, rows) to (x): a product and its join, where nothing comes between them."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        linear: LinearKernels,
        kernels: tuple[str, ...],
        dropout: Dropout,
    ) -> None:
        super().__init__(weight, bias, linear, kernels)
        self._dropout = dropout

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        x, rows = state
        return (x + self._dropout(self.product(rows), context.keys),)

    def forward_saving(self, state: State, context: Any, weight_grads: WeightGradStore) -> tuple[State, Any]:
        return self.forward(state, context), (state[1].detach(), context.keys)

    def backward(
        self, values: Any, given: Gradients, needs: tuple[bool, ...], weight_grads: WeightGradStore
    ) -> Gradients:
        (rows, keys), (gradient,) = values, given
        assert gradient is not None
        inner = self._dropout(gradient, keys)
        beside = gradient if needs[0] else None
        return beside, self.product_gradient(inner, rows, weight_grads, wanted=needs[1])


def gated(rows: Tensor) -> Tensor:
    """silu(first half) times second half, of rows with the gate above what it opens."""
    gate, up = rows.chunk(2, -1)
    return functional.silu(gate) * up


def gated_gradient(gradient: Tensor, rows: Tensor) -> Tensor:
    """It needs nothing but the rows, and is written in place: they are wide."""
    gate, up = rows.chunk(2, -1)
    found = torch.empty_like(rows)
    of_gate, of_up = found.chunk(2, -1)
    torch.mul(gradient, functional.silu(gate), out=of_up)
    torch.mul(gradient, up, out=of_gate)
    torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
    return found


class Gated(torch.autograd.Function):
    """For those who want a graph."""

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        context.save_for_backward(rows)
        return gated(rows)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gated_gradient(gradient, *context.saved_tensors)


def _sum(found: Tensor | None, beside: Tensor | None) -> Tensor | None:
    if found is None or beside is None:
        return beside if found is None else found
    return found.add_(beside)
