"""What a layer keeps on a rank from its forward to its backward."""

from __future__ import annotations

from optimus.cost.shape import LayerShape
from optimus.job.model import BF16_BYTES, FP32_BYTES


def activation_bytes(shape: LayerShape, recompute: str) -> float:
    """What a layer keeps on a rank from its forward to its backward.

    Without recomputation a GPT layer keeps sbh(34 + 5as/h)/t bytes when scores are stored,
    and 34 sbh/t with selective recomputation (Korthikanti et al., arXiv 2205.05198, eq. 2-5).
    """
    stack, tp = shape.stack, shape.layout.tp
    attention, hidden = stack.attention, stack.hidden
    if recompute == "full":
        return 2.0 * hidden * shape.shard
    widths = 4.0 * hidden + attention.query_width + attention.key_value_width + attention.output_width
    if attention.latent:
        widths += attention.latent.width
    masks = 2.0 * hidden if stack.dropout else 0.0
    widths += _mlp_widths(shape)
    fused = shape.prices.assumptions.fused_attention
    stored = BF16_BYTES * widths + masks
    if fused and recompute == "selective":
        stored -= BF16_BYTES * (2 * hidden + _nonlinear_widths(shape))
    scores = 0.0
    if fused:
        scores = FP32_BYTES * attention.heads * shape.tokens / tp  # log-sum-exp of every row
    elif recompute == "none":
        per_pair = 5 if stack.dropout else 2  # softmax output 2; dropout mask 1 and output 2
        scores = per_pair * attention.heads * shape.squares / shape.layout.cp / tp
    return stored * shape.shard + scores


def gradient_bytes(shape: LayerShape) -> float:
    """The most gradients of activations while a layer's backward runs: behind the MLP's non-linearity."""
    return BF16_BYTES * _mlp_widths(shape) * shape.shard


def _mlp_widths(shape: LayerShape) -> float:
    """Stored widths of the MLP or of the experts a token visits."""
    stack = shape.stack
    if not (stack.experts and stack.has_experts(shape.layer)):
        return stack.mlp.up_width + stack.mlp.width
    experts, active = stack.experts, stack.experts.active
    shared = 3.0 * experts.shared_width
    return active * (2.0 * stack.hidden + 3.0 * experts.width) + 2.0 * experts.count + shared


def _nonlinear_widths(shape: LayerShape) -> float:
    stack = shape.stack
    if not (stack.experts and stack.has_experts(shape.layer)):
        return stack.mlp.width
    return stack.experts.active * stack.experts.width + stack.experts.shared_width
