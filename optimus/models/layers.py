"""A transformer layer as five segments, cut where tensor parallelism communicates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from optimus.job.model import Stack
from optimus.models.dropout import dropout, hashed
from optimus.models.linear import linear
from optimus.models.norms import Norm
from optimus.models.numerics import Kernels, Numerics
from optimus.models.rotary import rotate
from optimus.models.segment import Deferred, Segment, State, cheap


class Projection(Segment):
    """A segment around one linear map, of which it holds the parameters."""

    defers = True

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        stack: Stack,
        numerics: Numerics,
        compute: Kernels,
        site: str = "",
        **where: Any,
    ) -> None:
        super().__init__()
        self.stack, self.numerics, self.compute = stack, numerics, compute
        self.site = hashed("site", site)
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **where))
        self.bias = nn.Parameter(torch.empty(outputs, **where)) if bias else None

    def project(self, rows: Tensor, deferred: Deferred | None) -> Tensor:
        return linear(rows, self.weight, self.bias, deferred=deferred, kernels=self.compute.linear)

    def joined(self, x: Tensor, rows: Tensor, keys: Tensor | None) -> Tensor:
        """The residual stream with what this projection adds."""
        return x + dropout(rows, keys, self.site, self.numerics.dropout)


class Qkv(Projection):
    """(x) to (x, queries, keys, values), heads turned by their positions."""

    kernels = ("norm1", "latent", "qkv")
    has_cheap = True

    def __init__(self, stack: Stack, numerics: Numerics, compute: Kernels, **where: Any) -> None:
        attention = stack.attention
        super().__init__(
            stack.hidden,
            attention.query_width + attention.key_value_width,
            bias=attention.bias,
            stack=stack,
            numerics=numerics,
            compute=compute,
            **where,
        )
        eps = numerics.norm_eps
        self.norm = Norm(stack.norm, stack.hidden, eps, **where)
        width = attention.head_dim
        self.query_norm = Norm("rmsnorm", width, eps, **where) if attention.qk_norm else None
        self.key_norm = Norm("rmsnorm", width, eps, **where) if attention.qk_norm else None

    def forward(self, state: State, context: Any, deferred: Deferred | None = None) -> State:
        (x,) = state
        attention = self.stack.attention
        counts = (attention.heads, attention.kv_heads, attention.kv_heads)
        normed = cheap(deferred, self.norm, x)
        rows = self.project(normed, deferred).unflatten(-1, (sum(counts), attention.head_dim))
        queries, keys, values = rows.split(counts, 1)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        if context.rotary is not None:
            queries, keys = rotate(queries, context.rotary), rotate(keys, context.rotary)
            values = values.clone()  # or all of the rows would be kept beside what was turned
        return x, queries, keys, values


class Attend(Segment):
    """(x, queries, keys, values) to (x, attended): rows of one span see each other."""

    kernels = ("attention",)
    defers = True

    def __init__(self, stack: Stack, layer: int, compute: Kernels) -> None:
        super().__init__()
        self.causal, self.compute = stack.attention.causal, compute
        self.windowed = stack.attention.window_of(layer) is not None

    def forward(self, state: State, context: Any, deferred: Deferred | None = None) -> State:
        x, queries, keys, values = state
        spans = context.window_spans if self.windowed else context.spans
        return x, self.compute.attention(queries, keys, values, spans, self.causal).flatten(1)


class Out(Projection):
    """(x, attended) to (x)."""

    kernels = ("out",)

    def __init__(self, stack: Stack, numerics: Numerics, compute: Kernels, site: str, **where: Any) -> None:
        attention = stack.attention
        super().__init__(
            attention.output_width,
            stack.hidden,
            bias=attention.bias if attention.output_bias is None else attention.output_bias,
            stack=stack,
            numerics=numerics,
            compute=compute,
            site=site,
            **where,
        )

    def forward(self, state: State, context: Any, deferred: Deferred | None = None) -> State:
        x, attended = state
        return (self.joined(x, self.project(attended, deferred), context.keys),)


class _Gated(torch.autograd.Function):
    """silu(first half) times second half, of which a backward needs nothing but the halves."""

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        context.save_for_backward(rows)
        gate, up = rows.chunk(2, -1)
        return functional.silu(gate) * up

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (rows,) = context.saved_tensors
        gate, up = rows.chunk(2, -1)
        found = torch.empty_like(rows)
        of_gate, of_up = found.chunk(2, -1)  # written in place: rows are wide
        torch.mul(gradient, functional.silu(gate), out=of_up)
        torch.mul(gradient, up, out=of_gate)
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return found


def gated(rows: Tensor) -> Tensor:
    """Of rows with the gate above what it opens."""
    found: Tensor = _Gated.apply(rows)
    return found


class Up(Projection):
    """(x) to (x, h): norm, the MLP's first matrix (gate above up when gated), the non-linearity."""

    kernels = ("norm2", "up")
    has_cheap = True

    def __init__(self, stack: Stack, numerics: Numerics, compute: Kernels, **where: Any) -> None:
        super().__init__(
            stack.hidden,
            stack.mlp.up_width,
            bias=stack.mlp.bias,
            stack=stack,
            numerics=numerics,
            compute=compute,
            **where,
        )
        self.norm = Norm(stack.norm, stack.hidden, numerics.norm_eps, **where)

    def forward(self, state: State, context: Any, deferred: Deferred | None = None) -> State:
        (x,) = state
        rows = self.project(cheap(deferred, self.norm, x), deferred)
        return x, cheap(deferred, self._nonlinear, rows)

    def _nonlinear(self, rows: Tensor) -> Tensor:
        return gated(rows) if self.stack.mlp.gated else functional.gelu(rows, approximate=self.numerics.gelu)


class Down(Projection):
    """(x, h) to (x)."""

    kernels = ("down",)

    def __init__(self, stack: Stack, numerics: Numerics, compute: Kernels, site: str, **where: Any) -> None:
        super().__init__(
            stack.mlp.width,
            stack.hidden,
            bias=stack.mlp.bias,
            stack=stack,
            numerics=numerics,
            compute=compute,
            site=site,
            **where,
        )

    def forward(self, state: State, context: Any, deferred: Deferred | None = None) -> State:
        x, h = state
        return (self.joined(x, self.project(h, deferred), context.keys),)
