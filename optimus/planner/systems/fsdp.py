"""Runs all modules under fully sharded data parallelism, with tensor parallelism inside a node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, pairwise, product
from typing import TYPE_CHECKING

import numpy as np

from optimus.cost.memory import RankMemory
from optimus.errors import DoesNotFit
from optimus.ir.op import Floats, OpKind
from optimus.ir.plan import WHOLE_STAGE, Bucket, Span
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.job.layout import Layout, divisors
from optimus.job.model import Encoder, Llm
from optimus.planner.context import PlanningContext, RecomputePolicy, describe_recompute
from optimus.planner.systems.base import BaseSystem, SimulatedSystem
from optimus.planner.systems.colocated_plan import Sharding
from optimus.planner.systems.pipeline import PipelineCandidate, find_least_recomputed
from optimus.schedule.pipeline_schedule import ParameterTraffic

if TYPE_CHECKING:
    from optimus.planner.systems.llm_only import LlmPipelines

FSDP_WITHIN = 1.1  # times the estimate, which leaves out what is exposed of the traffic
TP_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True, eq=False)
class FsdpCandidate(PipelineCandidate):
    """A pipeline of one stage over all GPUs whose layers are sharded and gathered one after another."""

    @property
    def identity(self) -> object:
        """The fields that tell pipelines of one context apart."""
        return super().identity, self.sharding

    @property
    def order_label(self) -> str:
        """Names what is sharded, since the op order of one stage is always 1F1B."""
        return "fully sharded, parameters kept gathered" if self.keeps_gathered else "fully sharded"

    @property
    def keeps_gathered(self) -> bool:
        """True if parameters stay gathered from the first forward on (ZeRO-2)."""
        return self.sharding == Sharding.GRADIENTS

    @cached_property
    def _traffic(self) -> list[ParameterTraffic]:
        """Parameter traffic of every layer; frozen layers are gathered too."""
        return [self.context.parameter_traffic([layer], gathers_frozen=True) for layer in self.layers]

    @property
    def estimate_s(self) -> float:
        """The busier of compute and the NIC."""
        seconds = self.context.chunks.price(self.layers).seconds
        gather_s = sum(part.gather_s for part in self._traffic)
        reduce_s = sum(part.reduce_s for part in self._traffic)
        gathers = 1 if self.keeps_gathered else 2 * self.microbatches
        traffic_s = gathers * gather_s + self.microbatches * reduce_s
        return max(self.microbatches * (seconds[OpKind.FORWARD] + seconds[OpKind.BACKWARD]), traffic_s)

    @cached_property
    def memories(self) -> tuple[RankMemory, ...]:
        """A bound: fixed bytes, two layers' parameters and gradients, activations of one microbatch."""
        fixed, layers = self.builder.fixed_bytes_of(0), self.layers
        gathered, reduced = self._moved_bytes
        llm = [layer.module == LLM for layer in layers]
        saved = [layer.activation_bytes for layer in layers]
        return (
            RankMemory(
                parameters=fixed["parameters"] + gathered,
                gradients=fixed["gradients"] + reduced,
                optimizer=fixed["optimizer"],
                llm_activations=sum(compress(saved, llm)) + fixed["working"],
                encoder_activations=sum(saved) - sum(compress(saved, llm)),
                seam=sum(choice.layers[-1].output_bytes for choice in self.builder.encoders),
                logits=sum(layer.logits_bytes for layer in layers),
                communicators=fixed["communicators"],
                reserve=fixed["reserve"],
            ),
        )

    @property
    def least_bytes(self) -> float:
        """Memory without what layers need while they run: no less recomputation needs less."""
        return self.memories[0].total - self.builder.fixed_bytes_of(0)["working"]

    @property
    def _peaks(self) -> Floats:
        held = self.memories
        return np.array([[rank.llm_activations, rank.encoder_activations, rank.logits] for rank in held])

    def _totals(self, peaks: Floats) -> Floats:
        return np.array([rank.total for rank in self.memories])

    @property
    def moved_bytes(self) -> float:
        """Bytes of parameters that are gathered, and of gradients, at the same time."""
        return sum(self._moved_bytes)

    @property
    def _moved_bytes(self) -> tuple[int, int]:
        """Bytes of two layers' parameters, where they are not kept gathered, and of their gradients."""
        buckets = self.builder.buckets_of(0)
        gathered = _most_at_a_time(buckets, [b.gather_bytes * (b.gathered_per > Span.STEP) for b in buckets])
        return gathered, _most_at_a_time(buckets, [bucket.reduce_bytes for bucket in buckets])

    @property
    def dealing_replicas(self) -> int:
        """Replicas that encode each other's items, where these differ: all wait for the slowest."""
        return self.context.dealing_replicas(self.layout.dp)

    def describe(self) -> str:
        """Returns layout, microbatch size and recomputation."""
        kept = " parameters kept gathered;" if self.keeps_gathered else ""
        size = f"microbatch {self.sequences:.3g} x {self.microbatches};{kept}"
        return f"{self.layout}; {size} {describe_recompute(self.policy)}"


def _most_at_a_time(buckets: Sequence[Bucket], sizes: Sequence[int]) -> int:
    """Returns the most bytes of two neighbouring layers, and of what belongs to the whole stage."""
    whole = [bucket.chunk == WHOLE_STAGE for bucket in buckets]
    layers = [size for size, is_whole in zip(sizes, whole, strict=True) if not is_whole]
    return sum(compress(sizes, whole)) + max(map(sum, pairwise([0, *layers])), default=0)


@dataclass(frozen=True)
class FsdpSystem(BaseSystem):
    """Fully sharded data parallelism, with tensor parallelism where it helps."""

    name = "fsdp"
    allowed_as = "fsdp"
    makes_plan = True
    needs_llm_pipeline = False
    searches_layouts = False
    simulate_within = FSDP_WITHIN
    tp: int | None = None  # every width if None
    sequences: int | None = None  # of a microbatch; every number that divides a rank's if None
    sharding: Sharding | None = None  # of parameters or gradients; both if None

    def keeps_layout(self, job: Job) -> bool:
        """Returns whether the job states no pipeline and no context parallelism."""
        return _can_keep_layout(job)

    def candidates(self, pipelines: LlmPipelines) -> Iterator[FsdpCandidate]:
        """Yields every tp and microbatch size with the least recomputation that fits."""
        job = pipelines.context.job
        for encoder in job.model.encoders:
            if not job.workload.encoder_load(encoder.name, encoder.merge).tokens:
                raise DoesNotFit(
                    f"no sequence has items of {encoder.name}, whose layers are gathered when they run",
                    "leave the encoder out, or use another system",
                )
        batch, gpus = job.workload.sequences_per_step, job.cluster.gpus
        sizes = [gpus // tp for tp in TP_SIZES if gpus % tp == 0 and gpus > tp]
        if sizes and all(batch % dp for dp in sizes):
            raise DoesNotFit(
                f"{batch} sequences do not divide into dp {' or '.join(map(str, sizes))}",
                "use another sequences_per_step, or another system",
            )
        listed = list_fsdp_candidates(pipelines.context, job.model.modules, fitting=self.sequences is None)
        for candidate in listed:
            stated = (self.tp, self.sequences, self.sharding)
            own = (candidate.layout.tp, candidate.sequences, candidate.sharding)
            if all(wanted in (None, value) for wanted, value in zip(stated, own, strict=True)):
                yield candidate

    def simulate(self, pipelines: LlmPipelines) -> SimulatedSystem:
        """Simulates the fastest candidate that fits; a stated one is reported as not fitting."""
        if self.sequences is None:
            return super().simulate(pipelines)
        candidates = pipelines.candidates(self)
        if not candidates:
            layout = pipelines.context.layout
            raise DoesNotFit(
                f"fsdp has no plan at {layout} with {self.sequences} sequences a microbatch",
                "use dp above 1, tp inside a node, and a microbatch that divides the sequences of a rank",
            )
        return self.simulate_candidate(min(candidates, key=lambda each: (not each.fits, each.estimate_s)))


def _can_keep_layout(job: Job) -> bool:
    stated = job.layout.of(LLM).stated()
    return all(stated.get(axis, 1) == 1 for axis in ("pp", "cp", "chunks"))


def list_fsdp_candidates(
    context: PlanningContext, modules: tuple[Encoder | Llm, ...], *, fitting: bool = True
) -> Iterator[FsdpCandidate]:
    """Yields every tp and microbatch size of some modules with the least recomputation that fits.

    What the job states of the LLM's layout is kept, unless fsdp cannot have it. Where not only `fitting` ones
    are asked for, those that never fit have the most recomputation.
    """
    job = context.job
    stated = job.layout.of(LLM).stated() if _can_keep_layout(job) else {}
    for tp in TP_SIZES:
        if job.cluster.gpus % tp or tp > job.cluster.gpus_per_node:
            continue
        if any(module.stack.attention.heads % tp for module in modules):
            continue
        dp = job.cluster.gpus // tp
        if dp == 1:  # nothing to shard over
            continue
        ep = context.layout.ep if (dp * tp) % context.layout.ep == 0 else 1
        layout = Layout(dp=dp, tp=tp, ep=ep)
        if any(getattr(layout, axis) != size for axis, size in stated.items()):
            continue
        per_rank, rest = divmod(job.workload.sequences_per_step, dp)
        if rest:
            continue
        for sequences, sharding in product(divisors(per_rank), (Sharding.PARAMETERS, Sharding.GRADIENTS)):
            microbatches = per_rank // sequences
            choice = _least_recomputed(context, modules, layout, sequences, microbatches, sharding)
            if choice.fits or not fitting:
                yield choice


def _least_recomputed(
    context: PlanningContext,
    modules: tuple[Encoder | Llm, ...],
    layout: Layout,
    sequences: int,
    microbatches: int,
    sharding: Sharding,
) -> FsdpCandidate:
    """Returns the candidate with the least recomputation that fits, or with the most."""
    copies = (1.0, 1.0) if sharding == Sharding.PARAMETERS else (1 / microbatches, 0.0)
    if not context.cost_model.assumptions.gather_copies:
        copies = 0.0, 0.0

    def build(policy: RecomputePolicy) -> FsdpCandidate:
        layers = context.layers(modules, sequences, policy, layout, gather_copies=copies)
        return FsdpCandidate(
            context=at_layout,
            layers=layers,
            cut=(0, len(layers)),
            order_name="1f1b",
            microbatches=microbatches,
            layout=layout,
            sequences=sequences,
            policy=policy,
            sharding=sharding,
        )

    ladders, at_layout = context.recompute_ladders(modules), replace(context, layout=layout)
    fitting = find_least_recomputed(ladders, build, lambda candidate: candidate.fits)
    return fitting or build(tuple(ladder[-1] for ladder in ladders))
