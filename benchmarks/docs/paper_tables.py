"""Computes the figures of docs/paper.md, stores them, and writes the page's tables."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.docs.pages import (
    DOCS,
    GOLDEN,
    Figures,
    fill_tables,
    markdown,
    read_figures,
    rounded,
    store_figures,
)
from optimus.cost.assumptions import get_preset
from optimus.ir.plan import Plan, PlannedModule
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.job.model import Recompute
from optimus.job.read import find_job
from optimus.job.workload import PackedSequence
from optimus.planner.filled_plan import FilledPlan, RejectedLayout
from optimus.planner.layouts import choose_smallest_context, common_encoder_layouts
from optimus.planner.step_bounds import StepBounds, compute_step_bounds
from optimus.planner.systems.base import SimulatedSystem
from optimus.planner.systems.llm_only import LlmOnlySystem, LlmPipelines
from optimus.planner.systems.paper import ADJUSTED_WARMUP, PaperSystem, warmup_variants
from optimus.planner.systems.paper_candidate import LlmTimelines, PaperCandidate, PaperSchedule
from optimus.planner.systems.registry import load_system
from optimus.schedule.lower import simulate_plan
from optimus.schedule.plan_schedule import build_plan_schedule

SECONDS = "search_s"  # how long a search took: shown, never compared

STRONG = (1536, 2048, 3072)
WEAK = ("A", "B", "C", "D")
DUAL = ("dual-11-5", "dual-22-5", "dual-22-11")
SMALL_LAYOUTS = ("", "pp2,tp2", "pp4,tp2")  # the paper states none; the first is left open
SWEEP_TOKENS = (512, 1024, 2048, 4096)  # of the encoder, per sequence of 2,048 LLM tokens
RECOMPUTATION: tuple[Recompute, ...] = ("none", "full")
MERGE, IMAGE_TOKENS = 4, 2048  # encoder tokens per LLM token, and of the largest image, as in the catalog


@dataclass(frozen=True, kw_only=True)
class PaperCase:
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


def all_cases() -> Iterator[PaperCase]:
    """Yields every case of every table, in the order of the stored figures."""
    for gpus in STRONG:
        for name in ("paper", "clean", "default"):
            yield PaperCase(job=f"strong-{gpus}", preset=name, both=name != "default")
    for name in ("paper", "default"):
        for job in (*WEAK, *DUAL):
            yield PaperCase(job=job, preset=name)
        for layout in SMALL_LAYOUTS:
            yield PaperCase(job="small-a100", preset=name, layout=layout)
    for tokens in SWEEP_TOKENS:
        for recompute in RECOMPUTATION:
            yield PaperCase(job="strong-3072", preset="paper", tokens=tokens, recompute=recompute)


def figures(case: PaperCase) -> Figures:
    """Returns all figures of one case."""
    assumptions = get_preset(case.preset)
    if case.recompute is not None:
        assumptions = replace(assumptions, recompute=case.recompute)
    pipelines = LlmPipelines(choose_smallest_context(_job(case), assumptions)[0])
    names = ["llm-only", "stage0", "balanced", "balanced-best"]
    names += ["fsdp"] if case.job == "small-a100" else []
    systems = {name: load_system(name).simulate(pipelines) for name in names}
    # At the paper's layouts: a fully sharded LLM is not among them.
    systems["llm-only"] = LlmOnlySystem().simulate_candidate(pipelines.floor)
    begin = time.process_time()
    (candidate,) = PaperSystem().candidates(pipelines)
    seconds = time.process_time() - begin
    bounds = compute_step_bounds(pipelines.context, pipelines.floor, systems["llm-only"].step_s)
    result: Figures = {
        "systems": {name: _system(system) for name, system in systems.items()},
        "encoder_s": rounded(bounds.encoder_s),
        "model_flops_share_s": rounded(systems["stage0"].mfu * systems["stage0"].step_s),
        "chosen": _choice(candidate.choice, candidate.filled, bounds),
        SECONDS: round(seconds),
    }
    if case.both:
        best = best_estimate(pipelines)
        result["best_estimate"] = _choice(best, best.candidate.plan(best), bounds)
    return result


def _job(case: PaperCase) -> Job:
    job = find_job(f"paper/{case.job}", layouts=[f"llm={case.layout}"] if case.layout else [])
    if case.tokens is None:
        return job
    images, rest = divmod(case.tokens, IMAGE_TOKENS)
    lengths = (IMAGE_TOKENS // MERGE,) * images + ((rest // MERGE,) if rest else ())
    text = job.workload.sequence_tokens - sum(lengths)
    sequence = PackedSequence(text=text, items=((job.model.encoders[0].name, lengths),))
    return replace(job, workload=replace(job.workload, sequences=(sequence,)))


def best_estimate(pipelines: LlmPipelines) -> PaperSchedule:
    """Returns the choice of the paper's own ranking, which leaves out the encoders' parameter traffic."""
    context, llm = pipelines.context, pipelines.floor_1f1b
    timelines: LlmTimelines = {}
    (policy,) = context.recompute_policies(context.job.model.encoders)  # these presets state it
    choices = []
    for layout in common_encoder_layouts(context, llm.layout):
        if isinstance(layout, RejectedLayout):
            continue
        fillings = [
            PaperCandidate(context, each, layout, dict(policy), timelines) for each in warmup_variants(llm)
        ]
        most = min(filling.max_microbatches(context.capacity_bytes) for filling in fillings)
        count = fillings[0].num_pipelines
        if count <= llm.microbatches <= count * most:
            choices += [filling.search_splits(most) for filling in fillings]
    return min(choices, key=lambda choice: choice.estimate_s)


def _choice(choice: PaperSchedule, filled: FilledPlan, bounds: StepBounds) -> Figures:
    filling = choice.candidate
    return {
        "layout": str(filling.layout),
        "adjusted": filling.llm.order_name == ADJUSTED_WARMUP,
        "moved": sum(choice.forward.moved) + sum(choice.backward.moved),
        "coarse": rounded(choice.hidden_share(coarse=True)),
        "fine": rounded(choice.hidden_share()),
        "strict": rounded(bounds.hidden_share(filled.step_s)),
        "llm_s": rounded(filling.base.step_s),
        "estimate_s": rounded(choice.estimate_s),
        "bare_s": rounded(bare_s(filled.plan)),
        "step_s": rounded(filled.step_s),
    }


def bare_s(plan: Plan) -> float:
    """Returns the plan's step without what the estimate leaves out: encoder traffic and messages."""
    modules = {name: m if name == LLM else _without_traffic(m) for name, m in plan.modules.items()}
    bare = replace(plan, modules=modules)
    return simulate_plan(bare, build_plan_schedule(bare, bare.programs)).step_s


def _without_traffic(module: PlannedModule) -> PlannedModule:
    buckets = tuple(
        tuple(replace(bucket, gather_s=0.0, reduce_s=0.0) for bucket in stage) for stage in module.buckets
    )
    chunks = tuple(replace(chunk, send_s=0.0) for chunk in module.chunks)
    return replace(module, buckets=buckets, chunks=chunks, seam_s=0.0)


def _system(system: SimulatedSystem) -> Figures:
    return {"step_s": rounded(system.step_s), "fits": system.fits}


def without_seconds(case_figures: Figures) -> Figures:
    """Returns the figures that are the same on every machine."""
    return {name: value for name, value in case_figures.items() if name != SECONDS}


PAGE = DOCS / "paper.md"
STORED = GOLDEN / "paper_figures.json"

# What the paper measured (arXiv 2408.03505, tables 5 and 7): seconds, MFU and hidden shares in per cent.
TABLE_5 = {1536: (10.65, 10.43, 9.80, 34.4), 2048: (8.26, 8.06, 7.29, 34.6), 3072: (5.91, 5.87, 4.87, 34.6)}
TABLE_7 = {1536: (34.3, 57.5, 322.2), 2048: (45.8, 69.3, 89.6), 3072: (68.7, 85.0, 15.1)}
DUAL_OVER_MEGATRON = dict(zip(DUAL, (1.25, 1.26, 1.27), strict=True))
SMALL = {"Alpa": 8.61, "FSDP": 3.20, "Megatron-LM": 3.42, "balanced": 3.04, "Optimus": 2.78}
RECOMPUTED = 4 / 3  # the paper's MFU counts the forward of all layers twice


def table_7(stored: Figures) -> str:
    """Compares hidden shares by the algorithm's own estimate and by the step."""
    header = ["GPUs", "preset", "layout", "encoder", "coarse %", "fine %", "strict %", "estimate s", "step s"]
    rows = []
    for gpus, (coarse, fine, _) in TABLE_7.items():
        rows.append([str(gpus), "**paper's own**", "not stated", "", f"{coarse}", f"{fine}", "", "", ""])
        for name in ("paper", "clean"):
            for which, words in (("chosen", "chosen"), ("best_estimate", "best estimate")):
                row = stored[f"strong-{gpus} {name}"][which]
                shares = [f"{100 * row[share]:.1f}" for share in ("coarse", "fine", "strict")]
                seconds = [f"{row['estimate_s']:.3f}", f"{row['step_s']:.3f}"]
                rows.append([str(gpus), f"`{name}`", words, _layout(row), *shares, *seconds])
    return markdown(header, rows)


def search(stored: Figures) -> str:
    """Compares the seconds of the search."""
    header = ["GPUs", "paper, one core", "ours, `paper`", "ours, `clean`"]
    rows = [
        [
            str(gpus),
            f"{theirs} s",
            *(f"{stored[f'strong-{gpus} {name}'][SECONDS]} s" for name in ("paper", "clean")),
        ]
        for gpus, (*_, theirs) in TABLE_7.items()
    ]
    return markdown(header, rows)


def estimate(stored: Figures) -> str:
    """Shows the steps from the algorithm's estimate to the claim."""
    header = ["GPUs", "preset", "encoder", "moved", "LLM alone", "estimate", "bare programs", "step"]
    rows = []
    for gpus in TABLE_7:
        for name in ("paper", "clean"):
            for which in ("chosen", "best_estimate"):
                row = stored[f"strong-{gpus} {name}"][which]
                seconds = [f"{row[s]:.3f}" for s in ("llm_s", "estimate_s", "bare_s", "step_s")]
                rows.append([str(gpus), f"`{name}`", _layout(row), str(row["moved"]), *seconds])
    return markdown(header, rows)


def table_5(stored: Figures) -> str:
    """Compares steps and speed-ups of strong scaling."""
    header = ["GPUs", "", "stage0 s", "balanced s", "balanced-best s", "paper's system s"]
    header += ["over stage0", "over balanced", "over balanced-best", "MFU %"]
    rows = []
    for gpus, (stage0, balanced, optimus, mfu) in TABLE_5.items():
        speedups = [f"{stage0 / optimus:.2f}x", f"{balanced / optimus:.2f}x", ""]
        model = f"{mfu / RECOMPUTED:.1f}"
        rows.append([f"{gpus}", "paper", f"{stage0}", f"{balanced}", "", f"{optimus:.2f}", *speedups, model])
        for name in ("paper", "default"):
            row = stored[f"strong-{gpus} {name}"]
            mfu = 100 * row["model_flops_share_s"] / row["chosen"]["step_s"]
            rows.append([f"{gpus}", f"ours, `{name}`", *_steps(row), *_speedups(row), f"{mfu:.1f}"])
    return markdown(header, rows)


def weak(stored: Figures) -> str:
    """Compares speed-ups of weak scaling and of two encoders; the paper prints no seconds."""
    header = ["job", "paper", "", "preset", "over stage0", "over balanced", "over balanced-best"]
    header += ["coarse %", "fine %", "strict %"]
    rows = []
    for job in (*WEAK, *DUAL):
        theirs = f"{DUAL_OVER_MEGATRON[job]}x" if job in DUAL else "up to 1.22x"
        other = "" if job in DUAL else "up to 1.18x"
        for name in ("paper", "default"):
            row = stored[f"{job} {name}"]
            shares = [f"{100 * row['chosen'][share]:.1f}" for share in ("coarse", "fine", "strict")]
            rows.append([f"`{job}`", theirs, other, f"`{name}`", *_speedups(row), *shares])
    return markdown(header, rows)


def small(stored: Figures) -> str:
    """Compares systems on eight GPUs."""
    header = ["", "LLM layout", "Alpa s", "FSDP s", "Megatron-LM s", "balanced s", "Optimus s"]
    header += ["over Megatron-LM", "over balanced"]
    base = SMALL["Optimus"]
    over = [f"{SMALL[name] / base:.2f}x" for name in ("Megatron-LM", "balanced")]
    rows = [["paper", "not stated", *(f"{seconds:.2f}" for seconds in SMALL.values()), *over]]
    for name in ("paper", "default"):
        for layout in SMALL_LAYOUTS:
            row = stored[PaperCase(job="small-a100", preset=name, layout=layout).key]
            steps = _steps(row, "fsdp", "stage0", "balanced")
            words = layout.replace(",", " ") or "left open"
            rows.append([f"ours, `{name}`", words, "", *steps, *_speedups(row, "stage0", "balanced")])
    return markdown(header, rows)


def sweep(stored: Figures) -> str:
    """Varies the encoder tokens and the recomputation, which the paper does not state."""
    header = ["encoder tokens", "recomputation", "encoder alone s", "coarse %", "fine %", "strict %"]
    header += ["over stage0", "over balanced", "over balanced-best"]
    rows = []
    for tokens in SWEEP_TOKENS:
        for recompute in RECOMPUTATION:
            case = PaperCase(job="strong-3072", preset="paper", tokens=tokens, recompute=recompute)
            row = stored[case.key]
            shares = [f"{100 * row['chosen'][share]:.1f}" for share in ("coarse", "fine", "strict")]
            rows.append(
                [
                    f"{tokens:,}",
                    recompute,
                    f"{row['encoder_s']:.2f}",
                    *shares,
                    *_speedups(row),
                ]
            )
    return markdown(header, rows)


def _layout(row: Figures) -> str:
    return f"{row['layout']}{', adjusted' if row['adjusted'] else ''}"


def _steps(row: Figures, *names: str) -> list[str]:
    """Formats seconds of systems, then of the plan, with a star where a system does not fit in memory."""
    systems = row["systems"]
    shown = names or ("stage0", "balanced", "balanced-best")
    steps = [f"{systems[name]['step_s']:.2f}{'' if systems[name]['fits'] else ' *'}" for name in shown]
    return [*steps, f"{row['chosen']['step_s']:.2f}"]


def _speedups(row: Figures, *names: str) -> list[str]:
    systems = row["systems"]
    shown = names or ("stage0", "balanced", "balanced-best")
    return [
        f"{systems[name]['step_s'] / row['chosen']['step_s']:.2f}x{'' if systems[name]['fits'] else ' *'}"
        for name in shown
    ]


TABLES = {
    "table-7": table_7,
    "search": search,
    "estimate": estimate,
    "table-5": table_5,
    "weak": weak,
    "small": small,
    "sweep": sweep,
}


def fill(page: str, stored: Figures) -> str:
    """Returns the page with every table computed from stored figures."""
    return fill_tables(page, {name: make(stored) for name, make in TABLES.items()})


def read_stored() -> Figures:
    """Returns the stored figures by the key of their case."""
    return read_figures(STORED)


if __name__ == "__main__":
    store_figures(STORED, {case.key: figures(case) for case in all_cases()})
    PAGE.write_text(fill(PAGE.read_text(), read_stored()))
