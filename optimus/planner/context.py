"""Holds what all systems share while a job is planned: the job, its cost model, the LLM's layout, caches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np

from optimus.cost.assumptions import Assumptions
from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.kernel import Kernel
from optimus.cost.memory import RankMemory, model_state_memory
from optimus.cost.priced_layer import PricedLayer, add_gather_copies, price_encoder_layers, price_llm_layers
from optimus.data.dealing import choose_dealing_replicas
from optimus.ir.op import Floats, OpKind
from optimus.ir.plan import Template
from optimus.job.job import Job
from optimus.job.layout import Layout
from optimus.job.model import Encoder, Llm
from optimus.planner.worst_step import BinShape, DrawnSteps
from optimus.schedule.op_phases import expand_op_into_phases
from optimus.schedule.op_times import OrderColumns
from optimus.schedule.pipeline_orders import PipelineOrder
from optimus.schedule.pipeline_schedule import ParameterTraffic, price_parameter_traffic
from optimus.schedule.schedule_builder import ChunkPricer
from optimus.schedule.stage_costs import Cut, LayerPrefixSums

if TYPE_CHECKING:
    from optimus.planner.filled_plan import FilledPlan

SMALL_ENCODER_SHARE = 0.03  # of a GPU's memory: parameters of smaller encoders are copied to every rank
RecomputePolicy = tuple[tuple[str, str], ...]  # recomputation of every module, by name
OrderKey = tuple[str, int, int, int]  # name, stages, chunks, microbatches
PipelineKey = tuple[
    int, Cut, PipelineOrder | str, int, Layout
]  # id of layers, cut, order, microbatches, layout


def describe_recompute(policy: RecomputePolicy) -> str:
    """Returns `recompute none`, or the recomputation of every module where they differ."""
    if len({step for _, step in policy}) == 1:
        return f"recompute {policy[0][1]}"
    return "recompute " + " ".join(f"{name} {step}" for name, step in policy)


class PlanningCache:
    """Priced layers, templates and estimates of a job and its cost model, at any layout."""

    def __init__(self) -> None:
        self.chunks: ChunkPricer | None = None
        self.priced: dict[object, tuple[PricedLayer, ...]] = {}
        # By ids of layers, which are kept alive, so that ids stay valid.
        self.traffic: dict[
            tuple[tuple[int, ...], bool], tuple[tuple[PricedLayer, ...], ParameterTraffic]
        ] = {}
        self.templates: dict[object, Template] = {}
        self.equal: dict[Template, Template] = {}
        self.sums: dict[int, tuple[tuple[PricedLayer, ...], LayerPrefixSums]] = {}
        self.images: dict[str, float] = {}  # per mean sequence, by encoder
        self.drawn_steps: DrawnSteps | None = None
        self.resident_bins: dict[BinShape, Floats] = {}  # in a heavy step
        self.orders: dict[OrderKey, PipelineOrder] = {}
        self.columns: dict[OrderKey, OrderColumns] = {}
        self.estimates: dict[PipelineKey, float] = {}
        self.peaks: dict[PipelineKey, Floats] = {}  # of activations
        self.states: dict[tuple[int, ...], tuple[tuple[PricedLayer, ...], RankMemory]] = {}
        self.plans: WeakValueDictionary[object, FilledPlan] = WeakValueDictionary()  # of pipelines
        self.cuts: dict[tuple[int, int], list[Cut]] = {}  # by id of layers and number of parts


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanningContext:
    """A job, its cost model and one layout of the LLM; `layout.chunks` is the V that the job states."""

    job: Job
    cost_model: ClusterCostModel
    layout: Layout
    microbatch_sequences: int
    uneven: bool = False  # replicas and microbatches may be of different sizes
    kept_free_bytes: float = 0.0  # of every GPU, for encoders that are placed later
    effort: float = 1.0  # times the default budgets of searches
    cores: int = 1  # that a search of encoder placements may use
    cache: PlanningCache = field(default_factory=PlanningCache)

    def with_assumptions(self, assumptions: Assumptions) -> PlanningContext:
        """Returns the context under other assumptions, with an empty cache."""
        if assumptions == self.cost_model.assumptions:
            return self
        return replace(
            self, cost_model=replace(self.cost_model, assumptions=assumptions), cache=PlanningCache()
        )

    @property
    def chunks(self) -> ChunkPricer:
        if self.cache.chunks is None:
            names = [module.name for module in self.job.model.modules]
            self.cache.chunks = ChunkPricer(names, self.cost_model.assumptions.residence_slowdown)
        return self.cache.chunks

    def build_template(
        self,
        layers: Sequence[PricedLayer],
        kind: OpKind,
        *,
        first: tuple[Kernel, ...] = (),
        last: tuple[Kernel, ...] = (),
    ) -> Template:
        """Returns the phases of one op of a chunk of these layers; equal templates are the same object."""
        # Ids stay valid: the cache keeps the priced layers alive.
        key = tuple(id(layer.kernels[kind]) for layer in layers), kind, first, last
        if key not in self.cache.templates:
            template = expand_op_into_phases(layers, kind, first=first, last=last)
            self.cache.templates[key] = self.cache.equal.setdefault(template, template)
        return self.cache.templates[key]

    def parameter_traffic(
        self, layers: Sequence[PricedLayer], *, gathers_frozen: bool = False
    ) -> ParameterTraffic:
        """Returns the traffic of the parameters of some layers, priced once."""
        key = tuple(map(id, layers)), gathers_frozen
        if key not in self.cache.traffic:
            traffic = price_parameter_traffic(
                layers, self.cost_model, self.job.model.precision, gathers_frozen=gathers_frozen
            )
            self.cache.traffic[key] = tuple(layers), traffic
        return self.cache.traffic[key][1]

    def model_states(self, layers: Sequence[PricedLayer]) -> RankMemory:
        """Returns the model states of some layers on a rank, counted once."""
        key = tuple(map(id, layers))
        if key not in self.cache.states:
            self.cache.states[key] = tuple(layers), model_state_memory(layers, self.job.model.precision)
        return self.cache.states[key][1]

    def sums(self, layers: tuple[PricedLayer, ...]) -> LayerPrefixSums:
        """Returns running sums over `layers`, computed once."""
        if id(layers) not in self.cache.sums:
            model = self.job.model
            sums = LayerPrefixSums(layers, self.chunks, self.cost_model, model.precision, model.llm.name)
            self.cache.sums[id(layers)] = layers, sums  # kept alive: the key is their id
        return self.cache.sums[id(layers)][1]

    @property
    def encoder_names(self) -> str:
        """Names of all encoders as one word: `vision+audio`."""
        return "+".join(encoder.name for encoder in self.job.model.encoders)

    @property
    def capacity_bytes(self) -> float:
        return self.job.cluster.gpu.memory_bytes - self.kept_free_bytes

    def microbatches(self, sequences: int, *, multiple_of: int = 1) -> tuple[int, float] | None:
        """Returns microbatches per replica, and sequences in each; None if the batch does not divide.

        Where replicas may be uneven, the busiest gets whole sequences, in microbatches of about equal size.
        """
        per_replica = self.job.workload.sequences_per_step / self.layout.dp
        count = math.ceil(per_replica / sequences)
        if self.uneven:
            count = math.ceil(count / multiple_of) * multiple_of
            return count, math.ceil(per_replica) / count
        return (count, sequences) if count * sequences == per_replica and count % multiple_of == 0 else None

    def dealing_replicas(self, replicas: int) -> int:
        """Returns how many replicas encode each other's items, where a system's encoders can."""
        job = self.job
        return choose_dealing_replicas(job.workload, replicas) if job.layout.limits.deal_items else 1

    def count_images(self, encoder: Encoder, sequences: float) -> float:
        """Returns the images (or clips) in so many mean sequences."""
        name, samples = encoder.name, self.job.workload.sequences
        if name not in self.cache.images:
            self.cache.images[name] = sum(len(sample.lengths(name)) for sample in samples) / len(samples)
        return sequences * self.cache.images[name]

    def busiest_group_sequences(self, encoder: Encoder, sequences: float, groups: int) -> float:
        """Returns the sequences' worth of whole images that the busiest of `groups` gets."""
        images = self.count_images(encoder, sequences)
        if not images:
            return 0.0
        return sequences if groups == 1 else math.ceil(images / groups) * sequences / images

    def sequences_per_piece(self, encoder: Encoder, sequences: float, pieces: int, across: int) -> float:
        """Returns the sequences' worth of one of the `pieces` (encoder microbatches) of an LLM microbatch.

        A TP group of the LLM holds `across` blocks of the encoder. Blocks that get equally many pieces run in
        parallel, and the busiest counts; pieces that one block runs in turn have the mean size, but at least
        one image.
        """
        blocks = across if pieces % across == 0 else 1
        mean = self.busiest_group_sequences(encoder, sequences, blocks) * blocks / pieces
        images = self.count_images(encoder, sequences)
        return mean if pieces == blocks or not images else max(mean, sequences / images)

    def resident_bins_at_p99(
        self, shape: BinShape, *, sequences: float, priced: float, bounded: bool = False
    ) -> Floats:
        """Returns by n the load of n bins in a row in a heavy step, or a bound on it, in priced bins.

        A bin has that of so many mean `sequences`, and was priced for as many or, where images are few, more.
        """
        self.cache.drawn_steps = self.cache.drawn_steps or DrawnSteps(self.job)
        if bounded:
            bins = self.cache.drawn_steps.most_resident_bins(shape)
        else:
            if shape not in self.cache.resident_bins:
                self.cache.resident_bins[shape] = self.cache.drawn_steps.resident_bins_at_p99(shape)
            bins = self.cache.resident_bins[shape]
        return np.maximum(bins * sequences / max(priced, 1e-30), np.arange(len(bins)))

    def recompute_policies(self, modules: tuple[Encoder | Llm, ...]) -> Iterator[RecomputePolicy]:
        """Yields the recomputation of all modules to try, least first; the last module's changes last."""
        for steps in product(*reversed(self.recompute_ladders(modules))):
            yield steps[::-1]

    def recompute_ladders(self, modules: tuple[Encoder | Llm, ...]) -> list[RecomputePolicy]:
        """Returns by module its recomputation to try, least first; only `auto` is open."""
        ladders = []
        for module in modules:
            stated = module.recompute if module.recompute != "auto" else self.cost_model.assumptions.recompute
            ladder = ("none", "selective", "full") if stated in (None, "auto") else (stated,)
            ladders.append(tuple((module.name, step) for step in ladder))
        return ladders

    def encoder_layers(
        self, encoder: Encoder, layout: Layout, sequences: float, recompute: str
    ) -> tuple[PricedLayer, ...]:
        """Returns an encoder's layers, priced for a microbatch of `sequences` (may be below 1)."""
        key = encoder.name, layout, sequences, recompute
        if key not in self.cache.priced:
            load = self.job.workload.encoder_load(encoder.name, encoder.merge)
            self.cache.priced[key] = price_encoder_layers(
                encoder, load.times(sequences), layout, self.cost_model, recompute
            )
        return self.cache.priced[key]

    def llm_layers(self, layout: Layout, sequences: float, recompute: str) -> tuple[PricedLayer, ...]:
        key = "llm", layout, sequences, recompute
        if key not in self.cache.priced:
            model = self.job.model
            upstream = any(e.train or e.projector.train for e in model.encoders)
            self.cache.priced[key] = price_llm_layers(
                model.llm,
                self.job.workload.llm_load().times(sequences),
                layout,
                self.cost_model,
                recompute,
                upstream_trained=upstream,
                feeds={fed for encoder in model.encoders for fed in encoder.feeds},
            )
        return self.cache.priced[key]

    def layers(
        self,
        modules: tuple[Encoder | Llm, ...],
        sequences: float,
        policy: RecomputePolicy,
        layout: Layout | None = None,
        *,
        gather_copies: tuple[float, float] = (0.0, 0.0),
    ) -> tuple[PricedLayer, ...]:
        """Returns the layers of modules in sequence, priced at one layout, the LLM's own by default.

        Fully sharded ones copy their parameters out of gathers, so often per forward and per backward.
        """
        recompute, where = dict(policy), layout or self.layout
        key = tuple(module.name for module in modules), where, sequences, policy, gather_copies
        if key in self.cache.priced:
            return self.cache.priced[key]
        layers: list[PricedLayer] = []
        for module in modules:
            if isinstance(module, Encoder):
                layers += self._encoder_on_llm_stage(module, where, sequences, recompute[module.name])
            else:
                layers += self.llm_layers(where, sequences, recompute[module.name])
        priced, (per_forward, per_backward) = tuple(layers), gather_copies
        if per_forward:
            size = self.job.model.precision.parameter_bytes
            priced = add_gather_copies(
                layers, self.cost_model, size, per_forward=per_forward, per_backward=per_backward
            )
        self.cache.priced[key] = priced
        return priced

    def _encoder_on_llm_stage(
        self, encoder: Encoder, layout: Layout, sequences: float, recompute: str
    ) -> tuple[PricedLayer, ...]:
        """Prices an encoder on the ranks of one LLM stage: tensor-parallel as the LLM, or replicated.

        Images of a microbatch are split over the LLM's context-parallel ranks. A small encoder wastes a wide
        TP group; then every rank holds a replica and takes a share of the images, as trainers with small
        vision towers do. The faster of the two is taken, unless the job's limits rule out such a split.
        """

        def price(tp: int) -> tuple[PricedLayer, ...]:
            groups = layout.cp * layout.tp // tp  # each takes whole images, at the same time
            share = self.busiest_group_sequences(encoder, sequences, groups)
            placed = Layout(dp=layout.dp * groups, pp=layout.pp, tp=tp, chunks=layout.chunks)
            return self.encoder_layers(encoder, placed, share, recompute)

        sharded = price(layout.tp)
        replica_bytes = encoder.parameters() * self.job.model.precision.parameter_bytes
        too_large = replica_bytes > SMALL_ENCODER_SHARE * self.capacity_bytes
        if layout.tp == 1 or too_large or not self.job.layout.limits.split_images:
            return sharded
        replicated = price(1)
        key = "on LLM stage", encoder.name, layout, sequences, recompute
        if key not in self.cache.priced:
            seconds = [self.chunks.price(layers).seconds for layers in (replicated, sharded)]
            faster, slower = (each[OpKind.FORWARD] + each[OpKind.BACKWARD] for each in seconds)
            self.cache.priced[key] = replicated if faster < slower else sharded
        return self.cache.priced[key]

    def gpu_seconds(self, layers: tuple[PricedLayer, ...]) -> float:
        """Returns forward and backward seconds of one microbatch, times the GPUs of a TP group."""
        seconds = self.chunks.price(layers).seconds
        layout = layers[0].layout
        return (seconds[OpKind.FORWARD] + seconds[OpKind.BACKWARD]) * layout.tp * layout.cp
