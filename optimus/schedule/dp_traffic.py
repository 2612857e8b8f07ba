"""Data-parallel traffic of a stage: when its gathers and reduces run, and who waits for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from optimus.cost.assumptions import Assumptions
from optimus.cost.module import PricedLayer
from optimus.cost.prices import Prices
from optimus.ir.op import Lane, OpKind
from optimus.job.model import FP32_BYTES, Precision
from optimus.schedule.build import Builder, Template, single

# AdamW reads the fp32 gradient, reads and writes master copy and two moments, writes bf16.
OPTIMIZER_TRAFFIC_BYTES = FP32_BYTES + 2 * 3 * FP32_BYTES + 2
HIDDEN, EXPOSED = 0, 1  # `segment` of a gather or reduce: under compute, or before and after all of it
Group = tuple[int, int]  # ranks that hold the same parameters, and their stride


@dataclass(frozen=True, kw_only=True)
class ParameterTraffic:
    """Seconds to gather a chunk's parameters, to reduce its gradients and to update its shard."""

    gather_s: float = 0.0
    gather_bytes: float = 0.0
    reduce_s: float = 0.0
    reduce_bytes: float = 0.0
    update_s: float = 0.0

    @staticmethod
    def of(sizes: Mapping[Group, tuple[float, float]], updated: float, prices: Prices) -> ParameterTraffic:
        """From bytes to gather and to reduce in every group, and the parameters of a rank's shard."""
        return ParameterTraffic(
            gather_s=sum(prices.gather_s(size, ranks=r, stride=s) for (r, s), (size, _) in sizes.items()),
            gather_bytes=sum(size for size, _ in sizes.values()),
            reduce_s=sum(prices.reduce_s(size, ranks=r, stride=s) for (r, s), (_, size) in sizes.items()),
            reduce_bytes=sum(size for _, size in sizes.values()),
            update_s=prices.memory_s(updated * OPTIMIZER_TRAFFIC_BYTES),
        )


def groups_of(layer: PricedLayer) -> tuple[tuple[Group, float], ...]:
    """A layer's parameters by the group that shares them: experts have one of their own."""
    layout = layer.layout
    dense = (layout.replica_ranks, layout.tp), layer.parameters
    if not layer.expert_parameters:
        return (dense,)
    return dense, ((layout.expert_replica_ranks, layout.ep), layer.expert_parameters)


def parameter_traffic(
    layers: Sequence[PricedLayer], prices: Prices, precision: Precision, *, gathers_frozen: bool = False
) -> ParameterTraffic:
    """Of a chunk's trained layers (and, where parameters are sharded too, gathers of frozen ones).

    Parameters travel in one message per group of ranks that hold the same ones.
    """
    sizes: dict[Group, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for layer in layers:
        for group, parameters in groups_of(layer):
            gathered, reduced = sizes[group]
            if layer.trained or gathers_frozen:
                gathered += parameters * precision.parameter_bytes
            if layer.trained:
                reduced += parameters * precision.gradient_bytes
            sizes[group] = gathered, reduced
    updated = sum(layer.shard_parameters for layer in layers if layer.trained)
    return ParameterTraffic.of(sizes, updated, prices)


def update(chunks: Iterable[ParameterTraffic]) -> Template:
    """The optimizer's pass over a rank's shard."""
    return single(OpKind.OPTIMIZER, Lane.COMPUTE, sum(chunk.update_s for chunk in chunks))


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """How much of a stage's traffic the assumptions leave exposed, and how much runs under compute."""

    chunks: Sequence[ParameterTraffic]
    assumptions: Assumptions

    @property
    def mode(self) -> str:
        return self.assumptions.dp_exposure

    def exposed(self, quantity: str) -> float:
        """Of the stage: seconds or bytes before or after all compute."""
        total = self._total(quantity)
        return {"chunks": 0.0, "all": total}.get(self.mode, self.assumptions.dp_exposed_share * total)

    def hidden(self, quantity: str, chunk: int) -> float:
        """Of one chunk: seconds or bytes that run under compute."""
        own = float(getattr(self.chunks[chunk], quantity))
        if self.mode == "lump":
            return (1.0 - self.assumptions.dp_exposed_share) * own
        return self._total(quantity) / len(self.chunks) if self.mode == "slack" else own

    def _total(self, quantity: str) -> float:
        return float(sum(getattr(chunk, quantity) for chunk in self.chunks))


class StageTraffic:
    """Adds one stage's gathers and reduces to a schedule."""

    def __init__(self, builder: Builder, device: int, exposure: Exposure) -> None:
        self._builder, self._device, self._exposure = builder, device, exposure
        # Slack is time off the NIC: sync, norm, cast.
        self._exposed_lane = Lane.HOST if exposure.mode == "slack" else Lane.DP
        self._gathers: dict[int, int] = {}
        self._exposed: int | None = None
        self.reduces: list[int] = []

    def gather(self) -> None:
        """What runs before the stage's first op."""
        if self._exposure.mode != "chunks":
            self._exposed = self._builder.add(self._exposed_op(OpKind.UNSHARD), device=self._device)
        if self._exposure.mode != "all":
            for chunk in range(len(self._exposure.chunks)):
                op = self._hidden_op(OpKind.UNSHARD, chunk)
                self._gathers[chunk] = self._builder.add(op, device=self._device, chunk=chunk)

    def needed_by(self, chunk: int) -> list[int]:
        """Blocks that a chunk's forward waits for."""
        waits = [] if self._exposed is None else [self._exposed]
        if chunk in self._gathers and (self._exposure.mode == "chunks" or chunk > 0):
            waits.append(self._gathers[chunk])
        return waits

    def chunk_done(self, chunk: int, last: int) -> None:
        """The chunk's last backward was `last`: reduce its gradients under what follows."""
        if self._exposure.mode != "all":
            op = self._hidden_op(OpKind.REDUCE_GRAD, chunk)
            self.reduces.append(
                self._builder.add(op, device=self._device, chunk=chunk, after=[last], right_after=last)
            )

    def stage_done(self, last: int) -> None:
        """All compute of the stage is done: what the assumptions leave exposed."""
        if self._exposure.mode != "chunks":
            op = self._exposed_op(OpKind.REDUCE_GRAD)
            self.reduces.append(self._builder.add(op, device=self._device, after=[last]))

    def _exposed_op(self, kind: OpKind) -> Template:
        name = kind.word
        size = 0.0 if self._exposed_lane == Lane.HOST else self._exposure.exposed(f"{name}_bytes")
        seconds = self._exposure.exposed(f"{name}_s")
        return single(kind, self._exposed_lane, seconds, segment=EXPOSED, size_bytes=size)

    def _hidden_op(self, kind: OpKind, chunk: int) -> Template:
        name = kind.word
        seconds, size = (self._exposure.hidden(f"{name}_{unit}", chunk) for unit in ("s", "bytes"))
        return single(kind, Lane.DP, seconds, segment=HIDDEN, size_bytes=size)
