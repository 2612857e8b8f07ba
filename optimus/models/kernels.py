"""Computes linear maps, embeddings and norms over rows, whose weight gradients can be deferred.

Kernels are replaceable: `KernelSet` holds those of linear maps and of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from optimus.models.attention import HAS_VARLEN, AttentionKernel, attend_by_spans, attend_varlen
from optimus.models.segment import WeightGradStore, accumulate_grad

WIDE_COPY_ROWS = 512  # rows copied to a wider type at a time


# ---------------------------------------------------------------------------------------- linear maps


def _input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    return gradient @ weight


def _add_weight_gradient(weight: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    """Adds `gradient.T @ inputs` to the weight's gradient, which may have a wider type.

    The product is then not rounded to the type of its factors: GPUs accumulate in the wider one anyway.
    """
    if weight.grad is None:
        weight.grad = gradient.T @ inputs
        return
    wide = weight.grad.dtype
    if wide == gradient.dtype or weight.grad.is_cuda:
        _add_product(weight, gradient, inputs)
    else:
        for left, right in zip(gradient.split(WIDE_COPY_ROWS), inputs.split(WIDE_COPY_ROWS), strict=True):
            weight.grad.addmm_(left.T.to(wide), right.to(wide))


def _add_product(weight: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    """Adds the product with one kernel; only GPUs have one for types of different width."""
    assert weight.grad is not None
    if weight.grad.dtype == gradient.dtype:
        weight.grad.addmm_(gradient.T, inputs)
    else:
        torch.addmm(weight.grad, gradient.T, inputs, out_dtype=weight.grad.dtype, out=weight.grad)


@dataclass(frozen=True, kw_only=True)
class LinearKernels:
    """The three matrix products of a linear map over rows."""

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor] = functional.linear
    input_gradient: Callable[[Tensor, Tensor], Tensor] = _input_gradient
    add_weight_gradient: Callable[[Tensor, Tensor, Tensor], None] = _add_weight_gradient


TORCH_LINEAR = LinearKernels()
GPU_LINEAR = LinearKernels(add_weight_gradient=_add_product)  # also for fake tensors of a GPU


def linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_grads: WeightGradStore | None = None,
    kernels: LinearKernels = TORCH_LINEAR,
) -> Tensor:
    """Maps rows (n, in) to rows (n, out); with `weight_grads` the backward defers the weight gradient."""
    if weight_grads is None:
        return kernels.forward(rows, weight, bias)
    output: Tensor = _DeferringLinear.apply(rows, weight, bias, weight_grads, kernels)
    return output


def linear_backward(
    gradient: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_grads: WeightGradStore,
    kernels: LinearKernels,
    *,
    needs_input_grad: bool,
) -> Tensor | None:
    """Returns the gradient of the rows if it is needed; those of weight and bias go to `weight_grads`."""
    if weight.requires_grad:
        weight_grads.add(partial(kernels.add_weight_gradient, weight, gradient, rows))
    if bias is not None and bias.requires_grad:
        weight_grads.add(partial(add_bias_gradient, bias, gradient))
    return kernels.input_gradient(gradient, weight) if needs_input_grad else None


def add_bias_gradient(bias: Tensor, gradient: Tensor) -> None:
    """Adds the gradient's sum over rows, computed in the type of the bias's gradient."""
    if bias.grad is None:
        bias.grad = gradient.sum(0)
    else:
        bias.grad.add_(gradient.sum(0, dtype=bias.grad.dtype))


class _DeferringLinear(torch.autograd.Function):
    """A linear map whose backward returns the input gradient and defers the others."""

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
        input_gradient = linear_backward(
            gradient,
            rows.detach(),  # the graph of the rows may refer to the store: a cycle that is never freed
            weight,
            bias,
            context.weight_grads,
            context.kernels,
            needs_input_grad=context.needs_input_grad[0],
        )
        return input_gradient, None, None, None, None


class Linear(nn.Module):
    """Parameters of a linear map, without values: `build_layers` initializes them by name."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, **factory_kwargs: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **factory_kwargs))
        self.bias = nn.Parameter(torch.empty(outputs, **factory_kwargs)) if bias else None

    def forward(
        self,
        rows: Tensor,
        weight_grads: WeightGradStore | None = None,
        kernels: LinearKernels = TORCH_LINEAR,
    ) -> Tensor:
        return linear(rows, self.weight, self.bias, weight_grads=weight_grads, kernels=kernels)


# ---------------------------------------------------------------------------------------- embeddings


def embedding(
    ids: Tensor,
    table: Tensor,
    *,
    first_id: int | None = None,
    weight_grads: WeightGradStore | None = None,
) -> Tensor:
    """Looks up rows of `table`; with `weight_grads` the backward defers the table's gradient.

    `first_id` is the first id of a table that is a shard; ids outside the shard give zeros.
    """
    if weight_grads is None:
        return _lookup(table, ids, first_id)
    rows: Tensor = _DeferringEmbedding.apply(ids, table, weight_grads, first_id)
    return rows


class _DeferringEmbedding(torch.autograd.Function):
    """A lookup whose backward defers the table's gradient."""

    @staticmethod
    def forward(
        context: Any, ids: Tensor, table: Tensor, weight_grads: WeightGradStore, first_id: int | None
    ) -> Tensor:
        context.save_for_backward(ids, table)
        context.weight_grads, context.first_id = weight_grads, first_id
        return _lookup(table, ids, first_id)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ids, table = context.saved_tensors
        context.weight_grads.add(partial(_add_table_gradient, table, gradient, ids, context.first_id))
        return None, None, None, None


def _lookup(table: Tensor, ids: Tensor, first_id: int | None) -> Tensor:
    if first_id is None:
        return functional.embedding(ids, table)
    inside, index = _shard_index(table, ids, first_id)
    return functional.embedding(index, table).mul_(inside[..., None])


def _shard_index(table: Tensor, ids: Tensor, first_id: int) -> tuple[Tensor, Tensor]:
    """Returns which ids a shard holds, and an index into it for every id (any for those outside)."""
    index, last = ids - first_id, table.shape[0] - 1
    return (index >= 0) & (index <= last), index.clamp(0, last)


def _add_table_gradient(table: Tensor, gradient: Tensor, ids: Tensor, first_id: int | None) -> None:
    if table.grad is None:
        table.grad = torch.zeros_like(table)
    rows, ids, wide = gradient.reshape(-1, gradient.shape[-1]), ids.reshape(-1), table.grad.dtype
    inside, index = (None, ids) if first_id is None else _shard_index(table, ids, first_id)
    for begin in range(0, len(rows), WIDE_COPY_ROWS):
        block = slice(begin, begin + WIDE_COPY_ROWS)
        widened = rows[block].to(wide, copy=inside is not None)
        if inside is not None:
            widened.mul_(inside[block, None])
        table.grad.index_add_(0, index[block], widened)


# ---------------------------------------------------------------------------------------- norms


class Norm(nn.Module):
    """LayerNorm with a bias, or RMSNorm without one."""

    def __init__(
        self, kind: Literal["layernorm", "rmsnorm"], width: int, eps: float, **factory_kwargs: Any
    ) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.ones(width, **factory_kwargs))
        self.bias = nn.Parameter(torch.zeros(width, **factory_kwargs)) if kind == "layernorm" else None

    def forward(self, rows: Tensor) -> Tensor:
        shape = tuple(self.weight.shape)
        if self.kind == "layernorm":
            return functional.layer_norm(rows, shape, self.weight, self.bias, self.eps)
        if rows.is_cuda:
            return functional.rms_norm(rows, shape, self.weight, self.eps)
        normed: Tensor = _RmsNorm.apply(rows, self.weight, self.eps)
        return normed

    def forward_saving(self, rows: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the normed rows and what `backward` reads, without a graph."""
        shape = self.weight.shape
        if self.kind == "layernorm":
            normed, *saved = torch.native_layer_norm(rows, shape, self.weight, self.bias, self.eps)
        elif rows.is_cuda:
            normed, *saved = torch.ops.aten._fused_rms_norm.default(rows, shape, self.weight, self.eps)
        else:
            normed, *saved = _rms_norm(rows, self.weight, self.eps)
        return normed, (rows, *saved)

    def backward(
        self, saved: tuple[Tensor, ...], gradient: Tensor, *, needs_input_grad: bool
    ) -> Tensor | None:
        """Returns the gradient of the rows if it is needed; adds those of the parameters to them."""
        rows, *statistics = saved
        shape, trains = self.weight.shape, self.weight.requires_grad
        aten, mask = torch.ops.aten, [needs_input_grad, trains]
        grads: tuple[Tensor | None, ...]
        if self.kind == "layernorm":
            layer_norm_backward = aten.native_layer_norm_backward.default
            mask = [*mask, trains]
            grads = layer_norm_backward(gradient, rows, shape, *statistics, self.weight, self.bias, mask)
        elif rows.is_cuda:
            rms_norm_backward = aten._fused_rms_norm_backward.default
            grads = rms_norm_backward(gradient, rows, shape, *statistics, self.weight, mask)
        else:
            grads = _rms_norm_backward(gradient, rows, self.weight, statistics[0], needs_weight_grad=trains)
        for parameter, parameter_grad in zip((self.weight, self.bias), grads[1:], strict=False):
            if parameter is not None and parameter_grad is not None:
                accumulate_grad(parameter, parameter_grad)
        return grads[0] if needs_input_grad else None


def _rms_norm(rows: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Computes as torch's GPU kernel and not as its CPU one: the backward reads the rows and no copy."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(rows.dtype) * weight, scale


def _rms_norm_backward(
    gradient: Tensor, rows: Tensor, weight: Tensor, scale: Tensor, *, needs_weight_grad: bool
) -> tuple[Tensor, Tensor | None]:
    normed = rows.to(scale.dtype, copy=True).mul_(scale)
    wide = gradient.to(scale.dtype, copy=True)  # both copies are large, so they are changed in place
    weight_grad = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype) if needs_weight_grad else None
    inner = wide.mul_(weight.to(scale.dtype))
    mean = (inner * normed).mean(-1, keepdim=True)
    return inner.sub_(normed.mul_(mean)).mul_(scale).to(rows.dtype), weight_grad


class _RmsNorm(torch.autograd.Function):
    """RMSNorm inside an autograd graph."""

    @staticmethod
    def forward(context: Any, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, scale = _rms_norm(rows, weight, eps)
        context.save_for_backward(rows, weight, scale)
        return normed

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        needs_weight_grad = context.needs_input_grad[1]
        grads = _rms_norm_backward(gradient, *context.saved_tensors, needs_weight_grad=needs_weight_grad)
        return *grads, None


# ---------------------------------------------------------------------------------------- choices


@dataclass(frozen=True, kw_only=True)
class KernelSet:
    """Replaceable kernels of segments."""

    linear: LinearKernels = TORCH_LINEAR
    attention: AttentionKernel = attend_by_spans


KERNELS = KernelSet()


def kernels_of_gpus(dtype: torch.dtype) -> KernelSet:
    """Returns the kernels of GPUs from sm80 on: attention over spans in one is for half precision."""
    one_kernel = HAS_VARLEN and dtype.itemsize == 2
    return KernelSet(linear=GPU_LINEAR, attention=attend_varlen if one_kernel else attend_by_spans)


def choose_kernels(device: torch.device, dtype: torch.dtype) -> KernelSet:
    """Returns the kernels that a device has for a dtype."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return KERNELS
    return kernels_of_gpus(dtype)
