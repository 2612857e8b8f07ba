"""Finds the LLM's best pipelines at one layout, and those that leave encoders more memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from optimus.errors import DoesNotFit
from optimus.ir.op import OpKind
from optimus.ir.ranks import LLM
from optimus.planner.context import PlanningContext
from optimus.planner.systems.base import BaseSystem, select_fastest
from optimus.planner.systems.fsdp import FSDP_WITHIN, list_fsdp_candidates
from optimus.planner.systems.pipeline import ORDERS, PipelineCandidate
from optimus.planner.systems.pipeline_search import EVALUATIONS, minimize_largest_stage, search_pipelines
from optimus.planner.systems.registry import is_allowed
from optimus.protocols import System, SystemCandidate

T = TypeVar("T")

PLAIN_ORDERS = ("1f1b", "interleaved")
HALVE_CHUNKS_FROM = 8  # V from which half of it may leave encoders more time


class LlmPipelines:
    """Pipelines of the LLM at one layout, each searched once for all systems."""

    def __init__(self, context: PlanningContext) -> None:
        self.context = context
        self._built: dict[object, Any] = {}

    def candidates(self, system: System) -> list[SystemCandidate]:
        """Returns a system's candidates at this layout, listed once."""
        if system not in self._built:
            self._built[system] = list(system.candidates(self))
        listed: list[SystemCandidate] = self._built[system]
        return listed

    def once(self, build: Callable[[LlmPipelines], T]) -> T:
        """Returns what a function builds of these pipelines, built once."""
        if build not in self._built:
            self._built[build] = build(self)
        built: T = self._built[build]
        return built

    def search(self) -> tuple[list[PipelineCandidate], list[PipelineCandidate]] | DoesNotFit:
        """Returns the pipelines of the LLM alone and of all modules, or why the LLM has none."""
        try:
            return self.of_llm, self.all_modules
        except DoesNotFit as no:
            return no

    @cached_property
    def of_llm(self) -> list[PipelineCandidate]:
        """Pipelines of the LLM alone that fit, over every V, op order and cut, fastest by estimate first."""
        return self._list_llm_alone(ORDERS)

    @cached_property
    def floor(self) -> PipelineCandidate:
        """The fastest pipeline of the LLM alone."""
        return select_fastest(self.context, LlmOnlySystem.name, self.of_llm)

    @cached_property
    def floor_1f1b(self) -> PipelineCandidate:
        """The fastest pipeline of the LLM alone with (interleaved) 1F1B."""
        return self.floor if self.floor.order_name in PLAIN_ORDERS else self._llm_alone(PLAIN_ORDERS)

    @property
    def floors(self) -> list[PipelineCandidate]:
        """The fastest pipelines of the LLM alone: of all op orders, and of those without split backwards."""
        return list({id(floor): floor for floor in (self.floor, self.floor_1f1b)}.values())

    @cached_property
    def for_colocation(self) -> list[PipelineCandidate]:
        """Pipelines that encoders are colocated with: `floors` at the V that the job states, if any.

        At their best V otherwise; where that is large, also the best with half as many chunks, whose first
        microbatches follow each other at a greater distance.
        """
        if self._stated is not None:
            pipelines = [self._at(self._stated, orders) for orders in (ORDERS, PLAIN_ORDERS)]
        else:
            pipelines = [*self.floors, *self._halved()]
        return list({each.identity: each for each in pipelines}.values())

    def _halved(self) -> Iterator[PipelineCandidate]:
        most = self.floor.layout.chunks
        if most >= HALVE_CHUNKS_FROM:
            with suppress(DoesNotFit):
                yield self._at(most // 2, PLAIN_ORDERS)

    @property
    def _stated(self) -> int | None:
        return self.context.job.layout.of("llm").chunks

    def _at(self, chunks: int, orders: Collection[str]) -> PipelineCandidate:
        """Returns the best pipeline with so many chunks, if possible one of `floors`."""
        known = (each for each in self.floors if each.layout.chunks == chunks and each.order_name in orders)
        return next(known, None) or self._llm_alone(orders, chunks)

    @cached_property
    def all_modules(self) -> list[PipelineCandidate]:
        """Pipelines of all modules, not of the LLM alone."""
        return search_pipelines(self.context, self.context.job.model.modules)

    def _llm_alone(self, orders: Collection[str], chunks: int | None = None) -> PipelineCandidate:
        """Returns the fastest pipeline of the LLM alone in some op orders."""
        return select_fastest(self.context, LlmOnlySystem.name, self._list_llm_alone(orders, chunks))

    def _list_llm_alone(self, orders: Collection[str], chunks: int | None = None) -> list[PipelineCandidate]:
        """Searches pipelines of the LLM, and takes those of all modules without the encoders' layers."""
        context, llm = self.context, self.context.job.model.llm
        counts = None if chunks is None else {chunks}
        pipelines = search_pipelines(context, (llm,), orders=orders, chunk_counts=counts)
        pipelines += [
            pipeline.only_module(llm.name)
            for pipeline in self.all_modules
            if pipeline.order_name in orders and chunks in (None, pipeline.layout.chunks)
        ]
        if not pipelines:
            raise DoesNotFit(
                f"the LLM alone does not fit at {context.layout} on {context.job.cluster.name}",
                "use more GPUs per replica (tp, pp), recompute: full, or a GPU with more memory",
            )
        return sorted(pipelines, key=lambda pipeline: pipeline.estimate_s)

    def with_free_memory(
        self, pipeline: PipelineCandidate, added_bytes: Sequence[float]
    ) -> Iterator[PipelineCandidate]:
        """Yields the best pipeline that leaves each of `added_bytes` free; then this one more recomputed."""
        by_identity: dict[object, PipelineCandidate] = {}
        for free_bytes in added_bytes:
            context = replace(self.context, kept_free_bytes=free_bytes)
            pipelines = search_pipelines(
                context,
                (self.context.job.model.llm,),
                chunk_counts=None if self._stated is None else {self._stated},
                starts=2,
                evaluations=EVALUATIONS // 4,
            )
            by_identity |= {each.identity: replace(each, context=self.context) for each in pipelines[:1]}
        by_identity.pop(pipeline.identity, None)
        yield from by_identity.values()
        yield from self.more_recomputed(pipeline)

    def more_recomputed(self, pipeline: PipelineCandidate) -> Iterator[PipelineCandidate]:
        """Yields an LLM pipeline with more and more recomputation."""
        llm = self.context.job.model.llm
        policies = list(self.context.recompute_policies((llm,)))
        for policy in policies[policies.index(pipeline.policy) + 1 :]:
            layers = self.context.layers((llm,), pipeline.sequences, policy)
            yield replace(pipeline, layers=layers, policy=policy)


class ShardedLlm(LlmPipelines):
    """Fully sharded layouts of the LLM, around which encoders are placed as around its pipelines."""

    @cached_property
    def of_llm(self) -> list[PipelineCandidate]:
        """Layouts of every tp, microbatch size and sharding: the fastest, then the others by estimate."""
        layouts = list_fsdp_candidates(self.context, (self.context.job.model.llm,))
        candidates = sorted(layouts, key=lambda each: each.estimate_s)
        fastest = select_fastest(self.context, LlmOnlySystem.name, candidates, within=FSDP_WITHIN)
        return [fastest, *(each for each in candidates if each is not fastest)]

    @cached_property
    def for_colocation(self) -> list[PipelineCandidate]:
        """The fastest of every tp and sharding."""
        by_kind: dict[object, PipelineCandidate] = {}
        for each in self.of_llm:
            by_kind.setdefault((each.layout.tp, each.sharding), each)
        return list(by_kind.values())

    def with_free_memory(
        self, pipeline: PipelineCandidate, added_bytes: Sequence[float]
    ) -> Iterator[PipelineCandidate]:
        """Yields the best layout of the same tp and sharding that leaves each of `added_bytes` free."""
        found = {pipeline.identity}
        for free_bytes in added_bytes:
            context = replace(self.context, kept_free_bytes=free_bytes)
            alike = [
                each
                for each in list_fsdp_candidates(context, (self.context.job.model.llm,))
                if (each.layout.tp, each.sharding) == (pipeline.layout.tp, pipeline.sharding)
            ]
            smaller = min(alike, key=lambda each: each.estimate_s, default=pipeline)
            if smaller.identity not in found:
                found.add(smaller.identity)
                yield replace(smaller, context=replace(smaller.context, kept_free_bytes=0.0))


def build_llm_pipeline(
    context: PlanningContext, *, chunks: int = 1, order_name: str = "1f1b", recompute: str = "none"
) -> PipelineCandidate:
    """Returns the LLM's pipeline in one op order, cut so that its longest virtual stage is shortest."""
    layout = context.layout.with_(chunks=chunks)
    split = context.microbatches(context.microbatch_sequences)
    assert split is not None, "the batch of a context splits into microbatches"
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


class LlmOnlySystem(BaseSystem):
    """The LLM without encoders: the floor that other systems are compared with."""

    name = "llm-only"
    runs_encoders = False
    simulate_within = FSDP_WITHIN

    def candidates(self, pipelines: LlmPipelines) -> list[PipelineCandidate]:
        """Returns the LLM's pipelines, and its fully sharded layouts if the job leaves room for them."""
        job = pipelines.context.job
        sharded = list_fsdp_candidates(pipelines.context, (job.model.llm,))
        return [*pipelines.of_llm, *(sharded if is_allowed("fsdp", job) else ())]
