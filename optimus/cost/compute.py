"""Seconds of kernels on one GPU, from measured efficiencies."""

from __future__ import annotations

from optimus.cost.curves import load_curves
from optimus.job.cluster import Gpu

BF16_BYTES = 2

# FlashAttention recomputes the scores: 5 matrix products backward for 2 forward; the papers on
# FlashAttention-2 (arXiv 2307.08691) and -3 (arXiv 2407.08608) count backward FLOPs the same way.
ATTENTION_BACKWARD_FLOPS = 2.5

# FlashAttention-3, arXiv 2407.08608, figures 5 and 6: H100, head_dim 128, no mask, forward and backward
# TFLOPS 625 and 501 at 2k tokens (0.80), 638 and 542 at 4k (0.85), 648 and 561 at 16k (0.87); best forward
# of any shape 740 (0.76, abstract). The bars were read from a third party's transcription of the figures, not
# from the paper: check before quoting. Only H100 is covered; other systems take its ratio, unmeasured.
ATTENTION_BACKWARD_RELATIVE_EFFICIENCY = 0.8

# aiconfigurator-core 0.12.0, systems/*.yaml: mem_bw_empirical_scaling_factor and
# mem_empirical_constant_latency, which it labels unofficial.
MEMORY_BANDWIDTH_SHARE = 0.8
MEMORY_KERNEL_LATENCY_S = 3e-6


def gemm_s(gpu: Gpu, m: float, n: float, k: float) -> float:
    """(m x k) @ (k x n) in bf16.

    A linear of `tokens` rows from `k` to `n` features: forward (tokens, n, k), input gradient
    (tokens, k, n), weight gradient (k, n, tokens). Below the smallest measured size a dimension costs what
    the smallest costs (a tile is not made smaller); above the largest the fraction of peak stays.
    Against the rows of the source tables inside the grid that are not shipped (14,636; A100 3,703): median
    error 3-4 % on Hopper, 5 % on B200 and 6 % on A100; nine in ten within 12 %, 13 % and 21 %.
    """
    if min(m, n, k) <= 0:
        return 0.0
    measured = load_curves(gpu.curves).gemm
    rows, columns, depth = (
        max(asked, kept) for asked, kept in zip((m, n, k), measured.clamp(m, n, k), strict=True)
    )
    compute_s = 2 * rows * columns * depth / (gpu.peak_flops * measured.at(m, n, k))
    traffic_s = BF16_BYTES * (m * k + k * n + m * n) / gpu.memory_bandwidth_bytes_per_s
    return max(compute_s, traffic_s)


def attention_s(
    gpu: Gpu, *, flops: float, tokens: float, head_dim: int, causal: bool, backward: bool = False
) -> float:
    """Fused attention whose FORWARD takes `flops`, over sequences of `tokens` tokens.

    `flops` counts 4 * heads * tokens^2 * head_dim per sequence, and half of it when causal.
    """
    if min(flops, tokens) <= 0:
        return 0.0
    fraction = load_curves(gpu.curves).attention[causal].at(head_dim, tokens)
    if backward:
        flops *= ATTENTION_BACKWARD_FLOPS
        fraction *= ATTENTION_BACKWARD_RELATIVE_EFFICIENCY
    return flops / (gpu.peak_flops * fraction)


def memory_bound_s(gpu: Gpu, size_bytes: float) -> float:
    """A kernel that only reads and writes `size_bytes`: norms, activations, the optimizer."""
    if size_bytes <= 0:
        return 0.0
    return size_bytes / (MEMORY_BANDWIDTH_SHARE * gpu.memory_bandwidth_bytes_per_s) + MEMORY_KERNEL_LATENCY_S
