"""Expands a layer into an ordered list of compute and communication kernels, per kind of op."""

from __future__ import annotations

from optimus.cost.kernel import Kernel, KernelListBuilder
from optimus.cost.layer_shape import Gemm, LayerShape
from optimus.cost.network import Collective
from optimus.ir.op import Communicator, KernelName, OpKind
from optimus.job.model import Experts, Mlp


def list_forward_kernels(shape: LayerShape, kind: OpKind = OpKind.FORWARD) -> list[Kernel]:
    """Lists the kernels of a forward: norm, gather, QKV, attention, output, scatter; then the MLP's."""
    kernels = shape.kernels(kind)
    size = shape.hidden_bytes
    kernels.compute(KernelName.NORM1, shape.norm_s())
    if shape.stack.attention.latent:
        kernels.compute(KernelName.LATENT, shape.forward_s(shape.latent_gemms()))
    kernels.collective(KernelName.GATHER1, Collective.ALL_GATHER, shape.qkv_input_bytes)
    kernels.compute(KernelName.QKV, shape.forward_s(shape.qkv_gemms()))
    _context_exchange(kernels, shape)
    kernels.compute(KernelName.ATTENTION, shape.attention_s())
    kernels.compute(KernelName.OUT, shape.forward_s([shape.out_gemm()]))
    kernels.collective(KernelName.SCATTER1, Collective.REDUCE_SCATTER, size)
    kernels.compute(KernelName.NORM2, shape.norm_s())
    experts = shape.stack.experts
    if experts and shape.stack.has_experts(shape.layer):
        _experts(kernels, shape, experts, [OpKind.FORWARD])
    else:
        _mlp_forward(kernels, shape, shape.stack.mlp)
    if side := shape.side_gemms():
        kernels.compute(KernelName.SIDE, shape.forward_s(side))
    return kernels.kernels


def _mlp_forward(kernels: KernelListBuilder, shape: LayerShape, mlp: Mlp) -> None:
    kernels.collective(KernelName.GATHER2, Collective.ALL_GATHER, shape.hidden_bytes)
    up_s = shape.forward_s([shape.up_gemm(mlp)])
    kernels.compute(KernelName.UP, up_s + shape.activation_s(mlp, shape.tokens, tp=shape.layout.tp))
    kernels.compute(KernelName.DOWN, shape.forward_s([shape.down_gemm(mlp)]))
    kernels.collective(KernelName.SCATTER2, Collective.REDUCE_SCATTER, shape.mlp_output_bytes(mlp))


def list_backward_kernels(shape: LayerShape, *, weights: bool) -> list[Kernel]:
    """Lists the kernels of B (input and weight gradients, Megatron's overlaps), or of I without `weights`."""
    kernels = shape.kernels(OpKind.BACKWARD if weights else OpKind.INPUT_GRAD)
    experts = shape.stack.experts
    if side := shape.side_gemms():
        seconds = shape.input_gradient_s(side) + (shape.weight_gradient_s(side) if weights else 0.0)
        kernels.compute(KernelName.SIDE, seconds)
    if experts and shape.stack.has_experts(shape.layer):
        _experts(
            kernels,
            shape,
            experts,
            [OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD] if weights else [OpKind.INPUT_GRAD],
        )
    else:
        _mlp_backward(kernels, shape, shape.stack.mlp, weights=weights)
    kernels.compute(KernelName.NORM2, shape.norm_s(backward=True))
    _row_backward(
        kernels, shape, KernelName.OUT, [shape.out_gemm()], weights=weights, size=shape.hidden_bytes
    )
    _context_exchange(kernels, shape)
    kernels.compute(KernelName.ATTENTION, shape.attention_s(backward=True))
    _context_exchange(kernels, shape, Collective.REDUCE_SCATTER)  # gradients of keys and values
    _column_backward(
        kernels, shape, KernelName.QKV, shape.qkv_gemms(), weights=weights, size=shape.qkv_input_bytes
    )
    if latent := shape.latent_gemms():
        seconds = shape.input_gradient_s(latent)
        kernels.compute(KernelName.LATENT, seconds + (shape.weight_gradient_s(latent) if weights else 0.0))
    kernels.compute(KernelName.NORM1, shape.norm_s(backward=True))
    return kernels.kernels


def _mlp_backward(kernels: KernelListBuilder, shape: LayerShape, mlp: Mlp, *, weights: bool) -> None:
    extra = shape.activation_s(mlp, shape.tokens, tp=shape.layout.tp, backward=True)
    down, size = [shape.down_gemm(mlp)], shape.mlp_output_bytes(mlp)
    _row_backward(kernels, shape, KernelName.DOWN, down, weights=weights, size=size, extra_s=extra)
    _column_backward(
        kernels, shape, KernelName.UP, [shape.up_gemm(mlp)], weights=weights, size=shape.hidden_bytes
    )


def _row_backward(
    kernels: KernelListBuilder,
    shape: LayerShape,
    name: KernelName,
    gemms: list[Gemm],
    *,
    weights: bool,
    size: float,
    extra_s: float = 0.0,
) -> None:
    """Adds a row-parallel linear: the output's gradient is gathered, exposed, then both products."""
    kernels.collective(name.gather, Collective.ALL_GATHER, size)
    kernels.compute(name.dgrad, shape.input_gradient_s(gemms) + extra_s)
    if weights:
        kernels.compute(name.wgrad, shape.weight_gradient_s(gemms))


def _column_backward(
    kernels: KernelListBuilder,
    shape: LayerShape,
    name: KernelName,
    gemms: list[Gemm],
    *,
    weights: bool,
    size: float,
) -> None:
    """Adds a column-parallel linear: its input is gathered under dgrad, its result scattered under wgrad."""
    before = kernels.last
    dgrad_s, wgrad_s = shape.input_gradient_s(gemms), shape.weight_gradient_s(gemms)
    if not weights or shape.cost_model.assumptions.tp_backward == "exposed":
        kernels.compute(name.dgrad, dgrad_s)
        kernels.collective(name.scatter, Collective.REDUCE_SCATTER, size)
        if weights:
            kernels.compute(name.wgrad, wgrad_s)
        return
    gathered = kernels.collective(name.gather, Collective.ALL_GATHER, size)
    dgrad = kernels.compute(name.dgrad, dgrad_s, after=before)
    scattered = kernels.collective(name.scatter, Collective.REDUCE_SCATTER, size, after=(dgrad,))
    waits = (dgrad,) if gathered is None else (dgrad, gathered)
    wgrad = kernels.compute(name.wgrad, wgrad_s, after=waits)
    kernels.join(wgrad, scattered)


def list_weight_grad_kernels(shape: LayerShape) -> list[Kernel]:
    """Lists the kernels of W; inputs of column-parallel linears are gathered under other products."""
    kernels = shape.kernels(OpKind.WEIGHT_GRAD)
    experts = shape.stack.experts
    if experts and shape.stack.has_experts(shape.layer):
        _experts(kernels, shape, experts, [OpKind.WEIGHT_GRAD])
    else:
        mlp = shape.stack.mlp
        _gather_under(
            kernels, shape, KernelName.DOWN, [shape.down_gemm(mlp)], KernelName.UP, [shape.up_gemm(mlp)]
        )
    _gather_under(kernels, shape, KernelName.OUT, [shape.out_gemm()], KernelName.QKV, shape.qkv_gemms())
    if latent := shape.latent_gemms():
        kernels.compute(KernelName.LATENT.wgrad, shape.weight_gradient_s(latent))
    if side := shape.side_gemms():
        kernels.compute(KernelName.SIDE.wgrad, shape.weight_gradient_s(side))
    return kernels.kernels


def _gather_under(
    kernels: KernelListBuilder,
    shape: LayerShape,
    row: KernelName,
    row_gemms: list[Gemm],
    column: KernelName,
    column_gemms: list[Gemm],
) -> None:
    before = kernels.last
    size = shape.qkv_input_bytes if column == KernelName.QKV else shape.hidden_bytes
    gathered = kernels.collective(column.gather, Collective.ALL_GATHER, size)
    product = kernels.compute(row.wgrad, shape.weight_gradient_s(row_gemms), after=before)
    kernels.join(product, gathered)
    kernels.compute(column.wgrad, shape.weight_gradient_s(column_gemms))


def _context_exchange(
    kernels: KernelListBuilder, shape: LayerShape, kind: Collective = Collective.ALL_GATHER
) -> None:
    """Adds the exposed gather of keys and values over CP ranks, or the scatter of their gradients."""
    layout = shape.layout
    name = KernelName.CONTEXT if kind == Collective.ALL_GATHER else KernelName.CONTEXT.scatter
    kernels.group(name, kind, shape.context_bytes, Communicator.CP, ranks=layout.cp, stride=layout.tp)


def _experts(kernels: KernelListBuilder, shape: LayerShape, experts: Experts, parts: list[OpKind]) -> None:
    """Adds router, dispatch, grouped products and combine; shared experts follow as an ordinary MLP."""
    ep = shape.layout.ep
    router = [(shape.shard, float(experts.count), float(shape.stack.hidden))]
    product = {
        OpKind.FORWARD: shape.forward_s,
        OpKind.INPUT_GRAD: shape.input_gradient_s,
        OpKind.WEIGHT_GRAD: shape.weight_gradient_s,
    }
    moves = parts != [OpKind.WEIGHT_GRAD]
    if moves:
        first = KernelName.DISPATCH if OpKind.FORWARD in parts else KernelName.COMBINE
        kernels.compute(KernelName.ROUTER, sum(product[part](router) for part in parts))
        kernels.exchange(first, shape.shard_bytes, experts, ep)
    rows = shape.shard * experts.active
    mlp = Mlp(width=experts.width)
    seconds = 0.0
    if moves:
        seconds += shape.activation_s(mlp, rows, tp=1, backward=OpKind.FORWARD not in parts)
        seconds += shape.permutation_s(experts)
    for part in parts:
        seconds += sum(times * product[part]([(m, n, k)]) for times, m, n, k in shape.expert_gemms(experts))
    kernels.compute(KernelName.EXPERTS, seconds)
    if moves:
        last = KernelName.COMBINE if OpKind.FORWARD in parts else KernelName.DISPATCH
        kernels.exchange(last, shape.shard_bytes, experts, ep)
    shared = shape.shared_mlp
    if shared is None:
        return
    if parts == [OpKind.FORWARD]:
        _mlp_forward(kernels, shape, shared)
    elif parts == [OpKind.WEIGHT_GRAD]:
        _gather_under(
            kernels, shape, KernelName.DOWN, [shape.down_gemm(shared)], KernelName.UP, [shape.up_gemm(shared)]
        )
    else:
        _mlp_backward(kernels, shape, shared, weights=OpKind.WEIGHT_GRAD in parts)


def list_selective_recompute_kernels(shape: LayerShape) -> list[Kernel]:
    """Lists the kernels of selective recomputation: unfused attention, else norms and non-linearity."""
    kernels = shape.kernels(OpKind.RECOMPUTE)
    if not shape.cost_model.assumptions.fused_attention:
        kernels.compute(KernelName.ATTENTION, shape.attention_s())
        return kernels.kernels
    experts = shape.stack.experts
    if experts and shape.stack.has_experts(shape.layer):
        activation_s = shape.activation_s(Mlp(width=experts.width), shape.shard * experts.active, tp=1)
    else:
        activation_s = shape.activation_s(shape.stack.mlp, shape.tokens, tp=shape.layout.tp)
    kernels.compute(KernelName.CHEAP, 2 * shape.norm_s() + activation_s)
    return kernels.kernels
