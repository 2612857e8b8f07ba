"""How many bytes a layout would need that does not fit, on which rank and for what."""

from __future__ import annotations

from dataclasses import dataclass, replace

from optimus.cost.assumptions import Assumptions
from optimus.cost.measured import Profile
from optimus.cost.memory import Memory
from optimus.errors import OptimusError
from optimus.job.job import Job
from optimus.job.layout import Layout
from optimus.planner.context import PlanningContext
from optimus.planner.encoder_layouts import common_layouts
from optimus.planner.layouts import decide_context
from optimus.planner.rejected import Rejected
from optimus.planner.systems.layer_partition import first_fitting
from optimus.planner.systems.optimus_search import Search
from optimus.planner.systems.paper_filling import Filling
from optimus.planner.systems.pipeline import InlinePipeline

SHOWN = 3  # components in a sentence
WORDS = {"llm_activations": "LLM activations", "encoder_activations": "encoder activations"}


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes of the worst rank with the most recomputation that is allowed, beside what a GPU has."""

    needed_bytes: float
    capacity_bytes: float
    llm_layout: Layout
    stage: int  # of the LLM alone, its worst
    llm_alone: Memory  # there
    encoders: Layout | None = None  # that need least; None: the LLM alone does not fit

    @property
    def largest(self) -> str:
        """The component that takes most."""
        if self.encoders is not None and self.encoder_bytes > max(by_size(self.llm_alone).values()):
            return "encoders"
        return next(iter(by_size(self.llm_alone)))

    @property
    def encoder_bytes(self) -> float:
        """What encoders add to the LLM's worst rank."""
        return 0.0 if self.encoders is None else self.needed_bytes - self.llm_alone.total

    @property
    def words(self) -> str:
        """`the LLM alone needs 132.4 of 80.0 GB on stage 0 at dp4 pp1 tp1: optimizer 60.1, ...`."""
        parts = list(by_size(self.llm_alone).items())[:SHOWN]
        held = ", ".join(f"{WORDS.get(name, name)} {_gb(size)}" for name, size in parts)
        if self.encoders is None:
            needs = f"the LLM alone needs {_gb(self.needed_bytes)} of {_gb(self.capacity_bytes)} GB"
            return f"{needs} on stage {self.stage} at {self.llm_layout}: {held}"
        needs, capacity = _gb(self.needed_bytes), _gb(self.capacity_bytes)
        if self.needed_bytes > self.capacity_bytes:
            needs = f"{needs} of {capacity} GB are needed on the worst rank"
        else:
            needs = f"every schedule made needs more than {capacity} GB; {needs} were reckoned before"
        where = f"with encoders at {self.encoders} beside the LLM at {self.llm_layout}"
        llm = f"the LLM {_gb(self.llm_alone.total)} ({held})"
        return f"{needs} {where}: {llm}, encoders {_gb(self.encoder_bytes)}"


def find_need(job: Job, assumptions: Assumptions, profile: Profile | None, strategy: str) -> Need | None:
    """What a job needs at its stated layout; none if memory is not what is missing."""
    try:
        context, _ = decide_context(job, assumptions, profile)
    except OptimusError:
        return None
    llm = _most_recomputed(context, first_fitting(context, (job.model.llm,)))
    stage = max(range(llm.layout.pp), key=lambda place: llm.memories[place].total)
    capacity, alone = context.capacity_bytes, llm.memories[stage]
    need = Need(
        needed_bytes=alone.total, capacity_bytes=capacity, llm_layout=llm.layout, stage=stage, llm_alone=alone
    )
    if not llm.fits:
        return need
    layouts = [each for each in common_layouts(context, llm.layout) if not isinstance(each, Rejected)]
    reckoned = {layout: _with_encoders(context, llm, layout, strategy) for layout in layouts}
    needed = {layout: size for layout, size in reckoned.items() if size is not None}
    if not needed:
        return None  # none divides model and batch
    best = min(needed, key=lambda layout: needed[layout])
    return replace(need, needed_bytes=needed[best], encoders=best)


def by_size(memory: Memory) -> dict[str, float]:
    """Components, the largest first; the states together."""
    parts = {
        "model states": memory.states,
        "llm_activations": memory.llm_activations,
        "logits": memory.logits,
        "communicators": memory.communicators,
        "reserve": memory.reserve,
    }
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def _most_recomputed(context: PlanningContext, llm: InlinePipeline) -> InlinePipeline:
    *_, policy = context.policies((context.job.model.llm,))
    return replace(llm, layers=context.layers((context.job.model.llm,), llm.sequences, policy), policy=policy)


def _with_encoders(
    context: PlanningContext, llm: InlinePipeline, layout: Layout, strategy: str
) -> float | None:
    """What the worst rank holds, as the strategy reckons before it schedules; none if it cannot run."""
    *_, policy = context.policies(context.job.model.encoders)
    if strategy == "paper":
        filling = Filling(context, llm, layout, dict(policy))
        if filling.num_pipelines > llm.microbatches:
            return None
        return filling.most_bytes(-(-llm.microbatches // filling.num_pipelines))
    ways = Search(context, llm).ladder({name: layout for name, _ in policy})
    return min(trial.most_bytes for trial in ways)


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f}"
