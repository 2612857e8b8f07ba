"""Every catalog model simulates on every catalog cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optimus.cost.assumptions import get_preset
from optimus.errors import DoesNotFit
from optimus.job.catalog_files import list_catalog_names, list_cluster_aliases
from optimus.job.job import Job
from optimus.job.read import find_job
from optimus.planner.compare import compare_systems
from optimus.planner.layouts import choose_smallest_context
from optimus.planner.systems.base import SimulatedSystem
from optimus.planner.systems.llm_only import LlmPipelines
from optimus.planner.systems.registry import load_system
from optimus.schedule.bubbles import CAUSES

pytestmark = pytest.mark.ci
QUICK = ("siglip-so400m-8b", "internvl3-78b")  # two of six run through every system in CI
PAIRS = [  # every model on one cluster in CI, those two on every one
    pytest.param(model, alias, marks=() if alias == "h100" or model in QUICK else pytest.mark.heavy)
    for model in list_catalog_names("models")
    for alias in sorted(list_cluster_aliases())
]


def short_step(model: str, cluster: str, *, chunks: int | None = None) -> Job:
    """Sixteen microbatches of one size: the default batch has up to 256, and takes as much longer."""
    job = find_job(model, f"{cluster}:512")
    layout = choose_smallest_context(job, get_preset("default"))[0].layout
    stated = f"llm=pp{layout.pp},tp{layout.tp},ep{layout.ep}" + (f",chunks{chunks}" if chunks else "")
    job = find_job(model, f"{cluster}:512", [stated])
    limits = replace(job.layout.limits, microbatch_sequences=(1,))
    workload = replace(job.workload, sequences_per_step=16 * layout.dp)
    return replace(job, workload=workload, layout=replace(job.layout, limits=limits))


def check(system: SimulatedSystem) -> None:
    assert 0 < system.mfu < 1
    assert system.memory.total > 0
    assert all(getattr(system.bubbles, cause) >= -1e-9 for cause in CAUSES)


@pytest.mark.parametrize(("model", "cluster"), PAIRS)
def test_every_model_simulates_on_every_cluster(model: str, cluster: str) -> None:
    """The systems that search least; all of them below."""
    context, _ = choose_smallest_context(short_step(model, cluster, chunks=1), get_preset("default"))
    pipelines = LlmPipelines(context)
    for name in ("stage0", "balanced", "fsdp"):
        try:
            check(load_system(name).simulate(pipelines))
        except DoesNotFit:
            assert name == "fsdp"  # fewer sequences than ranks


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=() if model in QUICK else pytest.mark.heavy)
        for model in list_catalog_names("models")
    ],
)
def test_every_model_runs_through_every_system(model: str) -> None:
    comparison = compare_systems(short_step(model, "h100"))
    assert {"llm-only", "stage0", "balanced", "balanced-best"} <= set(comparison.systems)
    for system in comparison.systems.values():
        check(system)
        if system.name not in ("fsdp", "separate-gpus"):  # their LLM has a layout of its own
            assert system.step_s >= comparison.floor_s * (1 - 1e-9), system.name
