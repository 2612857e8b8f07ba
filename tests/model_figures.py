"""Plans models of today under several loads of images: the figures behind docs/models.md."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from optimus.job.job import Job
from optimus.job.read import find_job
from optimus.job.workload import TokenPercentiles, Workload, sequences_from_percentiles
from optimus.planner.compare import Comparison
from optimus.planner.planning import Planned, make_plan
from optimus.planner.systems.registry import System
from optimus.sensitivity.batch_steps import play_batches
from optimus.sensitivity.drawn_batches import DEALINGS

SECONDS = "search_s"  # CPU of a search: shown, never compared
Figures = dict[str, Any]

ON = "h100:512"
PRESET = "default"
BATCHES = 100
SEQUENCE_TOKENS, SEQUENCES = 8192, 1024
SPREAD, LONG_SPREAD, TEXT_ONLY = 1.5, 3.0, 0.12  # p95 over p50, and sequences without any image
LARGEST_IMAGE = 1024  # LLM tokens
MEDIANS = {20: 1638, 40: 3277, 85: 6963}  # LLM tokens of images in a sequence, by their share in per cent
LONG_MEDIAN = 2600
MODELS = ("qwen2.5-vl-72b", "internvl3-78b", "qwen3-vl-235b", "siglip-so400m-8b")
LONG_TAILED = ("qwen2.5-vl-72b", "internvl3-78b")
OTHERS = ("balanced-best", "three-phase", "separate-gpus", "fsdp", "stage0")
STATED = {"qwen3-vl-235b": "pp16,ep8"}  # of the LLM's layout, where an open search takes minutes


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and one load of images."""

    model: str
    share: int | None  # per cent of a sequence that the median image tokens are; none: the long tail

    @property
    def key(self) -> str:
        return f"{self.model} {'long tail' if self.share is None else f'{self.share} %'}"

    @property
    def percentiles(self) -> TokenPercentiles:
        """As a job file states them: p95 is never above the length of a sequence."""
        if self.share is None:
            p50, spread, text_only = LONG_MEDIAN, LONG_SPREAD, TEXT_ONLY
        else:
            p50, spread, text_only = MEDIANS[self.share], SPREAD, 0.0
        return TokenPercentiles(
            p50=p50,
            p95=min(spread * p50, SEQUENCE_TOKENS),
            max=SEQUENCE_TOKENS,
            text_only_share=text_only,
            item=LARGEST_IMAGE,
        )


TABLE_CASES = tuple(Case(model=model, share=share) for model in MODELS for share in MEDIANS)
TAIL_CASES = tuple(Case(model=model, share=None) for model in LONG_TAILED)
ALL_CASES = (*TABLE_CASES, *TAIL_CASES)


def job_of(case: Case) -> Job:
    """The job of a case, with the LLM's layout stated where `STATED` has one."""
    stated = STATED.get(case.model)
    job = find_job(case.model, on=ON, layouts=[f"llm={stated}"] if stated else [])
    by_encoder = {encoder.name: case.percentiles for encoder in job.model.encoders}
    workload = Workload(
        sequence_tokens=SEQUENCE_TOKENS,
        sequences_per_step=SEQUENCES,
        sequences=sequences_from_percentiles(SEQUENCE_TOKENS, by_encoder),
    )
    return replace(job, workload=workload)


def figures(case: Case, names: Iterable[str] = OTHERS) -> Figures:
    """All that the tables show of one case."""
    job, begin = job_of(case), time.process_time()
    planned = make_plan(job, assumptions=PRESET, systems=names)
    seconds = time.process_time() - begin
    comparison = planned.comparison
    dealings = tuple(DEALINGS) if case.share is None else ("drawn",)
    return {
        "mean_share": _rounded(sum(job.workload.share_of_tokens(each.name) for each in job.model.encoders)),
        "floor": {"s": _rounded(planned.floor_s), "how": comparison.systems["llm-only"].how},
        "bounds": _bounds(planned),
        "capacity_gb": _rounded(comparison.context.capacity_bytes / 1e9),
        "proved": planned.report.ok,
        "systems": {
            name: {**_system(system), "batches": _batches(comparison, name, dealings)}
            for name, system in comparison.systems.items()
            if name != "llm-only"
        },
        "missing": comparison.missing,
        SECONDS: round(seconds),
    }


def _bounds(planned: Planned) -> Figures:
    bounds = planned.bounds
    return {
        "bound_s": _rounded(bounds.bound_s),
        "binds": bounds.binds,
        "encoder_s": _rounded(bounds.encoder_s),
        "hidden_strict": _rounded(planned.hidden_strict),
    }


def _system(system: System) -> Figures:
    return {
        "step_s": _rounded(system.step_s),
        "overlapped_s": _rounded(system.overlapped_step_s),
        "memory_gb": _rounded(system.memory.total / 1e9),
        "fits": system.fits,
        "how": system.how,
    }


def _batches(comparison: Comparison, name: str, dealings: Iterable[str]) -> Figures:
    """Mean and p95 by dealing; each system is asked alone, so that none is left out for its size."""
    found = {}
    for dealing in dealings:
        steps = play_batches(comparison, [name], dealing=dealing, count=BATCHES)
        if name in steps:
            found[dealing] = [_rounded(steps[name].mean_s), _rounded(steps[name].p95_s)]
    return found


def _rounded(value: float) -> float:
    return round(value, 6)
