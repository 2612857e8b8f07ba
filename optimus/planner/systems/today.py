"""Simulates the system and layout that the job runs today, and reports what was measured of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from optimus.errors import DoesNotFit
from optimus.job.job import CurrentRun, Job
from optimus.job.layout import Layout
from optimus.job.model import Model, Recompute
from optimus.planner.context import PlanningContext
from optimus.planner.systems.base import BaseSystem, SimulatedSystem
from optimus.planner.systems.colocated_plan import Sharding
from optimus.planner.systems.fsdp import FsdpSystem
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.planner.systems.registry import load_system
from optimus.planner.systems.single_pipeline import BalancedSystem, Stage0System
from optimus.protocols import System, SystemCandidate


class TodaySystem(BaseSystem):
    """The system and layout in the job's `today` section."""

    name = "today"
    searches_layouts = False

    def applies_to(self, job: Job) -> bool:
        """Returns whether the job has a `today` section."""
        return job.today is not None

    def candidates(self, pipelines: LlmPipelines) -> Iterable[SystemCandidate]:
        """Returns the candidates of today's system at today's layout."""
        system, at_layout = _system_today(pipelines.context)
        return system.candidates(at_layout)

    def simulate(self, pipelines: LlmPipelines) -> SimulatedSystem:
        """Simulates today's system at today's layout."""
        today = pipelines.context.job.today
        assert today is not None, "the job has no `today` section"
        system, at_layout = _system_today(pipelines.context)
        simulated = system.simulate(at_layout)
        return replace(
            simulated,
            name=self.name,
            how=f"{today.framework or 'framework not stated'}; {simulated.how}",
            measured_step_s=today.measured_step_s,
            measured_memory_bytes=today.measured_memory_bytes,
        )


def _system_today(context: PlanningContext) -> tuple[System, LlmPipelines]:
    """Returns the system that runs today, and the LLM's pipelines at today's layout."""
    today = context.job.today
    assert today is not None, "the job has no `today` section"
    at_layout = _context_today(context, today)
    chunks, tp = at_layout.layout.chunks, today.llm.tp
    match today.placement:
        case "stage0":
            system: System = Stage0System(chunks=chunks, order_name=today.schedule)
        case "balanced":
            system = BalancedSystem(chunks=chunks, order_name=today.schedule)
        case "fsdp":
            kinds = {None: None, True: Sharding.PARAMETERS, False: Sharding.GRADIENTS}
            sharding = kinds[today.reshard_after_forward]
            system = FsdpSystem(tp=tp, sequences=today.microbatch_sequences, sharding=sharding)
        case name:
            system = load_system(name)
    return system, LlmPipelines(at_layout)


def _context_today(context: PlanningContext, today: CurrentRun) -> PlanningContext:
    """Returns the context of today's recipe.

    Axes that are not stated are 1, dp follows, and no items are dealt.
    """
    job, assumptions = context.job, context.cost_model.assumptions
    stated = {axis: size for axis, size in today.llm.stated().items() if axis != "dp"}
    layout = Layout(**stated)
    layout = layout.with_(dp=job.cluster.gpus // layout.gpus)
    if today.tp_overlapped is not None:
        context = context.with_assumptions(replace(assumptions, tp_overlapped_share=today.tp_overlapped))
    limits = replace(job.layout.limits, deal_items=False)
    if today.microbatch_sequences is not None:
        limits = replace(limits, microbatch_sequences=(today.microbatch_sequences,))
    drawn = replace(
        job, model=_recomputed(job.model, today.recompute), layout=replace(job.layout, limits=limits)
    )
    for sequences in limits.microbatch_sequences:
        at_layout = replace(context, job=drawn, layout=layout, microbatch_sequences=sequences)
        microbatches = at_layout.microbatches(sequences)
        if layout.gpus == job.cluster.gpus and microbatches is not None:
            return _overlap_exchanges(at_layout, today, microbatches[0])
    raise DoesNotFit(
        f"today's layout {layout} does not divide {job.cluster.gpus} GPUs and "
        f"{job.workload.sequences_per_step} sequences",
        "state all of today.layout.llm: dp, pp and tp",
    )


def _overlap_exchanges(context: PlanningContext, today: CurrentRun, microbatches: int) -> PlanningContext:
    """Returns the context with exchanges of experts hidden under other microbatches, if there are any."""
    if today.ep_overlapped is None:
        return context
    share = today.ep_overlapped * (microbatches - 1) / microbatches
    return context.with_assumptions(replace(context.cost_model.assumptions, ep_overlapped_share=share))


def _recomputed(model: Model, recompute: Mapping[str, Recompute]) -> Model:
    """Returns a model whose modules are recomputed as stated."""
    encoders, llm = model.encoders, model.llm
    return replace(
        model,
        encoders=tuple(replace(e, recompute=recompute.get(e.name, e.recompute)) for e in encoders),
        llm=replace(llm, recompute=recompute.get(llm.name, llm.recompute)),
    )
