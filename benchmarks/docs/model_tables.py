"""Computes the figures of docs/models.md, stores them, and writes the page's tables.

With arguments (`"internvl3-78b 40 %"`), only cases whose key starts with one are computed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.docs.pages import (
    DOCS,
    GOLDEN,
    Figures,
    compute_named,
    fill_tables,
    markdown,
    read_figures,
    rounded,
)
from optimus.job.job import Job
from optimus.job.read import find_job
from optimus.job.workload import TokenPercentiles, Workload, build_sequences_from_percentiles
from optimus.planner.compare import Comparison
from optimus.planner.planning import PlanningResult, make_plan
from optimus.planner.systems.base import SimulatedSystem
from optimus.sensitivity.batch_steps import simulate_batches

SECONDS = "search_s"  # CPU of a search: shown, never compared

ON = "h100:512"
PRESET = "default"
BATCHES = 100
SEQUENCE_TOKENS, SEQUENCES = 8192, 1024
SPREAD = 1.5  # p95 over p50
LARGEST_IMAGE = 1024  # LLM tokens
MEDIANS = {20: 1638, 40: 3277, 85: 6963}  # LLM tokens of images in a sequence, by their share in per cent
MODELS = ("qwen2.5-vl-72b", "internvl3-78b", "qwen3-vl-235b", "siglip-so400m-8b")
OTHERS = ("balanced-best", "three-phase", "separate-gpus", "fsdp", "stage0")
STATED = {"qwen3-vl-235b": "pp16,ep8"}  # of the LLM's layout, where an open search takes minutes


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """One model and one load of images."""

    model: str
    share: int  # per cent of a sequence that the median image tokens are

    @property
    def key(self) -> str:
        return f"{self.model} {self.share} %"

    @property
    def percentiles(self) -> TokenPercentiles:
        """Percentiles as a job file states them; p95 never exceeds the length of a sequence."""
        p50 = MEDIANS[self.share]
        return TokenPercentiles(
            p50=p50, p95=min(SPREAD * p50, SEQUENCE_TOKENS), max=SEQUENCE_TOKENS, item=LARGEST_IMAGE
        )


ALL_CASES = tuple(ModelCase(model=model, share=share) for model in MODELS for share in MEDIANS)


def job_of(case: ModelCase) -> Job:
    """Returns the job of a case, with the LLM's layout of `STATED`, if any."""
    stated = STATED.get(case.model)
    job = find_job(case.model, on=ON, layouts=[f"llm={stated}"] if stated else [])
    by_encoder = {encoder.name: case.percentiles for encoder in job.model.encoders}
    workload = Workload(
        sequence_tokens=SEQUENCE_TOKENS,
        sequences_per_step=SEQUENCES,
        sequences=build_sequences_from_percentiles(SEQUENCE_TOKENS, by_encoder),
    )
    return replace(job, workload=workload)


def figures(case: ModelCase, names: Iterable[str] = OTHERS) -> Figures:
    """Returns all figures of one case."""
    job, begin = job_of(case), time.process_time()
    planned = make_plan(job, assumptions=PRESET, systems=names)
    seconds = time.process_time() - begin
    comparison = planned.comparison
    return {
        "mean_share": rounded(sum(job.workload.share_of_tokens(each.name) for each in job.model.encoders)),
        "floor": {"s": rounded(planned.floor_s), "how": comparison.systems["llm-only"].how},
        "bounds": _bounds(planned),
        "capacity_gb": rounded(comparison.context.capacity_bytes / 1e9),
        "proved": planned.report.ok,
        "systems": {
            name: {**_system(system), "batches": _batches(comparison, name)}
            for name, system in comparison.systems.items()
            if name != "llm-only"
        },
        "missing": comparison.missing,
        SECONDS: round(seconds),
    }


def _bounds(planned: PlanningResult) -> Figures:
    bounds = planned.bounds
    return {
        "bound_s": rounded(bounds.bound_s),
        "binds": bounds.largest_name,
        "encoder_s": rounded(bounds.encoder_s),
        "hidden_strict": rounded(planned.hidden_strict),
    }


def _system(system: SimulatedSystem) -> Figures:
    return {
        "step_s": rounded(system.step_s),
        "overlapped_s": rounded(system.overlapped_step_s),
        "memory_gb": rounded(system.peak_bytes / 1e9),
        "fits": system.fits,
        "how": system.how,
    }


def _batches(comparison: Comparison, name: str) -> Figures:
    """Returns mean and p95 as drawn; a system is simulated alone, so that none is left out for size."""
    steps = simulate_batches(comparison, [name], count=BATCHES)[name]
    return {"drawn": [rounded(steps.mean_s), rounded(steps.p95_s)]}


PAGE = DOCS / "models.md"
STORED = GOLDEN / "model_figures.json"
SYSTEMS = ("optimus", *OTHERS)


def steps(stored: Figures) -> str:
    """Shows steps with every microbatch at the mean, in seconds and over the floor."""
    header = ["model", "images, mean %", "encoders alone s", "floor s", *SYSTEMS]
    rows = []
    for case, row in _stored(ALL_CASES, stored):
        floor_s, systems = row["floor"]["s"], row["systems"]
        seconds = {name: systems[name]["step_s"] for name in SYSTEMS if name in systems}
        cells = {name: f"{value:.2f} ({value / floor_s:.3f})" for name, value in seconds.items()}
        alone = f"{row['bounds']['encoder_s']:.2f}"
        rows.append([*_head(case, row), alone, f"{floor_s:.2f}", *_cells(row, cells, seconds)])
    return markdown(header, rows)


def batches(stored: Figures) -> str:
    """Shows mean and p95 over drawn batches."""
    header = ["model", "images, mean %", *SYSTEMS]
    rows = []
    for case, row in _stored(ALL_CASES, stored):
        drawn = {name: system["batches"]["drawn"] for name, system in row["systems"].items()}
        cells = {name: f"{mean:.2f} ({p95:.2f})" for name, (mean, p95) in drawn.items()}
        means = {name: mean for name, (mean, _) in drawn.items()}
        rows.append([*_head(case, row), *_cells(row, cells, means)])
    return markdown(header, rows)


def worth(stored: Figures) -> str:
    """Shows the gain of leaving stage 0, of filling bubbles, and over the best system without filling."""
    header = ["model", "images, mean %", "stage0 / balanced-best", "balanced-best / optimus"]
    header += ["best other", "best other / optimus", "best other over batches", "its mean / optimus"]
    header += ["best other, TP overlapped", "its time / optimus"]
    rows = []
    for case, row in _stored(ALL_CASES, stored):
        fitting = {name: system for name, system in row["systems"].items() if system["fits"]}
        seconds = {name: system["step_s"] for name, system in fitting.items()}
        means = {name: system["batches"]["drawn"][0] for name, system in fitting.items()}
        overlapped = {name: system["overlapped_s"] for name, system in fitting.items()}
        cells = _head(case, row)
        cells += [_ratio(seconds, "stage0", "balanced-best"), _ratio(seconds, "balanced-best", "optimus")]
        for figure in (seconds, means, overlapped):
            best = min((name for name in figure if name != "optimus"), key=lambda name: figure[name])
            cells += [best, _ratio(figure, best, "optimus")]
        rows.append(cells)
    return markdown(header, rows)


def plans(stored: Figures) -> str:
    """Shows the chosen plans and their memory."""
    header = ["model", "images, mean %", "system", "what was chosen", "GB of the worst rank", "search s"]
    rows = []
    for case, row in _stored(ALL_CASES, stored):
        systems = {name: system for name, system in row["systems"].items() if system["fits"]}
        best = min((name for name in systems if name != "optimus"), key=lambda name: systems[name]["step_s"])
        for name in ("optimus", best):
            shown = [name, systems[name]["how"], f"{systems[name]['memory_gb']:.1f}"]
            rows.append([*_head(case, row), *shown, str(row[SECONDS]) if name == "optimus" else ""])
    return markdown(header, rows)


def missing(stored: Figures) -> str:
    """Names the cases that were not computed yet."""
    absent = [f"`{case.key}`" for case in ALL_CASES if case.key not in stored]
    return f"Not computed yet: {', '.join(absent)}." if absent else "All cases were computed."


def _stored(cases: Iterable[ModelCase], stored: Figures) -> Iterator[tuple[ModelCase, Figures]]:
    return ((case, stored[case.key]) for case in cases if case.key in stored)


def _head(case: ModelCase, row: Figures) -> list[str]:
    return [case.model, f"{100 * row['mean_share']:.1f}"]


def _cells(row: Figures, cells: dict[str, str], seconds: dict[str, float]) -> list[str]:
    """Formats one cell per system: the fastest that fits in bold, a star where one does not fit."""
    systems = row["systems"]
    fastest = min((name for name in seconds if systems[name]["fits"]), key=lambda name: seconds[name])
    shown = []
    for name in SYSTEMS:
        cell = cells.get(name, "no")
        fits = name not in systems or systems[name]["fits"]
        shown.append(f"**{cell}**" if name == fastest else cell + ("" if fits else " *"))
    return shown


def _ratio(seconds: dict[str, float], name: str, other: str) -> str:
    both = name in seconds and other in seconds
    return f"{seconds[name] / seconds[other]:.3f}" if both else "does not fit"


TABLES = {
    "steps": steps,
    "batches": batches,
    "worth": worth,
    "plans": plans,
    "missing": missing,
}


def fill(page: str, stored: Figures) -> str:
    """Returns the page with every table computed from stored figures."""
    return fill_tables(page, {name: make(stored) for name, make in TABLES.items()})


def read_stored() -> Figures:
    """Returns the stored figures by the key of their case."""
    return read_figures(STORED)


if __name__ == "__main__":
    compute_named(STORED, {case.key: partial(figures, case) for case in ALL_CASES}, sys.argv[1:])
    PAGE.write_text(fill(PAGE.read_text(), read_stored()))
