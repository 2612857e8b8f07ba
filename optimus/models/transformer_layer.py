"""A transformer layer as five segments; where it is divided, in parts with exchanges between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from optimus.job.model import Stack
from optimus.models.dropout import Dropout
from optimus.models.kernels import Kernels, Numerics
from optimus.models.layer_ops import Heads, Join, Joined, Multiplied, Normed, Widened
from optimus.models.norms import Norm
from optimus.models.param_split import ParamSplit
from optimus.models.segment import Segment, State, WeightGradStore, _ChainedSegment
from optimus.models.tensor_parallel import NO_TP, AllGather, ReduceScatter, TpGroup


class Projection(_ChainedSegment):
    """A segment around one linear map, of which it holds the parameters, or this rank's share of them."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        split: ParamSplit,
        tp_group: TpGroup = NO_TP,
        **where: Any,
    ) -> None:
        super().__init__()
        self.tp_group = tp_group
        by_rows = split.dim == 0  # of the matrix: then outputs are divided, and with them the bias
        self.splits = {"weight": split} | ({"bias": split} if bias and by_rows else {})
        own = split.length(tp_group.size)
        outputs, inputs = (own, inputs) if by_rows else (outputs, own)
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **where))
        self.bias = nn.Parameter(torch.empty(outputs, **where)) if bias else None

    def links(self) -> list[Segment]:
        """Formulas over its parameters."""
        raise NotImplementedError

    def _apply(self, *args: Any, **kwargs: Any) -> Projection:
        """Torch moves modules by it, and may put other parameters in place of these."""
        super()._apply(*args, **kwargs)
        self.link(*self.links())
        return self


class Qkv(Projection):
    """(x) to (x, queries, keys, values), heads turned by their positions."""

    kernels = ("norm1", "latent", "qkv")

    def __init__(
        self, stack: Stack, numerics: Numerics, compute: Kernels, tp_group: TpGroup = NO_TP, **where: Any
    ) -> None:
        attention = stack.attention
        heads = ((attention.heads, attention.head_dim), *((attention.kv_heads, attention.head_dim),) * 2)
        super().__init__(
            stack.hidden,
            attention.query_width + attention.key_value_width,
            bias=attention.bias,
            split=ParamSplit(dim=0, blocks=heads),
            tp_group=tp_group,
            **where,
        )
        eps, width = numerics.norm_eps, attention.head_dim
        self.norm = Norm(stack.norm, stack.hidden, eps, **where)
        self.query_norm = Norm("rmsnorm", width, eps, **where) if attention.qk_norm else None
        self.key_norm = Norm("rmsnorm", width, eps, **where) if attention.qk_norm else None
        self._linear, self._counts = compute.linear, [-(-units // tp_group.size) for units, _ in heads]
        self.link(*self.links())

    def links(self) -> list[Segment]:
        both = None if self.query_norm is None or self.key_norm is None else (self.query_norm, self.key_norm)
        counts = self._counts
        return [
            Normed(self.norm, ("norm1", "latent")),
            Heads(self.weight, self.bias, self._linear, ("qkv",), counts=counts, norms=both),
        ]

    def tp_segments(self) -> list[Segment]:
        normed, heads = self.linked
        return [
            normed,
            AllGather(self.tp_group, 1, forward_name="gather1", kernel="qkv", regather=True),
            heads,
        ]


class Attend(Segment):
    """(x, queries, keys, values) to (x, attended): rows of one span see each other."""

    kernels = ("attention",)
    defers_weight_grads = True

    def __init__(self, stack: Stack, layer: int, compute: Kernels) -> None:
        super().__init__()
        self.causal, self.compute = stack.attention.causal, compute
        self.windowed = stack.attention.window_of(layer) is not None

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        x, queries, keys, values = state
        spans = context.window_spans if self.windowed else context.spans
        return x, self.compute.attention(queries, keys, values, spans, self.causal).flatten(1)


class Joining(Projection):
    """(x, rows) to (x): a product that is added to the residual stream, with a bias of its own."""

    forward_name: str  # names of its exchange and of its kernel
    kernel: str

    def __init__(
        self, inputs: int, numerics: Numerics, compute: Kernels, site: str, tp_group: TpGroup, **given: Any
    ) -> None:
        super().__init__(inputs, tp_group=tp_group, **given)
        self._linear, self._dropout = compute.linear, Dropout(site, numerics.dropout)
        self.link(*self.links())

    def links(self) -> list[Segment]:
        return [Joined(self.weight, self.bias, self._linear, self.kernels, self._dropout)]

    def tp_segments(self) -> list[Segment]:
        return [
            Multiplied(self.weight, None, self._linear, self.kernels),
            ReduceScatter(self.tp_group, 1, forward_name=self.forward_name, kernel=self.kernel),
            Join(self.bias, self._dropout),
        ]


class Out(Joining):
    """(x, attended) to (x)."""

    kernels = ("out",)
    forward_name, kernel = "scatter1", "out"

    def __init__(
        self,
        stack: Stack,
        numerics: Numerics,
        compute: Kernels,
        site: str,
        tp_group: TpGroup = NO_TP,
        **where: Any,
    ) -> None:
        attention = stack.attention
        super().__init__(
            attention.output_width,
            numerics,
            compute,
            site,
            tp_group,
            outputs=stack.hidden,
            bias=attention.bias if attention.output_bias is None else attention.output_bias,
            split=ParamSplit(dim=1, blocks=((attention.heads, attention.output_width // attention.heads),)),
            **where,
        )


class Up(Projection):
    """(x) to (x, h): norm, the MLP's first matrix (gate above up when gated), the non-linearity."""

    kernels = ("norm2", "up")

    def __init__(
        self, stack: Stack, numerics: Numerics, compute: Kernels, tp_group: TpGroup = NO_TP, **where: Any
    ) -> None:
        mlp = stack.mlp
        super().__init__(
            stack.hidden,
            mlp.up_width,
            bias=mlp.bias,
            split=ParamSplit(dim=0, blocks=((mlp.width, 1),) * (2 if mlp.gated else 1)),
            tp_group=tp_group,
            **where,
        )
        self.norm = Norm(stack.norm, stack.hidden, numerics.norm_eps, **where)
        self._linear, self._nonlinear = compute.linear, (mlp.gated, numerics.gelu)
        self.link(*self.links())

    def links(self) -> list[Segment]:
        gated, gelu = self._nonlinear
        return [
            Normed(self.norm, ("norm2",)),
            Widened(self.weight, self.bias, self._linear, ("up",), gated=gated, gelu=gelu),
        ]

    def tp_segments(self) -> list[Segment]:
        normed, widened = self.linked
        return [
            normed,
            AllGather(self.tp_group, 1, forward_name="gather2", kernel="up", regather=True),
            widened,
        ]


class Down(Joining):
    """(x, h) to (x)."""

    kernels = ("down",)
    forward_name, kernel = "scatter2", "down"

    def __init__(
        self,
        stack: Stack,
        numerics: Numerics,
        compute: Kernels,
        site: str,
        tp_group: TpGroup = NO_TP,
        **where: Any,
    ) -> None:
        super().__init__(
            stack.mlp.width,
            numerics,
            compute,
            site,
            tp_group,
            outputs=stack.hidden,
            bias=stack.mlp.bias,
            split=ParamSplit(dim=1, blocks=((stack.mlp.width, 1),)),
            **where,
        )
