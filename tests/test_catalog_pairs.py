"""Every catalog model runs through every system on every catalog cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optimus.job import catalog
from optimus.job.read import find_job
from optimus.schedule.bubbles import CAUSES
from optimus.search.compare import compare_systems

PAIRS = [(model, alias) for model in catalog.names("models") for alias in sorted(catalog.aliases())]


@pytest.mark.ci
@pytest.mark.parametrize(("model", "cluster"), PAIRS)
def test_every_model_simulates_on_every_cluster(model: str, cluster: str) -> None:
    job = find_job(model, f"{cluster}:512")
    workload = replace(job.workload, sequences_per_step=512)  # the default's half, to be quick
    comparison = compare_systems(replace(job, workload=workload))
    assert {"llm-only", "stage0", "balanced", "balanced-best", "fsdp"} <= set(comparison.systems)
    for system in comparison.systems.values():
        if system.name not in ("fsdp", "separate-gpus"):  # their LLM has a layout of its own
            assert system.step_s >= comparison.floor_s * (1 - 1e-9), system.name
        assert 0 < system.mfu < 1
        assert system.memory.total > 0 and system.fits
        assert all(getattr(system.bubbles, cause) >= -1e-9 for cause in CAUSES)
