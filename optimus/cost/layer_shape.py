"""Gives the sizes of a transformer layer at one place of a layout, and the seconds and bytes of its parts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from optimus.cost.compute import ATTENTION_BACKWARD_FLOPS
from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.flops import count_attended_pairs, list_recurrence_products
from optimus.cost.kernel import KernelListBuilder
from optimus.ir.op import OpKind
from optimus.job.layout import Layout
from optimus.job.model import BF16_BYTES, FP32_BYTES, Experts, Mlp, Stack
from optimus.job.workload import TokenLoad

NORM_TENSORS = 4  # read input and residual, write residual and output
NORM_BACKWARD_TENSORS = 6
# Attention that stores its scores: the softmax reads and writes them, its backward reads two and writes one;
# dropout reads, writes and has a mask of one byte.
UNFUSED_BYTES_PER_SCORE = 2 * BF16_BYTES
UNFUSED_BACKWARD_BYTES_PER_SCORE = 3 * BF16_BYTES
DROPOUT_BYTES_PER_SCORE = 2 * BF16_BYTES + 1
Gemm = tuple[float, float, float]  # tokens, outputs, inputs


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A transformer layer at one place of a layout, for one microbatch."""

    module: str
    stack: Stack
    layer: int
    load: TokenLoad  # of the whole microbatch
    layout: Layout
    cost_model: ClusterCostModel

    @property
    def tokens(self) -> float:
        """Tokens that a TP group works on."""
        return self.load.tokens / self.layout.cp

    @property
    def shard(self) -> float:
        """Tokens a rank holds between TP regions (sequence parallelism)."""
        return self.tokens / self.layout.tp

    @property
    def hidden_bytes(self) -> float:
        """Bytes of the hidden states of a TP group's tokens."""
        return self.tokens * self.stack.hidden * BF16_BYTES

    @property
    def squares(self) -> float:
        """Sum of squared attention spans of the microbatch in this layer."""
        window = self.stack.attention.window_of(self.layer)
        if window is None or window >= self.load.span:
            return self.load.squares
        return self.load.tokens * window

    def kernels(self, kind: OpKind) -> KernelListBuilder:
        return KernelListBuilder(cost_model=self.cost_model, kind=kind, tp=self.layout.tp)

    @property
    def heads(self) -> int:
        """Query heads of a rank: padded where tp does not divide them."""
        return math.ceil(self.stack.attention.heads / self.layout.tp)

    @property
    def kv_heads(self) -> int:
        """Key and value heads of a rank: repeated where tp exceeds them."""
        attention = self.stack.attention
        return self.heads if attention.latent else math.ceil(attention.kv_heads / self.layout.tp)

    # Seconds of the parts --------------------------------------------------------------

    def norm_s(self, *, backward: bool = False) -> float:
        tensors = NORM_BACKWARD_TENSORS if backward else NORM_TENSORS
        size = tensors * self.shard * self.stack.hidden * BF16_BYTES
        return self.cost_model.memory_s(size * self.cost_model.norm_bytes_factor(self.stack.norm))

    def attention_s(self, *, backward: bool = False) -> float:
        attention = self.stack.attention
        if attention.linear:
            products = list_recurrence_products(attention, self.tokens, self.heads)
            convolved = self.tokens * (attention.query_width + attention.key_value_width) / self.layout.tp
            seconds = self.forward_s(products) + self.cost_model.memory_s(2 * convolved * BF16_BYTES)
            return seconds * (ATTENTION_BACKWARD_FLOPS if backward else 1.0)
        if not self.cost_model.assumptions.fused_attention:
            return self._unfused_attention_s(backward=backward)
        pairs = count_attended_pairs(attention, self.layer, self.load) / self.layout.cp
        heads = self.heads
        flops = 2.0 * pairs * (attention.score_dim + attention.value_dim) * heads
        span = self.squares / self.load.tokens if self.load.tokens else 0.0
        return self.cost_model.attention_s(
            flops=flops, tokens=span, head_dim=attention.score_dim, causal=attention.causal, backward=backward
        )

    def _unfused_attention_s(self, *, backward: bool) -> float:
        """Returns the seconds of products over all scores, masked ones too, and of passes over the scores."""
        attention, scores = self.stack.attention, self.heads * self.squares / self.layout.cp
        widths = [attention.score_dim, attention.value_dim]  # of queries with keys, of scores with values
        score_bytes = UNFUSED_BACKWARD_BYTES_PER_SCORE if backward else UNFUSED_BYTES_PER_SCORE
        score_bytes += DROPOUT_BYTES_PER_SCORE if self.stack.dropout else 0
        products_s = sum(self.cost_model.unfused_product_s(scores=scores, width=width) for width in widths)
        return (2 if backward else 1) * products_s + self.cost_model.memory_s(score_bytes * scores)

    def qkv_gemms(self) -> list[Gemm]:
        """Returns (tokens, outputs, inputs) of every projection before attention, per rank."""
        attention, hidden = self.stack.attention, self.stack.hidden
        if attention.latent is None:
            return [(self.tokens, attention.projected_width(self.heads, self.kv_heads), hidden)]
        latent = attention.latent
        keys = self.heads * (latent.nope_head_dim + latent.value_head_dim)
        return [
            (self.tokens, self.heads * attention.score_dim, latent.query_rank or hidden),
            (self.tokens, keys, latent.key_value_rank),
        ]

    def latent_gemms(self) -> list[Gemm]:
        """Returns the replicated down-projections of latent attention; every rank has its own tokens."""
        latent = self.stack.attention.latent
        return [(self.shard, latent.width, self.stack.hidden)] if latent else []

    def side_gemms(self) -> list[Gemm]:
        """Returns the replicated matrices besides attention and MLP; every rank has its own tokens."""
        return [(self.shard, linear.outputs, linear.inputs) for linear in self.stack.linears]

    @property
    def context_bytes(self) -> float:
        """Bytes that CP ranks gather: keys and values, or a state of every rank."""
        attention, layout = self.stack.attention, self.layout
        if attention.linear:
            state = self.heads * attention.score_dim * attention.value_dim
            return float(layout.cp * state * FP32_BYTES)
        return self.load.tokens * attention.key_value_width / layout.tp * BF16_BYTES

    @property
    def qkv_input_bytes(self) -> float:
        """Bytes gathered before the tensor-parallel projections: hidden states, or latents."""
        latent = self.stack.attention.latent
        if latent is None:
            return self.hidden_bytes
        direct = 0.0 if latent.query_rank else self.hidden_bytes
        return self.tokens * latent.width * BF16_BYTES + direct

    def out_gemm(self) -> Gemm:
        return self.tokens, self.stack.hidden, self.heads * self.stack.attention.value_dim

    def up_gemm(self, mlp: Mlp) -> Gemm:
        return self.tokens / mlp.merge, mlp.up_width / self.layout.tp, self.stack.hidden * mlp.merge

    def down_gemm(self, mlp: Mlp) -> Gemm:
        return self.tokens / mlp.merge, self.stack.hidden, mlp.width / self.layout.tp

    def mlp_output_bytes(self, mlp: Mlp) -> float:
        """Returns the bytes of the MLP's output over a TP group's tokens."""
        return self.hidden_bytes / mlp.merge

    def activation_s(self, mlp: Mlp, tokens: float, *, tp: int, backward: bool = False) -> float:
        """Returns the seconds of the non-linearity: reads outputs of `up`, writes inputs of `down`."""
        size = tokens / mlp.merge * (mlp.up_width + mlp.width) / tp * BF16_BYTES
        size *= self.cost_model.assumptions.gated_bytes_factor if mlp.gated else 1.0
        return self.cost_model.memory_s(size * (2 if backward else 1)) if mlp.width else 0.0

    def forward_s(self, gemms: list[Gemm]) -> float:
        return sum(self.cost_model.gemm_s(m, n, k) for m, n, k in gemms)

    def input_gradient_s(self, gemms: list[Gemm]) -> float:
        return sum(self.cost_model.gemm_s(m, k, n) for m, n, k in gemms)

    def weight_gradient_s(self, gemms: list[Gemm]) -> float:
        return sum(self.cost_model.weight_gradient_s(m, n, k) for m, n, k in gemms)

    # Mixture of experts ----------------------------------------------------------------

    @property
    def shared_mlp(self) -> Mlp | None:
        experts = self.stack.experts
        return Mlp(width=experts.shared_width) if experts and experts.shared_width else None

    def expert_gemms(self, experts: Experts) -> list[tuple[float, float, float, float]]:
        """Returns (times, tokens, outputs, inputs) of a rank's grouped products, with even experts."""
        local = experts.count / self.layout.ep
        rows = self.shard * experts.active / local
        hidden = self.stack.hidden
        return [(local, rows, 2 * experts.width, hidden), (local, rows, hidden, experts.width)]

    @property
    def shard_bytes(self) -> float:
        """Bytes of the hidden states of a rank's own tokens."""
        return self.shard * self.stack.hidden * BF16_BYTES

    def permutation_s(self, experts: Experts) -> float:
        """Returns the seconds in which tokens are sorted for the experts, and summed after them.

        Before and after an exchange; and between it and the products if a rank has several experts. What
        deduplicates tokens sorts them once, where they arrive.
        """
        ep, size = self.layout.ep, self.shard_bytes
        if ep > 1 and self.cost_model.deduplicates_tokens:
            arrived = self.cost_model.copies_sent(experts, ep)
            return 2 * self.cost_model.memory_s((arrived + experts.active) * size)
        seconds = 2 * self.cost_model.memory_s((1 + experts.active) * size)
        if 1 < ep < experts.count:
            seconds += 2 * self.cost_model.memory_s(2 * experts.active * size)
        return seconds


def saved_activation_bytes(shape: LayerShape, recompute: str) -> float:
    """Returns the bytes of activations that a rank saves from a layer's forward to its backward.

    Without recomputation a GPT layer keeps sbh(34 + 5as/h)/t bytes when scores are stored,
    and 34 sbh/t with selective recomputation (Korthikanti et al., arXiv 2205.05198, eq. 2-5).
    """
    stack, tp = shape.stack, shape.layout.tp
    attention, hidden = stack.attention, stack.hidden
    if recompute == "full":
        return 2.0 * hidden * shape.shard
    widths = 4.0 * hidden + attention.saved_width
    widths += sum(linear.inputs + linear.outputs for linear in stack.linears)
    masks = hidden * (1.0 + 1 / stack.merge_of(shape.layer)) if stack.dropout else 0.0
    widths += _mlp_widths(shape)
    fused = shape.cost_model.assumptions.fused_attention
    stored = BF16_BYTES * widths + masks
    if fused and recompute == "selective":
        stored -= BF16_BYTES * (2 * hidden + _nonlinear_widths(shape))
    scores = 0.0
    if attention.linear:
        scores = 0.0
    elif fused:
        scores = FP32_BYTES * attention.heads * shape.tokens / tp  # log-sum-exp of every row
    elif recompute == "none":
        per_pair = 5 if stack.dropout else 2  # softmax output 2; dropout mask 1 and output 2
        scores = per_pair * attention.heads * shape.squares / shape.layout.cp / tp
    return stored * shape.shard + scores


def activation_gradient_bytes(shape: LayerShape) -> float:
    """Returns the peak bytes of activation gradients in a layer's backward: after the MLP's non-linearity."""
    return BF16_BYTES * _mlp_widths(shape) * shape.shard


def gathered_gradient_bytes(shape: LayerShape) -> float:
    """Returns the bytes of other ranks' rows in gradients that a row-parallel linear's weight gradient reads.

    Attention has one such linear, and so has an MLP that is split over the TP group.
    """
    stack = shape.stack
    routed = stack.experts is not None and stack.has_experts(shape.layer)
    linears = 2 if not routed or shape.shared_mlp else 1
    return BF16_BYTES * linears * stack.hidden * (shape.layout.tp - 1) * shape.shard


def _mlp_widths(shape: LayerShape) -> float:
    """Returns the stored widths of the MLP, or of the experts that a token visits."""
    stack = shape.stack
    if not (stack.experts and stack.has_experts(shape.layer)):
        return (stack.mlp.up_width + stack.mlp.width) / stack.mlp.merge
    experts, active = stack.experts, stack.experts.active
    shared = 3.0 * experts.shared_width
    return active * (2.0 * stack.hidden + 3.0 * experts.width) + 2.0 * experts.count + shared


def _nonlinear_widths(shape: LayerShape) -> float:
    stack = shape.stack
    if not (stack.experts and stack.has_experts(shape.layer)):
        return stack.mlp.width / stack.mlp.merge
    return stack.experts.active * stack.experts.width + stack.experts.shared_width
