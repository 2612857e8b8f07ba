"""A pipeline with its chunks, sends and data-parallel traffic as one schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optimus.cost.prices import Prices
from optimus.ir.op import Ints, Lane, OpKind, Schedule
from optimus.job.layout import Layout
from optimus.schedule.build import Builder, Template, single
from optimus.schedule.chunk_templates import Chunk, Chunks
from optimus.schedule.dp_traffic import Exposure, ParameterTraffic, StageTraffic, update
from optimus.schedule.pipelines import Pipeline, PipelineOp

FORWARD, BACKWARD = 0, 1  # `segment` of a send


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelinePlan:
    """Everything that decides the schedule of one pipeline: `chunks[v]` is virtual stage v."""

    order: Pipeline
    chunks: Sequence[Chunk]
    traffic: Sequence[ParameterTraffic]  # of every virtual stage
    layout: Layout
    prices: Prices

    @property
    def stages(self) -> int:
        return len(self.order)

    def traffic_of(self, stage: int) -> Sequence[ParameterTraffic]:
        return self.traffic[stage :: self.stages]


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineBlocks:
    """Where a pipeline stands in a builder, for whoever adds work around it.

    `first` and `last` are one op per stage.
    """

    ops: dict[tuple[OpKind, int, int], int]  # of stage 0: (kind, chunk, microbatch)
    first: list[int]
    last: list[int]
    reduces: list[int]


def assemble(plan: PipelinePlan, chunks: Chunks, *, kernels: bool) -> Schedule:
    """Ops of all stages in program order; with `kernels`, every op expanded to its kernels."""
    builder = Builder(chunks.modules, plan.stages)
    blocks = add_pipeline(builder, plan, chunks, kernels=kernels)
    if plan.prices.assumptions.optimizer_time:
        for stage in range(plan.stages):
            builder.add(update(plan.traffic_of(stage)), device=stage, after=blocks.reduces)
    return builder.build()


def add_pipeline(builder: Builder, plan: PipelinePlan, chunks: Chunks, *, kernels: bool) -> PipelineBlocks:
    """Adds a pipeline to a builder: stage r becomes the next part of device r's program."""
    templates = _Templates(builder, plan, chunks, kernels)
    microbatches = 1 + max(op.microbatch for op in plan.order[0])
    # Block after which the next (or previous) virtual stage may run a microbatch.
    produced = np.full((2, len(plan.chunks), microbatches), -1, np.int64)
    wanted: list[tuple[Ints, int, Ints, Ints]] = []
    added = [_add_stage(builder, plan, stage, templates, produced, wanted) for stage in range(plan.stages)]
    for blocks, direction, virtual, microbatch in wanted:
        builder.wait(blocks, produced[direction, virtual, microbatch])
    entry = added[0][0]
    return PipelineBlocks(
        ops={
            (op.kind, op.chunk, op.microbatch): int(block)
            for op, block in zip(plan.order[0], entry, strict=True)
        },
        first=[int(blocks[0]) for blocks, _ in added],
        last=[int(blocks[-1]) for blocks, _ in added],
        reduces=[reduce for _, reduces in added for reduce in reduces],
    )


def _add_stage(
    builder: Builder,
    plan: PipelinePlan,
    stage: int,
    templates: _Templates,
    produced: Ints,
    wanted: list[tuple[Ints, int, Ints, Ints]],
) -> tuple[Ints, list[int]]:
    """One stage's program: gathers, ops with their sends, reduces. Returns the ops and the reduces."""
    order = plan.order[stage]
    kind, chunk, microbatch = np.array(order, np.int64).T
    virtual = chunk * plan.stages + stage
    exposure = Exposure(chunks=plan.traffic_of(stage), assumptions=plan.prices.assumptions)
    traffic = StageTraffic(builder, stage, exposure)
    traffic.gather()
    blocks = builder.add_many(templates.ops[kind, virtual], stage, chunk, microbatch)
    # An op waits for its predecessor's trailing collectives too, as Megatron's linears do.
    builder.wait(blocks[1:], blocks[:-1])
    for index, op in _first_of_each_chunk(order):
        waits = traffic.needed_by(op.chunk)
        builder.wait([blocks[index]] * len(waits), waits)
    forward, backward = kind == OpKind.FORWARD, (kind == OpKind.BACKWARD) | (kind == OpKind.INPUT_GRAD)
    for direction, here, step in ((FORWARD, forward, 1), (BACKWARD, backward, -1)):
        produced[direction, virtual[here], microbatch[here]] = blocks[here]
        follows = here & (virtual - step >= 0) & (virtual - step < len(plan.chunks))
        wanted.append((blocks[follows], direction, virtual[follows] - step, microbatch[follows]))
        sends = here & (virtual + step >= 0) & (virtual + step < len(plan.chunks))
        if plan.stages > 1 and sends.any():
            travels = templates.sends[direction, virtual[sends]]
            sent = builder.add_many(
                travels, stage, chunk[sends], microbatch[sends], right_after=blocks[sends]
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


class _Templates:
    """The rows of every op and send of a plan, registered in a builder."""

    def __init__(self, builder: Builder, plan: PipelinePlan, chunks: Chunks, kernels: bool) -> None:
        self._plan, self._chunks, self._kernels = plan, chunks, kernels
        count = len(plan.chunks)
        self.ops: Ints = np.full((len(OpKind), count), -1, np.int64)
        for kind in {op.kind for op in plan.order[0]}:
            self.ops[kind] = [builder.register(self._op(chunk, kind)) for chunk in plan.chunks]
        outputs = [builder.register(self._send(chunk, FORWARD)) for chunk in plan.chunks]
        gradients = [builder.register(self._send(chunk, BACKWARD)) for chunk in plan.chunks]
        # Backward, a virtual stage sends the gradient of what the one before it had sent.
        self.sends: Ints = np.array([outputs, gradients[-1:] + gradients[:-1]], np.int64)

    def _op(self, chunk: Chunk, kind: OpKind) -> Template:
        if self._kernels:
            return self._chunks.template(chunk, kind)
        return single(kind, Lane.COMPUTE, chunk.seconds[kind])

    def _send(self, chunk: Chunk, direction: int) -> Template:
        prices, size = self._plan.prices, chunk.output_bytes
        kind = OpKind.SEND_F if direction == FORWARD else OpKind.SEND_B
        seconds = prices.send_s(size, across_nodes=prices.stages_cross_nodes(self._plan.layout))
        return single(kind, Lane.P2P, seconds, segment=direction, size_bytes=size)
