"""Runs all encoder forwards on all GPUs, then the LLM's pipeline, then all encoder backwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from optimus.cost.memory import RankMemory, communicator_bytes
from optimus.data.dealing import choose_dealing_replicas
from optimus.ir.op import Lane, OpKind, Schedule
from optimus.job.model import BF16_BYTES
from optimus.planner.batch_assignment import BatchAssignment, EncoderBins
from optimus.planner.context import PlanningContext
from optimus.planner.systems.base import BaseCandidate, BaseSystem
from optimus.planner.systems.encoder_replica import (
    EncoderReplica,
    encoder_tp_and_recompute,
    pareto_front,
    replicate_on_all_gpus,
)
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.schedule.pipeline_schedule import add_pipeline_to_schedule, make_optimizer_graph
from optimus.schedule.schedule_builder import ScheduleBuilder, make_single_kernel_graph


@dataclass(frozen=True, kw_only=True, eq=False)
class ThreePhaseCandidate(BaseCandidate):
    """One LLM pipeline, with every encoder replicated over all GPUs before and after it."""

    context: PlanningContext
    encoders: tuple[EncoderReplica, ...]
    llm: PipelineCandidate

    def schedule(self) -> Schedule:
        context, plan = self.context, self.llm.plan
        builder = ScheduleBuilder(context.chunks.modules, plan.stages)
        sends = [self._forwards(builder, stage) for stage in range(plan.stages)]
        blocks = add_pipeline_to_schedule(builder, plan, context.chunks, kernels=True)
        builder.wait([blocks.first[0]] * len(sends), sends)
        back = self._seam(builder, OpKind.SEND_SEAM_B, 0, [blocks.last[0]])
        reduces = list(blocks.reduces)
        for stage in range(plan.stages):
            reduces += self._backwards(builder, stage, back)
        if context.cost_model.assumptions.optimizer_time:
            for stage in range(plan.stages):
                traffic = [
                    *plan.traffic_of(stage),
                    *(part for replicated in self.encoders for part in replicated.traffic),
                ]
                builder.add(make_optimizer_graph(traffic), device=stage, after=reduces)
        return builder.build()

    @property
    def estimate_s(self) -> float:
        """The sum of the three phases."""
        encoder_s = sum(replicated.seconds for replicated in self.encoders)
        return self.llm.estimate_s + encoder_s

    @property
    def memories(self) -> tuple[RankMemory, ...]:
        """Memory of the LLM's ranks with every encoder's states, activations of all pieces, and the seam."""
        return tuple(self._with_encoders(memory, stage) for stage, memory in enumerate(self.llm.memories))

    def batch_assignment(self) -> BatchAssignment:
        """Returns a replica's images dealt over all its encoder groups, for all microbatches at once.

        Groups of other replicas may encode them too: rows cross nodes either way, and are priced so.
        """
        context, replicas = self.context, self.llm.layout.dp
        bins = {}
        for replicated in self.encoders:
            groups = replicated.layout.dp
            priced = context.busiest_group_sequences(
                replicated.encoder, context.job.workload.sequences_per_step, groups
            )
            bins[replicated.encoder.name] = EncoderBins(
                bins=groups // replicas, sharing="replica", priced_sequences=priced
            )
        return BatchAssignment(
            replicas=replicas,
            microbatches=self.llm.microbatches,
            encoders=bins,
            dealing_replicas=choose_dealing_replicas(context.job.workload, replicas),
        )

    def describe(self) -> str:
        """Returns layout and recomputation of every encoder, then the LLM's pipeline."""
        encoders = "; ".join(f"{s.encoder.name} {s.layout} recompute {s.recompute}" for s in self.encoders)
        return f"{encoders}; {self.llm.describe()}"

    def _forwards(self, builder: ScheduleBuilder, stage: int) -> int:
        """Adds all encoder forwards of a group; returns the send of their outputs."""
        last = []
        for replicated in self.encoders:
            previous: list[int] = []
            for piece in range(replicated.pieces):
                previous = [replicated.add_forward(builder, stage, piece, first=piece == 0, after=previous)]
            last += previous
        return self._seam(builder, OpKind.SEND_SEAM, stage, last)

    def _backwards(self, builder: ScheduleBuilder, stage: int, back: int) -> list[int]:
        """Adds all encoder backwards of a group; returns the reduces."""
        reduces, previous = [], back
        for replicated in reversed(self.encoders):
            for piece in range(replicated.pieces):
                last = piece == replicated.pieces - 1
                previous, sent = replicated.add_backward(builder, stage, piece, last=last, after=[previous])
                reduces += sent
        return reduces

    def _seam(self, builder: ScheduleBuilder, kind: OpKind, stage: int, after: Sequence[int]) -> int:
        """Adds the send of one group's encoder outputs to stage 0, or of their gradients back."""
        size = sum(replicated.pieces * replicated.output_bytes for replicated in self.encoders)
        seconds = self.context.cost_model.send_s(size, across_nodes=True)
        return builder.add(
            make_single_kernel_graph(kind, Lane.P2P, seconds, size_bytes=size), device=stage, after=after
        )

    def _with_encoders(self, memory: RankMemory, stage: int) -> RankMemory:
        for replicated in self.encoders:
            states = replicated.states
            memory = replace(
                memory,
                parameters=memory.parameters + states.parameters,
                gradients=memory.gradients + states.gradients,
                optimizer=memory.optimizer + states.optimizer,
                encoder_activations=memory.encoder_activations
                + replicated.pieces * replicated.saved_activation_bytes
                + replicated.working_bytes,
                communicators=memory.communicators + communicator_bytes(replicated.layout.dp),
                seam=memory.seam + (self._seam_bytes(replicated) if stage == 0 else 0.0),
            )
        return memory

    def _seam_bytes(self, replicated: EncoderReplica) -> float:
        """Returns the bytes of encoder outputs of all microbatches, which wait at stage 0."""
        workload, layout = self.context.job.workload, self.context.layout
        encoder = replicated.encoder
        load = workload.encoder_load(encoder.name, encoder.merge)
        tokens = load.tokens / encoder.merge * workload.sequences_per_step / layout.dp / layout.cp
        return tokens * encoder.projector.widths[-1] * len(encoder.feeds) * BF16_BYTES / layout.tp


class ThreePhaseSystem(BaseSystem):
    """All encoder forwards, the LLM's pipeline, all encoder backwards."""

    name = "three-phase"
    allowed_as = "three-phase"

    def candidates(self, pipelines: LlmPipelines) -> Iterator[ThreePhaseCandidate]:
        """Yields candidates around the LLM's best pipelines."""
        for llm in pipelines.floors:
            yield from self._around(llm, pipelines)

    def _around(self, llm: PipelineCandidate, pipelines: LlmPipelines) -> list[ThreePhaseCandidate]:
        """Returns candidates around a pipeline with any recomputation; where none fits, a smaller one too."""
        candidates = list(_three_phase_candidates(pipelines.context, llm))
        added = min((candidate.peak_bytes for candidate in candidates), default=0.0) - llm.peak_bytes
        others = list(pipelines.more_recomputed(llm))
        if not any(candidate.fits for candidate in candidates):
            others += pipelines.with_free_memory(llm, [added])
        for other in others:
            candidates += _three_phase_candidates(pipelines.context, other)
        return candidates


def _three_phase_candidates(
    context: PlanningContext, llm: PipelineCandidate
) -> Iterator[ThreePhaseCandidate]:
    """Yields every tp and recomputation of the encoders around one LLM pipeline."""
    per_encoder = [
        pareto_front(
            [
                replicate_on_all_gpus(context, e, tp=tp, recompute=again)
                for tp, again in encoder_tp_and_recompute(context, e)
            ]
        )
        for e in context.job.model.encoders
    ]
    for combination in product(*per_encoder):
        yield ThreePhaseCandidate(context=context, encoders=combination, llm=llm)
