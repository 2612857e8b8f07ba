"""Runs all modules under fully sharded data parallelism, with tensor parallelism inside a node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from optimus.cost.memory import RankMemory, communicator_bytes, transient_bytes
from optimus.cost.network import Collective
from optimus.cost.priced_layer import PricedLayer
from optimus.ir.op import Lane, OpKind, Schedule
from optimus.job.layout import Layout, divisors
from optimus.job.model import BF16_BYTES
from optimus.planner.batch_assignment import BatchAssignment, encoder_bins_on_llm_ranks
from optimus.planner.context import PlanningContext, RecomputePolicy, describe_recompute
from optimus.planner.systems.base import BaseCandidate, BaseSystem
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.schedule.pipeline_schedule import ParameterTraffic, make_optimizer_graph, price_parameter_traffic
from optimus.schedule.schedule_builder import KernelGraph, ScheduleBuilder, make_single_kernel_graph

GATHERED_LAYERS = 2  # at a time: the one that runs and the next


@dataclass(frozen=True, kw_only=True, eq=False)
class FsdpCandidate(BaseCandidate):
    """FSDP over all GPUs, with tensor parallelism inside a node; `accumulate` microbatches per step."""

    context: PlanningContext
    layout: Layout
    layers: tuple[PricedLayer, ...]
    sequences: int
    accumulate: int
    policy: RecomputePolicy
    keeps_gathered: bool = False  # parameters stay gathered from the first forward on (ZeRO-2)

    @cached_property
    def _traffic(self) -> list[ParameterTraffic]:
        """Parameter traffic of every layer; frozen layers are gathered too."""
        precision = self.context.job.model.precision
        return [
            price_parameter_traffic([layer], self.context.cost_model, precision, gathers_frozen=True)
            for layer in self.layers
        ]

    def schedule(self) -> Schedule:
        """Returns one step layer by layer; the next layer's gather overlaps with the layer that runs."""
        context, builder = self.context, ScheduleBuilder(self.context.chunks.modules, 1)
        count = len(self.layers)
        order = [(OpKind.FORWARD, place) for place in range(count)]
        order += [(OpKind.BACKWARD, place) for place in reversed(range(count))]
        steps = [(microbatch, *step) for microbatch in range(self.accumulate) for step in order]
        templates = {step: self._compute(step) for step in order}
        ran: list[int] = []
        reduces: list[int] = []
        gathers = [self._gather(builder, steps[0], ran)]
        for place, (microbatch, kind, layer) in enumerate(steps):
            if place + 1 < len(steps):
                gathers.append(self._gather(builder, steps[place + 1], ran))
            waits = [*gathers[place], *ran[-1:]]
            block = builder.add(templates[kind, layer], device=0, microbatch=microbatch, after=waits)
            ran.append(block)
            traffic = self._traffic[layer]
            if kind == OpKind.BACKWARD and traffic.reduce_s > 0:
                reduce = make_single_kernel_graph(
                    OpKind.REDUCE_GRAD, Lane.DP, traffic.reduce_s, size_bytes=traffic.reduce_bytes
                )
                reduces.append(builder.add(reduce, device=0, microbatch=microbatch, after=[block]))
        if context.cost_model.assumptions.optimizer_time:
            builder.add(make_optimizer_graph(self._traffic), device=0, after=reduces)
        return builder.build()

    def _gather(self, builder: ScheduleBuilder, step: tuple[int, OpKind, int], ran: list[int]) -> list[int]:
        """Adds the gather of one layer, after the layer before the running one has freed its memory."""
        microbatch, kind, layer = step
        if self.keeps_gathered and (kind != OpKind.FORWARD or microbatch > 0):
            return []
        traffic = self._traffic[layer]
        op = make_single_kernel_graph(
            OpKind.UNSHARD, Lane.DP, traffic.gather_s, size_bytes=traffic.gather_bytes
        )
        return [builder.add(op, device=0, microbatch=microbatch, after=ran[-1:])]

    def _compute(self, step: tuple[OpKind, int]) -> KernelGraph:
        chunks = self.context.chunks
        return chunks.kernel_graph(chunks.price([self.layers[step[1]]]), step[0])

    @property
    def memories(self) -> tuple[RankMemory, ...]:
        return (self._memory,)

    @property
    def estimate_s(self) -> float:
        """The busier of compute and the NIC."""
        chunks = self.context.chunks
        seconds = chunks.price(self.layers).seconds
        gather_s = sum(part.gather_s for part in self._traffic)
        reduce_s = sum(part.reduce_s for part in self._traffic)
        traffic_s = self.accumulate * ((0 if self.keeps_gathered else 2 * gather_s) + reduce_s)
        traffic_s += gather_s if self.keeps_gathered else 0.0
        return max(self.accumulate * (seconds[OpKind.FORWARD] + seconds[OpKind.BACKWARD]), traffic_s)

    @cached_property
    def _memory(self) -> RankMemory:
        """Shards of all states, the gathered layers, and activations of one microbatch."""
        job, layout = self.context.job, self.layout
        precision, llm = job.model.precision, job.model.llm.name
        parameters = gradients = optimizer = 0.0
        for layer in self.layers:
            shard = layer.shard_parameters
            parameters += shard * precision.parameter_bytes
            if layer.trained:
                gradients += shard * precision.gradient_bytes
                optimizer += shard * precision.optimizer_bytes
        held = [layer.parameters + layer.expert_parameters for layer in self.layers]
        largest = max(held)
        gathered = sum(held) if self.keeps_gathered else GATHERED_LAYERS * largest
        parameters += gathered * precision.parameter_bytes
        gradients += largest * precision.gradient_bytes
        return RankMemory(
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            llm_activations=sum(x.activation_bytes for x in self.layers if x.module == llm)
            + transient_bytes(self.layers),
            encoder_activations=sum(x.activation_bytes for x in self.layers if x.module != llm),
            logits=sum(layer.logits_bytes for layer in self.layers),
            communicators=communicator_bytes(layout.tp, layout.dp, layout.ep),
            reserve=job.cluster.reserve_bytes,
        )

    def batch_assignment(self) -> BatchAssignment:
        """Returns one rank's share for every replica; layers are gathered from all of them."""
        return BatchAssignment(
            replicas=self.layout.dp,
            microbatches=self.accumulate,
            encoders=encoder_bins_on_llm_ranks(self.context, self.layers, self.sequences, self.layout),
            locked=True,
            dealing_replicas=self.layout.dp,
            exchange_s=self._exchange_s,
        )

    @property
    def _exchange_s(self) -> float:
        """Seconds of a microbatch's all-to-alls if images are dealt over all ranks: patches, and rows back.

        They are exposed: the tower waits for patches, the LLM for rows, and the tower for their gradients.
        """
        job, layout, seconds = self.context.job, self.layout, 0.0
        for encoder in job.model.encoders:
            load = job.workload.encoder_load(encoder.name, encoder.merge)
            tokens = load.tokens * self.sequences / layout.tp
            width = encoder.projector.widths[-1] * len(encoder.feeds) / encoder.merge
            trains = encoder.train or encoder.projector.train
            for times, numbers in ((1, encoder.patch_inputs), (1 + trains, width)):
                size = tokens * numbers * BF16_BYTES
                seconds += times * self.context.cost_model.group_s(
                    Collective.ALL_TO_ALL, size, ranks=layout.dp * layout.tp, stride=1
                )
        return seconds

    def describe(self) -> str:
        """Returns layout, microbatch size and recomputation."""
        kept = " parameters kept gathered;" if self.keeps_gathered else ""
        size = f"microbatch {self.sequences} x {self.accumulate};{kept}"
        return f"{self.layout}; {size} {describe_recompute(self.policy)}"


@dataclass(frozen=True)
class FsdpSystem(BaseSystem):
    """Fully sharded data parallelism, with tensor parallelism where it helps."""

    name = "fsdp"
    allowed_as = "fsdp"
    needs_llm_pipeline = False
    tp: int | None = None  # every width if None

    def candidates(self, pipelines: LlmPipelines) -> Iterator[FsdpCandidate]:
        """Yields every tp and microbatch size with the least recomputation that fits."""
        return (c for c in _fsdp_candidates(pipelines.context) if self.tp in (None, c.layout.tp))


def _fsdp_candidates(context: PlanningContext) -> Iterator[FsdpCandidate]:
    """Yields every tp and microbatch size with the least recomputation that fits."""
    job = context.job
    for tp in (1, 2, 4, 8):
        if job.cluster.gpus % tp or tp > job.cluster.gpus_per_node:
            continue
        if any(module.stack.attention.heads % tp for module in job.model.modules):
            continue
        dp = job.cluster.gpus // tp
        ep = context.layout.ep if (dp * tp) % context.layout.ep == 0 else 1
        layout = Layout(dp=dp, tp=tp, ep=ep)
        busiest = -(-job.workload.sequences_per_step // dp)  # sequences of the busiest rank
        if job.workload.sequences_per_step < dp:
            continue
        for sequences, keeps in product(divisors(busiest), (False, True)):
            choice = _first_fitting(context, layout, sequences, busiest // sequences, keeps_gathered=keeps)
            if choice is not None:
                yield choice


def _first_fitting(
    context: PlanningContext, layout: Layout, sequences: int, accumulate: int, *, keeps_gathered: bool
) -> FsdpCandidate | None:
    modules = context.job.model.modules
    for policy in context.recompute_policies(modules):
        choice = FsdpCandidate(
            context=context,
            layout=layout,
            layers=context.layers(modules, sequences, policy, layout),
            sequences=sequences,
            accumulate=accumulate,
            policy=policy,
            keeps_gathered=keeps_gathered,
        )
        if choice.fits:
            return choice
    return None
