"""Runs all modules as one pipeline, cut by a rule (stage0, balanced) or by search (balanced-best)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from optimus.cost.priced_layer import PricedLayer
from optimus.errors import UserError, one_of
from optimus.planner.context import PlanningContext
from optimus.planner.systems.base import BaseSystem, SimulatedSystem
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.planner.systems.pipeline_search import even_chunk_counts, minimize_largest_stage
from optimus.schedule.stage_costs import Cut


@dataclass(frozen=True)
class FixedCutSystem(BaseSystem):
    """One pipeline of all layers, cut by a rule; reported as not fitting where it exceeds the memory."""

    makes_plan = True
    chunks: int | None = None  # V; the job's, or if that is open every V that divides the LLM's layers
    order_name: str | None = None  # (interleaved) 1F1B if None

    @abstractmethod
    def cut(self, context: PlanningContext, layers: Sequence[PricedLayer], parts: int) -> Cut:
        """Returns the boundaries of `parts` virtual stages."""

    def simulate(self, pipelines: LlmPipelines) -> SimulatedSystem:
        """Simulates the pipeline with the shortest estimate that fits, or else the least memory."""
        return self.simulate_candidate(self.best_pipeline(pipelines))

    def best_pipeline(self, pipelines: LlmPipelines) -> PipelineCandidate:
        """Returns the pipeline with the shortest estimate that fits, or else the least memory."""
        listed = pipelines.candidates(self)
        candidates = [candidate for candidate in listed if isinstance(candidate, PipelineCandidate)]
        fitting = [pipeline for pipeline in candidates if pipeline.fits]
        if not fitting:
            return min(candidates, key=lambda pipeline: pipeline.peak_bytes)
        return min(fitting, key=lambda pipeline: pipeline.estimate_s)

    def candidates(self, pipelines: LlmPipelines) -> list[PipelineCandidate]:
        """Returns a pipeline for every microbatch size and V."""
        context = pipelines.context
        chunks = self.chunks or context.job.layout.of("llm").chunks
        counts = {chunks} if chunks else _even_counts(pipelines)
        candidates = [
            pipeline
            for sequences in context.job.layout.limits.microbatch_sequences
            for count in sorted(counts)
            for pipeline in self._at(context, sequences, count)
        ]
        if not candidates:
            raise _no_microbatches(context, counts)
        return candidates

    def _at(self, context: PlanningContext, sequences: int, chunks: int) -> Iterator[PipelineCandidate]:
        """Yields the pipeline of a microbatch size and V, if any, with the least recomputation that fits."""
        layout = context.layout.with_(chunks=chunks)
        batch = context.microbatches(sequences, multiple_of=layout.pp if chunks > 1 else 1)
        if batch is None:
            return
        for policy in context.recompute_policies(context.job.model.modules):
            layers = context.layers(context.job.model.modules, sequences, policy)
            pipeline = PipelineCandidate(
                context=context,
                layers=layers,
                cut=self.cut(context, layers, layout.virtual_stages),
                order_name=self.order_name or ("1f1b" if chunks == 1 else "interleaved"),
                microbatches=batch[0],
                layout=layout,
                sequences=sequences,
                policy=policy,
            )
            if pipeline.fits:
                break
        yield pipeline


class Stage0System(FixedCutSystem):
    """Megatron-LM: encoders in the first virtual stage, before the LLM's layers."""

    name = "stage0"

    def cut(self, context: PlanningContext, layers: Sequence[PricedLayer], parts: int) -> Cut:
        """Puts encoders into the first virtual stage and spreads the LLM's layers evenly."""
        return cut_encoders_into_stage0(layers, context.job.model.llm.name, parts)


def cut_encoders_into_stage0(layers: Sequence[PricedLayer], llm: str, parts: int) -> Cut:
    """Returns Megatron-LM's default: encoders in the first virtual stage, the LLM's layers spread evenly."""
    first = next(place for place, layer in enumerate(layers) if layer.module == llm)
    blocks = len(layers) - first - 2  # without embedding and head
    longer = range(parts - 1 - blocks % parts, parts - 1)  # neither the encoders' nor the head's
    sizes = [blocks // parts + (1 if part in longer else 0) for part in range(parts)]
    cut = [0]
    for size in sizes:
        cut.append((cut[-1] or first + 1) + size)
    return (*cut[:-1], len(layers))


def _even_counts(pipelines: LlmPipelines) -> set[int]:
    """Returns every V that divides the LLM's layers evenly, up to the V of its best 1F1B pipeline."""
    most = pipelines.floor_1f1b.layout.chunks
    return {chunks for chunks in even_chunk_counts(pipelines.context) if chunks <= most}


def _no_microbatches(context: PlanningContext, counts: Collection[int]) -> UserError:
    job, layout = context.job, context.layout
    sequences = job.workload.sequences_per_step // layout.dp
    return UserError(
        field="layout.llm.chunks",
        value=max(counts),
        problem=f"needs a multiple of pp = {layout.pp} microbatches, which {sequences} sequences per replica "
        f"in microbatches of {one_of(job.layout.limits.microbatch_sequences)} are not",
        hint="use chunks 1, another microbatch_sequences, or another sequences_per_step",
    )


class BalancedSystem(FixedCutSystem):
    """The paper's dynamic program over virtual stages, at the job's V."""

    name = "balanced"
    allowed_as = "balanced"

    def cut(self, context: PlanningContext, layers: Sequence[PricedLayer], parts: int) -> Cut:
        """Minimizes the largest FLOPs of a virtual stage, since the paper takes layer times from FLOPs."""
        return minimize_largest_stage([layer.flops * (3 if layer.trained else 1) for layer in layers], parts)


class BalancedBestSystem(BaseSystem):
    """The strongest pipeline of all layers: every V, op order and microbatch size, then local search."""

    name = "balanced-best"
    allowed_as = "balanced"
    makes_plan = True

    def candidates(self, pipelines: LlmPipelines) -> list[PipelineCandidate]:
        """Returns the fastest pipelines of all modules."""
        return pipelines.all_modules
