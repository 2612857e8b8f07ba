"""Reduces NVIDIA's measured tables to the few hundred numbers the cost model needs.

    python -m benchmarks.make_curves PATH_TO/aiconfigurator_core optimus/catalog/curves

Needs pandas and pyarrow, and the unpacked wheel of aiconfigurator-core; the planner needs neither.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

PACKAGE = "NVIDIA aiconfigurator-core 0.12.0 (PyPI, Apache-2.0)"


@dataclass(frozen=True, kw_only=True)
class CurveSource:
    """One folder of systems/data: its peak FLOPs and its NCCL version."""

    name: str
    peak_flops: float  # dense bf16, systems/<name>.yaml: bfloat16_tc_flops
    nccl: str


H100 = CurveSource(name="h100_sxm", peak_flops=989e12, nccl="2.29.2")
SYSTEMS = (
    H100,
    CurveSource(name="h200_sxm", peak_flops=989e12, nccl="2.29.2"),
    CurveSource(name="b200_sxm", peak_flops=2250e12, nccl="2.29.2"),
    CurveSource(name="a100_sxm", peak_flops=312e12, nccl="2.27.3"),
)

TOKENS = tuple(2**i for i in range(6, 15))
GEMM_M = (64, 256, 512, 1024, 2048, 4096, 8192, 16384)
GEMM_NK = (256, 512, 1024, 2048, 4096, 8192, 16384)
MIN_SEQUENCES_TIMES_HEADS = 16  # fewer thread blocks leave SMs idle: not how one trains
DERIVED_HEAD_DIM = 128
COLLECTIVES = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
}

Fractions = dict[tuple[int, int], float]  # (head_dim, tokens) -> fraction of peak
Kernels = dict[int, str]  # head_dim -> the kernel chosen for it


def padded(times: np.ndarray) -> np.ndarray:
    """No size takes longer than a larger one: one could pad to it. Removes spikes, keeps monotone data."""
    for axis in range(times.ndim):
        flipped = np.flip(times, axis)
        times = np.flip(np.minimum.accumulate(flipped, axis=axis), axis)
    return times


def write(path: Path, notes: list[str], columns: str, rows: list[str]) -> None:
    """One csv: `#` lines first, then the header, then the rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*(f"# {note}" for note in notes), columns, *rows]) + "\n")


# ---------------------------------------------------------------- GEMM


def make_gemm(data: Path, system: CurveSource, out: Path) -> None:
    """Achieved fraction of peak at measured points of a coarse grid."""
    (source,) = (data / system.name / "gemm/trtllm").glob("*/gemm_perf.parquet")
    table = pd.read_parquet(source)
    table = table[table.gemm_dtype == "bfloat16"].set_index(["m", "n", "k"])
    sizes_m = [m for m in GEMM_M if m in table.index.get_level_values("m")]
    sizes = np.array([(m, n, k) for m in sizes_m for n in GEMM_NK for k in GEMM_NK])
    measured = 1e-3 * table.latency.loc[[tuple(size) for size in sizes]].to_numpy()
    seconds = padded(measured.reshape(len(sizes_m), len(GEMM_NK), len(GEMM_NK))).ravel()
    moved = np.abs(seconds / measured - 1)
    fractions = 2 * sizes.prod(axis=1) / seconds / system.peak_flops
    notes = [
        f"Source: {PACKAGE}, systems/data/{source.relative_to(data)}, gemm_dtype bfloat16.",
        "Derivation: fraction = 2 m n k / (latency * peak) at measured points, nothing fitted.",
        "A size that took longer than a larger one takes its time:",
        f"{(moved > 0.001).sum()} of {len(moved)} rows, at most {100 * moved.max():.0f} %.",
        f"Units: elements of (m x k) @ (k x n); fraction of {system.peak_flops / 1e12:g} dense bf16 TFLOPS.",
    ]
    rows = [f"{m},{n},{k},{f:.4g}" for (m, n, k), f in zip(sizes, fractions, strict=True)]
    write(out / system.name / "gemm.csv", notes, "m,n,k,fraction", rows)


# ---------------------------------------------------------------- attention


def read_attention(source: Path, system: CurveSource, *, causal: bool) -> pd.DataFrame:
    """bf16 rows without window, with their fraction of peak; a causal square counts half."""
    table = pd.read_parquet(source)
    keep = (table.attn_dtype == "bfloat16") & (table.isl.isin(TOKENS)) & (table.head_dim <= 256)
    keep &= table.batch_size * table.num_heads >= MIN_SEQUENCES_TIMES_HEADS
    if "kv_cache_dtype" in table:
        keep &= table.kv_cache_dtype == "bfloat16"
    if "window_size" in table:
        keep &= table.window_size == 0
    keep &= ~table.kernel_source.str.contains("triton")  # fall-backs: 0.1 of peak where others reach 0.5
    table = table[keep].copy()
    square = table.isl.astype(float) ** 2 * table.batch_size * table.num_heads * table.head_dim
    table["fraction"] = (2 if causal else 4) * square / (1e-3 * table.latency) / system.peak_flops
    table["kernel"] = f"{source.parts[-3]} {source.parts[-2]} " + table.kernel_source
    return table


def best_attention(data: Path, system: CurveSource, *, causal: bool) -> tuple[Fractions, Kernels]:
    """Medians of the kernel that is best from 1024 tokens on, for every head_dim."""
    kind = "context_attention" if causal else "encoder_attention"
    folder = data / system.name / ("attention" if causal else "encoder_attention")
    sources = sorted(folder.glob(f"*/*/{kind}_perf.parquet"))
    fractions: Fractions = {}
    kernels: Kernels = {}
    if not sources:
        return fractions, kernels
    table = pd.concat([read_attention(source, system, causal=causal) for source in sources])
    medians = table.groupby(["head_dim", "kernel", "isl"]).fraction.median().unstack("isl")
    medians = medians.dropna()  # kernels measured at every length
    for head_dim, group in medians.groupby("head_dim"):
        kernel = group.loc[:, [t for t in TOKENS if t >= 1024]].mean(axis=1).idxmax()[1]
        kernels[head_dim] = kernel
        fractions |= {(head_dim, t): group.loc[(head_dim, kernel), t] for t in TOKENS}
    return fractions, kernels


def derive_unmasked_128(causal: Fractions, unmasked: Fractions) -> Fractions:
    """Causal 128 times what dropping the mask is worth at head_dim 64, at most causal 128 at full length.

    The share of masked tiles vanishes with the length, so the longest causal sequence is the ceiling.
    """
    ceiling = causal[DERIVED_HEAD_DIM, TOKENS[-1]]
    return {
        (DERIVED_HEAD_DIM, t): min(ceiling, causal[DERIVED_HEAD_DIM, t] * unmasked[64, t] / causal[64, t])
        for t in TOKENS
    }


def derive_from(other: Fractions, other_causal: Fractions, causal: Fractions) -> Fractions:
    """This system's causal 128 times the other system's ratio to its own causal 128, same ceiling."""
    ceiling = causal[DERIVED_HEAD_DIM, TOKENS[-1]]
    return {
        (h, t): min(ceiling, causal[DERIVED_HEAD_DIM, t] * f / other_causal[DERIVED_HEAD_DIM, t])
        for (h, t), f in other.items()
    }


def attention_of(data: Path, system: CurveSource) -> tuple[Fractions, Fractions, list[str]]:
    """(causal, not causal, notes), with what is not measured derived and named."""
    causal, kernels = best_attention(data, system, causal=True)
    unmasked, unmasked_kernels = best_attention(data, system, causal=False)
    notes = [f"causal head_dim {h}: {kernel}." for h, kernel in kernels.items()]
    notes += [f"not causal head_dim {h}: {kernel}." for h, kernel in unmasked_kernels.items()]
    if unmasked:
        unmasked |= derive_unmasked_128(causal, unmasked)
        notes.append(
            "not causal head_dim 128: DERIVED, causal 128 times (not causal 64 / causal 64), "
            "at most causal 128 at 16384 tokens."
        )
        return causal, unmasked, notes
    other_causal, other_unmasked, _ = attention_of(data, H100)
    missing = {key: f for key, f in other_causal.items() if key not in causal}
    names = ", ".join(map(str, sorted({h for h, _ in missing})))
    notes.append(
        f"causal head_dim {names} and all of not causal: DERIVED, causal 128 of this system times "
        "the ratio to causal 128 on h100_sxm, at most causal 128 at 16384 tokens."
    )
    unmasked = derive_from(other_unmasked, other_causal, causal)
    return causal | derive_from(missing, other_causal, causal), unmasked, notes


def padded_fractions(fractions: Fractions) -> Fractions:
    """Fractions of peak under which no length takes longer than a longer one."""
    result = dict(fractions)
    for head_dim in {h for h, _ in fractions}:
        lengths = np.array(sorted(n for h, n in fractions if h == head_dim))
        times = padded(lengths**2.0 / [fractions[head_dim, n] for n in lengths.tolist()])
        result |= {(head_dim, int(n)): float(n**2 / t) for n, t in zip(lengths, times, strict=True)}
    return result


def make_attention(data: Path, system: CurveSource, out: Path) -> None:
    """Fraction of peak of forward attention by mask, head_dim and tokens."""
    causal, unmasked, choices = attention_of(data, system)
    causal, unmasked = padded_fractions(causal), padded_fractions(unmasked)
    notes = [
        f"Source: {PACKAGE}, systems/data/{system.name}: attention/*/*/context_attention_perf.parquet",
        "and encoder_attention/*/*/encoder_attention_perf.parquet, bf16, no window.",
        "FLOPs: forward = 4 * sequences * heads * tokens^2 * head_dim; causal counts HALF of that square.",
        f"Derivation: median over all cases with sequences * heads >= {MIN_SEQUENCES_TIMES_HEADS},",
        "of the kernel that is best from 1024 tokens on; Triton fall-backs left out. No length takes longer",
        "than a longer one. Kernels:",
        *choices,
        f"Units: tokens per sequence; fraction of {system.peak_flops / 1e12:g} dense bf16 TFLOPS.",
    ]
    rows = [
        f"{mask},{h},{t},{f:.4g}"
        for mask, fractions in ((1, causal), (0, unmasked))
        for (h, t), f in sorted(fractions.items())
    ]
    write(out / system.name / "attention.csv", notes, "causal,head_dim,tokens,fraction", rows)


# ---------------------------------------------------------------- collectives


def make_collectives(data: Path, system: CurveSource, out: Path) -> None:
    """Seconds of collectives inside one node."""
    source = data / system.name / "comm/nccl" / system.nccl / "nccl_perf.parquet"
    table = pd.read_parquet(source)
    table = table[(table.nccl_dtype == "half") & table.op_name.isin(list(COLLECTIVES))]
    rows = []
    for (op, ranks), group in table.groupby(["op_name", "num_gpus"], sort=False):
        ordered = group.sort_values("message_size")
        seconds = padded(1e-3 * ordered.latency.to_numpy())
        rows += [
            f"{COLLECTIVES[op]},{ranks},{2 * elements},{s:.4g}"
            for elements, s in zip(ordered.message_size, seconds, strict=True)
        ]
    notes = [
        f"Source: {PACKAGE}, systems/data/{source.relative_to(data)}, nccl_dtype half.",
        f"NCCL {system.nccl}, one node, measured; message_size is in elements of 2 bytes.",
        "Derivation: latency as measured; a size that took longer than a larger one takes its time.",
        "Units: bytes = the whole tensor: all_gather, gathered output; reduce_scatter, unscattered input;",
        "all_reduce, the tensor; all_to_all, what one rank sends, its own part included. As in nccl-tests:",
        "busbw = (ranks - 1) / ranks * bytes / seconds, twice that for all_reduce.",
    ]
    write(out / system.name / "collectives.csv", notes, "op,ranks,bytes,seconds", rows)


def main() -> None:
    """Write the curves of every system."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path, help="unpacked aiconfigurator_core")
    parser.add_argument("out", type=Path, help="folder to write <system>/*.csv into")
    arguments = parser.parse_args()
    data = arguments.package / "systems" / "data"
    for system in SYSTEMS:
        make_gemm(data, system, arguments.out)
        make_attention(data, system, arguments.out)
        make_collectives(data, system, arguments.out)


if __name__ == "__main__":
    main()
