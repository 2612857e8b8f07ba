"""All encoder forwards on all GPUs, then the LLM's pipeline, then all encoder backwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from optimus.cost.memory import Memory, communicator_bytes
from optimus.ir.op import Kind, Lane, Schedule
from optimus.job.model import BF16_BYTES
from optimus.planner.context import PlanningContext
from optimus.planner.systems.pipeline import InlinePipeline
from optimus.planner.systems.replicated_encoder import (
    SpreadEncoder,
    encoder_choices,
    promising,
    spread_over_all,
)
from optimus.schedule.assemble import add_pipeline
from optimus.schedule.build import Builder, single
from optimus.schedule.dp_traffic import update


@dataclass(frozen=True, kw_only=True, eq=False)
class ThreePhase:
    """One way to run the three phases."""

    context: PlanningContext
    encoders: tuple[SpreadEncoder, ...]
    llm: InlinePipeline

    def schedule(self) -> Schedule:
        context, plan = self.context, self.llm.plan
        builder = Builder(context.chunks.modules, plan.stages)
        sends = [self._forwards(builder, stage) for stage in range(plan.stages)]
        blocks = add_pipeline(builder, plan, context.chunks, kernels=True)
        builder.wait([blocks.first[0]] * len(sends), sends)
        back = self._seam(builder, 0, [blocks.last[0]])
        reduces = list(blocks.reduces)
        for stage in range(plan.stages):
            reduces += self._backwards(builder, stage, back)
        if context.prices.assumptions.optimizer_time:
            for stage in range(plan.stages):
                traffic = [
                    *plan.traffic_of(stage),
                    *(part for spread in self.encoders for part in spread.traffic),
                ]
                builder.add(update(traffic), device=stage, after=reduces)
        return builder.build()

    @property
    def estimate_s(self) -> float:
        """Rank of this choice: the phases one after another."""
        encoder_s = sum(spread.seconds for spread in self.encoders)
        return self.llm.estimate_s + encoder_s

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The LLM's, with every encoder's states, activations of all its pieces, and the seam."""
        return tuple(self._with_encoders(memory, stage) for stage, memory in enumerate(self.llm.memories))

    @property
    def peak_bytes(self) -> float:
        return max(memory.total for memory in self.memories)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.context.capacity_bytes

    def _forwards(self, builder: Builder, stage: int) -> int:
        """All encoder forwards of a group; returns the send of their outputs."""
        last = []
        for spread in self.encoders:
            previous: list[int] = []
            for piece in range(spread.pieces):
                previous = [spread.forwards(builder, stage, piece, first=piece == 0, after=previous)]
            last += previous
        return self._seam(builder, stage, last)

    def _backwards(self, builder: Builder, stage: int, back: int) -> list[int]:
        """All encoder backwards of a group; returns the reduces."""
        reduces, previous = [], back
        for spread in reversed(self.encoders):
            for piece in range(spread.pieces):
                last = piece == spread.pieces - 1
                previous, sent = spread.backwards(builder, stage, piece, last=last, after=[previous])
                reduces += sent
        return reduces

    def _seam(self, builder: Builder, stage: int, after: Sequence[int]) -> int:
        """Encoder outputs of one group travel to stage 0, or their gradients back."""
        size = sum(spread.pieces * spread.output_bytes for spread in self.encoders)
        seconds = self.context.prices.send_s(size, across_nodes=True)
        return builder.add(single(Kind.SEND, Lane.P2P, seconds, size_bytes=size), device=stage, after=after)

    def _with_encoders(self, memory: Memory, stage: int) -> Memory:
        for spread in self.encoders:
            held = spread.states
            memory = replace(
                memory,
                parameters=memory.parameters + held.parameters,
                gradients=memory.gradients + held.gradients,
                optimizer=memory.optimizer + held.optimizer,
                encoder_activations=memory.encoder_activations
                + spread.pieces * spread.kept_bytes
                + spread.working_bytes,
                communicators=memory.communicators + communicator_bytes(spread.layout.dp),
                seam=memory.seam + (self._seam_bytes(spread) if stage == 0 else 0.0),
            )
        return memory

    def _seam_bytes(self, spread: SpreadEncoder) -> float:
        """Encoder outputs of all microbatches, waiting at stage 0."""
        workload, layout = self.context.job.workload, self.context.layout
        projector = spread.encoder.projector
        load = workload.encoder_load(spread.encoder.name, projector.merge)
        tokens = load.tokens / projector.merge * workload.sequences_per_step / layout.dp / layout.cp
        return tokens * projector.widths[-1] * len(spread.encoder.feeds) * BF16_BYTES / layout.tp


def three_phase_choices(context: PlanningContext, llm: InlinePipeline) -> Iterator[ThreePhase]:
    """Every choice of tp and recomputation of the encoders beside one LLM pipeline."""
    per_encoder = [
        promising(
            [spread_over_all(context, e, tp=tp, recompute=again) for tp, again in encoder_choices(context, e)]
        )
        for e in context.job.model.encoders
    ]
    for combination in product(*per_encoder):
        yield ThreePhase(context=context, encoders=combination, llm=llm)
