"""A transformer layer as five segments; where it is divided, in parts with exchanges between them."""

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
from optimus.models.segment import Deferred, Gradients, Part, Saved, Segment, State, cheap
from optimus.models.split import Split
from optimus.models.tensor_parallel import ALONE, Gather, Scatter, Share

JOIN = ("join",)  # no kernel of a plan: it runs where the exchange before it has ended


class Projection(Segment):
    """A segment around one linear map, of which it holds the parameters, or this rank's share of them."""

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
        split: Split,
        share: Share = ALONE,
        site: str = "",
        **where: Any,
    ) -> None:
        super().__init__()
        self.stack, self.numerics, self.compute, self.share = stack, numerics, compute, share
        self.site = hashed("site", site)
        by_rows = split.dim == 0  # of the matrix: then outputs are divided, and with them the bias
        self.splits = {"weight": split} | ({"bias": split} if bias and by_rows else {})
        own = split.length(share.size)
        outputs, inputs = (own, inputs) if by_rows else (outputs, own)
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **where))
        self.bias = nn.Parameter(torch.empty(outputs, **where)) if bias else None

    def project(self, rows: Tensor, deferred: Deferred | None) -> Tensor:
        return linear(rows, self.weight, self.bias, deferred=deferred, kernels=self.compute.linear)


class Qkv(Projection):
    """(x) to (x, queries, keys, values), heads turned by their positions."""

    kernels = ("norm1", "latent", "qkv")
    has_cheap = True

    def __init__(
        self, stack: Stack, numerics: Numerics, compute: Kernels, share: Share = ALONE, **where: Any
    ) -> None:
        attention = stack.attention
        heads = ((attention.heads, attention.head_dim), *((attention.kv_heads, attention.head_dim),) * 2)
        split = Split(dim=0, blocks=heads)
        super().__init__(
            stack.hidden,
            attention.query_width + attention.key_value_width,
            bias=attention.bias,
            stack=stack,
            numerics=numerics,
            compute=compute,
            split=split,
            share=share,
            **where,
        )
        self._counts = [-(-units // share.size) for units, _ in heads]
        eps = numerics.norm_eps
        self.norm = Norm(stack.norm, stack.hidden, eps, **where)
        width = attention.head_dim
        self.query_norm = Norm("rmsnorm", width, eps, **where) if attention.qk_norm else None
        self.key_norm = Norm("rmsnorm", width, eps, **where) if attention.qk_norm else None

    def parts(self) -> list[Segment]:
        reads = (self.weight, self.bias, self.query_norm, self.key_norm)
        return [
            Part(self, self._normed, ("norm1", "latent"), [self.norm], has_cheap=True),
            Gather(self.share, 1, there="gather1", of="qkv", regathers=True),
            Part(self, self._heads, ("qkv",), reads),
        ]

    def forward(self, state: State, context: Any, deferred: Deferred | None = None) -> State:
        return self._heads(self._normed(state, context, deferred), context, deferred)

    def _normed(self, state: State, context: Any, deferred: Deferred | None) -> State:
        (x,) = state
        return x, cheap(deferred, self.norm, x)

    def _heads(self, state: State, context: Any, deferred: Deferred | None) -> State:
        x, normed = state
        rows = self.project(normed, deferred).unflatten(-1, (sum(self._counts), -1))
        queries, keys, values = rows.split(self._counts, 1)
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


class Joining(Projection):
    """(x, rows) to (x): a product that is added to the residual stream, with a bias of its own."""

    there: str  # names of its exchange and of its kernel
    of: str

    def parts(self) -> list[Segment]:
        return [
            Part(self, self._multiplied, self.kernels, [self.weight]),
            Scatter(self.share, 1, there=self.there, of=self.of),
            Join(self, self._joined, JOIN, [self.bias]),
        ]

    def forward(self, state: State, context: Any, deferred: Deferred | None = None) -> State:
        x, rows = state
        return self._added(x, self.project(rows, deferred), context)

    def _multiplied(self, state: State, context: Any, deferred: Deferred | None) -> State:
        x, rows = state
        return x, linear(rows, self.weight, deferred=deferred, kernels=self.compute.linear)

    def _joined(self, state: State, context: Any, deferred: Deferred | None) -> State:
        x, rows = state
        return self._added(x, rows if self.bias is None else rows + self.bias, context)

    def _added(self, x: Tensor, rows: Tensor, context: Any) -> State:
        return (x + dropout(rows, context.keys, self.site, self.numerics.dropout),)


class _Joined(Saved):
    """All that the gradient of a join depends on."""

    __slots__ = ("keys",)

    def __init__(self, keys: Tensor | None) -> None:
        super().__init__((), (), Deferred())
        self.keys = keys


class Join(Part):
    """What ends a divided layer: rows that were summed over ranks are added to the residual stream.

    Its gradient is a formula, so that it needs no graph, keeps no rows, and may run wherever they arrive.
    """

    keeps_nothing = True

    def run(
        self, state: State, needs: tuple[bool, ...], context: Any, *, empties: bool = False
    ) -> tuple[State, Saved | None]:
        with torch.no_grad():
            found = self.forward(state, context)
        if not self.trained and not any(needs):
            return found, None
        return tuple(tensor.requires_grad_() for tensor in found), _Joined(context.keys)

    def input_gradient(self, saved: Saved, gradients: Gradients, *, split: bool) -> Gradients:
        (gradient,), owner = gradients, self.owner
        assert isinstance(saved, _Joined) and isinstance(owner, Joining) and gradient is not None
        rows = dropout(gradient, saved.keys, owner.site, owner.numerics.dropout)
        if self.trained:
            self.add_gradients(self.trained, (rows.sum(0),))
        return gradient, rows


class Out(Joining):
    """(x, attended) to (x)."""

    kernels = ("out",)
    there, of = "scatter1", "out"

    def __init__(
        self,
        stack: Stack,
        numerics: Numerics,
        compute: Kernels,
        site: str,
        share: Share = ALONE,
        **where: Any,
    ) -> None:
        attention = stack.attention
        super().__init__(
            attention.output_width,
            stack.hidden,
            bias=attention.bias if attention.output_bias is None else attention.output_bias,
            stack=stack,
            numerics=numerics,
            compute=compute,
            split=Split(dim=1, blocks=((attention.heads, attention.output_width // attention.heads),)),
            share=share,
            site=site,
            **where,
        )


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

    def __init__(
        self, stack: Stack, numerics: Numerics, compute: Kernels, share: Share = ALONE, **where: Any
    ) -> None:
        mlp = stack.mlp
        super().__init__(
            stack.hidden,
            mlp.up_width,
            bias=mlp.bias,
            stack=stack,
            numerics=numerics,
            compute=compute,
            split=Split(dim=0, blocks=((mlp.width, 1),) * (2 if mlp.gated else 1)),
            share=share,
            **where,
        )
        self.norm = Norm(stack.norm, stack.hidden, numerics.norm_eps, **where)

    def parts(self) -> list[Segment]:
        return [
            Part(self, self._normed, ("norm2",), [self.norm], has_cheap=True),
            Gather(self.share, 1, there="gather2", of="up", regathers=True),
            Part(self, self._widened, ("up",), [self.weight, self.bias], has_cheap=True),
        ]

    def forward(self, state: State, context: Any, deferred: Deferred | None = None) -> State:
        return self._widened(self._normed(state, context, deferred), context, deferred)

    def _normed(self, state: State, context: Any, deferred: Deferred | None) -> State:
        (x,) = state
        return x, cheap(deferred, self.norm, x)

    def _widened(self, state: State, context: Any, deferred: Deferred | None) -> State:
        x, normed = state
        return x, cheap(deferred, self._nonlinear, self.project(normed, deferred))

    def _nonlinear(self, rows: Tensor) -> Tensor:
        return gated(rows) if self.stack.mlp.gated else functional.gelu(rows, approximate=self.numerics.gelu)


class Down(Joining):
    """(x, h) to (x)."""

    kernels = ("down",)
    there, of = "scatter2", "down"

    def __init__(
        self,
        stack: Stack,
        numerics: Numerics,
        compute: Kernels,
        site: str,
        share: Share = ALONE,
        **where: Any,
    ) -> None:
        super().__init__(
            stack.mlp.width,
            stack.hidden,
            bias=stack.mlp.bias,
            stack=stack,
            numerics=numerics,
            compute=compute,
            split=Split(dim=1, blocks=((stack.mlp.width, 1),)),
            share=share,
            site=site,
            **where,
        )
