"""Data-parallel traffic of a stage: when its gathers and reduces run, and who waits for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from optimus.cost.module import PricedLayer
from optimus.cost.prices import Prices
from optimus.job.model import FP32_BYTES, Precision
from optimus.program.op import Kind, Lane
from optimus.schedule.build import Builder, Template, single

# AdamW reads the fp32 gradient, reads and writes master copy and two moments, writes bf16.
OPTIMIZER_TRAFFIC_BYTES = FP32_BYTES + 2 * 3 * FP32_BYTES + 2


@dataclass(frozen=True, kw_only=True)
class ParameterTraffic:
    """Seconds to gather a chunk's parameters, to reduce its gradients and to update its shard."""

    gather_s: float
    gather_bytes: float
    reduce_s: float
    reduce_bytes: float
    update_bytes: float


def parameter_traffic(
    layers: Sequence[PricedLayer], prices: Prices, precision: Precision, *, gathers_frozen: bool = False
) -> ParameterTraffic:
    """Of a chunk's trained layers (and, where parameters are sharded too, gathers of frozen ones).

    Parameters travel in one message per group of ranks that hold the same ones: each module has
    its own, and experts have another.
    """
    to_gather: dict[tuple[int, int], float] = defaultdict(float)  # bytes by (ranks, stride)
    to_reduce: dict[tuple[int, int], float] = defaultdict(float)
    update_bytes = 0.0
    for layer in layers:
        dense = layer.layout.replica_ranks, layer.layout.tp
        experts = layer.layout.expert_replica_ranks, layer.layout.ep
        for group, parameters in ((dense, layer.parameters), (experts, layer.expert_parameters)):
            if layer.trained or gathers_frozen:
                to_gather[group] += parameters * precision.parameter_bytes
            if layer.trained:
                to_reduce[group] += parameters * precision.gradient_bytes
        if layer.trained:
            update_bytes += layer.shard_parameters * OPTIMIZER_TRAFFIC_BYTES
    return ParameterTraffic(
        gather_s=sum(prices.gather_s(size, ranks=r, stride=s) for (r, s), size in to_gather.items()),
        gather_bytes=sum(to_gather.values()),
        reduce_s=sum(prices.reduce_s(size, ranks=r, stride=s) for (r, s), size in to_reduce.items()),
        reduce_bytes=sum(to_reduce.values()),
        update_bytes=update_bytes,
    )


def update(prices: Prices, chunks: Iterable[ParameterTraffic]) -> Template:
    """The optimizer's pass over a rank's shard."""
    size = sum(chunk.update_bytes for chunk in chunks)
    return single(Kind.FINISH, Lane.COMPUTE, prices.memory_s(size))


class StageTraffic:
    """Adds one stage's gathers and reduces to a schedule, exposed as the assumptions say."""

    def __init__(self, builder: Builder, device: int, chunks: list[ParameterTraffic], prices: Prices) -> None:
        self._builder, self._device, self._chunks = builder, device, chunks
        self._mode = prices.assumptions.dp_exposure
        self._share = prices.assumptions.dp_exposed_share
        self._gathers: dict[int, int] = {}
        self._exposed: int | None = None
        self.reduces: list[int] = []

    def gather(self) -> None:
        """What runs before the stage's first op."""
        total_s = sum(chunk.gather_s for chunk in self._chunks)
        total_bytes = sum(chunk.gather_bytes for chunk in self._chunks)
        if self._mode == "all":
            self._exposed = self._add(Kind.GATHER, Lane.DP, total_s, total_bytes)
        elif self._mode == "lump":
            self._exposed = self._add(Kind.GATHER, Lane.DP, self._share * total_s, self._share * total_bytes)
        elif self._mode == "slack":
            self._exposed = self._add(Kind.GATHER, Lane.HOST, self._share * total_s, 0.0)
        if self._mode != "all":
            for index, chunk in enumerate(self._chunks):
                seconds, size = (
                    self._part(chunk.gather_s, total_s),
                    self._part(chunk.gather_bytes, total_bytes),
                )
                self._gathers[index] = self._add(Kind.GATHER, Lane.DP, seconds, size, chunk=index)

    def needed_by(self, chunk: int) -> list[int]:
        """Blocks that a chunk's forward waits for."""
        waits = [] if self._exposed is None else [self._exposed]
        if chunk in self._gathers and (self._mode == "chunks" or chunk > 0):
            waits.append(self._gathers[chunk])
        return waits

    def chunk_done(self, chunk: int, last: int) -> None:
        """The chunk's last backward was `last`: reduce its gradients under what follows."""
        if self._mode == "all":
            return
        total_s = sum(part.reduce_s for part in self._chunks)
        total_bytes = sum(part.reduce_bytes for part in self._chunks)
        part = self._chunks[chunk]
        seconds, size = self._part(part.reduce_s, total_s), self._part(part.reduce_bytes, total_bytes)
        reduce = single(Kind.REDUCE, Lane.DP, seconds, size_bytes=size)
        self.reduces.append(
            self._builder.add(reduce, device=self._device, chunk=chunk, after=[last], right_after=last)
        )

    def stage_done(self, last: int) -> None:
        """All compute of the stage is done: what the assumptions leave exposed."""
        total_s = sum(part.reduce_s for part in self._chunks)
        total_bytes = sum(part.reduce_bytes for part in self._chunks)
        if self._mode == "all":
            self.reduces.append(self._add(Kind.REDUCE, Lane.DP, total_s, total_bytes, after=[last]))
        elif self._mode == "lump":
            seconds, size = self._share * total_s, self._share * total_bytes
            self.reduces.append(self._add(Kind.REDUCE, Lane.DP, seconds, size, after=[last]))
        elif self._mode == "slack":
            self.reduces.append(self._add(Kind.REDUCE, Lane.HOST, self._share * total_s, 0.0, after=[last]))

    def _part(self, own: float, total: float) -> float:
        """A chunk's share of what runs under compute."""
        if self._mode == "lump":
            return (1.0 - self._share) * own
        return total / len(self._chunks) if self._mode == "slack" else own

    def _add(
        self,
        kind: Kind,
        lane: Lane,
        seconds: float,
        size: float,
        *,
        chunk: int = 0,
        after: list[int] | None = None,
    ) -> int:
        template: Template = single(kind, lane, seconds, size_bytes=size)
        return self._builder.add(template, device=self._device, chunk=chunk, after=after or [])
