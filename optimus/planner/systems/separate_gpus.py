"""Places encoders on GPUs of their own, as a leading stage of the LLM's pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from optimus.cost.memory import RankMemory, communicator_bytes
from optimus.ir.op import Floats, Lane, OpKind, Schedule
from optimus.job.layout import Layout
from optimus.planner.batch_assignment import BatchAssignment, EncoderBins
from optimus.planner.context import PlanningContext
from optimus.planner.systems.base import BaseCandidate, BaseSystem
from optimus.planner.systems.encoder_replica import (
    EncoderReplica,
    encoder_tp_and_recompute,
    pareto_front,
    replicate_on_separate_gpus,
)
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.planner.systems.pipeline_search import search_pipelines
from optimus.schedule.op_times import OrderColumns, find_peak_activations
from optimus.schedule.pipeline_orders import PipelineOp
from optimus.schedule.pipeline_schedule import (
    PipelineBlockIds,
    add_pipeline_to_schedule,
    make_optimizer_graph,
)
from optimus.schedule.schedule_builder import KernelGraph, ScheduleBuilder, make_single_kernel_graph
from optimus.schedule.simulator import Timeline, simulate_schedule

LEADS_STEPS = (0.0, 0.3, 1.0)  # how far encoder forwards may run ahead
ENCODER_GPU_FACTORS = (1.0, 1.15, 1.3)  # GPUs of the encoders, relative to their share of the work
REFINE_AT_MOST = 6  # choices whose leads are tried


@dataclass(frozen=True, kw_only=True, eq=False)
class SeparateGpusCandidate(BaseCandidate):
    """An LLM on fewer GPUs and encoders on the rest; devices are the LLM's stages, then the encoders."""

    context: PlanningContext
    llm: PipelineCandidate
    encoders: tuple[EncoderReplica, ...]
    encoder_gpus: int
    lead: float = 0.0

    @property
    def stages(self) -> int:
        return len(self.llm.order)

    @property
    def llm_pipeline(self) -> PipelineCandidate:
        return self.llm

    def simulated(self) -> tuple[Schedule, Timeline]:
        return self._simulated

    @cached_property
    def _simulated(self) -> tuple[Schedule, Timeline]:
        schedule, assumptions = self._build(kernels=True), self.context.cost_model.assumptions
        return schedule, simulate_schedule(
            schedule, slowdown=assumptions.residence_slowdown, launch_s=assumptions.launch_s
        )

    def _build(self, *, kernels: bool) -> Schedule:
        context, plan, device = self.context, self.llm.plan, self.stages
        names = [*(f"stage {stage}" for stage in range(self.stages)), "encoders"]
        builder = ScheduleBuilder(context.chunks.modules, self.stages + 1, names)
        blocks = add_pipeline_to_schedule(builder, plan, context.chunks, kernels=kernels)
        send, send_back = self._send(OpKind.SEND_SEAM), self._send(OpKind.SEND_SEAM_B)
        order = self._order
        reduces = list(blocks.reduces)
        previous: list[int] = []
        last_backward = max(place for place, (kind, _) in enumerate(order) if kind == OpKind.BACKWARD)
        for place, (kind, microbatch) in enumerate(order):
            if kind == OpKind.FORWARD:
                for replicated in self.encoders:
                    previous = [
                        replicated.add_forward(builder, device, microbatch, first=place == 0, after=previous)
                        if kernels
                        else builder.add(self._as_one_op(replicated, kind), device=device, after=previous)
                    ]
                sent = builder.add(send, device=device, microbatch=microbatch, after=previous)
                builder.wait([self._entry(blocks, OpKind.FORWARD, microbatch)], [sent])
                continue
            source = self._entry(blocks, OpKind.BACKWARD, microbatch)
            back = builder.add(send_back, device=0, microbatch=microbatch, after=[source], right_after=source)
            previous = [*previous, back]
            for replicated in reversed(self.encoders):
                if kernels:
                    last = place == last_backward
                    block, sent_back = replicated.add_backward(
                        builder, device, microbatch, last=last, after=previous
                    )
                    previous, reduces = [block], reduces + sent_back
                else:
                    previous = [builder.add(self._as_one_op(replicated, kind), device=device, after=previous)]
        if context.cost_model.assumptions.optimizer_time:
            for stage in range(self.stages):
                builder.add(make_optimizer_graph(plan.traffic_of(stage)), device=stage, after=reduces)
            own = make_optimizer_graph([part for replicated in self.encoders for part in replicated.traffic])
            builder.add(own, device=device, after=reduces)
        return builder.build()

    @cached_property
    def estimate_s(self) -> float:
        """Step time simulated op by op."""
        slowdown = self.context.cost_model.assumptions.residence_slowdown
        return simulate_schedule(self._build(kernels=False), slowdown=slowdown).step_s

    @property
    def rough_s(self) -> float:
        """Rough step time: the busier of LLM and encoders, and one encoder microbatch at either end."""
        once_s = self._seconds(OpKind.FORWARD) + self._seconds(OpKind.BACKWARD)
        return max(self.llm.estimate_s, len(self._order) / 2 * once_s) + once_s

    @cached_property
    def memories(self) -> tuple[RankMemory, ...]:
        return (*self.llm.memories, self._encoder_memory())

    @property
    def device_gpus(self) -> Floats:
        """GPUs of every LLM stage, then of the encoders."""
        llm_gpus = self.context.job.cluster.gpus - self.encoder_gpus
        return np.array([llm_gpus / self.stages] * self.stages + [self.encoder_gpus])

    def batch_assignment(self) -> BatchAssignment:
        """Returns each microbatch of all replicas, encoded together.

        Both LLM and encoders are priced at the busiest replica's sequences: a mean batch takes as long.
        """
        job = self.context.job
        mean = job.workload.sequences_per_step / self.llm.microbatches
        together = EncoderBins(bins=1, sharing="all", priced_sequences=mean)
        return BatchAssignment(
            replicas=self.llm.layout.dp,
            microbatches=self.llm.microbatches,
            encoders={encoder.name: together for encoder in job.model.encoders},
            dealing_replicas=self.llm.layout.dp,
        )

    def describe(self) -> str:
        """Returns GPUs of LLM and encoders, encoder layouts, then the LLM's pipeline."""
        gpus = self.context.job.cluster.gpus
        encoders = "; ".join(f"{s.encoder.name} {s.layout}" for s in self.encoders)
        return f"{gpus - self.encoder_gpus}+{self.encoder_gpus} GPUs; {encoders}; {self.llm.describe()}"

    @cached_property
    def _order(self) -> list[tuple[OpKind, int]]:
        """Encoder ops in the order that the LLM needs and releases them, forwards `lead` steps earlier."""
        starts, ends, step_s = self.llm.seam_times
        when = [
            (float(start) - self.lead * step_s, OpKind.FORWARD, place) for place, start in enumerate(starts)
        ]
        when += [(float(end), OpKind.BACKWARD, place) for place, end in enumerate(ends)]
        return [(kind, microbatch) for _, kind, microbatch in sorted(when)]

    def _entry(self, blocks: PipelineBlockIds, kind: OpKind, microbatch: int) -> int:
        """Returns stage 0's op on this microbatch."""
        kinds = (OpKind.FORWARD,) if kind == OpKind.FORWARD else (OpKind.BACKWARD, OpKind.INPUT_GRAD)
        return next(blocks.ops[k, 0, microbatch] for k in kinds if (k, 0, microbatch) in blocks.ops)

    def _seconds(self, kind: OpKind) -> float:
        return sum(self.context.chunks.price(replicated.layers).seconds[kind] for replicated in self.encoders)

    def _as_one_op(self, replicated: EncoderReplica, kind: OpKind) -> KernelGraph:
        """Returns an encoder's op as a single entry."""
        return make_single_kernel_graph(
            kind, Lane.COMPUTE, self.context.chunks.price(replicated.layers).seconds[kind]
        )

    def _send(self, kind: OpKind) -> KernelGraph:
        """Returns the send of a group's part of one microbatch; groups send in parallel."""
        size = sum(replicated.output_bytes for replicated in self.encoders)
        seconds = self.context.cost_model.send_s(size, across_nodes=True)
        return make_single_kernel_graph(kind, Lane.P2P, seconds, size_bytes=size)

    def _encoder_memory(self) -> RankMemory:
        memory = RankMemory(reserve=self.context.job.cluster.reserve_bytes)
        ops = tuple(PipelineOp(kind, 0, microbatch) for kind, microbatch in self._order)
        order = OrderColumns.of((ops,))
        for replicated in self.encoders:
            held, saved = replicated.states, np.full((1, 1, 1), replicated.saved_activation_bytes)
            kept = float(find_peak_activations(order, saved).sum())
            memory = replace(
                memory,
                parameters=memory.parameters + held.parameters,
                gradients=memory.gradients + held.gradients,
                optimizer=memory.optimizer + held.optimizer,
                encoder_activations=memory.encoder_activations + kept + replicated.working_bytes,
                communicators=memory.communicators
                + communicator_bytes(replicated.layout.tp, replicated.layout.dp),
            )
        return memory


class SeparateGpusSystem(BaseSystem):
    """Encoders on GPUs of their own."""

    name = "separate-gpus"
    allowed_as = "separate-gpus"

    def candidates(self, pipelines: LlmPipelines) -> Iterator[SeparateGpusCandidate]:
        """Yields LLMs on fewer GPUs, with encoders on the rest."""
        return _separate_candidates(pipelines.context, pipelines.floor)


def _separate_candidates(
    context: PlanningContext, floor: PipelineCandidate
) -> Iterator[SeparateGpusCandidate]:
    """Yields LLMs with fewer replicas or stages, and encoders on the freed GPUs."""
    roughly = sorted(_shares(context, floor), key=lambda choice: choice.rough_s)
    refined = 0
    for choice in roughly:
        led = [replace(choice, lead=lead) for lead in LEADS_STEPS]
        fitting = [choice for choice in led if choice.fits]
        yield from fitting
        refined += bool(fitting)
        if refined == REFINE_AT_MOST:
            return


def _shares(context: PlanningContext, floor: PipelineCandidate) -> Iterator[SeparateGpusCandidate]:
    """Yields every smaller LLM with every tp and recomputation of the encoders."""
    model = context.job.model
    for shrunk in _smaller_layouts(context):
        smaller = replace(context, layout=shrunk, uneven=True)
        chunks = floor.layout.virtual_stages // shrunk.pp
        pipelines = search_pipelines(smaller, (model.llm,), chunk_counts={1, chunks}, starts=1, evaluations=0)
        if not pipelines:
            continue
        llm = pipelines[0]
        gpus = context.job.cluster.gpus - shrunk.gpus
        per_encoder = [
            pareto_front(
                [
                    replicate_on_separate_gpus(
                        smaller, e, tp=tp, recompute=again, gpus=gpus, sequences=llm.sequences
                    )
                    for tp, again in encoder_tp_and_recompute(smaller, e)
                    if gpus >= tp
                ]
            )
            for e in model.encoders
        ]
        for combination in product(*per_encoder):
            yield SeparateGpusCandidate(context=smaller, llm=llm, encoders=combination, encoder_gpus=gpus)


def _smaller_layouts(context: PlanningContext) -> Iterator[Layout]:
    """Yields layouts of the LLM on fewer replicas or stages, less the encoders' share of the GPU seconds."""
    layout, share = context.layout, _encoder_share(context)
    for axis, size in (("dp", layout.dp), ("pp", layout.pp)):
        counts = {math.ceil(factor * share * size) for factor in ENCODER_GPU_FACTORS}
        counts.add(max(counts) + 1)  # the fullest of one stage less may hold no more layers
        for count in sorted(counts):
            shrunk = layout.with_(**{axis: max(1, size - count)})
            if count < size and (shrunk.dp * shrunk.cp * shrunk.tp) % shrunk.ep == 0:
                yield shrunk


def _encoder_share(context: PlanningContext) -> float:
    """Returns the encoders' share of a step's GPU seconds, with every GPU working alone on them."""
    llm = context.job.model.llm
    policies = dict(next(iter(context.recompute_policies(context.job.model.modules))))
    llm_s = context.gpu_seconds(context.llm_layers(context.layout, 1, policies[llm.name]))
    encoders_s = sum(
        context.gpu_seconds(context.encoder_layers(e, Layout(), 1, policies[e.name]))
        for e in context.job.model.encoders
    )
    return encoders_s / (llm_s + encoders_s)
