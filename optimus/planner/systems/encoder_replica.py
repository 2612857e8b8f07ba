"""Replicates an encoder over many small groups of GPUs, each with its share of the images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from optimus.cost.memory import RankMemory, model_state_memory, transient_bytes
from optimus.cost.priced_layer import PricedLayer
from optimus.ir.op import Lane, OpKind
from optimus.job.layout import Layout
from optimus.job.model import Encoder
from optimus.planner.context import PlanningContext
from optimus.schedule.pipeline_schedule import ParameterTraffic
from optimus.schedule.schedule_builder import KernelGraph, ScheduleBuilder, make_single_kernel_graph

BUCKETS = 8  # per encoder: enough to overlap, few enough for large messages


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderReplica:
    """An encoder's work on one group of `layout.tp` GPUs; a piece is one microbatch of the group."""

    context: PlanningContext
    encoder: Encoder
    layout: Layout
    layers: tuple[PricedLayer, ...]  # for one piece
    pieces: int  # of a group: in a step, or in one microbatch of the LLM
    recompute: str

    def template(self, kind: OpKind) -> KernelGraph:
        """Returns the kernels of one piece."""
        return self._part(self.layers, kind)

    @cached_property
    def buckets(self) -> list[tuple[PricedLayer, ...]]:
        """Consecutive layers whose parameters are gathered and reduced together."""
        size = math.ceil(len(self.layers) / BUCKETS)
        return [self.layers[place : place + size] for place in range(0, len(self.layers), size)]

    @cached_property
    def traffic(self) -> list[ParameterTraffic]:
        """Parameter traffic of every bucket."""
        return [self.context.parameter_traffic(bucket) for bucket in self.buckets]

    def add_forward(
        self, builder: ScheduleBuilder, device: int, microbatch: int, *, first: bool, after: list[int]
    ) -> int:
        """Adds one piece's forward; the first of a step waits for each bucket's parameters."""
        if not first:
            return builder.add(
                self.template(OpKind.FORWARD), device=device, microbatch=microbatch, after=after
            )
        for bucket, traffic in zip(self.buckets, self.traffic, strict=True):
            gather = make_single_kernel_graph(
                OpKind.UNSHARD, Lane.DP, traffic.gather_s, size_bytes=traffic.gather_bytes
            )
            gathered = builder.add(gather, device=device)
            waits = [*after, gathered]
            after = [
                builder.add(
                    self._part(bucket, OpKind.FORWARD), device=device, microbatch=microbatch, after=waits
                )
            ]
        return after[0]

    def add_backward(
        self, builder: ScheduleBuilder, device: int, microbatch: int, *, last: bool, after: list[int]
    ) -> tuple[int, list[int]]:
        """Adds one piece's backward; the last of a step also reduces each bucket's gradients."""
        if not last:
            block = builder.add(
                self.template(OpKind.BACKWARD), device=device, microbatch=microbatch, after=after
            )
            return block, []
        reduces = []
        for bucket, traffic in zip(self.buckets[::-1], self.traffic[::-1], strict=True):
            after = [
                builder.add(
                    self._part(bucket, OpKind.BACKWARD), device=device, microbatch=microbatch, after=after
                )
            ]
            reduce = make_single_kernel_graph(
                OpKind.REDUCE_GRAD, Lane.DP, traffic.reduce_s, size_bytes=traffic.reduce_bytes
            )
            reduces.append(builder.add(reduce, device=device, after=after))
        return after[0], reduces

    def _part(self, layers: tuple[PricedLayer, ...], kind: OpKind) -> KernelGraph:
        chunks = self.context.chunks
        return chunks.kernel_graph(chunks.price(layers), kind)

    @property
    def states(self) -> RankMemory:
        return model_state_memory(self.layers, self.context.job.model.precision)

    @property
    def saved_activation_bytes(self) -> float:
        """Activation bytes of one piece."""
        return sum(layer.activation_bytes for layer in self.layers)

    @property
    def working_bytes(self) -> float:
        return transient_bytes(self.layers)

    @cached_property
    def seconds(self) -> float:
        """Seconds of forward and backward of all pieces."""
        by_kind = self.context.chunks.price(self.layers).seconds
        return self.pieces * (by_kind[OpKind.FORWARD] + by_kind[OpKind.BACKWARD])

    @cached_property
    def held_bytes(self) -> float:
        return self.states.states + self.pieces * self.saved_activation_bytes + self.working_bytes

    @property
    def output_bytes(self) -> float:
        return self.layers[-1].output_bytes


def replicate_on_all_gpus(
    context: PlanningContext, encoder: Encoder, *, tp: int, recompute: str
) -> EncoderReplica:
    """Replicates an encoder on all GPUs of the job; whole images are assigned as evenly as possible."""
    workload = context.job.workload
    layout = Layout(dp=context.job.cluster.gpus // tp, tp=tp)
    busiest = context.busiest_group_sequences(encoder, workload.sequences_per_step, layout.dp)
    pieces = math.ceil(busiest / context.microbatch_sequences)
    share = busiest / pieces if pieces else 0.0
    return EncoderReplica(
        context=context,
        encoder=encoder,
        layout=layout,
        layers=context.encoder_layers(encoder, layout, share, recompute),
        pieces=pieces,
        recompute=recompute,
    )


def replicate_on_separate_gpus(
    context: PlanningContext, encoder: Encoder, *, tp: int, recompute: str, gpus: int, sequences: float
) -> EncoderReplica:
    """Replicates an encoder on GPUs of its own; a piece is a group's part of a microbatch of all replicas."""
    layout = Layout(dp=gpus // tp, tp=tp)
    share = context.layout.dp * sequences / layout.dp
    return EncoderReplica(
        context=context,
        encoder=encoder,
        layout=layout,
        layers=context.encoder_layers(encoder, layout, share, recompute),
        pieces=1,
        recompute=recompute,
    )


def pareto_front(choices: Sequence[EncoderReplica]) -> list[EncoderReplica]:
    """Returns the choices that no other beats in both time and memory."""
    return [
        choice
        for choice in choices
        if not any(
            (other.seconds, other.held_bytes) < (choice.seconds, choice.held_bytes)
            and other.held_bytes <= choice.held_bytes
            for other in choices
        )
    ]


def encoder_tp_and_recompute(context: PlanningContext, encoder: Encoder) -> Iterator[tuple[int, str]]:
    """Yields pairs of tp and recomputation to try, least recomputation first."""
    for policy in context.recompute_policies((encoder,)):
        for tp in (1, 2, 4, 8):
            if context.layout.tp % tp == 0 and encoder.stack.attention.heads % tp == 0:
                yield tp, policy[0][1]
