"""Computes the bytes that a layout needs where it does not fit, on which rank and for which components."""

from __future__ import annotations

from dataclasses import dataclass, replace

from optimus.cost.assumptions import Assumptions
from optimus.cost.measured_profile import Profile
from optimus.cost.memory import RankMemory
from optimus.errors import OptimusError
from optimus.job.job import Job
from optimus.job.layout import Layout
from optimus.planner.context import PlanningContext
from optimus.planner.encoder_layouts import common_encoder_layouts
from optimus.planner.layouts import choose_smallest_context
from optimus.planner.rejected import RejectedLayout
from optimus.planner.systems.colocation_search import ColocationSearch
from optimus.planner.systems.layer_partition import first_fitting_pipeline
from optimus.planner.systems.paper_candidate import PaperCandidate
from optimus.planner.systems.pipeline import PipelineCandidate

SHOWN_COMPONENTS = 3  # in a sentence
LABELS = {"llm_activations": "LLM activations", "encoder_activations": "encoder activations"}


@dataclass(frozen=True, kw_only=True)
class MemoryRequirement:
    """Bytes of the worst rank with the most recomputation allowed, and the capacity of a GPU."""

    needed_bytes: float
    capacity_bytes: float
    llm_layout: Layout
    stage: int  # of the LLM alone, its worst
    llm_alone: RankMemory  # there
    encoders: Layout | None = None  # the layout that needs least; None: the LLM alone does not fit

    @property
    def largest(self) -> str:
        """The component with the most bytes."""
        if self.encoders is not None and self.encoder_bytes > max(_by_size(self.llm_alone).values()):
            return "encoders"
        return next(iter(_by_size(self.llm_alone)))

    @property
    def encoder_bytes(self) -> float:
        """Bytes that encoders add to the LLM's worst rank."""
        return 0.0 if self.encoders is None else self.needed_bytes - self.llm_alone.total

    @property
    def description(self) -> str:
        """E.g. `the LLM alone needs 132.4 of 80.0 GB on stage 0 at dp4 pp1 tp1: optimizer 60.1, ...`."""
        parts = list(_by_size(self.llm_alone).items())[:SHOWN_COMPONENTS]
        held = ", ".join(f"{LABELS.get(name, name)} {_gb(size)}" for name, size in parts)
        if self.encoders is None:
            needs = f"the LLM alone needs {_gb(self.needed_bytes)} of {_gb(self.capacity_bytes)} GB"
            return f"{needs} on stage {self.stage} at {self.llm_layout}: {held}"
        needs, capacity = _gb(self.needed_bytes), _gb(self.capacity_bytes)
        if self.needed_bytes > self.capacity_bytes:
            needs = f"{needs} of {capacity} GB are needed on the worst rank"
        else:
            estimate = f"the estimate before scheduling was {needs}"
            needs = f"every schedule made needs more than {capacity} GB; {estimate}"
        where = f"with encoders at {self.encoders} and the LLM at {self.llm_layout}"
        llm = f"the LLM {_gb(self.llm_alone.total)} ({held})"
        return f"{needs} {where}: {llm}, encoders {_gb(self.encoder_bytes)}"


def find_memory_requirement(
    job: Job, assumptions: Assumptions, profile: Profile | None, strategy: str
) -> MemoryRequirement | None:
    """Returns the memory that a job needs at its stated layout, or None if memory is not the reason."""
    try:
        context, _ = choose_smallest_context(job, assumptions, profile)
    except OptimusError:
        return None
    llm = _most_recomputed(context, first_fitting_pipeline(context, (job.model.llm,)))
    stage = max(range(llm.layout.pp), key=lambda place: llm.memories[place].total)
    capacity, alone = context.capacity_bytes, llm.memories[stage]
    need = MemoryRequirement(
        needed_bytes=alone.total, capacity_bytes=capacity, llm_layout=llm.layout, stage=stage, llm_alone=alone
    )
    if not llm.fits:
        return need
    layouts = [
        layout
        for layout in common_encoder_layouts(context, llm.layout)
        if not isinstance(layout, RejectedLayout)
    ]
    estimates = {layout: _with_encoders(context, llm, layout, strategy) for layout in layouts}
    needed = {layout: size for layout, size in estimates.items() if size is not None}
    if not needed:
        return None  # no layout divides model and batch
    best = min(needed, key=lambda layout: needed[layout])
    return replace(need, needed_bytes=needed[best], encoders=best)


def _by_size(memory: RankMemory) -> dict[str, float]:
    """Returns the components, largest first, with model states summed."""
    parts = {
        "model states": memory.states,
        "llm_activations": memory.llm_activations,
        "logits": memory.logits,
        "communicators": memory.communicators,
        "reserve": memory.reserve,
    }
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def _most_recomputed(context: PlanningContext, llm: PipelineCandidate) -> PipelineCandidate:
    *_, policy = context.policies((context.job.model.llm,))
    return replace(llm, layers=context.layers((context.job.model.llm,), llm.sequences, policy), policy=policy)


def _with_encoders(
    context: PlanningContext, llm: PipelineCandidate, layout: Layout, strategy: str
) -> float | None:
    """Returns the strategy's estimate of the worst rank's bytes, or None if it cannot run."""
    *_, policy = context.policies(context.job.model.encoders)
    if strategy == "paper":
        filling = PaperCandidate(context, llm, layout, dict(policy))
        if filling.num_pipelines > llm.microbatches:
            return None
        return filling.most_bytes(-(-llm.microbatches // filling.num_pipelines))
    ways = ColocationSearch(context, llm).ladder({name: layout for name, _ in policy})
    return min(trial.most_bytes for trial in ways)


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f}"
