"""Computes lower bounds of a step: the LLM alone, all work spread evenly, one microbatch's path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimus.cost.priced_layer import PricedLayer
from optimus.ir.op import Lane, OpKind
from optimus.planner.context import PlanningContext
from optimus.planner.systems.encoder_replica import (
    EncoderReplica,
    encoder_tp_and_recompute,
    replicate_on_all_gpus,
)
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.schedule.schedule_builder import ScheduleBuilder
from optimus.schedule.simulator import simulate_schedule


@dataclass(frozen=True, kw_only=True)
class StepBounds:
    """Lower bounds of a step in seconds; `encoder_s` is the time of encoders alone on all GPUs."""

    floor_s: float
    work_s: float
    critical_path_s: float
    encoder_s: float

    @property
    def bound_s(self) -> float:
        return max(self.floor_s, self.work_s, self.critical_path_s)

    @property
    def largest_name(self) -> str:
        """Name of the largest bound."""
        named = {
            "floor": self.floor_s,
            "total work": self.work_s,
            "critical path": self.critical_path_s,
        }
        return max(named, key=lambda name: named[name])

    def hidden_share(self, step_s: float) -> float:
        """Returns the share of the encoders' own time by which the step is not longer than the floor."""
        return 1.0 - (step_s - self.floor_s) / self.encoder_s if self.encoder_s else 1.0


def compute_step_bounds(context: PlanningContext, llm: PipelineCandidate, floor_s: float) -> StepBounds:
    """Computes the bounds of every step with this LLM, of which layout and recomputation are stated."""
    encoders = context.job.model.encoders
    choices = [
        [
            replicate_on_all_gpus(context, encoder, tp=tp, recompute=recompute)
            for tp, recompute in encoder_tp_and_recompute(context, encoder)
        ]
        for encoder in encoders
    ]
    return StepBounds(
        floor_s=floor_s,
        work_s=_llm_work_s(llm) + sum(min(map(_work_s, each)) for each in choices),
        critical_path_s=_llm_path_s(llm) + sum(min(map(_path_s, each)) for each in choices),
        encoder_s=sum(min(map(_alone_s, each)) for each in choices),
    )


def _alone_s(replicated: EncoderReplica) -> float:
    """Simulates all forwards, then all backwards of an encoder on all GPUs, its traffic overlapped."""
    if not replicated.pieces:
        return 0.0
    builder = ScheduleBuilder(replicated.context.chunks.modules, 1)
    after: list[int] = []
    for piece in range(replicated.pieces):
        after = [replicated.add_forward(builder, 0, piece, first=piece == 0, after=after)]
    for piece in range(replicated.pieces):
        block, _ = replicated.add_backward(
            builder, 0, piece, last=piece == replicated.pieces - 1, after=after
        )
        after = [block]
    slowdown = replicated.context.cost_model.assumptions.residence_slowdown
    return simulate_schedule(builder.build(), slowdown=slowdown).step_s


def _work_s(replicated: EncoderReplica) -> float:
    """Returns the seconds of an encoder's kernels on the mean GPU, as if images could be split."""
    context, sequences = replicated.context, replicated.context.microbatch_sequences
    layers = context.encoder_layers(replicated.encoder, replicated.layout, sequences, replicated.recompute)
    microbatches = context.job.workload.sequences_per_step / sequences
    return _compute_s(layers) * microbatches / replicated.layout.dp


def _llm_work_s(llm: PipelineCandidate) -> float:
    """Returns the seconds of the LLM's kernels on the mean stage, without communication."""
    return _compute_s(llm.layers) * llm.microbatches / llm.layout.pp


def _compute_s(layers: Sequence[PricedLayer]) -> float:
    """Returns the compute seconds of one microbatch, forward and backward."""
    kernels = (
        kernel
        for layer in layers
        for kind in (OpKind.FORWARD, OpKind.BACKWARD)
        for kernel in layer.kernels[kind]
    )
    return sum(kernel.duration_s for kernel in kernels if kernel.lane == Lane.COMPUTE)


def _llm_path_s(llm: PipelineCandidate) -> float:
    """Returns the time of one microbatch through all stages and back; weight gradients may wait."""
    chunks = [llm.context.chunks.price([layer]).seconds for layer in llm.layers]
    return sum(
        seconds[OpKind.FORWARD] + min(seconds[OpKind.INPUT_GRAD], seconds[OpKind.BACKWARD])
        for seconds in chunks
    )


def _path_s(replicated: EncoderReplica) -> float:
    """Returns the time of one piece's forward and the shorter of its backwards."""
    seconds = replicated.context.chunks.price(replicated.layers).seconds
    return (
        seconds[OpKind.FORWARD] + min(seconds[OpKind.INPUT_GRAD], seconds[OpKind.BACKWARD])
        if replicated.pieces
        else 0.0
    )
