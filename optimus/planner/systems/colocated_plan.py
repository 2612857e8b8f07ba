"""Builds the header of a plan whose encoders and LLM share the GPUs, apart or in one pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from itertools import accumulate, chain, pairwise
from math import ceil
from typing import TYPE_CHECKING

from optimus import __version__
from optimus.cost.flops import fit_item_cost
from optimus.cost.kernel import Kernel
from optimus.cost.memory import (
    RankMemory,
    communicator_bytes,
    sharded_state_memory,
    transient_bytes,
)
from optimus.cost.network import Collective
from optimus.cost.priced_layer import PricedLayer
from optimus.ir.op import Communicator, KernelName, Lane, OpKind, list_recomputed_kernels, regathers_inputs
from optimus.ir.plan import (
    WHOLE_STAGE,
    Bucket,
    Plan,
    PlanClaims,
    PlannedChunk,
    PlannedModule,
    Span,
    Template,
)
from optimus.ir.ranks import LLM, RankGrid
from optimus.job.layout import Layout
from optimus.job.model import Encoder
from optimus.planner.context import PlanningContext
from optimus.schedule.op_phases import PASS_THROUGH_TEMPLATES, SECONDS_DIGITS, make_collective_kernel
from optimus.schedule.pipeline_schedule import ParameterTraffic, TrafficOverlap
from optimus.schedule.schedule_builder import PricedChunk
from optimus.schedule.stage_costs import Cut

if TYPE_CHECKING:
    from optimus.planner.systems.pipeline import PipelineCandidate

STATES = ("parameters", "gradients", "optimizer")  # components of RankMemory


class Sharding(IntEnum):
    """Lists what replicas shard, by the stages of ZeRO; each includes those before."""

    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class ColocatedEncoder:
    """One encoder in its own layout over all GPUs; `pieces` of its microbatches make up one of the LLM's."""

    encoder: Encoder
    layout: Layout
    layers: tuple[PricedLayer, ...]  # for one encoder microbatch
    pieces: int
    pipelines: tuple[int, ...]  # which pipeline runs each encoder microbatch
    recompute: str
    layers_per_stage: tuple[int, ...] = ()  # inner layers; as even as they can be if left out
    split_backward: bool = False  # into input and weight gradients
    pipeline_cut: Cut = ()  # of its layers at virtual stages, if it is a part of the LLM's pipeline

    @property
    def kinds(self) -> tuple[OpKind, ...]:
        """Ops of an encoder microbatch on every stage."""
        return (
            (OpKind.FORWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD)
            if self.split_backward
            else (OpKind.FORWARD, OpKind.BACKWARD)
        )

    @cached_property
    def virtual_stages(self) -> list[tuple[PricedLayer, ...]]:
        """Layers of every virtual stage; embedding and projector go with their neighbours."""
        counts = self.layers_per_stage or split_layers_evenly(len(self.layers) - 2, self.layout.pp)
        cut = self.pipeline_cut or (0, *(1 + total for total in accumulate(counts[:-1])), len(self.layers))
        return [self.layers[a:b] for a, b in pairwise(cut)]

    @cached_property
    def stages(self) -> list[tuple[PricedLayer, ...]]:
        """Layers of every stage, of all its chunks."""
        pp = self.layout.pp
        return [tuple(chain.from_iterable(self.virtual_stages[stage::pp])) for stage in range(pp)]

    @cached_property
    def activation_bytes(self) -> list[tuple[int, int]]:
        """`activation_bytes_of` every stage."""
        return list(map(self.activation_bytes_of, self.stages))

    def activation_bytes_of(self, layers: Sequence[PricedLayer]) -> tuple[int, int]:
        """Returns what a microbatch saves, and what waits for weight gradients besides."""
        saved = sum(layer.activation_bytes for layer in layers)
        held = sum(layer.held_for_weight_grad_bytes for layer in layers) if self.split_backward else 0
        return round(saved), round(held)


def split_layers_evenly(inner: int, stages: int) -> tuple[int, ...]:
    """Returns the layers of every stage, as even as they can be; later stages get one more."""
    return tuple(inner // stages + (stage >= stages - inner % stages) for stage in range(stages))


def encoder_layout_on_llm_gpus(llm: Layout, *, pp: int, tp: int) -> Layout:
    """Returns an encoder's layout over all GPUs of the LLM; dp follows from pp and tp."""
    return Layout(dp=llm.gpus // (pp * tp), pp=pp, tp=tp)


class ColocatedPlanBuilder:
    """Builds the header of a plan from one LLM pipeline and encoders in layouts of their own."""

    def __init__(
        self,
        context: PlanningContext,
        llm: PipelineCandidate,
        encoders: Sequence[ColocatedEncoder],
        *,
        dealing_replicas: int = 1,
    ) -> None:
        self.context, self.llm, self.encoders = context, llm, tuple(encoders)
        self._seam_bytes = sum(e.layers[-1].output_bytes * e.layout.tp * e.pieces for e in self.encoders)
        self.dealing_replicas = dealing_replicas if self._seam_bytes else 1
        self._templates: dict[str, Template] = {}
        self._names: dict[int, str] = {}  # by the ids of templates, which the context keeps alive

    @cached_property
    def ranks(self) -> RankGrid:
        layouts = {choice.encoder.name: choice.layout for choice in self.encoders}
        return RankGrid(
            layouts={**layouts, LLM: self.llm.layout}, entry_stage=self._entry % self.llm.layout.pp
        )

    def header(self, *, strategy: str) -> Plan:
        """Returns the plan without programs and claims."""
        assumptions = self.context.cost_model.assumptions
        modules = {choice.encoder.name: self._plan_encoder(choice) for choice in self.encoders}
        modules[LLM] = self._plan_llm()
        if any(choice.pipeline_cut for choice in self.encoders):
            modules = _expose_traffic_of_stages(modules)
        modules = {name: self._with_recomputation(module) for name, module in modules.items()}
        return Plan(
            name=self.context.job.name,
            tool=f"optimus {__version__}",
            strategy=strategy,
            order=self.llm.order_name,
            microbatches=self.llm.microbatches,
            modules=modules,
            templates=self._templates,
            slowdown=assumptions.residence_slowdown,
            launch_s=assumptions.launch_s,
            capacity_bytes=round(self.context.capacity_bytes),
            memory=(),
            claims=PlanClaims(step_s=0.0, lagged_s=0.0, estimate_s=0.0, encoder_s={}),
            programs=(),
            finish_s=tuple(self._finish_s(stage) for stage in range(self.llm.layout.pp)),
            dealing_replicas=self.dealing_replicas,
        )

    # ------------------------------------------------------------------------ modules

    def _plan_llm(self) -> PlannedModule:
        plan = self.llm.plan
        kinds = sorted({op.kind for op in plan.order[0]})
        cost_model = self.context.cost_model
        across = cost_model.stages_cross_nodes(plan.layout)
        chunks = []
        entry = self._entry
        for virtual, chunk in enumerate(plan.chunks):
            templates = {
                kind: self._llm_template(chunk, kind, first=virtual == entry)
                for kind in kinds
                if virtual >= entry
            }
            chunks.append(
                PlannedChunk(
                    templates=templates,
                    layers=len(chunk.layers),
                    saved_activation_bytes=round(chunk.saved_activation_bytes),
                    recomputed_bytes=round(sum(x.held_for_weight_grad_bytes for x in chunk.layers)),
                    logits_bytes=round(sum(x.logits_bytes for x in chunk.layers)),
                    output_bytes=round(chunk.output_bytes),
                    send_s=round(cost_model.send_s(chunk.output_bytes, across_nodes=across), SECONDS_DIGITS),
                )
            )
        return PlannedModule(
            layout=plan.layout,
            chunks=tuple(chunks),
            buckets=tuple(self._llm_buckets(stage) for stage in range(plan.stages)),
            recompute=dict(self.llm.policy)[LLM],
        )

    @property
    def _entry(self) -> int:
        """The LLM's first virtual stage with layers; it takes the rows of encoders."""
        return next(virtual for virtual, chunk in enumerate(self.llm.plan.chunks) if chunk.layers)

    def _with_recomputation(self, module: PlannedModule) -> PlannedModule:
        """States what the module's templates compute and gather a second time."""
        names = dict.fromkeys(name for chunk in module.chunks for name in chunk.templates.values())
        phases = [(phase.name, phase.kind) for name in names for phase in self._templates[name]]
        return replace(module, recomputed=list_recomputed_kernels(phases), regather=regathers_inputs(phases))

    def _llm_template(self, chunk: PricedChunk, kind: OpKind, *, first: bool) -> str:
        """Returns the name of a chunk's template; chunks of the same kernels share one."""
        seam = self._seam_collectives.get(kind, ()) if first else ()
        before, after = (seam, ()) if kind == OpKind.FORWARD else ((), seam)
        phases = (
            self.context.build_template(chunk.layers, kind, first=before, last=after)
            or PASS_THROUGH_TEMPLATES[kind]
        )
        return self._name(LLM, kind, phases)

    def _plan_encoder(self, choice: ColocatedEncoder) -> PlannedModule:
        name, cost_model = choice.encoder.name, self.context.cost_model
        across = cost_model.stages_cross_nodes(self.llm.layout)
        chunks: list[PlannedChunk] = []
        output = 0.0
        for virtual, layers in enumerate(choice.virtual_stages):
            phases = {kind: self.context.build_template(layers, kind) for kind in choice.kinds}
            earlier = chunks[-1].templates if chunks else {}
            if layers or (earlier and any(choice.virtual_stages[virtual:])):
                # Layers without kernels, and stages between layers, pass tensors and gradients on.
                needed = {OpKind.FORWARD, *earlier} - {OpKind.WEIGHT_GRAD}
                needed |= {OpKind.INPUT_GRAD} if phases.get(OpKind.WEIGHT_GRAD) else set()
                phases |= {kind: PASS_THROUGH_TEMPLATES[kind] for kind in needed if not phases.get(kind)}
            templates = {
                kind: self._name(name, kind, template) for kind, template in phases.items() if template
            }
            output = layers[-1].output_bytes if layers else output
            saved, recomputed = choice.activation_bytes_of(layers)
            chunks.append(
                PlannedChunk(
                    templates=templates,
                    layers=len(layers),
                    saved_activation_bytes=saved,
                    recomputed_bytes=recomputed,
                    output_bytes=round(output),
                    send_s=round(cost_model.send_s(output, across_nodes=across), SECONDS_DIGITS),
                )
            )
        buckets = [self._encoder_buckets(choice, stage) for stage in range(choice.layout.pp)]
        rows = choice.layers[-1].output_bytes
        return PlannedModule(
            layout=choice.layout,
            chunks=tuple(chunks),
            buckets=tuple(buckets),
            recompute=choice.recompute,
            microbatches_per_llm_microbatch=choice.pieces,
            pipelines=choice.pipelines,
            bin_tokens=self._bin_tokens(choice),
            item_cost=fit_item_cost(choice.encoder),
            seam_bytes=round(rows),
            seam_s=round(cost_model.send_s(rows, across_nodes=across), SECONDS_DIGITS),
        )

    def _bin_tokens(self, choice: ColocatedEncoder) -> int:
        """Returns the most tokens of an encoder microbatch: whole merge groups on every TP rank."""
        merge = choice.encoder.merge
        needed = self.context.job.workload.bin_tokens(
            choice.encoder.name,
            merge,
            groups=self.llm.layout.dp // self.dealing_replicas,
            columns=self.llm.microbatches,
            bins=self.dealing_replicas * choice.pieces,
        )
        return ceil(needed / (merge * choice.layout.tp)) * merge * choice.layout.tp

    def _name(self, module: str, kind: OpKind, phases: Template) -> str:
        """Returns the name of a template; equal templates are stored once."""
        if id(phases) not in self._names:
            number = sum(known.startswith(f"{module}.{kind.word}.") for known in self._templates)
            self._names[id(phases)] = f"{module}.{kind.word}.{number}"
            self._templates[self._names[id(phases)]] = phases
        return self._names[id(phases)]

    # ------------------------------------------------------------------------ seam

    @cached_property
    def _seam_collectives(self) -> dict[OpKind, tuple[Kernel, ...]]:
        """Collectives that bring encoder outputs to ranks of stage 0, and their adjoints.

        Rows go to other replicas first, then to the ranks of a replica, tp first.
        """
        layout, cost_model, replicas = self.llm.layout, self.context.cost_model, self.dealing_replicas
        size = self._seam_bytes

        def list_kernels(kind: Collective, name: str) -> tuple[Kernel, ...]:
            kernels = []
            if replicas > 1:
                stride = layout.cp * layout.tp
                own, all_to_all = size / stride, Collective.ALL_TO_ALL
                # It runs beside gathers and reduces of parameters with half of the NIC. On the NIC's lane it
                # would wait for each of them to end, and the LLM with it: 10 % of a step of strong-3072.
                nic = cost_model.cluster.between_nodes.bandwidth_bytes_per_s / 2
                seconds = cost_model.group_s(
                    all_to_all, own, ranks=replicas, stride=stride, nic_bytes_per_s=nic
                )
                kernels.append(
                    make_collective_kernel(f"{name}.deal", Lane.TP, Communicator.DEAL, seconds, own)
                )
            if layout.tp > 1 and size:
                seconds = cost_model.tp_s(kind, size, layout.tp)
                kernels.append(make_collective_kernel(f"{name}.tp", Lane.TP, Communicator.TP, seconds, size))
            if layout.cp > 1 and size:
                seconds = cost_model.group_s(kind, size, ranks=layout.cp, stride=layout.tp)
                lane = cost_model.group_lane(layout.cp, layout.tp)
                kernels.append(make_collective_kernel(f"{name}.cp", lane, Communicator.CP, seconds, size))
            ordered = kernels if kind == Collective.ALL_GATHER else kernels[::-1]
            return tuple(replace(k, after=(place - 1,) if place else ()) for place, k in enumerate(ordered))

        trains = any(choice.encoder.train or choice.encoder.projector.train for choice in self.encoders)
        backward = list_kernels(Collective.REDUCE_SCATTER, KernelName.SEAM.scatter) if trains else ()
        return {
            OpKind.FORWARD: list_kernels(Collective.ALL_GATHER, KernelName.SEAM.gather),
            OpKind.BACKWARD: backward,
            OpKind.INPUT_GRAD: backward,
        }

    # ------------------------------------------------------------------------ traffic

    def buckets_of(self, stage: int) -> list[Bucket]:
        """Returns the buckets of all modules of one stage, encoders first."""
        encoders = (self._encoder_buckets(choice, stage) for choice in self.encoders)
        return [*chain.from_iterable(encoders), *self._llm_buckets(stage)]

    def _llm_buckets(self, stage: int) -> tuple[Bucket, ...]:
        llm = self.llm
        chunks = [llm.layers[a:b] for a, b in list(pairwise(llm.cut))[stage :: llm.layout.pp]]
        if llm.sharding != Sharding.OPTIMIZER:
            return self._layer_buckets(chunks, ends_at_loss=True)
        return self._pipeline_buckets(llm.plan.traffic_of(stage), [len(layers) for layers in chunks])

    def _layer_buckets(
        self, chunks: Sequence[Sequence[PricedLayer]], *, ends_at_loss: bool = False
    ) -> tuple[Bucket, ...]:
        """Returns a bucket of every layer, reduced in every microbatch; with ZeRO-3 gathered for every op.

        A layer without a backward is gathered once in a microbatch, and so is the last one before the loss:
        its backward follows its forward. A tied embedding and head are one bucket, of the whole stage.
        """
        first, last = chunks[0][0], chunks[-1][-1]
        ends = [first, last] if ends_at_loss and self.context.job.model.llm.tied else []
        buckets = [self._layer_bucket(WHOLE_STAGE, 0, ends, once=True)] if ends else []
        for number, layers in enumerate(chunks):
            for at, layer in enumerate(layers):
                if layer not in ends:
                    once = not layer.kernels[OpKind.BACKWARD] or (ends_at_loss and layer is last)
                    buckets.append(self._layer_bucket(number, at, [layer], once=once))
        return tuple(bucket for bucket in buckets if bucket.gather_bytes)

    def _layer_bucket(self, chunk: int, at: int, layers: Sequence[PricedLayer], *, once: bool) -> Bucket:
        """Returns the bucket of a layer of a chunk, or of tied ones; `once`: gathered once a microbatch."""
        reshards = self.llm.sharding == Sharding.PARAMETERS
        part = self.context.parameter_traffic(layers, gathers_frozen=reshards)
        return replace(
            _bucket(chunk, at, at + (chunk != WHOLE_STAGE), part),
            gathered_per=(Span.MICROBATCH if once else Span.OP) if reshards else Span.STEP,
            reduced_per=Span.MICROBATCH if layers[0].trained else Span.NEVER,
        )

    def _encoder_buckets(self, choice: ColocatedEncoder, stage: int) -> tuple[Bucket, ...]:
        """Returns one stage's buckets of an encoder: its layers, or as the LLM's in one pipeline with it."""
        chunks = choice.virtual_stages[stage :: choice.layout.pp]
        if choice.pipeline_cut:
            if self.llm.sharding != Sharding.OPTIMIZER:
                return self._layer_buckets(chunks)
            traffic = [self.context.parameter_traffic(layers) for layers in chunks]
            return self._pipeline_buckets(traffic, [len(layers) for layers in chunks])
        parts = [self.context.parameter_traffic([layer]) for layer in chunks[0]]
        return tuple(_bucket(0, at, at + 1, part) for at, part in enumerate(parts) if _has_traffic(part))

    def _pipeline_buckets(
        self, traffic: Sequence[ParameterTraffic], layers: Sequence[int]
    ) -> tuple[Bucket, ...]:
        """Returns one stage's buckets: the traffic that stays exposed, then what overlaps with each chunk."""
        exposure = TrafficOverlap(chunks=traffic, assumptions=self.context.cost_model.assumptions)
        quantities = ("gather_s", "gather_bytes", "reduce_s", "reduce_bytes")
        buckets = []
        if exposure.mode != "chunks":
            lane = Lane.HOST if exposure.mode == "slack" else Lane.DP
            part = ParameterTraffic(**{quantity: exposure.exposed(quantity) for quantity in quantities})
            buckets.append(_bucket(WHOLE_STAGE, 0, 0, part, lane=lane))
        if exposure.mode != "all":
            for number, count in enumerate(layers):
                part = ParameterTraffic(**{each: exposure.hidden(each, number) for each in quantities})
                gates = exposure.mode == "chunks" or number > 0
                buckets.append(_bucket(number, 0, count, part, gates=gates))
        return tuple(bucket for bucket in buckets if bucket.gather_s or bucket.reduce_s)

    def _finish_s(self, stage: int) -> float:
        """Returns the time of the optimizer's pass over a rank's shards."""
        if not self.context.cost_model.assumptions.optimizer_time:
            return 0.0
        parts = list(self.llm.plan.traffic_of(stage))
        for choice in self.encoders:
            layers = choice.stages[stage % choice.layout.pp]
            parts.append(self.context.parameter_traffic(layers))
        return round(sum(part.update_s for part in parts), SECONDS_DIGITS)

    # ------------------------------------------------------------------------ memory

    def fixed_bytes(self) -> list[Mapping[str, int]]:
        """Returns the bytes that one rank of every device class holds all the time, by component."""
        ranks = self.ranks
        stages = [self.fixed_bytes_of(stage) for stage in range(self.llm.layout.pp)]
        return [stages[ranks.coordinates(device)[0]] for device in range(ranks.num_classes)]

    def fixed_bytes_of(self, stage: int) -> dict[str, int]:
        """Returns the bytes that a rank of one stage holds all the time, by component."""
        layout, context = self.llm.layout, self.context
        held, sharding = self.llm.stage_bytes, self.llm.sharding
        working = float(held.working[stage])
        states = [
            self._states(self.llm.layers, sharding)
            if sharding != Sharding.OPTIMIZER
            else RankMemory(**{part: float(getattr(held, part)[stage]) for part in STATES})
        ]
        groups = [layout.tp, layout.replica_ranks, min(layout.pp, 2), layout.cp, layout.ep]
        for choice in self.encoders:
            layers = choice.stages[stage % choice.layout.pp]
            states.append(self._states(layers, sharding if choice.pipeline_cut else Sharding.OPTIMIZER))
            working += transient_bytes(layers)
            groups += self._encoder_groups(choice, stage) if layers else []
        total = {part: sum(getattr(memory, part) for memory in states) for part in STATES}
        total |= {
            "working": working,
            "communicators": communicator_bytes(*groups),
            "reserve": context.job.cluster.reserve_bytes,
        }
        return {part: round(value) for part, value in total.items()}

    def _states(self, layers: Sequence[PricedLayer], sharding: Sharding) -> RankMemory:
        """Returns the model states of some layers on a rank."""
        context = self.context
        if sharding == Sharding.OPTIMIZER:
            return context.model_states(layers)
        precision, kept = context.job.model.precision, sharding == Sharding.GRADIENTS
        return sharded_state_memory(layers, precision, keeps_gathered=kept)

    def _encoder_groups(self, choice: ColocatedEncoder, stage: int) -> list[int]:
        """Returns the sizes of the communicators of an encoder on a rank of one stage.

        An encoder in the LLM's pipeline has its stages, and where its tp is the LLM's, its replicas too.
        """
        layout = choice.layout
        if choice.pipeline_cut:
            return [layout.tp, *([] if layout.tp == self.llm.layout.tp else [layout.dp])]
        leaves = layout.pp > 1 or stage > 0 or self.llm.layout.pp > layout.pp  # rows cross the seam
        return [layout.dp, layout.tp, min(layout.pp, 2), 2 if leaves else 1]


def _expose_traffic_of_stages(modules: Mapping[str, PlannedModule]) -> dict[str, PlannedModule]:
    """Moves the seconds that stay exposed on a stage to the module whose layers come first there.

    In one pipeline they are spent before and after all compute of the stage, not of one of its modules.
    """
    buckets = {name: [list(stage) for stage in module.buckets] for name, module in modules.items()}
    for stage in range(modules[LLM].layout.pp):
        exposed = [
            (name, at)
            for name in modules
            for at, b in enumerate(buckets[name][stage])
            if b.chunk == WHOLE_STAGE
        ]
        whole = [buckets[name][stage][at] for name, at in exposed]
        for place, (name, at) in enumerate(exposed):
            gather_s, reduce_s = sum(b.gather_s for b in whole), sum(b.reduce_s for b in whole)
            seconds = (
                (0.0, 0.0) if place else (round(gather_s, SECONDS_DIGITS), round(reduce_s, SECONDS_DIGITS))
            )
            buckets[name][stage][at] = replace(whole[place], gather_s=seconds[0], reduce_s=seconds[1])
    return {
        name: replace(module, buckets=tuple(map(tuple, buckets[name]))) for name, module in modules.items()
    }


def _has_traffic(part: ParameterTraffic) -> bool:
    return part.gather_s > 0 or part.reduce_s > 0


def _bucket(
    chunk: int, first: int, end: int, part: ParameterTraffic, *, lane: Lane = Lane.DP, gates: bool = True
) -> Bucket:
    return Bucket(
        chunk=chunk,
        first_layer=first,
        end_layer=end,
        gather_s=round(part.gather_s, SECONDS_DIGITS),
        gather_bytes=round(part.gather_bytes),
        reduce_s=round(part.reduce_s, SECONDS_DIGITS),
        reduce_bytes=round(part.reduce_bytes),
        lane=lane,
        gates=gates,
    )
