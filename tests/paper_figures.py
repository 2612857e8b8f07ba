"""Plays the paper's jobs with our implementation of its system: the figures behind docs/paper.md."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from optimus.cost.assumptions import preset
from optimus.ir.plan import Plan, PlannedModule
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.job.model import Recompute
from optimus.job.read import find_job
from optimus.job.workload import PackedSequence
from optimus.planner.bounds import Bounds, find_bounds
from optimus.planner.encoder_layouts import common_layouts
from optimus.planner.filled_plan import FilledPlan
from optimus.planner.layouts import decide_context
from optimus.planner.rejected import Rejected
from optimus.planner.systems.paper import Bases, Choice, Filling
from optimus.planner.systems.paper_search import ADJUSTED, warmups
from optimus.planner.systems.registry import System, Systems
from optimus.schedule.dependencies import couple
from optimus.schedule.lower import play

SECONDS = "search_s"  # how long a search took: shown, never compared
Figures = dict[str, Any]

STRONG = (1536, 2048, 3072)
WEAK = ("A", "B", "C", "D")
DUAL = ("dual-11-5", "dual-22-5", "dual-22-11")
SMALL_LAYOUTS = ("", "pp2,tp2", "pp4,tp2")  # the paper states none; the first is left open
SWEEP_TOKENS = (512, 1024, 2048, 4096)  # of the encoder, per sequence of 2,048 LLM tokens
RECOMPUTATION: tuple[Recompute, ...] = ("none", "full")
MERGE, IMAGE_TOKENS = 4, 2048  # encoder tokens per LLM token, and of the largest image, as in the catalog


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job under one set of assumptions."""

    job: str
    preset: str
    layout: str = ""  # of the LLM, on top of the job's
    tokens: int | None = None  # of the encoder per sequence, instead of the job's
    recompute: Recompute | None = None  # instead of the preset's
    both: bool = False  # also the layout with the best estimate

    @property
    def key(self) -> str:
        parts = (self.job, self.preset, self.layout, self.tokens, self.recompute)
        return " ".join(str(part) for part in parts if part)


def all_cases() -> Iterator[Case]:
    for gpus in STRONG:
        for name in ("paper", "clean", "default"):
            yield Case(job=f"strong-{gpus}", preset=name, both=name != "default")
    for name in ("paper", "default"):
        for job in (*WEAK, *DUAL):
            yield Case(job=job, preset=name)
        for layout in SMALL_LAYOUTS:
            yield Case(job="small-a100", preset=name, layout=layout)
    for tokens in SWEEP_TOKENS:
        for recompute in RECOMPUTATION:
            yield Case(job="strong-3072", preset="paper", tokens=tokens, recompute=recompute)


def figures(case: Case) -> Figures:
    """All that the tables show of one case."""
    assumptions = preset(case.preset)
    if case.recompute is not None:
        assumptions = replace(assumptions, recompute=case.recompute)
    systems = Systems(decide_context(_job(case), assumptions)[0])
    names = ["llm-only", "stage0", "balanced", "balanced-best"]
    made = {name: systems.make(name) for name in [*names, *(["fsdp"] if case.job == "small-a100" else [])]}
    begin = time.process_time()
    found = systems.paper_found
    seconds = time.process_time() - begin
    bounds = find_bounds(systems.context, systems.floor, made["llm-only"].step_s)
    result: Figures = {
        "systems": {name: _system(system) for name, system in made.items()},
        "encoder_s": _rounded(bounds.encoder_s),
        "model_flops_share_s": _rounded(made["stage0"].mfu * made["stage0"].step_s),
        "chosen": _choice(found.choice, found.filled, bounds),
        SECONDS: round(seconds),
    }
    if case.both:
        best = best_estimate(systems)
        result["best_estimate"] = _choice(best, best.filling.plan(best), bounds)
    return result


def _job(case: Case) -> Job:
    job = find_job(f"paper/{case.job}", layouts=[f"llm={case.layout}"] if case.layout else [])
    if case.tokens is None:
        return job
    images, rest = divmod(case.tokens, IMAGE_TOKENS)
    lengths = (IMAGE_TOKENS // MERGE,) * images + ((rest // MERGE,) if rest else ())
    text = job.workload.sequence_tokens - sum(lengths)
    sequence = PackedSequence(text=text, items=((job.model.encoders[0].name, lengths),))
    return replace(job, workload=replace(job.workload, sequences=(sequence,)))


def best_estimate(systems: Systems) -> Choice:
    """What the paper's own ranking takes: its model leaves out the encoders' parameter traffic."""
    context, llm, bases = systems.context, systems.floor_1f1b, Bases()
    (policy,) = context.policies(context.job.model.encoders)  # these presets state it
    choices = []
    for layout in common_layouts(context, llm.layout):
        if isinstance(layout, Rejected):
            continue
        fillings = [Filling(context, each, layout, dict(policy), bases) for each in warmups(llm)]
        most = min(filling.most_microbatches(context.capacity_bytes) for filling in fillings)
        count = fillings[0].num_pipelines
        if count <= llm.microbatches <= count * most:
            choices += [filling.best(most) for filling in fillings]
    return min(choices, key=lambda choice: choice.estimate_s)


def _choice(choice: Choice, filled: FilledPlan, bounds: Bounds) -> Figures:
    filling = choice.filling
    return {
        "layout": str(filling.layout),
        "adjusted": filling.llm.order_name == ADJUSTED,
        "moved": sum(choice.forward.moved) + sum(choice.backward.moved),
        "coarse": _rounded(choice.hidden_share(coarse=True)),
        "fine": _rounded(choice.hidden_share()),
        "strict": _rounded(bounds.hidden_share(filled.step_s)),
        "llm_s": _rounded(filling.base.step_s),
        "estimate_s": _rounded(choice.estimate_s),
        "bare_s": _rounded(bare_s(filled.plan)),
        "step_s": _rounded(filled.step_s),
    }


def bare_s(plan: Plan) -> float:
    """The plan's step if all that the estimate leaves out took no time: encoder traffic and messages."""
    modules = {name: m if name == LLM else _without_traffic(m) for name, m in plan.modules.items()}
    bare = replace(plan, modules=modules)
    return play(bare, couple(bare, bare.programs)).step_s


def _without_traffic(module: PlannedModule) -> PlannedModule:
    buckets = tuple(
        tuple(replace(bucket, gather_s=0.0, reduce_s=0.0) for bucket in stage) for stage in module.buckets
    )
    chunks = tuple(replace(chunk, send_s=0.0) for chunk in module.chunks)
    return replace(module, buckets=buckets, chunks=chunks, seam_s=0.0)


def _system(system: System) -> Figures:
    return {"step_s": _rounded(system.step_s), "fits": system.fits}


def _rounded(value: float) -> float:
    return round(value, 6)


def without_seconds(found: Figures) -> Figures:
    """What must be the same on every machine."""
    return {name: value for name, value in found.items() if name != SECONDS}
