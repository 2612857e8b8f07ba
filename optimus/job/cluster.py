"""Describes a cluster: GPUs, nodes, links and reserved memory."""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9
FLAT = "flat"  # curves of what nobody measured: peak_flops everywhere, rings over the links


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU (or CPU core): vendor figures, and the name of its measured curves."""

    name: str
    peak_flops: float  # dense bf16
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    curves: str  # catalog/curves/<name>: measured GEMM, attention and in-node collectives; or FLAT
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Point-to-point and ring traffic between nodes, per GPU and direction."""

    bandwidth_bytes_per_s: float
    latency_s: float
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    name: str
    gpu: Gpu
    gpus: int
    gpus_per_node: int
    within_node: Link
    between_nodes: Link
    reserve_bytes: float  # CUDA context and fragmentation; communicator buffers are counted apart

    def ranks_per_node(self, ranks: int, stride: int) -> int:
        """Ranks of a group of `ranks` ranks, `stride` apart, that share a node."""
        return min(ranks, max(1, self.gpus_per_node // stride))

    def nodes_spanned(self, ranks: int, stride: int) -> int:
        """Nodes that a group of `ranks` ranks, `stride` apart, touches."""
        return -(-ranks // self.ranks_per_node(ranks, stride))
