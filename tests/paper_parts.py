"""Layers of the paper's models, priced at the paper's layout: what several tests look at."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.docs.validation_tables import layer_shape as layer_shape
from optimus.cost.assumptions import Assumptions, get_preset
from optimus.job.job import Job
from optimus.job.read import find_job

PAPER_JOBS = (
    *(f"paper/strong-{gpus}" for gpus in (1536, 2048, 3072)),
    *(f"paper/{letter}" for letter in "ABCD"),
    *(f"paper/dual-{pair}" for pair in ("11-5", "22-5", "22-11")),
)


def strong_3072() -> Job:
    return find_job("paper/strong-3072")


def unfused(name: str = "clean") -> Assumptions:
    """A preset with attention scores stored, as in Korthikanti et al."""
    return replace(get_preset(name), fused_attention=False)
