"""Kernel times reproduce NVIDIA's measured tables and behave where nothing was measured."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus.cost.compute import (
    ATTENTION_BACKWARD_FLOPS,
    ATTENTION_BACKWARD_RELATIVE_EFFICIENCY,
    attention_s,
    gemm_s,
    load_efficiency_curves,
    memory_bound_kernel_s,
)
from optimus.errors import UserError
from optimus.job.cluster import Gpu

GPUS = {
    name: Gpu(
        name=name,
        peak_flops=tflops * 1e12,
        memory_bytes=80e9,
        memory_bandwidth_bytes_per_s=tb_per_s * 1e12,
        curves=name,
    )
    for name, tflops, tb_per_s in (
        ("a100_sxm", 312, 2.039),
        ("h100_sxm", 989, 3.35),
        ("h200_sxm", 989, 4.8),
        ("b200_sxm", 2250, 8.0),
    )
}
H100 = GPUS["h100_sxm"]
ROUNDING = 1.001  # four digits in the csv files

sizes = st.integers(1, 100_000)
gpus = st.sampled_from(sorted(GPUS)).map(GPUS.__getitem__)


def attention_flops(tokens: int, *, causal: bool, heads: int = 16, head_dim: int = 128) -> float:
    return (2 if causal else 4) * heads * head_dim * tokens**2


# Median fraction of peak over N, K >= 1024 (reference/hardware.md, section 2).
GEMM_MEDIANS = [
    ("a100_sxm", {64: 0.25, 256: 0.58, 1024: 0.75, 2048: 0.81, 4096: 0.82, 8192: 0.83}),
    ("h100_sxm", {64: 0.15, 256: 0.50, 1024: 0.73, 2048: 0.75, 4096: 0.77, 8192: 0.79, 16384: 0.78}),
    ("h200_sxm", {64: 0.19, 256: 0.59, 1024: 0.74, 2048: 0.77, 4096: 0.77, 8192: 0.78, 16384: 0.78}),
    ("b200_sxm", {64: 0.12, 256: 0.40, 1024: 0.60, 2048: 0.65, 4096: 0.64, 8192: 0.65, 16384: 0.66}),
]


@pytest.mark.parametrize(("name", "medians"), GEMM_MEDIANS)
def test_gemm_medians_by_tokens(name: str, medians: dict[int, float]) -> None:
    widths = (1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 16384, 65536)
    for m, expected in medians.items():
        fractions = [
            2 * m * n * k / gemm_s(GPUS[name], m, n, k) / GPUS[name].peak_flops
            for n in widths
            for k in widths
        ]
        assert statistics.median(fractions) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(
    ("m", "n", "k", "milliseconds"),
    [
        (2048, 3072, 12288, 0.1968),
        (4096, 7168, 5120, 0.3818),
        (8192, 12288, 6144, 1.525),
        (512, 2560, 2560, 0.0132),
    ],
)
def test_gemm_between_the_points_of_the_grid(m: int, n: int, k: int, milliseconds: float) -> None:
    """H100 rows of the source table that are not among the rows we ship."""
    assert 1e3 * gemm_s(H100, m, n, k) == pytest.approx(milliseconds, rel=0.1)


@given(gpu=gpus, m=sizes, n=sizes, k=sizes, axis=st.integers(0, 2), factor=st.floats(1, 64))
def test_gemm_never_gets_faster_when_a_size_grows(
    gpu: Gpu, m: int, n: int, k: int, axis: int, factor: float
) -> None:
    larger = [float(m), float(n), float(k)]
    larger[axis] *= factor
    assert gemm_s(gpu, m, n, k) <= gemm_s(gpu, *larger) * ROUNDING


@given(gpu=gpus, m=sizes, n=sizes, k=sizes)
def test_gemm_is_never_faster_than_the_gpu(gpu: Gpu, m: int, n: int, k: int) -> None:
    seconds = gemm_s(gpu, m, n, k)
    assert seconds >= 2 * m * n * k / gpu.peak_flops
    assert seconds >= 2 * (m * n + m * k + n * k) / gpu.memory_bandwidth_bytes_per_s
    assert seconds >= 1e-6  # a kernel launch, nearly


def test_nothing_costs_nothing() -> None:
    assert gemm_s(H100, 0, 4096, 4096) == 0
    assert attention_s(H100, flops=0, tokens=0, head_dim=128, causal=True) == 0
    assert memory_bound_kernel_s(H100, 0) == 0


# Fraction of peak, causal, head_dim 128 (reference/hardware.md, section 3). There the median is over all
# cases; the curves leave out low occupancy and, on B200, a slower kernel: up to 0.04 better.
CAUSAL_128 = [
    ("a100_sxm", {1024: 0.41, 2048: 0.54, 4096: 0.60}),
    ("h100_sxm", {1024: 0.32, 2048: 0.44, 4096: 0.51, 8192: 0.57}),
    ("b200_sxm", {1024: 0.21, 2048: 0.33, 4096: 0.42}),
]


@pytest.mark.parametrize(("name", "fractions"), CAUSAL_128)
def test_causal_attention(name: str, fractions: dict[int, float]) -> None:
    gpu = GPUS[name]
    for tokens, expected in fractions.items():
        flops = attention_flops(tokens, causal=True)
        seconds = attention_s(gpu, flops=flops, tokens=tokens, head_dim=128, causal=True)
        assert -0.01 <= flops / seconds / gpu.peak_flops - expected <= 0.041


@pytest.mark.parametrize(
    ("head_dim", "best"),
    [(64, {1024: 0.35, 4096: 0.50}), (72, {1024: 0.33, 4096: 0.47}), (80, {1024: 0.40, 4096: 0.55})],
)
def test_encoder_attention(head_dim: int, best: dict[int, float]) -> None:
    """Hardware.md prints the best over batch on H100; the curves are medians, so a little below."""
    for tokens, expected in best.items():
        fraction = load_efficiency_curves("h100_sxm").attention[False].at(head_dim, tokens)
        assert 0.74 * expected <= fraction <= expected


def test_derived_head_dim_128_agrees_with_flash_attention_3() -> None:
    """arXiv 2407.08608, figure 5, H100, no mask: TFLOPS by tokens."""
    for tokens, tflops in {2048: 625, 4096: 638, 8192: 646, 16384: 648}.items():
        fraction = load_efficiency_curves("h100_sxm").attention[False].at(128, tokens)
        assert fraction * 989 == pytest.approx(tflops, rel=0.1)


@given(gpu=gpus, tokens=st.integers(1, 60_000), head_dim=st.integers(32, 256), causal=st.booleans())
def test_attention_never_gets_faster_with_tokens(gpu: Gpu, tokens: int, head_dim: int, causal: bool) -> None:
    def seconds(tokens: int) -> float:
        flops = attention_flops(tokens, causal=causal, head_dim=head_dim)
        return attention_s(gpu, flops=flops, tokens=tokens, head_dim=head_dim, causal=causal)

    rounding = 1 + 1e-3  # of the curves' four digits
    assert seconds(tokens) <= rounding * seconds(tokens + 1) <= rounding**2 * seconds(2 * tokens + 1)


def test_attention_backward() -> None:
    forward, backward = (
        attention_s(H100, flops=1e12, tokens=4096, head_dim=128, causal=True, backward=backward)
        for backward in (False, True)
    )
    expected = ATTENTION_BACKWARD_FLOPS / ATTENTION_BACKWARD_RELATIVE_EFFICIENCY
    assert backward / forward == pytest.approx(expected)


def test_memory_bound() -> None:
    assert memory_bound_kernel_s(H100, 3.35e9) == pytest.approx(1 / 666 + 3e-6, rel=1e-9)
    assert memory_bound_kernel_s(H100, 1) == pytest.approx(3e-6, rel=1e-3)


def test_outside_tells_extrapolation() -> None:
    gemm = load_efficiency_curves("h100_sxm").gemm
    assert not gemm.outside(64, 256, 16384)
    assert not gemm.outside(3000, 300, 5120)
    assert gemm.outside(63, 256, 256)
    assert gemm.outside(64, 256, 32768)


def test_unknown_curves_name_the_known_ones() -> None:
    with pytest.raises(UserError, match="did you mean h100_sxm"):
        load_efficiency_curves("h100_sx")
