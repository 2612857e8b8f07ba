"""Prices kernels and collectives of a cluster from curves and link models, under named assumptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from optimus.cost import compute, network
from optimus.cost.assumptions import Assumptions
from optimus.cost.measured_profile import Profile, ProfileGap
from optimus.ir.op import Lane
from optimus.job.cluster import Cluster
from optimus.job.layout import Layout
from optimus.job.model import FP32_BYTES, Experts


@dataclass(frozen=True, kw_only=True)
class ClusterCostModel:
    """Seconds of kernels, collectives and sends on one cluster, under a set of assumptions."""

    cluster: Cluster
    assumptions: Assumptions
    profile: Profile = field(default_factory=Profile)
    gradient_bytes: int = FP32_BYTES  # of a weight's sum over microbatches

    def gemm_s(self, m: float, n: float, k: float) -> float:
        gpu = self.cluster.gpu
        seconds = compute.gemm_s(gpu, m, n, k, rate=compute.SUSTAINED_SHARE.get(gpu.curves, 1.0))
        return self._scaled(seconds / self.assumptions.efficiency)

    def weight_gradient_s(self, tokens: float, outputs: float, inputs: float) -> float:
        """Returns the seconds of a linear's weight gradient, added to that of earlier microbatches."""
        if min(tokens, outputs, inputs) <= 0:
            return 0.0
        added_s = compute.accumulation_s(self.cluster.gpu, inputs * outputs, self.gradient_bytes)
        return self.gemm_s(inputs, outputs, tokens) + self._scaled(added_s / self.assumptions.efficiency)

    def attention_s(
        self, *, flops: float, tokens: float, head_dim: int, causal: bool, backward: bool = False
    ) -> float:
        seconds = compute.attention_s(
            self.cluster.gpu, flops=flops, tokens=tokens, head_dim=head_dim, causal=causal, backward=backward
        )
        if self.assumptions.attention_kernel == "flash2":
            seconds *= compute.FLASH2_SLOWDOWN.get(self.cluster.gpu.curves, 1.0)
        return self._scaled(seconds / self.assumptions.efficiency)

    def unfused_product_s(self, *, scores: float, width: float) -> float:
        """Returns the seconds of a product that writes or reads the stored scores of attention."""
        seconds = compute.unfused_product_s(self.cluster.gpu, scores=scores, width=width)
        return self._scaled(seconds / self.assumptions.efficiency)

    def norm_bytes_factor(self, norm: str) -> float:
        """Returns the bytes of a norm and what goes with it over those of a fused kernel."""
        is_rms = norm == "rmsnorm"
        return self.assumptions.rmsnorm_bytes_factor if is_rms else self.assumptions.layernorm_bytes_factor

    def memory_s(self, size_bytes: float) -> float:
        seconds = compute.memory_bound_kernel_s(self.cluster.gpu, size_bytes)
        return self._scaled(seconds / self.assumptions.efficiency)

    def tp_s(self, collective: network.Collective, size_bytes: float, tp: int) -> float:
        """Returns the seconds of a TP collective inside a layer, less the share that the framework hides."""
        seconds = network.collective_s(self.cluster, collective, size_bytes, ranks=tp, stride=1)
        return self._scaled_traffic(seconds * (1.0 - self.assumptions.tp_overlapped_share))

    def exchange_s(self, token_bytes: float, experts: Experts, ep: int) -> float:
        """Returns the seconds of the exchange of tokens between experts, less the share that is hidden."""
        seconds = network.exchange_s(
            self.cluster,
            token_bytes,
            chosen=experts.active,
            experts=experts.count,
            ranks=ep,
            deduplicated=self.deduplicates_tokens,
        )
        return self._scaled_traffic(seconds * (1.0 - self.assumptions.ep_overlapped_share))

    def copies_sent(self, experts: Experts, ep: int) -> float:
        """Returns how often a token is sent: to every expert, or once to a rank that has several."""
        if not self.deduplicates_tokens:
            return float(experts.active)
        return network.count_distinct(experts.active, experts.count, places=ep)

    @property
    def deduplicates_tokens(self) -> bool:
        """True if a token is sent once to a rank and node with several of its experts."""
        return self.assumptions.token_dispatcher == "flex"

    def group_s(
        self,
        collective: network.Collective,
        size_bytes: float,
        *,
        ranks: int,
        stride: int,
        nic_bytes_per_s: float | None = None,
    ) -> float:
        """Returns the seconds of a collective of ranks that are `stride` apart."""
        seconds = network.collective_s(
            self.cluster, collective, size_bytes, ranks=ranks, stride=stride, nic_bytes_per_s=nic_bytes_per_s
        )
        return self._scaled_traffic(seconds)

    def gather_s(self, size_bytes: float, *, ranks: int, stride: int) -> float:
        """Returns the seconds of a data-parallel all-gather of `size_bytes` of parameters."""
        nic = self.assumptions.nic_gather_bytes_per_s
        kind = network.Collective.ALL_GATHER
        return self.group_s(kind, size_bytes, ranks=ranks, stride=stride, nic_bytes_per_s=nic)

    def reduce_s(self, size_bytes: float, *, ranks: int, stride: int) -> float:
        """Returns the seconds of a data-parallel reduce-scatter of `size_bytes` of gradients."""
        nic = self.assumptions.nic_reduce_bytes_per_s
        kind = network.Collective.REDUCE_SCATTER
        return self.group_s(kind, size_bytes, ranks=ranks, stride=stride, nic_bytes_per_s=nic)

    def send_s(self, size_bytes: float, *, across_nodes: bool) -> float:
        size = min(size_bytes, 1.0) if self.assumptions.p2p_latency_only else size_bytes
        return self._scaled_traffic(network.send_s(self.cluster, size, across_nodes=across_nodes))

    def measured_s(self, seconds: float) -> float:
        """Returns seconds of a profile, scaled by the calibration."""
        return self._scaled(seconds)

    def _scaled(self, seconds: float) -> float:
        return seconds * self.assumptions.time_scale

    def _scaled_traffic(self, seconds: float) -> float:
        return self._scaled(seconds * self.assumptions.traffic_scale)

    def group_lane(self, ranks: int, stride: int) -> Lane:
        """Returns the lane of a group: links inside a node, or the NIC when the group leaves it."""
        return Lane.TP if self.cluster.nodes_spanned(ranks, stride) == 1 else Lane.DP

    def stages_cross_nodes(self, layout: Layout) -> bool:
        """Returns whether a pipeline spans nodes (pp is the slowest axis of the rank order)."""
        return layout.gpus > self.cluster.gpus_per_node

    @cached_property
    def profile_gaps(self) -> set[ProfileGap]:
        """Gaps of the profile met so far; for warnings, never for a price."""
        return set()
