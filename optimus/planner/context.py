"""What every system is built from: a job, its prices, and the layout of its LLM."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from optimus.cost.assumptions import Assumptions
from optimus.cost.cost_model import ClusterCostModel
from optimus.cost.kernel import Kernel
from optimus.cost.memory import RankMemory
from optimus.cost.priced_layer import PricedLayer, price_encoder_layers, price_llm_layers
from optimus.ir.op import OpKind
from optimus.ir.plan import Template
from optimus.job.job import Job
from optimus.job.layout import Layout
from optimus.job.model import Encoder, Llm
from optimus.schedule.phase_templates import build_op_template
from optimus.schedule.pipeline_orders import PipelineOrder
from optimus.schedule.schedule_builder import ChunkPricer
from optimus.schedule.stage_costs import Cut, LayerPrefixSums, RetimableSchedule

SMALL_ENCODER = 0.03  # share of a GPU's memory up to which an encoder's parameters are copied to every rank
Policy = tuple[tuple[str, str], ...]  # recomputation of every module, by name
PipelineKey = tuple[
    int, Cut, PipelineOrder | str, int, Layout
]  # id of layers, cut, order, microbatches, layout


def describe_recompute(policy: Policy) -> str:
    """`recompute none`, or module by module where they differ."""
    if len({step for _, step in policy}) == 1:
        return f"recompute {policy[0][1]}"
    return "recompute " + " ".join(f"{name} {step}" for name, step in policy)


class PlanningCache:
    """What was made for a job and its prices, at any layout: settings that share it do not make it again."""

    def __init__(self) -> None:
        self.chunks: ChunkPricer | None = None
        self.priced: dict[object, tuple[PricedLayer, ...]] = {}
        # Of op orders, for stages, chunks and microbatches.
        self.graphs: dict[tuple[PipelineOrder | str, int, int, int], RetimableSchedule] = {}
        self.templates: dict[object, Template] = {}
        self.equal: dict[Template, Template] = {}
        self.sums: dict[int, tuple[tuple[PricedLayer, ...], LayerPrefixSums]] = {}
        self.images: dict[str, float] = {}  # of every encoder in a mean sequence
        self.estimates: dict[PipelineKey, float] = {}
        self.memories: dict[PipelineKey, tuple[RankMemory, ...]] = {}
        self.cuts: dict[tuple[int, int], list[Cut]] = {}  # of layers, by their id, into so many parts


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanningContext:
    """A job with everything decided that all systems share. `layout.chunks` is the job's own V."""

    job: Job
    cost_model: ClusterCostModel
    layout: Layout
    microbatch_sequences: int
    uneven: bool = False  # replicas and microbatches may be of different sizes
    kept_free_bytes: float = 0.0  # of every GPU, for what others will add

    cache: PlanningCache = field(default_factory=PlanningCache)

    def under(self, assumptions: Assumptions) -> PlanningContext:
        """The same under other assumptions."""
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

    def phases(
        self,
        layers: Sequence[PricedLayer],
        kind: OpKind,
        *,
        first: tuple[Kernel, ...] = (),
        last: tuple[Kernel, ...] = (),
    ) -> Template:
        """One op of a chunk of these layers; equal ones are the same object.

        Layers are kept, so that ids stay their own.
        """
        key = tuple(id(layer.kernels[kind]) for layer in layers), kind, first, last
        if key not in self.cache.templates:
            made = build_op_template(layers, kind, first=first, last=last)
            self.cache.templates[key] = self.cache.equal.setdefault(made, made)
        return self.cache.templates[key]

    def sums(self, layers: tuple[PricedLayer, ...]) -> LayerPrefixSums:
        """Running sums over `layers`, made once."""
        if id(layers) not in self.cache.sums:
            model = self.job.model
            made = LayerPrefixSums(layers, self.chunks, self.cost_model, model.precision, model.llm.name)
            self.cache.sums[id(layers)] = layers, made  # kept alive, so that its id stays its own
        return self.cache.sums[id(layers)][1]

    @property
    def encoder_names(self) -> str:
        """All encoders in one word: `vision+audio`."""
        return "+".join(encoder.name for encoder in self.job.model.encoders)

    @property
    def capacity_bytes(self) -> float:
        return self.job.cluster.gpu.memory_bytes - self.kept_free_bytes

    def microbatches(self, sequences: int, *, multiple_of: int = 1) -> tuple[int, float] | None:
        """Microbatches per step and replica, and sequences in each; None if the batch does not divide.

        Where replicas may be uneven, the busiest gets whole sequences, in microbatches of about equal size.
        """
        own = self.job.workload.sequences_per_step / self.layout.dp
        count = math.ceil(own / sequences)
        if self.uneven:
            count = math.ceil(count / multiple_of) * multiple_of
            return count, math.ceil(own) / count
        return (count, sequences) if count * sequences == own and count % multiple_of == 0 else None

    def images(self, encoder: Encoder, sequences: float) -> float:
        """Images (or clips) in so many mean sequences."""
        name, every = encoder.name, self.job.workload.sequences
        if name not in self.cache.images:
            self.cache.images[name] = sum(len(each.lengths(name)) for each in every) / len(every)
        return sequences * self.cache.images[name]

    def dealt(self, encoder: Encoder, sequences: float, groups: int) -> float:
        """Sequences' worth of whole images that the busiest of `groups` gets when they are dealt out."""
        images = self.images(encoder, sequences)
        if not images:
            return 0.0
        return sequences if groups == 1 else math.ceil(images / groups) * sequences / images

    def piece(self, encoder: Encoder, sequences: float, pieces: int, across: int) -> float:
        """Sequences' worth of one of `pieces` on the `across` blocks of an LLM rank group.

        Blocks that get as many each work side by side, and the busiest counts; what one block gets, one
        after another, is as much as it is on average, but never less than an image.
        """
        blocks = across if pieces % across == 0 else 1
        own = self.dealt(encoder, sequences, blocks) * blocks / pieces
        images = self.images(encoder, sequences)
        return own if pieces == blocks or not images else max(own, sequences / images)

    def policies(self, modules: tuple[Encoder | Llm, ...]) -> Iterator[Policy]:
        """Recomputation to try, cheapest in time first: what is stated is kept, `auto` is open."""
        ladders = []
        for module in modules:
            stated = module.recompute if module.recompute != "auto" else self.cost_model.assumptions.recompute
            ladder = ("none", "selective", "full") if stated in (None, "auto") else (stated,)
            ladders.append([(module.name, step) for step in ladder])
        weight = {"none": 0, "selective": 1, "full": 2}
        combinations = sorted(product(*ladders), key=lambda c: [weight[step] for _, step in reversed(c)])
        yield from combinations

    def encoder_layers(
        self, encoder: Encoder, layout: Layout, sequences: float, recompute: str
    ) -> tuple[PricedLayer, ...]:
        """An encoder's layers for a microbatch of `sequences` sequences (a fraction is a piece of one)."""
        key = encoder.name, layout, sequences, recompute
        if key not in self.cache.priced:
            load = self.job.workload.encoder_load(encoder.name, encoder.projector.merge)
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
            )
        return self.cache.priced[key]

    def layers(
        self,
        modules: tuple[Encoder | Llm, ...],
        sequences: float,
        policy: Policy,
        layout: Layout | None = None,
    ) -> tuple[PricedLayer, ...]:
        """Modules one after another in one layout, the LLM's own by default."""
        recompute, where = dict(policy), layout or self.layout
        key = tuple(module.name for module in modules), where, sequences, policy
        if key in self.cache.priced:
            return self.cache.priced[key]
        layers: list[PricedLayer] = []
        for module in modules:
            if isinstance(module, Encoder):
                layers += self._encoder_beside_llm(module, where, sequences, recompute[module.name])
            else:
                layers += self.llm_layers(where, sequences, recompute[module.name])
        self.cache.priced[key] = tuple(layers)
        return self.cache.priced[key]

    def _encoder_beside_llm(
        self, encoder: Encoder, layout: Layout, sequences: float, recompute: str
    ) -> tuple[PricedLayer, ...]:
        """An encoder on the ranks of one LLM stage: divided as the LLM is, or its images dealt out.

        A small encoder wastes a wide TP group; then every rank holds all of it and takes a share of
        the images, as trainers with small vision towers do. The faster of the two is taken.
        """
        divided = self.encoder_layers(encoder, layout, sequences, recompute)
        whole_bytes = encoder.parameters() * self.job.model.precision.parameter_bytes
        if layout.tp == 1 or whole_bytes > SMALL_ENCODER * self.capacity_bytes:
            return divided
        dealt_layout = layout.with_(dp=layout.dp * layout.tp, tp=1, ep=1)
        dealt = self.encoder_layers(
            encoder, dealt_layout, self.dealt(encoder, sequences, layout.tp), recompute
        )
        # Dealt out, each of tp ranks does this much at the same time.
        key = "beside", encoder.name, layout, sequences, recompute
        if key not in self.cache.priced:
            faster = layout.tp * self.gpu_seconds(dealt) < self.gpu_seconds(divided)
            self.cache.priced[key] = dealt if faster else divided
        return self.cache.priced[key]

    def gpu_seconds(self, layers: tuple[PricedLayer, ...]) -> float:
        """Forward and backward of one microbatch, times the GPUs of a TP group."""
        seconds = self.chunks.make(layers).seconds
        layout = layers[0].layout
        return (seconds[OpKind.FORWARD] + seconds[OpKind.BACKWARD]) * layout.tp * layout.cp
