"""Computes what dealing is worth to every system, stores the figures, and writes tables of docs/models.md.

With arguments (`"strong-3072, 20 % text-only"`), only cases whose key starts with one are computed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

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
from optimus.job.layout import PartialLayout
from optimus.job.read import find_job
from optimus.job.workload import TokenPercentiles, build_sequences_from_percentiles
from optimus.planner.planning import PlanningResult, make_plan
from optimus.sensitivity.batch_steps import BEST, simulate_batches

PAGE = DOCS / "models.md"
STORED = GOLDEN / "dealing_figures.json"
BATCHES = 20
OTHERS = ("balanced-best", "three-phase", "separate-gpus", "fsdp", "stage0")
DOUBLED = (2, 4, 8)  # pieces, as long as they were only doubled
SPREAD = 3.0  # p95 over p50


@dataclass(frozen=True, kw_only=True)
class TailCase:
    """A job whose sequences have images with a long tail."""

    job: str
    on: str | None
    p50: int  # LLM tokens of images in a sequence,
    item: int  # and of an image at most
    text_only: float
    sequences: int

    @property
    def key(self) -> str:
        return f"{self.job.removeprefix('paper/')}, {100 * self.text_only:.0f} % text-only"


CASES = (
    TailCase(job="internvl3-78b", on="h100:512", p50=2600, item=1024, text_only=0.12, sequences=1024),
    TailCase(job="qwen2.5-vl-72b", on="h100:512", p50=2600, item=1024, text_only=0.12, sequences=1024),
    TailCase(job="paper/strong-3072", on=None, p50=400, item=256, text_only=0.0, sequences=1536),
    TailCase(job="paper/strong-3072", on=None, p50=400, item=256, text_only=0.2, sequences=1536),
)


def job_of(case: TailCase) -> Job:
    """Returns the job of a case."""
    job = find_job(case.job, on=case.on)
    tokens = job.workload.sequence_tokens
    percentiles = TokenPercentiles(
        p50=case.p50,
        p95=min(SPREAD * case.p50, tokens),
        max=tokens,
        text_only_share=case.text_only,
        item=case.item,
    )
    sequences = build_sequences_from_percentiles(tokens, {e.name: percentiles for e in job.model.encoders})
    workload = replace(job.workload, sequences=sequences, sequences_per_step=case.sequences)
    return replace(job, workload=workload)


def figures(case: TailCase) -> Figures:
    """Returns all figures of one case."""
    job = job_of(case)
    planned = make_plan(job, systems=OTHERS)
    comparison = planned.comparison
    systems = {}
    for name, system in comparison.systems.items():
        if name != "llm-only":
            drawn = simulate_batches(comparison, [name], count=BATCHES)[name]
            best = simulate_batches(comparison, [name], dealing=BEST, count=BATCHES)[name]
            systems[name] = {
                "step_s": rounded(system.step_s),
                "fits": system.fits,
                "how": system.how,
                "drawn_s": rounded(drawn.mean_s),
                "dealt_s": rounded(best.mean_s),
                "dealt_p95_s": rounded(best.p95_s),
                "dealing": best.dealing,
                "exchange_ms": rounded(1e3 * system.candidate.batch_assignment().exchange_s),
            }
    return {
        "floor_s": rounded(planned.floor_s),
        "mean_share": rounded(sum(job.workload.share_of_tokens(each.name) for each in job.model.encoders)),
        "doubled_s": rounded(_doubled_s(job, planned)),
        "systems": systems,
        "missing": comparison.missing,
    }


def _doubled_s(job: Job, planned: PlanningResult) -> float:
    """Returns the step of a plan at the same layout of the LLM with pieces that are only doubled."""
    llm = planned.plan.modules["llm"].layout
    stated = {**job.layout.modules, "llm": PartialLayout(pp=llm.pp, tp=llm.tp, cp=llm.cp, ep=llm.ep)}
    with patch("optimus.planner.systems.colocation_search.PIECES_PER_BLOCK", DOUBLED):
        return make_plan(replace(job, layout=replace(job.layout, modules=stated)), systems=()).step_s


def dealt(stored: Figures) -> str:
    """Shows every system at the mean, over batches as drawn, and over the same with its best dealing."""
    header = [
        "job",
        "system",
        "mean s",
        "as drawn s",
        "best dealing",
        "dealt s (p95)",
        "dealt / mean",
        "/ optimus",
    ]
    rows = []
    for key, row in stored.items():
        ours = row["systems"]["optimus"]["dealt_s"]
        for name in ("optimus", *OTHERS):
            if name in row["systems"]:
                s = row["systems"][name]
                seconds = f"{s['dealt_s']:.2f} ({s['dealt_p95_s']:.2f})"
                ratios = [f"{s['dealt_s'] / s['step_s']:.3f}", f"{s['dealt_s'] / ours:.3f}"]
                mean = f"{s['step_s']:.2f}" + ("" if s["fits"] else " *")
                rows.append([key, name, mean, f"{s['drawn_s']:.2f}", s["dealing"], seconds, *ratios])
    return markdown(header, rows)


def pieces(stored: Figures) -> str:
    """Shows a plan's step over the floor, with pieces doubled and searched."""
    header = ["job", "images, mean %", "floor s", "pieces doubled", "pieces searched", "dealt", "chosen"]
    rows = []
    for key, row in stored.items():
        ours, floor = row["systems"]["optimus"], row["floor_s"]
        steps = row["doubled_s"], ours["step_s"], ours["dealt_s"]
        cells = [f"{step:.2f} ({step / floor:.3f})" for step in steps]
        rows.append([key, f"{100 * row['mean_share']:.1f}", f"{floor:.2f}", *cells, ours["how"]])
    return markdown(header, rows)


def fill(page: str, stored: Figures) -> str:
    """Returns the page with both tables computed from stored figures."""
    return fill_tables(page, {"dealt": dealt(stored), "pieces": pieces(stored)})


def read_stored() -> Figures:
    """Returns the stored figures by the key of their case."""
    return read_figures(STORED)


if __name__ == "__main__":
    compute_named(STORED, {case.key: partial(figures, case) for case in CASES}, sys.argv[1:])
    PAGE.write_text(fill(PAGE.read_text(), read_stored()))
