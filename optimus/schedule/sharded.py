"""Fully sharded data parallelism: a layer is gathered before it runs, its gradients scattered after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from optimus.cost.memory import Memory, communicator_bytes
from optimus.cost.module import PricedLayer
from optimus.job.layout import Layout
from optimus.program.op import Kind, Lane, Schedule
from optimus.schedule.build import Builder, Template, single
from optimus.schedule.setting import Policy, Setting
from optimus.schedule.traffic import ParameterTraffic, parameter_traffic, update

PREFETCH = 2  # layers gathered ahead of the one that runs


@dataclass(frozen=True, kw_only=True, eq=False)
class Sharded:
    """FSDP over all GPUs, with tensor parallelism inside a node; `accumulate` microbatches per step."""

    setting: Setting
    layout: Layout
    layers: tuple[PricedLayer, ...]
    sequences: int
    accumulate: int
    policy: Policy

    @cached_property
    def _traffic(self) -> list[ParameterTraffic]:
        """Of every layer; a frozen one is gathered too."""
        precision = self.setting.job.model.precision
        return [
            parameter_traffic([layer], self.setting.prices, precision, gathers_frozen=True)
            for layer in self.layers
        ]

    def schedule(self) -> Schedule:
        setting = self.setting
        builder = Builder(setting.chunks.modules, 1)
        order: list[tuple[Kind, int]] = []
        count = len(self.layers)
        order += [(Kind.F, place) for place in range(count)]
        order += [(Kind.B, place) for place in reversed(range(count))]
        templates = {step: self._compute(step) for step in order}
        ran: list[int] = []  # compute blocks of the whole step
        reduces: list[int] = []
        for microbatch in range(self.accumulate):
            for kind, place in order:
                traffic = self._traffic[place]
                gather = single(Kind.GATHER, Lane.DP, traffic.gather_s, size_bytes=traffic.gather_bytes)
                room = [ran[-PREFETCH]] if len(ran) >= PREFETCH else []
                gathered = builder.add(gather, device=0, microbatch=microbatch, after=room)
                waits = [gathered, *ran[-1:]]
                block = builder.add(templates[kind, place], device=0, microbatch=microbatch, after=waits)
                ran.append(block)
                if kind == Kind.B and traffic.reduce_s > 0:
                    reduce = single(Kind.REDUCE, Lane.DP, traffic.reduce_s, size_bytes=traffic.reduce_bytes)
                    reduces.append(builder.add(reduce, device=0, microbatch=microbatch, after=[block]))
        if setting.prices.assumptions.optimizer_time:
            builder.add(update(self._traffic), device=0, after=reduces)
        return builder.build()

    def _compute(self, step: tuple[Kind, int]) -> Template:
        chunks = self.setting.chunks
        return chunks.template(chunks.make([self.layers[step[1]]]), step[0])

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (self._memory,)

    @property
    def estimate_s(self) -> float:
        """Rank of this choice: the busier of compute and the NIC."""
        chunks = self.setting.chunks
        seconds = chunks.make(self.layers).seconds
        traffic_s = sum(2 * part.gather_s + part.reduce_s for part in self._traffic)
        return self.accumulate * max(seconds[Kind.F] + seconds[Kind.B], traffic_s)

    @cached_property
    def _memory(self) -> Memory:
        """Shards of all states, the layers in flight gathered, activations of one microbatch."""
        job, layout = self.setting.job, self.layout
        precision, llm = job.model.precision, job.model.llm.name
        parameters = gradients = optimizer = 0.0
        for layer in self.layers:
            shard = layer.shard_parameters
            parameters += shard * precision.parameter_bytes
            if layer.trained:
                gradients += shard * precision.gradient_bytes
                optimizer += shard * precision.optimizer_bytes
        whole = max(layer.parameters + layer.expert_parameters for layer in self.layers)
        parameters += (1 + PREFETCH) * whole * precision.parameter_bytes
        gradients += whole * precision.gradient_bytes
        return Memory(
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            llm_activations=sum(x.activation_bytes for x in self.layers if x.module == llm)
            + max(x.working_bytes for x in self.layers),
            encoder_activations=sum(x.activation_bytes for x in self.layers if x.module != llm),
            logits=sum(layer.logits_bytes for layer in self.layers),
            communicators=communicator_bytes(layout.tp, layout.dp, layout.ep),
            reserve=job.cluster.reserve_bytes,
        )

    @property
    def fits(self) -> bool:
        return self._memory.total <= self.setting.capacity_bytes


def sharded_choices(setting: Setting) -> Iterator[Sharded]:
    """Every tp and microbatch size with the least recomputation that fits."""
    job = setting.job
    for tp in (1, 2, 4, 8):
        if job.cluster.gpus % tp or tp > job.cluster.gpus_per_node:
            continue
        if any(module.stack.attention.heads % tp for module in job.model.modules):
            continue
        dp = job.cluster.gpus // tp
        ep = setting.layout.ep if (dp * tp) % setting.layout.ep == 0 else 1
        layout = Layout(dp=dp, tp=tp, ep=ep)
        own = -(-job.workload.sequences_per_step // dp)  # of the busiest rank
        if job.workload.sequences_per_step < dp:
            continue
        for sequences in _divisors(own):
            choice = _first_fitting(setting, layout, sequences, own // sequences)
            if choice is not None:
                yield choice


def _first_fitting(setting: Setting, layout: Layout, sequences: int, accumulate: int) -> Sharded | None:
    modules = setting.job.model.modules
    for policy in setting.policies(modules):
        choice = Sharded(
            setting=setting,
            layout=layout,
            layers=setting.layers(modules, sequences, policy, layout),
            sequences=sequences,
            accumulate=accumulate,
            policy=policy,
        )
        if choice.fits:
            return choice
    return None


def _divisors(number: int) -> Sequence[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
