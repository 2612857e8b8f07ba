"""Runs all encoder forwards on all GPUs, then the LLM's pipeline, then all encoder backwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil, gcd

from optimus.cost.memory import RankMemory
from optimus.ir.op import OpKind, Schedule
from optimus.job.model import Encoder
from optimus.planner.batch_assignment import BatchAssignment
from optimus.planner.context import PlanningContext
from optimus.planner.filled_plan import FilledPlan, SearchResult
from optimus.planner.systems.base import BaseCandidate, BaseSystem
from optimus.planner.systems.colocated_plan import encoder_layout_on_llm_gpus
from optimus.planner.systems.colocation_candidate import ColocationCandidate, EncoderPlacement
from optimus.planner.systems.encoder_replica import (
    encoder_tp_and_recompute,
    pareto_front,
    replicate_on_all_gpus,
)
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.schedule.simulator import Timeline


@dataclass(frozen=True, kw_only=True, eq=False)
class ThreePhaseCandidate(BaseCandidate):
    """One LLM pipeline, with every encoder replicated over all GPUs before and after it."""

    context: PlanningContext
    llm: PipelineCandidate
    placements: Mapping[str, EncoderPlacement]
    estimate_s: float  # the sum of the three phases

    @cached_property
    def colocated(self) -> ColocationCandidate:
        return ColocationCandidate(self.context, self.llm, self.placements)

    @cached_property
    def filled(self) -> FilledPlan:
        """The plan: no encoder work between the LLM's."""
        return self.colocated.lower_around_llm(self.estimate_s)

    @property
    def peak_bytes(self) -> float:
        """Memory of the fullest rank at p99 of steps; all encoder microbatches are resident."""
        return self.colocated.peak_bytes_bound

    @property
    def memories(self) -> tuple[RankMemory, ...]:
        return self.filled.memories

    def simulated(self) -> tuple[Schedule, Timeline]:
        return self.filled.compared.schedule, self.filled.compared.timeline

    def search_result(self) -> SearchResult:
        """Returns the plan of this candidate."""
        return SearchResult(
            filled=self.filled,
            llm=self.llm,
            how=self.describe(),
            considered=1,
            peak_bytes_at_p99=self.colocated.peak_bytes_at_p99(self.filled),
        )

    def batch_assignment(self) -> BatchAssignment:
        return self.search_result().batch_assignment()

    def describe(self) -> str:
        """Returns layout, pieces and recomputation of every encoder, then the LLM's pipeline."""
        parts = []
        for name, chosen in self.placements.items():
            pieces = "" if chosen.pieces == 1 else f" in {chosen.pieces} pieces"
            parts.append(f"{name} {chosen.layout}{pieces} recompute {chosen.recompute}")
        return "; ".join([*parts, self.llm.describe()])


class ThreePhaseSystem(BaseSystem):
    """All encoder forwards, the LLM's pipeline, all encoder backwards."""

    name = "three-phase"
    allowed_as = "three-phase"
    makes_plan = True
    simulate_within = 1.004

    def candidates(self, pipelines: LlmPipelines) -> Iterator[ThreePhaseCandidate]:
        """Yields candidates around the LLM's best pipelines."""
        for llm in pipelines.floors:
            yield from self._around(llm, pipelines)

    def _around(self, llm: PipelineCandidate, pipelines: LlmPipelines) -> list[ThreePhaseCandidate]:
        """Returns candidates around a pipeline with any recomputation; where none fits, a smaller one too."""
        candidates = list(list_three_phase_candidates(pipelines.context, llm))
        others = list(pipelines.more_recomputed(llm))
        if not any(candidate.fits for candidate in candidates):
            added = min((candidate.peak_bytes for candidate in candidates), default=0.0) - llm.peak_bytes
            others += pipelines.with_free_memory(llm, [added])
        for other in others:
            candidates += list_three_phase_candidates(pipelines.context, other)
        return candidates


def list_three_phase_candidates(
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
        one_tp = len({each.layout.tp for each in combination}) == 1
        placements, seconds = {}, llm.estimate_s
        for each in combination:
            placements[each.encoder.name], encoder_s = _place(
                context, llm, each.encoder, each.layout.tp, each.recompute, any_pieces=one_tp
            )
            seconds += encoder_s
        yield ThreePhaseCandidate(context=context, llm=llm, placements=placements, estimate_s=seconds)


def _place(
    context: PlanningContext,
    llm: PipelineCandidate,
    encoder: Encoder,
    tp: int,
    recompute: str,
    *,
    any_pieces: bool,
) -> tuple[EncoderPlacement, float]:
    """Returns the placement with the pieces that take least time, and its seconds.

    Microbatches are dealt to all pipelines of the encoder. Each pipeline gets equally many if they are cut
    into enough pieces; more pieces than images help nothing.
    """
    layout = encoder_layout_on_llm_gpus(llm.layout, pp=1, tp=tp)
    blocks, microbatches = llm.layout.tp // tp, llm.microbatches
    pipelines = llm.layout.pp * llm.layout.cp * blocks
    even = pipelines // gcd(microbatches, pipelines)
    counts = {blocks, ceil(even / blocks) * blocks, *((1, even) if any_pieces else ())}

    def seconds(pieces: int) -> float:
        share = context.sequences_per_piece(encoder, llm.sequences, pieces, blocks)
        layers = context.encoder_layers(encoder, layout, share, recompute)
        by_kind = context.chunks.price(layers).seconds
        rounds = ceil(microbatches * pieces / pipelines)
        return rounds * (by_kind[OpKind.FORWARD] + by_kind[OpKind.BACKWARD])

    pieces = min(sorted(counts), key=seconds)
    chosen = EncoderPlacement(layout=layout, recompute=recompute, pieces=pieces, split_backward=False)
    return chosen, seconds(pieces)
