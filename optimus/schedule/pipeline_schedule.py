"""Builds the schedule of a pipeline: its ops, sends, and data-parallel traffic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optimus.cost.assumptions import Assumptions
from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.priced_layer import PricedLayer
from optimus.ir.op import Ints, Lane, OpKind
from optimus.job.layout import Layout
from optimus.job.model import FP32_BYTES, Precision
from optimus.schedule.pipeline_orders import PipelineOp, PipelineOrder
from optimus.schedule.schedule_builder import (
    ChunkPricer,
    KernelGraph,
    PricedChunk,
    ScheduleBuilder,
    make_single_kernel_graph,
)

FORWARD, BACKWARD = 0, 1  # `segment` of a send
# AdamW reads the fp32 gradient, reads and writes master copy and two moments, writes bf16.
OPTIMIZER_TRAFFIC_BYTES = FP32_BYTES + 2 * 3 * FP32_BYTES + 2
HIDDEN, EXPOSED = 0, 1  # `segment` of a gather or reduce: under compute, or before or after all compute
DpGroup = tuple[int, int]  # ranks that hold the same parameters, and their stride


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineSpec:
    """All inputs of the schedule of one pipeline; `chunks[v]` is virtual stage v."""

    order: PipelineOrder
    chunks: Sequence[PricedChunk]
    traffic: Sequence[ParameterTraffic]  # of every virtual stage
    layout: Layout
    cost_model: ClusterCostModel

    @property
    def stages(self) -> int:
        return len(self.order)

    def traffic_of(self, stage: int) -> Sequence[ParameterTraffic]:
        return self.traffic[stage :: self.stages]


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineBlockIds:
    """Blocks of a pipeline in a builder, for work that is added around it.

    `first` and `last` are one op per stage.
    """

    ops: dict[tuple[OpKind, int, int], int]  # of stage 0: (kind, chunk, microbatch)
    first: list[int]
    last: list[int]
    reduces: list[int]


def add_pipeline_to_schedule(
    builder: ScheduleBuilder, spec: PipelineSpec, pricer: ChunkPricer, *, kernels: bool
) -> PipelineBlockIds:
    """Adds a pipeline to a builder: stage r becomes the next part of device r's program."""
    graphs = _register_op_graphs(builder, spec, pricer, kernels), _register_send_graphs(builder, spec)
    microbatches = 1 + max(op.microbatch for op in spec.order[0])
    # The block after which the next (or previous) virtual stage can run a microbatch.
    produced = np.full((2, len(spec.chunks), microbatches), -1, np.int64)
    inputs: list[tuple[Ints, int, Ints, Ints]] = []
    added = [_add_stage(builder, spec, stage, graphs, produced, inputs) for stage in range(spec.stages)]
    for blocks, direction, virtual, microbatch in inputs:
        builder.wait(blocks, produced[direction, virtual, microbatch])
    entry = added[0][0]
    return PipelineBlockIds(
        ops={
            (op.kind, op.chunk, op.microbatch): int(block)
            for op, block in zip(spec.order[0], entry, strict=True)
        },
        first=[int(blocks[0]) for blocks, _ in added],
        last=[int(blocks[-1]) for blocks, _ in added],
        reduces=[reduce for _, reduces in added for reduce in reduces],
    )


def _add_stage(
    builder: ScheduleBuilder,
    spec: PipelineSpec,
    stage: int,
    graphs: tuple[Ints, Ints],
    produced: Ints,
    inputs: list[tuple[Ints, int, Ints, Ints]],
) -> tuple[Ints, list[int]]:
    """Adds one stage's gathers, ops with their sends, and reduces; returns the ops and the reduces."""
    order = spec.order[stage]
    kind, chunk, microbatch = np.array(order, np.int64).T
    virtual = chunk * spec.stages + stage
    exposure = TrafficOverlap(chunks=spec.traffic_of(stage), assumptions=spec.cost_model.assumptions)
    traffic = _StageTraffic(builder, stage, exposure)
    traffic.gather()
    op_graphs, send_graphs = graphs
    blocks = builder.add_many(op_graphs[kind, virtual], stage, chunk, microbatch)
    # An op waits for its predecessor's trailing collectives too, as Megatron's linears do.
    builder.wait(blocks[1:], blocks[:-1])
    for index, op in _first_of_each_chunk(order):
        waits = traffic.needed_by(op.chunk)
        builder.wait([blocks[index]] * len(waits), waits)
    forward, backward = kind == OpKind.FORWARD, (kind == OpKind.BACKWARD) | (kind == OpKind.INPUT_GRAD)
    for direction, here, step in ((FORWARD, forward, 1), (BACKWARD, backward, -1)):
        produced[direction, virtual[here], microbatch[here]] = blocks[here]
        follows = here & (virtual - step >= 0) & (virtual - step < len(spec.chunks))
        inputs.append((blocks[follows], direction, virtual[follows] - step, microbatch[follows]))
        sends = here & (virtual + step >= 0) & (virtual + step < len(spec.chunks))
        if spec.stages > 1 and sends.any():
            sent = builder.add_many(
                send_graphs[direction, virtual[sends]],
                stage,
                chunk[sends],
                microbatch[sends],
                right_after=blocks[sends],
            )
            builder.wait(sent, blocks[sends])
            produced[direction, virtual[sends], microbatch[sends]] = sent
    for index, op in _last_of_each_chunk(order):
        traffic.chunk_done(op.chunk, int(blocks[index]))
    traffic.stage_done(int(blocks[-1]))
    return blocks, traffic.reduces


def _first_of_each_chunk(order: Sequence[PipelineOp]) -> list[tuple[int, PipelineOp]]:
    first = {order[place].chunk: place for place in reversed(range(len(order)))}
    return [(place, order[place]) for place in sorted(first.values())]


def _last_of_each_chunk(order: Sequence[PipelineOp]) -> list[tuple[int, PipelineOp]]:
    last = {op.chunk: place for place, op in enumerate(order)}
    return [(place, order[place]) for place in sorted(last.values())]


def _register_op_graphs(
    builder: ScheduleBuilder, spec: PipelineSpec, pricer: ChunkPricer, kernels: bool
) -> Ints:
    """Registers the kernels of every op; returns their numbers by kind and virtual stage."""
    numbers: Ints = np.full((len(OpKind), len(spec.chunks)), -1, np.int64)
    for kind in {op.kind for op in spec.order[0]}:
        for virtual, chunk in enumerate(spec.chunks):
            graph = (
                pricer.kernel_graph(chunk, kind)
                if kernels
                else make_single_kernel_graph(kind, Lane.COMPUTE, chunk.seconds[kind])
            )
            numbers[kind, virtual] = builder.register(graph)
    return numbers


def _register_send_graphs(builder: ScheduleBuilder, spec: PipelineSpec) -> Ints:
    """Registers every send; returns their numbers by direction and virtual stage."""
    cost_model = spec.cost_model
    across_nodes = cost_model.stages_cross_nodes(spec.layout)

    def register(chunk: PricedChunk, direction: int) -> int:
        size = chunk.output_bytes
        kind = OpKind.SEND_F if direction == FORWARD else OpKind.SEND_B
        seconds = cost_model.send_s(size, across_nodes=across_nodes)
        return builder.register(
            make_single_kernel_graph(kind, Lane.P2P, seconds, segment=direction, size_bytes=size)
        )

    outputs = [register(chunk, FORWARD) for chunk in spec.chunks]
    gradients = [register(chunk, BACKWARD) for chunk in spec.chunks]
    # In the backward, a virtual stage sends the gradient of its input, the previous one's output.
    return np.array([outputs, gradients[-1:] + gradients[:-1]], np.int64)


# ---------------------------------------------------------------------------- data-parallel traffic


@dataclass(frozen=True, kw_only=True)
class ParameterTraffic:
    """Seconds to gather a chunk's parameters, to reduce its gradients and to update its shard."""

    gather_s: float = 0.0
    gather_bytes: float = 0.0
    reduce_s: float = 0.0
    reduce_bytes: float = 0.0
    update_s: float = 0.0

    @staticmethod
    def from_bytes(
        sizes: Mapping[DpGroup, tuple[float, float]], updated: float, cost_model: ClusterCostModel
    ) -> ParameterTraffic:
        """Prices bytes to gather and to reduce in every group, and the parameters of a rank's shard."""
        return ParameterTraffic(
            gather_s=sum(cost_model.gather_s(size, ranks=r, stride=s) for (r, s), (size, _) in sizes.items()),
            gather_bytes=sum(size for size, _ in sizes.values()),
            reduce_s=sum(cost_model.reduce_s(size, ranks=r, stride=s) for (r, s), (_, size) in sizes.items()),
            reduce_bytes=sum(size for _, size in sizes.values()),
            update_s=cost_model.memory_s(updated * OPTIMIZER_TRAFFIC_BYTES),
        )


def split_parameters_by_dp_group(layer: PricedLayer) -> tuple[tuple[DpGroup, float], ...]:
    """Returns a layer's parameters by the ranks that share them; experts have a group of their own."""
    layout = layer.layout
    dense = (layout.replica_ranks, layout.tp), layer.parameters
    if not layer.expert_parameters:
        return (dense,)
    return dense, ((layout.expert_replica_ranks, layout.ep), layer.expert_parameters)


def price_parameter_traffic(
    layers: Sequence[PricedLayer],
    cost_model: ClusterCostModel,
    precision: Precision,
    *,
    gathers_frozen: bool = False,
) -> ParameterTraffic:
    """Prices the traffic of a chunk's trained layers; with `gathers_frozen`, also gathers of frozen ones.

    Parameters travel in one message per group of ranks that hold the same ones.
    """
    sizes: dict[DpGroup, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for layer in layers:
        for group, parameters in split_parameters_by_dp_group(layer):
            gathered, reduced = sizes[group]
            if layer.trained or gathers_frozen:
                gathered += parameters * precision.parameter_bytes
            if layer.trained:
                reduced += parameters * precision.gradient_bytes
            sizes[group] = gathered, reduced
    updated = sum(layer.shard_parameters for layer in layers if layer.trained)
    return ParameterTraffic.from_bytes(sizes, updated, cost_model)


def make_optimizer_graph(chunks: Iterable[ParameterTraffic]) -> KernelGraph:
    """Makes the optimizer's pass over a rank's shard."""
    return make_single_kernel_graph(OpKind.OPTIMIZER, Lane.COMPUTE, sum(chunk.update_s for chunk in chunks))


@dataclass(frozen=True, kw_only=True)
class TrafficOverlap:
    """Split of a stage's traffic into what is exposed and what runs under compute, by the assumptions."""

    chunks: Sequence[ParameterTraffic]
    assumptions: Assumptions

    @property
    def mode(self) -> str:
        return self.assumptions.dp_exposure

    def exposed(self, quantity: str) -> float:
        """Returns seconds or bytes of the stage before or after all compute."""
        total = self._total(quantity)
        return {"chunks": 0.0, "all": total}.get(self.mode, self.assumptions.dp_exposed_share * total)

    def hidden(self, quantity: str, chunk: int) -> float:
        """Returns seconds or bytes of one chunk that run under compute."""
        value = float(getattr(self.chunks[chunk], quantity))
        if self.mode == "lump":
            return (1.0 - self.assumptions.dp_exposed_share) * value
        return self._total(quantity) / len(self.chunks) if self.mode == "slack" else value

    def _total(self, quantity: str) -> float:
        return float(sum(getattr(chunk, quantity) for chunk in self.chunks))


def exposed_lane(mode: str) -> Lane:
    """Returns the lane of exposed traffic; slack is host time, not the NIC's: sync, norm, cast."""
    return Lane.HOST if mode == "slack" else Lane.DP


class _StageTraffic:
    """Adds one stage's gathers and reduces to a schedule."""

    def __init__(self, builder: ScheduleBuilder, device: int, exposure: TrafficOverlap) -> None:
        self._builder, self._device, self._exposure = builder, device, exposure
        self._exposed_lane = exposed_lane(exposure.mode)
        self._gathers: dict[int, int] = {}
        self._exposed: int | None = None
        self.reduces: list[int] = []

    def gather(self) -> None:
        """Adds the gathers that run before the stage's first op."""
        if self._exposure.mode != "chunks":
            self._exposed = self._builder.add(self._exposed_op(OpKind.UNSHARD), device=self._device)
        if self._exposure.mode != "all":
            for chunk in range(len(self._exposure.chunks)):
                op = self._hidden_op(OpKind.UNSHARD, chunk)
                self._gathers[chunk] = self._builder.add(op, device=self._device, chunk=chunk)

    def needed_by(self, chunk: int) -> list[int]:
        """Returns the blocks that a chunk's forward waits for."""
        waits = [] if self._exposed is None else [self._exposed]
        if chunk in self._gathers and (self._exposure.mode == "chunks" or chunk > 0):
            waits.append(self._gathers[chunk])
        return waits

    def chunk_done(self, chunk: int, last: int) -> None:
        """Adds the reduce of a chunk whose last backward is `last`; it runs under what follows."""
        if self._exposure.mode != "all":
            op = self._hidden_op(OpKind.REDUCE_GRAD, chunk)
            self.reduces.append(
                self._builder.add(op, device=self._device, chunk=chunk, after=[last], right_after=last)
            )

    def stage_done(self, last: int) -> None:
        """Adds the reduce that the assumptions leave exposed, after all compute of the stage."""
        if self._exposure.mode != "chunks":
            op = self._exposed_op(OpKind.REDUCE_GRAD)
            self.reduces.append(self._builder.add(op, device=self._device, after=[last]))

    def _exposed_op(self, kind: OpKind) -> KernelGraph:
        name = kind.word
        size = 0.0 if self._exposed_lane == Lane.HOST else self._exposure.exposed(f"{name}_bytes")
        seconds = self._exposure.exposed(f"{name}_s")
        return make_single_kernel_graph(kind, self._exposed_lane, seconds, segment=EXPOSED, size_bytes=size)

    def _hidden_op(self, kind: OpKind, chunk: int) -> KernelGraph:
        name = kind.word
        seconds, size = (self._exposure.hidden(f"{name}_{unit}", chunk) for unit in ("s", "bytes"))
        return make_single_kernel_graph(kind, Lane.DP, seconds, segment=HIDDEN, size_bytes=size)
