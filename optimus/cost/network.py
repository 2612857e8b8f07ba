"""Computes seconds of collectives and sends: measured inside a node, NCCL's own model between nodes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import StrEnum

from optimus.cost.compute import load_efficiency_curves
from optimus.job.cluster import FLAT, Cluster


class Collective(StrEnum):
    """A collective; its size is that of the full tensor, or for all-to-all all that one rank sends."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"


@dataclass(frozen=True, kw_only=True)
class _Protocol:
    """An NCCL wire protocol: latencies in microseconds, bandwidth as a share of the bus."""

    ring_base_us: float
    ring_nvlink_us: float
    ring_net_us: float
    ring_share: float
    tree_base_us: float
    tree_nvlink_us: float
    tree_net_us: float
    tree_share: float
    net_overhead_us: float = 1.0  # getNetOverhead: 1 on Intel and Arm hosts, 2 on AMD


# NVIDIA/nccl src/graph/tuning.cc (2.28 and later): baseLatencies, hwLatencies, and the bandwidth factors of
# ncclTopoTuneModel. The latencies are those of reference/hardware.md; PAT, LL limits, bandwidth shares and
# the plateau were read from a public annotated copy of that file. Left out: limits per channel, the tree's
# correction by size. A model, not a measurement: a profile of the links replaces it.
_LL = _Protocol(
    ring_base_us=6.6,
    ring_nvlink_us=0.6,
    ring_net_us=2.7,
    ring_share=0.5,
    tree_base_us=6.8,
    tree_nvlink_us=0.6,
    tree_net_us=5.0,
    tree_share=0.92 / 3.8,
)
_LL128 = _Protocol(
    ring_base_us=14.0,
    ring_nvlink_us=1.9,
    ring_net_us=4.0,
    ring_share=0.92,
    tree_base_us=14.0,
    tree_nvlink_us=1.25,
    tree_net_us=8.5,
    tree_share=0.92 * 120 / 128,
)
_SIMPLE = _Protocol(
    ring_base_us=8.4,
    ring_nvlink_us=3.4,
    ring_net_us=14.0,
    ring_share=1.0,
    tree_base_us=8.4,
    tree_nvlink_us=4.0,
    tree_net_us=14.0,
    tree_share=0.92,
    net_overhead_us=3.0,
)
_LL_LIMIT_TWO_NODES = 39.0e9  # llMaxBws, hosts other than AMD
_LL_LIMIT_MORE_NODES = 20.4e9
_SIMPLE_ALL_REDUCE_PLATEAU = 1.4  # ncclTopoGetAlgoTime: latency of the ring, Ampere and later
_PAT_BASE_US, _PAT_RANK_US, _PAT_STEP_SHARE, _PAT_SHARE = 8.0, 2.8, 1 / 3.5, 0.75


@functools.lru_cache(maxsize=1 << 16)
def collective_s(
    cluster: Cluster,
    collective: Collective,
    size_bytes: float,
    *,
    ranks: int,
    stride: int,
    nic_bytes_per_s: float | None = None,
) -> float:
    """Returns the seconds of a collective over `ranks` ranks that are `stride` apart in the global order.

    The fastest axis of that order is tp. `nic_bytes_per_s` replaces the cluster's bandwidth between nodes.
    """
    if ranks <= 1 or size_bytes <= 0:
        return 0.0
    nodes = cluster.nodes_spanned(ranks, stride)
    if cluster.gpu.curves == FLAT:
        return _ring_over_link_s(cluster, collective, size_bytes, ranks, nodes, nic_bytes_per_s)
    if nodes == 1:
        return _within_node_s(cluster, collective, size_bytes, ranks)
    group = _Group(
        ranks=ranks,
        nodes=nodes,
        ranks_per_node=cluster.ranks_per_node(ranks, stride),
        nic_bytes_per_s=nic_bytes_per_s or cluster.between_nodes.bandwidth_bytes_per_s,
    )
    local = _local_bus_bytes_per_s(cluster, collective, group.ranks_per_node)
    if collective is Collective.ALL_TO_ALL:
        return _all_to_all_s(group, size_bytes, local)
    bus = min(local, group.ranks_per_node * group.nic_bytes_per_s)
    return min(_candidates_s(group, collective, size_bytes, bus))


def exchange_s(
    cluster: Cluster, token_bytes: float, *, chosen: int, experts: int, ranks: int, deduplicated: bool
) -> float:
    """Returns the seconds in which every rank's tokens reach their `chosen` experts of all, on other ranks.

    A token goes to every expert by itself; deduplicated, once to every rank that has one, and on clusters
    with measured links once to every other node, where it is forwarded.
    """
    if not deduplicated:
        return collective_s(cluster, Collective.ALL_TO_ALL, token_bytes * chosen, ranks=ranks, stride=1)
    near_bytes = token_bytes * count_distinct(chosen, experts, places=ranks)
    nodes = cluster.nodes_spanned(ranks, 1)
    if nodes == 1 or cluster.gpu.curves == FLAT:
        return collective_s(cluster, Collective.ALL_TO_ALL, near_bytes, ranks=ranks, stride=1)
    per_node = cluster.ranks_per_node(ranks, 1)
    local = _local_bus_bytes_per_s(cluster, Collective.ALL_TO_ALL, per_node)
    near_s = near_bytes * (per_node - 1) / per_node / local
    far_bytes = token_bytes * count_distinct(chosen, experts, places=nodes) * (nodes - 1) / nodes
    far_s = far_bytes / cluster.between_nodes.bandwidth_bytes_per_s
    return 1e-6 * (_SIMPLE.ring_base_us + _SIMPLE.ring_net_us) + max(near_s, far_s)


def count_distinct(chosen: int, experts: int, *, places: int) -> float:
    """Returns the expected number of places that hold the chosen experts; each holds as many of all."""
    missed, elsewhere = 1.0, experts - experts / places
    for place in range(chosen):
        missed *= max(0.0, elsewhere - place) / (experts - place)
    return places * (1.0 - missed)


def send_s(cluster: Cluster, size_bytes: float, *, across_nodes: bool) -> float:
    """Returns the seconds of a send of `size_bytes` from one rank to another."""
    if size_bytes <= 0:
        return 0.0
    link = cluster.between_nodes if across_nodes else cluster.within_node
    return link.latency_s + size_bytes / link.bandwidth_bytes_per_s


def _ring_over_link_s(
    cluster: Cluster,
    collective: Collective,
    size_bytes: float,
    ranks: int,
    nodes: int,
    nic_bytes_per_s: float | None,
) -> float:
    """Returns the seconds of a ring over the slowest link, for systems without measured collectives."""
    link = cluster.within_node if nodes == 1 else cluster.between_nodes
    rate = link.bandwidth_bytes_per_s if nodes == 1 else nic_bytes_per_s or link.bandwidth_bytes_per_s
    return _passes(collective) * (ranks - 1) * (link.latency_s + size_bytes / ranks / rate)


# ---------------------------------------------------------------- inside a node


def _within_node_s(cluster: Cluster, collective: Collective, size_bytes: float, ranks: int) -> float:
    """Returns measured seconds; beyond the largest message the bandwidth stays, beyond 8 ranks the time."""
    measured = load_efficiency_curves(cluster.gpu.curves).collectives[collective]
    _, kept_bytes = measured.clamp(ranks, size_bytes)
    return measured.at(ranks, size_bytes) * max(1.0, size_bytes / kept_bytes)


def _local_bus_bytes_per_s(cluster: Cluster, collective: Collective, ranks: int) -> float:
    """Returns the bus bandwidth among ranks of a group in one node, at the largest message measured."""
    if ranks == 1:
        return math.inf
    measured = load_efficiency_curves(cluster.gpu.curves).collectives[collective]
    kept_ranks, size_bytes = measured.clamp(ranks, math.inf)
    seconds = measured.at(kept_ranks, size_bytes)
    return _passes(collective) * (kept_ranks - 1) / kept_ranks * size_bytes / seconds


# ---------------------------------------------------------------- between nodes


@dataclass(frozen=True, kw_only=True)
class _Group:
    """A communicator that spans nodes."""

    ranks: int
    nodes: int
    ranks_per_node: int
    nic_bytes_per_s: float


def _passes(collective: Collective) -> int:
    """Returns how often data goes round the ring: twice for an all-reduce."""
    return 2 if collective is Collective.ALL_REDUCE else 1


def _candidates_s(group: _Group, collective: Collective, size_bytes: float, bus: float) -> list[float]:
    """Returns the seconds by every algorithm and protocol that NCCL chooses from."""
    limit = _LL_LIMIT_TWO_NODES if group.nodes == 2 else _LL_LIMIT_MORE_NODES
    times = []
    for protocol in (_LL, _LL128, _SIMPLE):
        cap = limit if protocol is _LL else math.inf
        times.append(_ring_s(group, protocol, collective, size_bytes, bus, cap))
        if collective is Collective.ALL_REDUCE:
            times.append(_tree_s(group, protocol, size_bytes, bus, cap))
    if collective is not Collective.ALL_REDUCE and group.ranks_per_node == 1:
        times.append(_pat_s(group, size_bytes, bus))
    return times


def _ring_s(
    group: _Group, protocol: _Protocol, collective: Collective, size_bytes: float, bus: float, cap: float
) -> float:
    """Returns the seconds of `ranks - 1` steps of `size / ranks`, `nodes - 1` of them over the network."""
    passes = _passes(collective)
    step_us = max(protocol.ring_nvlink_us, protocol.net_overhead_us)
    net_us = protocol.tree_net_us if group.ranks_per_node == 1 else protocol.ring_net_us
    steps_us = (group.ranks - group.nodes) * step_us + (group.nodes - 1) * net_us
    latency_us = protocol.ring_base_us + passes * steps_us
    if protocol is _SIMPLE and collective is Collective.ALL_REDUCE:
        latency_us *= _SIMPLE_ALL_REDUCE_PLATEAU
    moved = passes * (group.ranks - 1) / group.ranks * size_bytes
    return 1e-6 * latency_us + moved / min(cap, bus * protocol.ring_share)


def _tree_s(group: _Group, protocol: _Protocol, size_bytes: float, bus: float, cap: float) -> float:
    """Returns the seconds of an all-reduce over a double binary tree: few steps, for small messages."""
    local_us = (group.ranks_per_node - 1) * protocol.tree_nvlink_us
    net_us = int(math.log2(group.nodes)) * protocol.tree_net_us
    latency_us = protocol.tree_base_us + 2 * (local_us + net_us)
    return 1e-6 * latency_us + 2 * size_bytes / min(cap, bus * protocol.tree_share)


def _pat_s(group: _Group, size_bytes: float, bus: float) -> float:
    """Returns the seconds of NCCL's logarithmic gather and scatter, used with one rank per node."""
    step_us = _SIMPLE.tree_net_us * _PAT_STEP_SHARE
    latency_us = _PAT_BASE_US + int(math.log2(group.nodes)) * step_us + group.ranks * _PAT_RANK_US
    return 1e-6 * latency_us + size_bytes / (bus * _PAT_SHARE)


def _all_to_all_s(group: _Group, size_bytes: float, local: float) -> float:
    """Returns the seconds of sends to all peers at once, to other nodes over the NIC, in parallel."""
    share = size_bytes / group.ranks
    near_s = (group.ranks_per_node - 1) * share / local
    far_s = (group.ranks - group.ranks_per_node) * share / group.nic_bytes_per_s
    return 1e-6 * (_SIMPLE.ring_base_us + _SIMPLE.ring_net_us) + max(near_s, far_s)
