"""Computes seconds of kernels on one GPU from measured efficiency curves."""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np

from optimus.errors import UserError, nearest
from optimus.ir.op import Floats
from optimus.job.cluster import FLAT, Gpu
from optimus.job.model import BF16_BYTES


@dataclass(frozen=True, eq=False)
class _LogGrid:
    """Positive values on a grid of sorted axes, stored and interpolated as logarithms."""

    log_axes: tuple[Floats, ...]
    log_values: Floats

    def at(self, *point: float) -> float:
        """Interpolates linearly in the logarithms; beyond an edge, returns the value at the edge."""
        cube = self.log_values
        for axis, coordinate in zip(self.log_axes, point, strict=True):
            place = float(np.interp(math.log(coordinate), axis, np.arange(len(axis))))  # stops at the edges
            low = min(int(place), len(axis) - 2)
            cube = cube[low] + (place - low) * (cube[low + 1] - cube[low])
        return math.exp(float(cube))

    def clamp(self, *point: float) -> tuple[float, ...]:
        """Returns the nearest point inside the grid."""
        edges = zip(self.log_axes, point, strict=True)
        return tuple(min(max(x, math.exp(axis[0])), math.exp(axis[-1])) for axis, x in edges)

    def outside(self, *point: float) -> bool:
        """Returns whether the point is outside of the grid, where `at` is not reliable."""
        return any(not math.isclose(x, y) for x, y in zip(point, self.clamp(*point), strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class EfficiencyCurves:
    """Measured efficiency curves of one system; the csv files say where, how and in which units."""

    gemm: _LogGrid  # (m, n, k) -> fraction of peak
    attention: Mapping[bool, _LogGrid]  # causal -> (head_dim, tokens) -> fraction of peak, forward
    collectives: Mapping[str, _LogGrid]  # name -> (ranks, bytes) -> seconds inside one node


@functools.cache
def load_efficiency_curves(system: str) -> EfficiencyCurves:
    """Loads `catalog/curves/<system>`; `flat` reaches the peak everywhere and has no collectives."""
    if system == FLAT:
        return EfficiencyCurves(gemm=_flat(3), attention={False: _flat(2), True: _flat(2)}, collectives={})
    folder = resources.files("optimus.catalog") / "curves"
    known = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if system not in known:
        hint = nearest(system, known)
        raise UserError(field="gpu.curves", value=system, problem="is not measured", hint=hint)
    gemm, attention, collectives = (
        _read_rows((folder / system / f"{name}.csv").read_text(encoding="utf-8"))
        for name in ("gemm", "attention", "collectives")
    )
    return EfficiencyCurves(
        gemm=_to_grid(gemm),
        attention={bool(int(key)): _to_grid(rows) for key, rows in _split_by_first(attention).items()},
        collectives={key: _to_grid(rows) for key, rows in _split_by_first(collectives).items()},
    )


def _flat(dimensions: int) -> _LogGrid:
    """Returns a grid that is 1 everywhere."""
    return _LogGrid((np.log([1.0, 2.0]),) * dimensions, np.zeros((2,) * dimensions))


def _read_rows(text: str) -> list[list[str]]:
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return list(csv.reader(lines))[1:]


def _split_by_first(rows: Sequence[Sequence[str]]) -> dict[str, list[Sequence[str]]]:
    groups: dict[str, list[Sequence[str]]] = {}
    for first, *rest in rows:
        groups.setdefault(first, []).append(rest)
    return groups


def _to_grid(rows: Sequence[Sequence[str]]) -> _LogGrid:
    logs = np.log(np.array(rows, dtype=np.float64))
    logs = logs[np.lexsort(logs.T[-2::-1])]  # first column slowest, as in the shape below
    axes = tuple(np.unique(column) for column in logs.T[:-1])
    shape = tuple(len(axis) for axis in axes)
    assert len(logs) == math.prod(shape), f"{len(logs)} rows do not fill a grid of {shape}"
    return _LogGrid(axes, logs[:, -1].reshape(shape))


# FlashAttention recomputes the scores: 5 matrix products backward for 2 forward; the papers on
# FlashAttention-2 (arXiv 2307.08691) and -3 (arXiv 2407.08608) count backward FLOPs the same way.
ATTENTION_BACKWARD_FLOPS = 2.5

# FlashAttention-3, arXiv 2407.08608, figures 5 and 6: H100, head_dim 128, no mask, forward and backward
# TFLOPS 625 and 501 at 2k tokens (0.80), 638 and 542 at 4k (0.85), 648 and 561 at 16k (0.87); best forward
# of any shape 740 (0.76, abstract). The bars were read from a third party's transcription of the figures, not
# from the paper: check before quoting. Only H100 is covered; other systems take its ratio, unmeasured.
ATTENTION_BACKWARD_RELATIVE_EFFICIENCY = 0.8

# The curves were measured in short bursts at full clocks; training runs at the power limit. Rates of
# products in training over those of the curves: H100, 18 products of torch.profiler traces of single-GPU
# training, median 0.905 (H200: the same chip, unmeasured); B200, 288 products without accumulation of
# MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json (Apache-2.0), median 1/1.38. A100:
# unmeasured. Attention is not slowed down: SimuMax's of B200 takes what the curves say, 0.9 to 1.1 of it
# with many heads.
SUSTAINED_SHARE = {"h100_sxm": 0.905, "h200_sxm": 0.905, "b200_sxm": 0.725}

# FlashAttention-3, arXiv 2407.08608, abstract: 1.5 to 2.0 times as fast as FlashAttention-2 on Hopper,
# which is what torch's own flash attention is (the same H100 traces: 1.25 to 1.56). Blackwell:
# unmeasured, taken alike.
FLASH2_SLOWDOWN = {"h100_sxm": 1.5, "h200_sxm": 1.5, "b200_sxm": 1.5}

# Assumed: what SimuMax takes for kernels that it has not measured. Measured are 0.71 by SimuMax on A100,
# 0.50 (permutations) and 0.28 to 0.32 (cross-entropy) on B200, and 0.42 to 0.62 by norms of the H100
# traces. Latency: aiconfigurator-core 0.12.0, mem_empirical_constant_latency, which it labels unofficial.
MEMORY_BANDWIDTH_SHARE = 0.666
MEMORY_KERNEL_LATENCY_S = 3e-6


def gemm_s(gpu: Gpu, m: float, n: float, k: float, *, rate: float = 1.0) -> float:
    """Returns the seconds of (m x k) @ (k x n) in bf16, computed at a share of the measured rate.

    A linear of `tokens` rows from `k` to `n` features: forward (tokens, n, k), input gradient
    (tokens, k, n), weight gradient (k, n, tokens). Below the smallest measured size a dimension costs what
    the smallest costs (a tile is not made smaller); above the largest the fraction of peak stays.
    Against the rows of the source tables inside the grid that are not shipped (14,636; A100 3,703): median
    error 3-4 % on Hopper, 5 % on B200 and 6 % on A100; nine in ten within 12 %, 13 % and 21 %.
    """
    if min(m, n, k) <= 0:
        return 0.0
    measured = load_efficiency_curves(gpu.curves).gemm
    rows, columns, depth = (
        max(size, measured_size)
        for size, measured_size in zip((m, n, k), measured.clamp(m, n, k), strict=True)
    )
    compute_s = 2 * rows * columns * depth / (gpu.peak_flops * measured.at(m, n, k) * rate)
    traffic_s = BF16_BYTES * (m * k + k * n + m * n) / gpu.memory_bandwidth_bytes_per_s
    return max(compute_s, traffic_s)


def accumulation_s(gpu: Gpu, weights: float, gradient_bytes: int) -> float:
    """Returns the seconds by which a weight gradient takes longer because it is added to what is there.

    Fused into the product, it reads and writes sums instead of writing bf16; apart from it, gradients are
    read and added, or cast and copied for the reduction, which moves as many bytes. Predicted over
    measured, of 226 accumulating products of SimuMax on B200: 0.93 without it; with it 1.06 in the median
    (1.2 below 50 million weights, 0.99 above a billion) and 0.98 of all seconds.
    """
    extra_bytes = (2 * gradient_bytes - BF16_BYTES) * weights
    return extra_bytes / (MEMORY_BANDWIDTH_SHARE * gpu.memory_bandwidth_bytes_per_s)


# Products of scores are thin, and bound by the scores that they write or read; their rate is assumed.
UNFUSED_ATTENTION_SHARE = 0.5  # of the peak


def unfused_product_s(gpu: Gpu, *, scores: float, width: float) -> float:
    """Returns the seconds of a batched product that writes or reads stored scores of `width` each."""
    compute_s = 2 * scores * width / (UNFUSED_ATTENTION_SHARE * gpu.peak_flops)
    traffic_s = BF16_BYTES * scores / (MEMORY_BANDWIDTH_SHARE * gpu.memory_bandwidth_bytes_per_s)
    return max(compute_s, traffic_s)


def attention_s(
    gpu: Gpu, *, flops: float, tokens: float, head_dim: int, causal: bool, backward: bool = False
) -> float:
    """Returns the seconds of fused attention whose FORWARD takes `flops`, over sequences of `tokens` tokens.

    `flops` counts 4 * heads * tokens^2 * head_dim per sequence, and half of it when causal.
    """
    if min(flops, tokens) <= 0:
        return 0.0
    fraction = load_efficiency_curves(gpu.curves).attention[causal].at(head_dim, tokens)
    if backward:
        flops *= ATTENTION_BACKWARD_FLOPS
        fraction *= ATTENTION_BACKWARD_RELATIVE_EFFICIENCY
    return flops / (gpu.peak_flops * fraction)


def memory_bound_kernel_s(gpu: Gpu, size_bytes: float) -> float:
    """Returns the seconds of a kernel that reads and writes `size_bytes`: norms, activations, optimizer."""
    if size_bytes <= 0:
        return 0.0
    return size_bytes / (MEMORY_BANDWIDTH_SHARE * gpu.memory_bandwidth_bytes_per_s) + MEMORY_KERNEL_LATENCY_S
