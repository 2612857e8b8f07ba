"""Describes a cluster: GPUs, nodes, links and reserved memory, and the blocks of files that state it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from optimus.job.typed import Amount, Count, NonNegative, NumberRange

GB = 1e9
CPU_CORE = "cpu-core"
FLAT = "flat"  # curves of unmeasured GPUs: peak_flops at every size, rings over the links


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU (or CPU core): vendor figures, and the name of its measured curves."""

    name: str
    peak_flops: float  # dense bf16
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    curves: str  # catalog/curves/<name>: measured GEMM, attention and in-node collectives; or FLAT
    source: str = ""

    @property
    def is_cpu(self) -> bool:
        """True if ranks are on cores of CPUs, as in the catalog's `cpu` jobs and in profiles of CPUs."""
        return self.name == CPU_CORE


@dataclass(frozen=True, kw_only=True)
class Link:
    """Bandwidth and latency of point-to-point and ring traffic, per GPU and direction."""

    bandwidth_bytes_per_s: float
    latency_s: float
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Cluster of equal nodes with equal GPUs."""

    name: str
    gpu: Gpu
    gpus: int
    gpus_per_node: int
    within_node: Link
    between_nodes: Link
    reserve_bytes: float  # CUDA context and fragmentation; communicator buffers are counted apart

    def ranks_per_node(self, ranks: int, stride: int) -> int:
        """Returns how many ranks of a group of `ranks` ranks, `stride` apart, share a node."""
        return min(ranks, max(1, self.gpus_per_node // stride))

    def nodes_spanned(self, ranks: int, stride: int) -> int:
        """Returns the number of nodes of a group of `ranks` ranks, `stride` apart."""
        return -(-ranks // self.ranks_per_node(ranks, stride))


# ---------------------------------------------------------------------------- blocks of job and catalog files


@dataclass(frozen=True, kw_only=True)
class GpuBlock:
    """`gpu:` of a cluster: vendor figures in the units of data sheets."""

    name: str | None = None
    peak_tflops: Amount
    memory_gb: Amount
    memory_tb_per_s: Amount
    curves: str
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class LinkBlock:
    """A link of a cluster, per GPU and direction, in the units of data sheets."""

    gb_per_s_per_gpu: Annotated[float, NumberRange(least=1e-6, most=1e6)]
    latency_us: Annotated[float, NumberRange(least=0, most=1e6)]
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class ClusterBlock:
    """`cluster:` of a job file, merged over a file of catalog/clusters."""

    name: str = "cluster"
    gpus: Count
    gpus_per_node: Count
    gpu: GpuBlock
    within_node: LinkBlock
    between_nodes: LinkBlock
    reserve_gb_per_gpu: NonNegative
    source: str = ""
