"""What would make an impossible job fit: changes that were tried, nearest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from optimus.cost.assumptions import Assumptions, get_preset
from optimus.errors import OptimusError, one_of
from optimus.job.job import Job
from optimus.job.layout import Layout, LayoutChoice
from optimus.planner.encoder_layouts import common_encoder_layouts
from optimus.planner.layouts import choose_smallest_context, encoder_layout_conflict
from optimus.planner.rejected import RejectedLayout
from optimus.planner.systems.layer_partition import first_fitting_pipeline
from optimus.planner.systems.paper_candidate import PaperCandidate

MOST_TIMES = 64  # as many GPUs are tried
MOST_HINTS = 3


def _suggest_remedies(job: Job, assumptions: Assumptions | str) -> str:
    """A hint that names the changes under which the job fits; empty if none of them helps."""
    assumed = get_preset(assumptions) if isinstance(assumptions, str) else assumptions
    found: dict[str, str] = {}  # sort of change -> words
    for sort, words, changed in _changes(job):
        if sort not in found and _fits(changed, assumed):
            found[sort] = words
        if len(found) == MOST_HINTS:
            break
    return f"it fits with {one_of(found.values())}" if found else ""


def _changes(job: Job) -> Iterator[tuple[str, str, Job]]:
    """Sort of change, in words, and the changed job: recomputation, layouts, more GPUs, fewer GPUs."""
    stated = [m.name for m in job.model.modules if m.recompute not in ("auto", "full")]
    if stated:
        yield "recompute", f"recompute: full for {one_of(stated)}", _recomputed(job)
    for text, changed in _layouts(job):
        yield "layout", f"--layout {text}", changed
    gpus, times = job.cluster.gpus, 2
    while times <= MOST_TIMES:
        yield "more", f"{gpus * times} GPUs", job.replace(gpus=gpus * times)
        times *= 2
    for fewer in (gpus // 2, gpus // 4, gpus // 8):
        if fewer:
            yield "fewer", f"{fewer} GPUs", job.replace(gpus=fewer)


def _recomputed(job: Job) -> Job:
    encoders = tuple(replace(encoder, recompute="full") for encoder in job.model.encoders)
    llm = replace(job.model.llm, recompute="full")
    return replace(job, model=replace(job.model, encoders=encoders, llm=llm))


def _layouts(job: Job) -> Iterator[tuple[str, Job]]:
    """Other layouts of the LLM on the same GPUs, in order of their size."""
    stated = job.layout.of("llm").stated()
    encoders = {name: own for name, own in job.layout.modules.items() if name != "llm"}
    sizes = product((1, 2, 4, 8, 16), (1, 2, 4, 8))
    for pp, tp in sorted(sizes, key=lambda size: (size[0] * size[1], size[0])):
        choice = LayoutChoice(pp=pp, tp=tp, cp=stated.get("cp"), ep=stated.get("ep"))
        if job.cluster.gpus % (pp * tp) == 0 and encoder_layout_conflict(job, Layout(pp=pp, tp=tp)) is None:
            modules = {**encoders, "llm": choice}
            yield f"llm=pp{pp},tp{tp}", replace(job, layout=replace(job.layout, modules=modules))


def _fits(job: Job, assumptions: Assumptions) -> bool:
    """Whether some layout of the encoders fits beside the LLM; nothing is scheduled."""
    try:
        context, _ = choose_smallest_context(job, assumptions)
        llm = first_fitting_pipeline(context, (job.model.llm,))
    except OptimusError:
        return False
    if not llm.fits:
        return False
    for layout in common_encoder_layouts(context, llm.layout):
        if isinstance(layout, RejectedLayout):
            continue
        *_, policy = context.policies(job.model.encoders)
        filling = PaperCandidate(context, llm, layout, dict(policy))
        even = -(-llm.microbatches // filling.num_pipelines)
        if filling.num_pipelines <= llm.microbatches and filling.most_bytes(even) <= context.capacity_bytes:
            return True
    return False
