"""What stands before and after the layers: embeddings, projector, head and loss, as kernels."""

from __future__ import annotations

from optimus.cost.kernel import Kernel, KernelList
from optimus.cost.network import Collective
from optimus.cost.prices import Prices
from optimus.ir.op import OpKind
from optimus.job.layout import Layout
from optimus.job.model import BF16_BYTES, FP32_BYTES, Encoder, Llm

KernelsByKind = dict[OpKind, tuple[Kernel, ...]]
# Loss over fp32 logits: read bf16 logits, write and read fp32 probabilities.
LOSS_BYTES_PER_LOGIT = BF16_BYTES + 2 * FP32_BYTES
# What the head keeps per logit from forward to backward: bf16 logits and fp32 probabilities.
KEPT_BYTES_PER_LOGIT = BF16_BYTES + FP32_BYTES


def _list(prices: Prices, kind: OpKind, tp: int) -> KernelList:
    return KernelList(prices=prices, kind=kind, tp=tp)


def llm_embedding(llm: Llm, tokens: float, layout: Layout, prices: Prices) -> KernelsByKind:
    """A look-up in a table split over the vocabulary; the sum is scattered over the sequence."""
    size = tokens * llm.stack.hidden * BF16_BYTES
    forward = _list(prices, OpKind.FORWARD, layout.tp)
    forward.compute("embedding", prices.memory_s(2 * size))
    forward.collective("embedding.scatter", Collective.REDUCE_SCATTER, size)
    result: KernelsByKind = {OpKind.FORWARD: tuple(forward.kernels), OpKind.INPUT_GRAD: ()}
    for kind in (OpKind.BACKWARD, OpKind.WEIGHT_GRAD):
        back = _list(prices, kind, layout.tp)
        if llm.train:
            back.collective("embedding.gather", Collective.ALL_GATHER, size)
            back.compute("embedding.wgrad", prices.memory_s(3 * size))
        result[kind] = tuple(back.kernels)
    return result


def llm_head(llm: Llm, tokens: float, layout: Layout, prices: Prices) -> KernelsByKind:
    """Final norm, logits and loss; the weight gradient stays in kind W when it is split off."""
    hidden, columns = llm.stack.hidden, llm.vocab / layout.tp
    size, norm_s = tokens * hidden * BF16_BYTES, prices.memory_s(4 * tokens * hidden / layout.tp * BF16_BYTES)
    loss_s = prices.memory_s(tokens * columns * LOSS_BYTES_PER_LOGIT)
    forward = _list(prices, OpKind.FORWARD, layout.tp)
    forward.compute("head.norm", norm_s)
    forward.collective("head.gather", Collective.ALL_GATHER, size)
    forward.compute("head", prices.gemm_s(tokens, columns, hidden) + loss_s)
    result: KernelsByKind = {OpKind.FORWARD: tuple(forward.kernels)}
    for kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD):
        back = _list(prices, kind, layout.tp)
        if kind != OpKind.WEIGHT_GRAD:
            back.compute("head.dgrad", prices.gemm_s(tokens, hidden, columns) + loss_s)
            back.collective("head.scatter", Collective.REDUCE_SCATTER, size)
        if kind != OpKind.INPUT_GRAD and llm.train:
            back.compute("head.wgrad", prices.gemm_s(hidden, columns, tokens))
        if kind != OpKind.WEIGHT_GRAD:
            back.compute("head.norm", norm_s)
        result[kind] = tuple(back.kernels)
    return result if llm.train else {**result, OpKind.BACKWARD: result[OpKind.INPUT_GRAD]}


def encoder_embedding(encoder: Encoder, tokens: float, layout: Layout, prices: Prices) -> KernelsByKind:
    """Patches (or mel frames) to hidden states, every rank its own tokens; no input gradient."""
    shard, hidden, inputs = tokens / layout.tp, encoder.stack.hidden, encoder.patch_inputs
    forward = _list(prices, OpKind.FORWARD, layout.tp)
    forward.compute("patches", prices.gemm_s(shard, hidden, inputs))
    result: KernelsByKind = {OpKind.FORWARD: tuple(forward.kernels), OpKind.INPUT_GRAD: ()}
    for kind in (OpKind.BACKWARD, OpKind.WEIGHT_GRAD):
        back = _list(prices, kind, layout.tp)
        if encoder.train:
            back.compute("patches.wgrad", prices.gemm_s(inputs, hidden, shard))
        result[kind] = tuple(back.kernels)
    return result


def projector(encoder: Encoder, tokens: float, layout: Layout, prices: Prices) -> KernelsByKind:
    """Encoder tokens to LLM tokens, once per LLM layer fed; every rank its own tokens."""
    rows = tokens / layout.tp / encoder.projector.merge
    gemms = encoder.projector.linears(encoder.stack.hidden)
    times = len(encoder.feeds)
    prices_of = {
        OpKind.FORWARD: sum(prices.gemm_s(rows, n, k) for k, n in gemms),
        OpKind.INPUT_GRAD: sum(prices.gemm_s(rows, k, n) for k, n in gemms) if encoder.train else 0.0,
        OpKind.WEIGHT_GRAD: sum(prices.gemm_s(k, n, rows) for k, n in gemms)
        if encoder.projector.train
        else 0.0,
    }
    if encoder.projector.train and not encoder.train:  # gradients still pass between its own linears
        prices_of[OpKind.INPUT_GRAD] = sum(prices.gemm_s(rows, k, n) for k, n in gemms[1:])
    prices_of[OpKind.BACKWARD] = prices_of[OpKind.INPUT_GRAD] + prices_of[OpKind.WEIGHT_GRAD]
    result: KernelsByKind = {}
    for kind, seconds in prices_of.items():
        kernels = _list(prices, kind, layout.tp)
        if seconds > 0:
            kernels.compute("projector", times * seconds)
        result[kind] = tuple(kernels.kernels)
    return result if encoder.projector.train else {**result, OpKind.BACKWARD: result[OpKind.INPUT_GRAD]}
