"""Builds the five segments of a transformer layer, and the ops and collectives of parallel ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from optimus.ir.op import KernelName
from optimus.job.model import Stack
from optimus.job.own_layers import GELU_APPROXIMATIONS
from optimus.models.attention import attend_by_blocks
from optimus.models.collectives import ParamSplit, TpGroup
from optimus.models.context_parallel import ContextGather
from optimus.models.dropout import Dropout
from optimus.models.kernels import KernelSet, Norm
from optimus.models.layer_ops import (
    LinearResidualAdd,
    MlpUp,
    PartialLinear,
    PreNorm,
    QkvLinear,
    ResidualAdd,
    SideHook,
)
from optimus.models.segment import Segment, SequentialSegment, State, WeightGradStore
from optimus.models.tensor_parallel import AllGather, ReduceScatter


def build_layer_segments(
    stack: Stack,
    layer: int,
    name: str,
    compute: KernelSet,
    tp_group: TpGroup,
    cp_group: TpGroup,
    side: SideHook = None,
    **factory_kwargs: Any,
) -> list[Segment]:
    """Returns the segments of one layer; `name` is the layer's in the model, `side` reads its output."""
    return [
        QkvSegment(stack, compute, tp_group, joins_kv=cp_group.size > 1, **factory_kwargs),
        SelfAttention(stack, layer, compute, cp_group),
        build_attention_out(stack, compute, f"{name}.out", tp_group, **factory_kwargs),
        MlpUpSegment(stack, compute, tp_group, **factory_kwargs),
        build_mlp_down(stack, compute, f"{name}.down", tp_group, side=side, **factory_kwargs),
    ]


class LinearSegment(SequentialSegment):
    """Base class of segments around one linear map; it owns the map's parameters, or this rank's shards."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        split: ParamSplit,
        tp_group: TpGroup,
        **factory_kwargs: Any,
    ) -> None:
        super().__init__()
        self.tp_group = tp_group
        column_parallel = split.dim == 0  # the outputs are sharded, and the bias with them
        self.splits = {"weight": split} | ({"bias": split} if bias and column_parallel else {})
        length = split.shard_length(tp_group.size)
        outputs, inputs = (length, inputs) if column_parallel else (outputs, length)
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **factory_kwargs))
        self.bias = nn.Parameter(torch.empty(outputs, **factory_kwargs)) if bias else None

    def ops(self) -> list[Segment]:
        """Returns its ops over the parameters that it owns."""
        raise NotImplementedError

    def _apply(self, *args: Any, **kwargs: Any) -> LinearSegment:
        """Moves the module, as torch does; new ops take the place of those over the old parameters."""
        super()._apply(*args, **kwargs)
        self.set_segments(self.ops())
        return self


class QkvSegment(LinearSegment):
    """Computes attention heads: (x) to (x, queries, keys, values), or keys and values as one tensor."""

    kernels = (KernelName.NORM1, KernelName.LATENT, KernelName.QKV)

    def __init__(
        self,
        stack: Stack,
        compute: KernelSet,
        tp_group: TpGroup,
        *,
        joins_kv: bool,
        **factory_kwargs: Any,
    ) -> None:
        attention = stack.attention
        heads, kv_heads, width = attention.heads, attention.kv_heads, attention.head_dim
        super().__init__(
            stack.hidden,
            attention.query_width + attention.key_value_width,
            bias=attention.bias,
            split=ParamSplit(dim=0, blocks=((heads, width), (kv_heads, width), (kv_heads, width))),
            tp_group=tp_group,
            **factory_kwargs,
        )
        eps = stack.norm_eps
        self.norm = Norm(stack.norm, stack.hidden, eps, **factory_kwargs)
        self.query_norm = Norm("rmsnorm", width, eps, **factory_kwargs) if attention.qk_norm else None
        self.key_norm = Norm("rmsnorm", width, eps, **factory_kwargs) if attention.qk_norm else None
        self._linear, self._joins_kv = compute.linear, joins_kv
        self._heads = [-(-count // tp_group.size) for count in (heads, kv_heads, kv_heads)]
        self.set_segments(self.ops())

    def ops(self) -> list[Segment]:
        norms = None
        if self.query_norm is not None and self.key_norm is not None:
            norms = self.query_norm, self.key_norm
        return [
            PreNorm(self.norm, (KernelName.NORM1, KernelName.LATENT)),
            QkvLinear(
                self.weight,
                self.bias,
                self._linear,
                (KernelName.QKV,),
                heads=self._heads,
                norms=norms,
                joins_kv=self._joins_kv,
            ),
        ]

    def parallel_segments(self) -> list[Segment]:
        if self.tp_group.size == 1:
            return [self]
        norm, linear = self.segments
        gather = AllGather(
            self.tp_group, 1, forward_name=KernelName.GATHER1, kernel=KernelName.QKV, regather=True
        )
        return [norm, gather, linear]


class SelfAttention(Segment):
    """Lets the rows of each span attend to one another: (x, queries, keys, values) to (x, attended).

    With context parallelism, this rank's queries attend to keys and values of all ranks, which were gathered
    as one tensor.
    """

    kernels = (KernelName.ATTENTION,)
    defers_weight_grads = True

    def __init__(self, stack: Stack, layer: int, compute: KernelSet, cp_group: TpGroup) -> None:
        super().__init__()
        self.cp_group = cp_group
        self.causal, self.compute = stack.attention.causal, compute
        self.windowed = stack.attention.window_of(layer) is not None

    def forward(self, state: State, context: Any, weight_grads: WeightGradStore | None = None) -> State:
        if self.cp_group.size > 1:
            x, queries, keys_values = state
            keys, values = keys_values.chunk(2, 1)
            return x, attend_by_blocks(queries, keys, values, context.share.blocks).flatten(1)
        x, queries, keys, values = state
        spans = context.window_spans if self.windowed else context.spans
        return x, self.compute.attention(queries, keys, values, spans, self.causal).flatten(1)

    def parallel_segments(self) -> list[Segment]:
        return [ContextGather(self.cp_group, 2), self] if self.cp_group.size > 1 else [self]


class MlpUpSegment(LinearSegment):
    """Runs norm and first half of an MLP: (x) to (x, h)."""

    kernels = (KernelName.NORM2, KernelName.UP)

    def __init__(
        self,
        stack: Stack,
        compute: KernelSet,
        tp_group: TpGroup,
        **factory_kwargs: Any,
    ) -> None:
        mlp = stack.mlp
        super().__init__(
            stack.hidden,
            mlp.up_width,
            bias=mlp.bias,
            split=ParamSplit(dim=0, blocks=((mlp.width, 1),) * (2 if mlp.gated else 1)),
            tp_group=tp_group,
            **factory_kwargs,
        )
        self.norm = Norm(stack.norm, stack.hidden, stack.norm_eps, **factory_kwargs)
        self._linear, self._gated = compute.linear, mlp.gated
        self._gelu = "none" if mlp.gated else GELU_APPROXIMATIONS[mlp.activation_name]
        self.set_segments(self.ops())

    def ops(self) -> list[Segment]:
        return [
            PreNorm(self.norm, (KernelName.NORM2,)),
            MlpUp(self.weight, self.bias, self._linear, (KernelName.UP,), gated=self._gated, gelu=self._gelu),
        ]

    def parallel_segments(self) -> list[Segment]:
        if self.tp_group.size == 1:
            return [self]
        norm, linear = self.segments
        gather = AllGather(
            self.tp_group, 1, forward_name=KernelName.GATHER2, kernel=KernelName.UP, regather=True
        )
        return [norm, gather, linear]


class ResidualProjection(LinearSegment):
    """Adds a product, with bias and dropout, to the residual stream: (x, rows) to (x)."""

    def __init__(
        self,
        stack: Stack,
        compute: KernelSet,
        site: str,
        tp_group: TpGroup,
        *,
        kernel: KernelName,
        scatter: str,
        bias: bool,
        block: tuple[int, int],
        side: SideHook = None,
        **factory_kwargs: Any,
    ) -> None:
        units, length = block
        super().__init__(
            units * length,
            stack.hidden,
            bias=bias,
            split=ParamSplit(dim=1, blocks=(block,)),
            tp_group=tp_group,
            **factory_kwargs,
        )
        self.kernels, self._kernel, self._scatter = (kernel,), kernel, scatter
        self._linear, self._dropout = compute.linear, Dropout(site, stack.dropout_rate)
        self._side = side
        self.set_segments(self.ops())

    def ops(self) -> list[Segment]:
        dropout, side = self._dropout, self._side
        return [LinearResidualAdd(self.weight, self.bias, self._linear, self.kernels, dropout, side)]

    def parallel_segments(self) -> list[Segment]:
        if self.tp_group.size == 1:
            return [self]
        return [
            PartialLinear(self.weight, None, self._linear, self.kernels),
            ReduceScatter(self.tp_group, 1, forward_name=self._scatter, kernel=self._kernel),
            ResidualAdd(self.bias, self._dropout, self._side),
        ]


def build_attention_out(
    stack: Stack,
    compute: KernelSet,
    site: str,
    tp_group: TpGroup,
    **factory_kwargs: Any,
) -> ResidualProjection:
    """Returns the projection of attended rows; `site` names its dropout."""
    attention = stack.attention
    return ResidualProjection(
        stack,
        compute,
        site,
        tp_group,
        kernel=KernelName.OUT,
        scatter=KernelName.SCATTER1,
        bias=attention.bias if attention.output_bias is None else attention.output_bias,
        block=(attention.heads, attention.output_width // attention.heads),
        **factory_kwargs,
    )


def build_mlp_down(
    stack: Stack,
    compute: KernelSet,
    site: str,
    tp_group: TpGroup,
    *,
    side: SideHook = None,
    **factory_kwargs: Any,
) -> ResidualProjection:
    """Returns the second half of an MLP; `site` names its dropout."""
    return ResidualProjection(
        stack,
        compute,
        site,
        tp_group,
        kernel=KernelName.DOWN,
        scatter=KernelName.SCATTER2,
        bias=stack.mlp.bias,
        block=(stack.mlp.width, 1),
        side=side,
        **factory_kwargs,
    )
