"""The LLM alone at one layout: its best pipelines, and those that leave encoders more room."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from optimus.errors import DoesNotFit
from optimus.ir.op import OpKind
from optimus.ir.ranks import LLM
from optimus.planner.context import PlanningContext
from optimus.planner.systems.base import BaseSystem, select_fastest
from optimus.planner.systems.layer_partition import EVALUATIONS, minimize_largest_stage, search_pipelines
from optimus.planner.systems.pipeline import ORDERS, PipelineCandidate

PLAIN_ORDERS = ("1f1b", "interleaved")
MANY_CHUNKS = 8  # from here on half as many may leave encoders more time


class LlmPipelines:
    """Pipelines of the LLM; what several systems share is made once."""

    def __init__(self, context: PlanningContext) -> None:
        self.context = context

    @cached_property
    def floor(self) -> PipelineCandidate:
        """Best V, schedule and cut."""
        return self._llm_alone(ORDERS)

    @cached_property
    def floor_1f1b(self) -> PipelineCandidate:
        """The same with (interleaved) 1F1B only."""
        return self.floor if self.floor.order_name in PLAIN_ORDERS else self._llm_alone(PLAIN_ORDERS)

    @property
    def floors(self) -> list[PipelineCandidate]:
        """The best of all orders, and of those without split backwards."""
        return list({id(floor): floor for floor in (self.floor, self.floor_1f1b)}.values())

    @cached_property
    def for_colocation(self) -> list[PipelineCandidate]:
        """Pipelines for encoders to lie beside: `floors` at the V that the job states, if it states one.

        Else at their best V; and where that is large, the best of half as many chunks: its first microbatches
        follow each other at a greater distance.
        """
        if self._stated is not None:
            found = [self._at(self._stated, orders) for orders in (ORDERS, PLAIN_ORDERS)]
        else:
            found = [*self.floors, *self._halved()]
        return list({_sort(each): each for each in found}.values())

    def _halved(self) -> Iterator[PipelineCandidate]:
        most = self.floor.layout.chunks
        if most >= MANY_CHUNKS:
            with suppress(DoesNotFit):
                yield self._at(most // 2, PLAIN_ORDERS)

    @property
    def _stated(self) -> int | None:
        return self.context.job.layout.of("llm").chunks

    def _at(self, chunks: int, orders: Collection[str]) -> PipelineCandidate:
        """The best with so many chunks; what is known already is not looked for again."""
        known = (each for each in self.floors if each.layout.chunks == chunks and each.order_name in orders)
        return next(known, None) or self._llm_alone(orders, chunks)

    @cached_property
    def all_modules(self) -> list[PipelineCandidate]:
        """Pipelines of all modules, not of the LLM alone."""
        return search_pipelines(self.context, self.context.job.model.modules)

    def _llm_alone(self, orders: Collection[str], chunks: int | None = None) -> PipelineCandidate:
        """What is found for the LLM, and what is found for all modules less its encoders."""
        context, llm = self.context, self.context.job.model.llm
        counts = None if chunks is None else {chunks}
        pipelines = search_pipelines(context, (llm,), orders=orders, chunk_counts=counts)
        pipelines += [
            made.only(llm.name)
            for made in self.all_modules
            if made.order_name in orders and chunks in (None, made.layout.chunks)
        ]
        if not pipelines:
            raise DoesNotFit(
                f"the LLM alone does not fit at {context.layout} on {context.job.cluster.name}",
                "use more GPUs per replica (tp, pp), recompute: full, or a GPU with more memory",
            )
        return select_fastest(context, "llm-only", pipelines)

    def with_free_memory(
        self, pipeline: PipelineCandidate, added_bytes: Sequence[float]
    ) -> Iterator[PipelineCandidate]:
        """The best pipeline that leaves each of `added_bytes` free; then this one with more made again."""
        found: dict[object, PipelineCandidate] = {}
        for free_bytes in added_bytes:
            context = replace(self.context, kept_free_bytes=free_bytes)
            made = search_pipelines(
                context,
                (self.context.job.model.llm,),
                chunk_counts=None if self._stated is None else {self._stated},
                starts=2,
                evaluations=EVALUATIONS // 4,
            )
            found |= {_sort(each): replace(each, context=self.context) for each in made[:1]}
        found.pop(_sort(pipeline), None)
        yield from found.values()
        yield from self.more_recomputed(pipeline)

    def more_recomputed(self, pipeline: PipelineCandidate) -> Iterator[PipelineCandidate]:
        """An LLM pipeline with more recomputation than its own."""
        llm = self.context.job.model.llm
        policies = list(self.context.recompute_policies((llm,)))
        for policy in policies[policies.index(pipeline.policy) + 1 :]:
            layers = self.context.layers((llm,), pipeline.sequences, policy)
            yield replace(pipeline, layers=layers, policy=policy)


def build_llm_pipeline(
    context: PlanningContext, *, chunks: int = 1, order_name: str = "1f1b", recompute: str = "none"
) -> PipelineCandidate:
    """Returns the LLM's pipeline in one op order, cut so that its longest virtual stage is shortest."""
    layout = context.layout.with_(chunks=chunks)
    split = context.microbatches(context.microbatch_sequences)
    assert split is not None, "decide_context found a batch that splits"
    microbatches, sequences = split
    policy = ((LLM, recompute),)
    layers = context.layers((context.job.model.llm,), sequences, policy)
    sums = context.sums(layers)
    weights = sums.layer_seconds(OpKind.FORWARD) + sums.layer_seconds(OpKind.BACKWARD)
    return PipelineCandidate(
        context=context,
        layers=layers,
        cut=minimize_largest_stage(weights, layout.virtual_stages),
        order_name=order_name,
        microbatches=microbatches,
        layout=layout,
        sequences=sequences,
        policy=policy,
    )


def _sort(pipeline: PipelineCandidate) -> object:
    """What tells pipelines of one setting apart."""
    made = pipeline
    return made.cut, made.order_name, made.explicit_order, made.microbatches, made.layout, made.policy


class LlmOnlySystem(BaseSystem):
    """The LLM without encoders: the floor that other systems are compared with."""

    name = "llm-only"
    runs_encoders = False

    def candidates(self, pipelines: LlmPipelines) -> list[PipelineCandidate]:
        """Returns the LLM's best pipeline."""
        return [pipelines.floor]
