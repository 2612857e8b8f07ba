"""All systems to compare: named ways to run a job, each at its best, in the same IR."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np

from optimus.cost.flops import step_flops
from optimus.cost.memory import Memory
from optimus.cost.module import PricedLayer
from optimus.errors import DoesNotFit, UserError, one_of
from optimus.ir.op import Communicator, Floats, Schedule
from optimus.job.job import Job
from optimus.job.layout import Layout
from optimus.planner.context import PlanningContext, describe_recompute
from optimus.planner.search_result import SearchResult
from optimus.planner.systems.base import Way, fastest, play, step_s
from optimus.planner.systems.fsdp import sharded_choices
from optimus.planner.systems.layer_partition import (
    even_chunks,
    smallest_maximum_cut,
    stage0_cut,
    strong_pipelines,
)
from optimus.planner.systems.llm_only import PLAIN_ORDERS, Floors
from optimus.planner.systems.optimus import search_ours
from optimus.planner.systems.paper_search import PaperFound, search_paper
from optimus.planner.systems.pipeline import InlinePipeline
from optimus.planner.systems.separate_gpus import separate_choices
from optimus.planner.systems.three_phase import ThreePhase, three_phase_choices
from optimus.schedule.bubbles import Bubbles, find_bubbles, mean_bubbles
from optimus.schedule.simulate import Timeline
from optimus.schedule.stage_costs import Cut

TP_OVERLAP = 0.7  # what a framework with fused or pipelined TP collectives may already hide


@dataclass(frozen=True, kw_only=True, eq=False)
class System:
    """A named way to run the job, played kernel by kernel."""

    name: str
    how: str  # what was chosen, in one line
    step_s: float
    overlapped_step_s: float  # the same schedule if the framework hid TP_OVERLAP of the TP traffic
    mfu: float
    tokens_per_s_per_gpu: float
    memory: Memory  # of the worst rank
    worst_rank: str
    bubbles: Bubbles
    fits: bool
    context: PlanningContext
    schedule: Schedule
    timeline: Timeline
    found: SearchResult | None = None  # of a system that makes a plan
    measured_step_s: float | None = None
    measured_memory_bytes: float | None = None
    weights: Floats | None = None  # GPUs that each device stands for, where they are not equal
    way: Way | None = None  # what was played


class Systems:
    """Makes systems of one setting; what several of them share is made once."""

    def __init__(self, context: PlanningContext) -> None:
        self.context, self.floors = context, Floors(context)

    def make(self, name: str) -> System:
        """The system called `name`, or DoesNotFit with the reason."""
        return MAKERS[name](self)

    @property
    def floor(self) -> InlinePipeline:
        """The LLM alone at the job's layout: best V, schedule and cut."""
        return self.floors.floor

    @property
    def floor_1f1b(self) -> InlinePipeline:
        """The same with (interleaved) 1F1B only."""
        return self.floors.floor_1f1b

    def llm_only(self) -> System:
        return self._of_inline("llm-only", self.floor)

    def stage0(self) -> System:
        """Megatron-LM: encoders in the first virtual stage, before the LLM's layers."""
        return self._of_inline("stage0", self.inline("stage0"))

    def balanced(self) -> System:
        """The paper's dynamic program over virtual stages, at the job's V."""
        return self._of_inline("balanced", self.inline("balanced"))

    def balanced_best(self) -> System:
        """The strongest pipeline of all layers we can make."""
        return self._of_inline(
            "balanced-best", fastest(self.context, "balanced-best", self.floors.all_modules)
        )

    def three_phase(self) -> System:
        """All encoder forwards, the LLM's pipeline, all encoder backwards."""
        fitting = [choice for llm in self.floors.both for choice in self._three_phases(llm)]
        choice = fastest(self.context, "three-phase", fitting)
        encoders = "; ".join(f"{s.encoder.name} {s.layout} recompute {s.recompute}" for s in choice.encoders)
        return self._played("three-phase", f"{encoders}; {_describe(choice.llm)}", choice)

    def _three_phases(self, llm: InlinePipeline) -> list[ThreePhase]:
        """Beside this pipeline with any recomputation, and where none fits beside its own, a roomier one."""
        found = list(three_phase_choices(self.context, llm))
        added = min((choice.peak_bytes for choice in found), default=0.0) - llm.peak_bytes
        others = list(self.floors.more_recomputed(llm))
        if not any(choice.fits for choice in found):
            others += self.floors.roomier(llm, [added])
        return [*found, *(choice for other in others for choice in three_phase_choices(self.context, other))]

    def separate_gpus(self) -> System:
        """Encoders on GPUs of their own."""
        choice = fastest(self.context, "separate-gpus", separate_choices(self.context, self.floor))
        gpus = self.context.job.cluster.gpus
        encoders = "; ".join(f"{s.encoder.name} {s.layout}" for s in choice.encoders)
        how = f"{gpus - choice.encoder_gpus}+{choice.encoder_gpus} GPUs; {encoders}; {_describe(choice.llm)}"
        weights = np.full(choice.stages + 1, (gpus - choice.encoder_gpus) / choice.stages)
        weights[-1] = choice.encoder_gpus
        return self._played("separate-gpus", how, choice, weights=weights)

    def paper(self) -> System:
        """The paper's algorithm: encoders in layouts of their own, their work in the LLM's bubbles."""
        return self._of_plan("paper", self.paper_found)

    @cached_property
    def paper_found(self) -> PaperFound:
        """Beside the best V, and beside the V that the job states."""
        if not self.context.job.model.encoders:
            raise DoesNotFit("there is no encoder to place", "use llm-only")
        llm, stated = self.context.job.model.llm, self.context.job.layout.of("llm").chunks
        bases = [self.floor_1f1b]
        if stated not in (None, self.floor_1f1b.layout.chunks):
            bases += strong_pipelines(
                self.context, (llm,), orders=PLAIN_ORDERS, chunk_counts={stated}, starts=1, evaluations=0
            )[:1]
        found, reasons = [], []
        for base in bases:
            try:
                found.append(search_paper(self.context, [base, *self.floors.more_recomputed(base)]))
            except DoesNotFit as no:
                reasons.append(no)
        if not found:
            raise reasons[0]
        return min(found, key=lambda made: made.filled.step_s)

    def _of_plan(self, name: str, found: SearchResult) -> System:
        limits = {"limits": asdict(self.context.job.layout.limits)}  # of the search, for who searches again
        noted = replace(found, notes={**found.notes, **limits})
        return replace(self._played(name, found.how, found.filled), found=noted)

    def optimus(self) -> System:
        """Our scheduler: list scheduling over all lanes, beside the best LLM pipelines."""
        if not self.context.job.model.encoders:
            raise DoesNotFit("there is no encoder to place", "use llm-only")
        found = search_ours(self.context, self.floors.beside, self.floors.roomier)
        return self._of_plan("optimus", found)

    def fsdp(self) -> System:
        """Fully sharded data parallelism, with tensor parallelism where it helps."""
        return self._of_sharded(None)

    def _of_sharded(self, tp: int | None) -> System:
        choices = sharded_choices(self.context)
        choice = fastest(self.context, "fsdp", (made for made in choices if tp in (None, made.layout.tp)))
        kept = " parameters kept gathered;" if choice.keeps_gathered else ""
        size = f"microbatch {choice.sequences} x {choice.accumulate};{kept}"
        how = f"{choice.layout}; {size} {describe_recompute(choice.policy)}"
        return self._played("fsdp", how, choice)

    def today(self) -> System:
        """What the job says runs now."""
        today = self.context.job.today
        assert today is not None, "asked of a job without a `today` section"
        context = self._context_today(today.llm.stated())
        there = Systems(context)
        if today.placement in ("stage0", "balanced"):
            system = there._of_inline("today", there.inline(today.placement, {context.layout.chunks}))
        elif today.placement == "fsdp" and today.llm.tp is not None:
            system = there._of_sharded(today.llm.tp)
        else:
            system = there.make(today.placement)
        return replace(
            system,
            name="today",
            how=f"{today.framework or 'framework not stated'}; {system.how}",
            measured_step_s=today.measured_step_s,
            measured_memory_bytes=today.measured_memory_bytes,
        )

    def step_s(self, way: Way) -> float:
        """Step time of one way, kernel by kernel."""
        return step_s(self.context, way)

    # ------------------------------------------------------------------------ shared parts

    def _context_today(self, stated: dict[str, int]) -> PlanningContext:
        """The setting at the layout that runs now; what it does not state is 1, and dp follows."""
        job = self.context.job
        layout = Layout(**{axis: size for axis, size in stated.items() if axis != "dp"})
        layout = layout.with_(dp=job.cluster.gpus // layout.gpus)
        for sequences in job.layout.limits.microbatch_sequences:
            context = replace(self.context, layout=layout, microbatch_sequences=sequences)
            if layout.gpus == job.cluster.gpus and context.microbatches(sequences) is not None:
                return context
        raise DoesNotFit(
            f"today's layout {layout} does not divide {job.cluster.gpus} GPUs and "
            f"{job.workload.sequences_per_step} sequences",
            "state all of today.layout.llm: dp, pp and tp",
        )

    def inline(self, name: str, chunk_counts: Collection[int] | None = None) -> InlinePipeline:
        """`stage0` or `balanced`: the best of its microbatch sizes and, where V is not stated, of V.

        V is 1, or divides the LLM's layers evenly up to the floor's V.
        """
        stated = self.context.job.layout.of("llm").chunks
        counts = chunk_counts or ({stated} if stated else self._even_counts())
        made = [
            pipeline
            for sequences in self.context.job.layout.limits.microbatch_sequences
            for chunks in sorted(counts)
            for pipeline in self._at(name, sequences, chunks)
        ]
        if not made:
            raise self._no_microbatches(counts)
        fitting = [pipeline for pipeline in made if pipeline.fits]
        if not fitting:
            return min(made, key=lambda pipeline: pipeline.peak_bytes)
        return min(fitting, key=lambda pipeline: pipeline.estimate_s)

    def _even_counts(self) -> set[int]:
        return {chunks for chunks in even_chunks(self.context) if chunks <= self.floor_1f1b.layout.chunks}

    def _at(self, name: str, sequences: int, chunks: int) -> Iterator[InlinePipeline]:
        """The pipeline at one microbatch size and V, with the least recomputation that fits, if any."""
        context, layout = self.context, self.context.layout.with_(chunks=chunks)
        divided = context.microbatches(sequences, multiple_of=layout.pp if chunks > 1 else 1)
        if divided is None:
            return
        for policy in context.policies(context.job.model.modules):
            layers = context.layers(context.job.model.modules, sequences, policy)
            pipeline = InlinePipeline(
                context=context,
                layers=layers,
                cut=self._cut(name, layers, layout.virtual_stages),
                order_name="1f1b" if chunks == 1 else "interleaved",
                microbatches=divided[0],
                layout=layout,
                sequences=sequences,
                policy=policy,
            )
            if pipeline.fits:
                break
        yield pipeline

    def _no_microbatches(self, counts: Collection[int]) -> UserError:
        job, layout = self.context.job, self.context.layout
        own = job.workload.sequences_per_step // layout.dp
        return UserError(
            field="layout.llm.chunks",
            value=max(counts),
            problem=f"needs a multiple of pp = {layout.pp} microbatches, which {own} sequences per replica "
            f"in microbatches of {one_of(job.layout.limits.microbatch_sequences)} are not",
            hint="use chunks 1, another microbatch_sequences, or another sequences_per_step",
        )

    def _cut(self, name: str, layers: Sequence[PricedLayer], parts: int) -> Cut:
        if name == "stage0":
            return stage0_cut(layers, self.context.job.model.llm.name, parts)
        # The paper takes layer times from FLOPs.
        weights = [layer.flops * (3 if layer.trained else 1) for layer in layers]
        return smallest_maximum_cut(weights, parts)

    def _of_inline(self, name: str, pipeline: InlinePipeline) -> System:
        return self._played(name, _describe(pipeline), pipeline)

    def _with_less_tp(self, schedule: Schedule) -> Schedule:
        """The schedule with at least TP_OVERLAP of its TP traffic hidden."""
        hidden = self.context.prices.assumptions.tp_overlapped_share
        factor = min(1.0, (1.0 - TP_OVERLAP) / (1.0 - hidden)) if hidden < 1.0 else 1.0
        scale = np.where(schedule.communicator == Communicator.TP, factor, 1.0)
        return replace(schedule, duration_s=schedule.duration_s * scale)

    def _played(
        self,
        name: str,
        how: str,
        way: Way,
        *,
        weights: Floats | None = None,
    ) -> System:
        """`way` as a system; `weights` are the GPUs that each device stands for."""
        job, memories = self.context.job, way.memories
        schedule = way.schedule()
        timeline = play(self.context, schedule)
        worst = max(range(len(memories)), key=lambda rank: memories[rank].total)
        model = replace(job.model, encoders=()) if name == "llm-only" else job.model
        peak_flops = job.cluster.gpu.peak_flops * job.cluster.gpus
        tokens = job.workload.sequence_tokens * job.workload.sequences_per_step
        return System(
            name=name,
            how=how,
            step_s=timeline.step_s,
            overlapped_step_s=play(self.context, self._with_less_tp(schedule)).step_s,
            mfu=step_flops(model, job.workload) / (timeline.step_s * peak_flops),
            tokens_per_s_per_gpu=tokens / timeline.step_s / job.cluster.gpus,
            memory=memories[worst],
            worst_rank=schedule.device_name(worst),
            bubbles=mean_bubbles(find_bubbles(schedule, timeline), weights),
            fits=memories[worst].total <= self.context.capacity_bytes,
            context=self.context,
            schedule=schedule,
            timeline=timeline,
            weights=weights,
            way=way,
        )


def _describe(pipeline: InlinePipeline) -> str:
    size = f"microbatch {pipeline.sequences:.3g}"
    return f"llm {pipeline.layout}; {pipeline.order_name}; {size}; {describe_recompute(pipeline.policy)}"


STRATEGIES = ("optimus", "paper")  # systems that schedule encoder work into bubbles; `plan` makes them
MAKERS: dict[str, Callable[[Systems], System]] = {
    "llm-only": Systems.llm_only,
    "stage0": Systems.stage0,
    "balanced": Systems.balanced,
    "balanced-best": Systems.balanced_best,
    "three-phase": Systems.three_phase,
    "separate-gpus": Systems.separate_gpus,
    "fsdp": Systems.fsdp,
    "paper": Systems.paper,
    "optimus": Systems.optimus,
    "today": Systems.today,
}
WAYS = {  # what `layout.limits.allow` calls them; what is not here is always allowed
    "balanced": "balanced",
    "balanced-best": "balanced",
    "three-phase": "three-phase",
    "separate-gpus": "separate-gpus",
    "fsdp": "fsdp",
    "paper": "fill",
    "optimus": "fill",
}


def default_systems(job: Job) -> list[str]:
    """Those that apply, that the job allows, and that schedule no encoder work."""
    allowed = job.layout.limits.allow
    return [
        name
        for name in MAKERS
        if name not in STRATEGIES
        and (name not in WAYS or WAYS[name] in allowed)
        and (name != "today" or job.today is not None)
    ]
