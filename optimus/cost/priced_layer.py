"""Prices the layers of a module at one place of a layout: kernels, parameters and bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from optimus.cost import flops
from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.kernel import Kernel, KernelListBuilder, KernelsByKind, apply_measured_times
from optimus.cost.layer_kernels import (
    list_backward_kernels,
    list_forward_kernels,
    list_selective_recompute_kernels,
    list_weight_grad_kernels,
)
from optimus.cost.layer_shape import (
    LayerShape,
    activation_gradient_bytes,
    gathered_gradient_bytes,
    saved_activation_bytes,
)
from optimus.cost.measured_profile import LayerClass, classify_layer
from optimus.cost.network import Collective
from optimus.ir.op import KernelName, Lane, OpKind
from optimus.job.layout import Layout
from optimus.job.model import BF16_BYTES, FP32_BYTES, Encoder, Llm, Stack
from optimus.job.workload import TokenLoad


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedLayer:
    """A layer that a stage can hold: a transformer layer, an embedding, a projector or a head."""

    module: str
    layout: Layout  # of its module
    kernels: dict[OpKind, tuple[Kernel, ...]]  # F, B, I, W; B and I include recomputation
    parameters: float  # on one rank, without experts
    activation_bytes: float  # saved from forward to backward, per microbatch
    output_bytes: float  # what a rank sends on, per microbatch
    trained: bool
    flops: float = 0.0  # of the model's forward pass, all ranks together
    expert_parameters: float = 0.0  # on one rank
    recomputed_bytes: float = 0.0  # of activations recomputed before the layer's backward
    working_bytes: float = 0.0  # alive only while the layer runs: gradients, or what a frozen one computes
    logits_bytes: float = 0.0
    logit_gradient_bytes: float = 0.0
    gathered_gradient_bytes: float = 0.0  # of gradients gathered over the TP group: other ranks' rows

    @property
    def held_for_weight_grad_bytes(self) -> float:
        """Bytes that wait for the weight gradient, if it is computed apart from the input's."""
        return self.recomputed_bytes + self.logit_gradient_bytes + self.gathered_gradient_bytes

    @property
    def transient_bytes(self) -> float:
        """Bytes that exist only while the layer itself runs."""
        return self.recomputed_bytes + self.working_bytes

    @property
    def shard_parameters(self) -> float:
        """Parameters of a rank's shard, over all ranks that hold the same ones."""
        dense = self.parameters / self.layout.replica_ranks
        return dense + self.expert_parameters / self.layout.expert_replica_ranks


def price_encoder_layers(
    encoder: Encoder, load: TokenLoad, layout: Layout, cost_model: ClusterCostModel, recompute: str
) -> tuple[PricedLayer, ...]:
    """Prices the patch embedding, layers and projector of an encoder."""
    tokens, hidden, tp = load.tokens / layout.cp, encoder.stack.hidden, layout.tp
    last_tokens = tokens / encoder.stack.merge_before(encoder.stack.layers)
    llm_width = encoder.projector.widths[-1]
    llm_tokens = tokens / encoder.merge
    projected_bytes = llm_tokens / tp * llm_width * BF16_BYTES * len(encoder.feeds)
    needs_backward = encoder.train or encoder.projector.train
    inputs = encoder.projector.input_width(hidden)
    middle = sum(encoder.projector.widths[:-1])
    first = PricedLayer(
        module=encoder.name,
        layout=layout,
        kernels=_encoder_embedding_kernels(encoder, tokens, layout, cost_model),
        parameters=encoder.embedding_parameters,
        activation_bytes=float(encoder.train) * tokens / tp * encoder.patch_inputs * BF16_BYTES,
        output_bytes=tokens / tp * hidden * BF16_BYTES,
        trained=encoder.train,
        flops=flops.patch_embedding_flops(encoder, load),
    )
    last = PricedLayer(
        module=encoder.name,
        layout=layout,
        kernels=_projector_kernels(encoder, last_tokens, layout, cost_model),
        parameters=encoder.projector_parameters + encoder.stack.norm_parameters,
        activation_bytes=float(needs_backward)
        * (last_tokens / tp * hidden * BF16_BYTES + llm_tokens / tp * (inputs + 2 * middle) * BF16_BYTES)
        * len(encoder.feeds),
        output_bytes=projected_bytes,
        trained=encoder.projector.train,
        flops=flops.projector_flops(encoder, load),
    )
    layers = _stack_layers(
        encoder.name,
        encoder.stack,
        load,
        layout,
        cost_model,
        recompute,
        train=encoder.train,
        passes_gradients=encoder.train,
    )
    first = _measured(first, "embedding", tokens, cost_model)
    last = _measured(last, "projector", last_tokens, cost_model)
    given = [sum(deep <= index for deep in encoder.deepstack_layers) for index in range(len(layers))]
    layers = [
        replace(layer, output_bytes=layer.output_bytes * (1 + rows)) if rows else layer
        for layer, rows in zip(layers, given, strict=True)
    ]
    return (first, *layers, last)


def price_llm_layers(
    llm: Llm,
    load: TokenLoad,
    layout: Layout,
    cost_model: ClusterCostModel,
    recompute: str,
    *,
    upstream_trained: bool = True,
    feeds: Collection[int] = (0,),
) -> tuple[PricedLayer, ...]:
    """Prices embedding, layers and head of an LLM; a frozen one passes gradients to trained encoders.

    Encoder rows for layers of `feeds` behind the first travel with the state up to them, and the layer before
    saves them: they are added to its output.
    """
    tokens, hidden, tp = load.tokens / layout.cp, llm.stack.hidden, layout.tp
    state_bytes = tokens / tp * hidden * BF16_BYTES
    passes = llm.train or upstream_trained
    embedding = PricedLayer(
        module=llm.name,
        layout=layout,
        kernels=_llm_embedding_kernels(llm, tokens, layout, cost_model),
        parameters=llm.embedding_parameters / tp,
        activation_bytes=0.0,
        output_bytes=state_bytes,
        trained=llm.train,
        flops=float(flops.embedding_flops(llm, load)),
    )
    kernels = _llm_head_kernels(llm, tokens, layout, cost_model)
    tied = llm.vocab * hidden / tp if llm.tied and layout.pp > 1 else 0.0  # the last stage's own copy
    head = PricedLayer(
        module=llm.name,
        layout=layout,
        kernels=kernels
        if passes
        else {kind: kernels[kind] if kind == OpKind.FORWARD else () for kind in kernels},
        parameters=llm.head_parameters / tp + tied,
        activation_bytes=2 * state_bytes,
        output_bytes=0.0,
        trained=llm.train,
        flops=flops.lm_head_flops(llm, load),
        logits_bytes=tokens * llm.vocab / tp * SAVED_BYTES_PER_LOGIT,
        logit_gradient_bytes=tokens * llm.vocab / tp * BF16_BYTES,
    )
    layers = _stack_layers(
        llm.name, llm.stack, load, layout, cost_model, recompute, train=llm.train, passes_gradients=passes
    )
    embedding = _measured(embedding, "embedding", tokens, cost_model)
    head = _measured(head, "head", tokens, cost_model)
    return (*_pass_rows(llm, (embedding, *layers), feeds, tokens / tp, passes=passes), head)


def _pass_rows(
    llm: Llm, stack: Sequence[PricedLayer], feeds: Collection[int], tokens: float, *, passes: bool
) -> list[PricedLayer]:
    """Adds what travels with the state to later layers: encoder rows, and inputs that each layer has."""
    state_bytes = tokens * llm.stack.hidden * BF16_BYTES
    input_bytes = tokens * llm.per_layer_inputs.width * BF16_BYTES if llm.per_layer_inputs else 0.0

    def pass_rows(index: int, layer: PricedLayer) -> PricedLayer:
        behind, fed_here = sum(fed > index for fed in feeds), index in feeds and index > 0
        if not (behind or fed_here or input_bytes):
            return layer
        return replace(
            layer,
            output_bytes=layer.output_bytes * (1 + behind) + (len(stack) - 1 - index) * input_bytes,
            activation_bytes=layer.activation_bytes + state_bytes * (passes and fed_here),
        )

    return [pass_rows(index, layer) for index, layer in enumerate(stack)]


def add_gather_copies(
    layers: Sequence[PricedLayer],
    cost_model: ClusterCostModel,
    parameter_bytes: int,
    *,
    per_forward: float,
    per_backward: float,
) -> tuple[PricedLayer, ...]:
    """Adds the copies of parameters out of the buffers that they are gathered to.

    FSDP2 copies on the stream of the layers. The last layer, whose backward follows its forward, is gathered
    once for both.
    """
    copied: dict[tuple[int, bool], PricedLayer] = {}
    result = []
    for layer in layers:
        key = id(layer), layer is layers[-1]
        if key not in copied:
            size = 2 * parameter_bytes * (layer.parameters + layer.expert_parameters)  # read and written
            backward = 0.0 if layer is layers[-1] else per_backward
            copies = {
                OpKind.FORWARD: per_forward,
                OpKind.BACKWARD: backward,
                OpKind.INPUT_GRAD: backward,
                OpKind.WEIGHT_GRAD: 0.0,
            }
            kernels = {
                kind: _delay_first(listed, copies[kind] * cost_model.memory_s(size))
                for kind, listed in layer.kernels.items()
            }
            copied[key] = replace(layer, kernels=kernels)
        result.append(copied[key])
    return tuple(result)


def _delay_first(kernels: tuple[Kernel, ...], seconds: float) -> tuple[Kernel, ...]:
    """Returns kernels of which the first that computes takes so much longer."""
    place = next((at for at, kernel in enumerate(kernels) if kernel.lane == Lane.COMPUTE), None)
    if place is None:
        return kernels
    delayed = replace(kernels[place], duration_s=kernels[place].duration_s + seconds)
    return (*kernels[:place], delayed, *kernels[place + 1 :])


def _stack_layers(
    module: str,
    stack: Stack,
    load: TokenLoad,
    layout: Layout,
    cost_model: ClusterCostModel,
    recompute: str,
    *,
    train: bool,
    passes_gradients: bool,
) -> list[PricedLayer]:
    """Prices every layer of a stack; equal layers are one object."""
    priced: dict[tuple[bool, int | None, int | None, int], PricedLayer] = {}
    layers = []
    for index in range(stack.layers):
        here, variant, merge = stack.at(index), stack.variant_of(index), stack.merge_before(index)
        sort = (stack.has_experts(index), here.attention.window_of(index), variant, merge)
        if sort not in priced:
            shape = LayerShape(
                module=module,
                stack=here,
                layer=index,
                load=load.merged(merge),
                layout=layout,
                cost_model=cost_model,
            )
            layer = _price_layer(shape, recompute, train=train, passes_gradients=passes_gradients)
            if variant is None:  # profiles measure our own layers, which have no variants
                layer = _measured(layer, classify_layer(stack, index), shape.tokens, cost_model)
            priced[sort] = layer
        layers.append(priced[sort])
    return layers


def _measured(
    layer: PricedLayer, sort: LayerClass, tokens: float, cost_model: ClusterCostModel
) -> PricedLayer:
    """Returns the layer with the measured seconds of the profile."""
    kernels = apply_measured_times(
        layer.kernels, cost_model, module=layer.module, layers=sort, tokens=tokens, tp=layer.layout.tp
    )
    return replace(layer, kernels=kernels)


def _price_layer(shape: LayerShape, recompute: str, *, train: bool, passes_gradients: bool) -> PricedLayer:
    recomputed: tuple[Kernel, ...] = ()
    if recompute == "full":
        recomputed = tuple(list_forward_kernels(shape, OpKind.RECOMPUTE))
    elif recompute == "selective":
        recomputed = tuple(list_selective_recompute_kernels(shape))
    inputs = (
        _chain(recomputed, tuple(list_backward_kernels(shape, weights=False))) if passes_gradients else ()
    )
    both = _chain(recomputed, tuple(list_backward_kernels(shape, weights=True))) if train else inputs
    stack, layout = shape.stack, shape.layout
    experts, replicated = stack.expert_parameters(shape.layer), stack.replicated_parameters(shape.layer)
    whole = saved_activation_bytes(shape, "none")
    saved = saved_activation_bytes(shape, recompute) if passes_gradients else 0.0
    return PricedLayer(
        module=shape.module,
        layout=layout,
        kernels={
            OpKind.FORWARD: tuple(list_forward_kernels(shape)),
            OpKind.BACKWARD: both,
            OpKind.INPUT_GRAD: inputs,
            OpKind.WEIGHT_GRAD: tuple(list_weight_grad_kernels(shape)) if train else (),
        },
        parameters=replicated + (stack.layer_parameters(shape.layer) - experts - replicated) / layout.tp,
        expert_parameters=experts / layout.ep,
        activation_bytes=saved,
        recomputed_bytes=whole - saved if passes_gradients else 0.0,
        working_bytes=activation_gradient_bytes(shape) if passes_gradients else whole,
        gathered_gradient_bytes=gathered_gradient_bytes(shape) if train else 0.0,
        output_bytes=shape.shard * stack.hidden * BF16_BYTES / stack.merge_of(shape.layer),
        trained=train,
        flops=flops.layer_flops(stack, shape.layer, shape.load),
    )


def _chain(first: tuple[Kernel, ...], second: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """Joins two lists: kernels that start the second wait for those that end the first."""
    if not first:
        return second
    waited = {place for kernel in first for place in kernel.after}
    ends_of_first = tuple(place for place in range(len(first)) if place not in waited)
    shift = len(first)
    moved = (
        replace(k, after=tuple(place + shift for place in k.after) if k.after else ends_of_first)
        for k in second
    )
    return (*first, *moved)


# Loss over fp32 logits: read bf16 logits, write and read fp32 probabilities.
LOSS_BYTES_PER_LOGIT = BF16_BYTES + 2 * FP32_BYTES
# The head saves from forward to backward, per logit: bf16 logits and fp32 probabilities.
SAVED_BYTES_PER_LOGIT = BF16_BYTES + FP32_BYTES


def _kernel_list(cost_model: ClusterCostModel, kind: OpKind, tp: int) -> KernelListBuilder:
    return KernelListBuilder(cost_model=cost_model, kind=kind, tp=tp)


def _llm_embedding_kernels(
    llm: Llm, tokens: float, layout: Layout, cost_model: ClusterCostModel
) -> KernelsByKind:
    """Prices a look-up in a table split over the vocabulary; the sum is scattered over the sequence."""
    size = tokens * llm.stack.hidden * BF16_BYTES
    forward = _kernel_list(cost_model, OpKind.FORWARD, layout.tp)
    linears = [(tokens / layout.tp, side.outputs, side.inputs) for side in llm.embedding_linears]
    linears_s = sum(cost_model.gemm_s(m, n, k) for m, n, k in linears)
    forward.compute(KernelName.EMBEDDING, cost_model.memory_s(2 * size) + linears_s)
    forward.collective(KernelName.EMBEDDING.scatter, Collective.REDUCE_SCATTER, size)
    result: KernelsByKind = {OpKind.FORWARD: tuple(forward.kernels), OpKind.INPUT_GRAD: ()}
    for kind in (OpKind.BACKWARD, OpKind.WEIGHT_GRAD):
        back = _kernel_list(cost_model, kind, layout.tp)
        if llm.train:
            back.collective(KernelName.EMBEDDING.gather, Collective.ALL_GATHER, size)
            linears_s = sum(
                cost_model.weight_gradient_s(m, n, k) + cost_model.gemm_s(m, k, n) for m, n, k in linears
            )
            back.compute(KernelName.EMBEDDING.wgrad, cost_model.memory_s(3 * size) + linears_s)
        result[kind] = tuple(back.kernels)
    return result


def _llm_head_kernels(llm: Llm, tokens: float, layout: Layout, cost_model: ClusterCostModel) -> KernelsByKind:
    """Prices final norm, logits and loss; the weight gradient is in kind W when it is split off."""
    hidden, columns = llm.stack.hidden, llm.vocab / layout.tp
    size = tokens * hidden * BF16_BYTES
    norm_bytes = 4 * tokens * hidden / layout.tp * BF16_BYTES
    norm_s = cost_model.memory_s(norm_bytes * cost_model.norm_bytes_factor(llm.stack.norm))
    loss_s = cost_model.memory_s(tokens * columns * LOSS_BYTES_PER_LOGIT)
    forward = _kernel_list(cost_model, OpKind.FORWARD, layout.tp)
    forward.compute(KernelName.HEAD_NORM, norm_s)
    forward.collective(KernelName.HEAD.gather, Collective.ALL_GATHER, size)
    forward.compute(KernelName.HEAD, cost_model.gemm_s(tokens, columns, hidden) + loss_s)
    result: KernelsByKind = {OpKind.FORWARD: tuple(forward.kernels)}
    for kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD):
        back = _kernel_list(cost_model, kind, layout.tp)
        if kind != OpKind.WEIGHT_GRAD:
            dgrad_s = cost_model.gemm_s(tokens, hidden, columns) + loss_s
            back.compute(KernelName.HEAD.dgrad, dgrad_s)
            back.collective(KernelName.HEAD.scatter, Collective.REDUCE_SCATTER, size)
        if kind != OpKind.INPUT_GRAD and llm.train:
            back.compute(KernelName.HEAD.wgrad, cost_model.weight_gradient_s(tokens, columns, hidden))
        if kind != OpKind.WEIGHT_GRAD:
            back.compute(KernelName.HEAD_NORM, norm_s)
        result[kind] = tuple(back.kernels)
    return result if llm.train else {**result, OpKind.BACKWARD: result[OpKind.INPUT_GRAD]}


def _encoder_embedding_kernels(
    encoder: Encoder, tokens: float, layout: Layout, cost_model: ClusterCostModel
) -> KernelsByKind:
    """Prices patches (or mel frames) to hidden states, every rank its own tokens; no input gradient."""
    shard, hidden, inputs = tokens / layout.tp, encoder.stack.hidden, encoder.patch_inputs
    forward = _kernel_list(cost_model, OpKind.FORWARD, layout.tp)
    forward.compute(KernelName.PATCHES, cost_model.gemm_s(shard, hidden, inputs))
    result: KernelsByKind = {OpKind.FORWARD: tuple(forward.kernels), OpKind.INPUT_GRAD: ()}
    for kind in (OpKind.BACKWARD, OpKind.WEIGHT_GRAD):
        back = _kernel_list(cost_model, kind, layout.tp)
        if encoder.train:
            back.compute(KernelName.PATCHES.wgrad, cost_model.weight_gradient_s(shard, hidden, inputs))
        result[kind] = tuple(back.kernels)
    return result


def _projector_kernels(
    encoder: Encoder, tokens: float, layout: Layout, cost_model: ClusterCostModel
) -> KernelsByKind:
    """Prices encoder tokens to LLM tokens, once per LLM layer fed; every rank its own tokens."""
    rows = tokens / layout.tp / encoder.projector.merge
    gemms = encoder.projector.linears(encoder.stack.hidden)
    times = len(encoder.feeds)
    seconds_by_kind = {
        OpKind.FORWARD: sum(cost_model.gemm_s(rows, n, k) for k, n in gemms),
        OpKind.INPUT_GRAD: sum(cost_model.gemm_s(rows, k, n) for k, n in gemms) if encoder.train else 0.0,
        OpKind.WEIGHT_GRAD: sum(cost_model.weight_gradient_s(rows, n, k) for k, n in gemms)
        if encoder.projector.train
        else 0.0,
    }
    if encoder.projector.train and not encoder.train:  # gradients still pass between its own linears
        seconds_by_kind[OpKind.INPUT_GRAD] = sum(cost_model.gemm_s(rows, k, n) for k, n in gemms[1:])
    seconds_by_kind[OpKind.BACKWARD] = (
        seconds_by_kind[OpKind.INPUT_GRAD] + seconds_by_kind[OpKind.WEIGHT_GRAD]
    )
    result: KernelsByKind = {}
    for kind, seconds in seconds_by_kind.items():
        kernels = _kernel_list(cost_model, kind, layout.tp)
        if seconds > 0:
            kernels.compute(KernelName.PROJECTOR, times * seconds)
        result[kind] = tuple(kernels.kernels)
    return result if encoder.projector.train else {**result, OpKind.BACKWARD: result[OpKind.INPUT_GRAD]}
