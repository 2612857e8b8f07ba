"""The strongest baseline against the proven optimum over layer split and op order, on small instances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("ortools")

from exact_pipeline import ExactModel, Optimum, bare_setting, draw

from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.planner.systems.pipeline_search import search_pipelines
from optimus.schedule.simulator import simulate_schedule

pytestmark = pytest.mark.ci

SIZES = (  # stages, chunks, microbatches
    (2, 1, 4),
    (2, 1, 6),
    (2, 2, 2),
    (2, 2, 3),
    (2, 2, 6),
    (3, 1, 2),
    (3, 1, 4),
    (3, 1, 6),
    (3, 2, 2),
    (3, 2, 3),
    (3, 2, 4),
    (4, 1, 3),
    (4, 1, 5),
    (4, 1, 6),
    (4, 2, 2),
    (4, 2, 3),
    (4, 2, 4),
)
TOLERANCE = 1.02
Row = tuple[tuple[int, int, int], int, int, float]  # size, layers, optimum, ours over it


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    """Gaps of all instances; shown by `pytest -s`."""
    rows: list[Row] = []
    yield rows
    lines = [
        f"p{p} v{v} m{m}  {layers:2} layers  optimum {optimum:4}  ours +{ratio - 1:.2%}"
        for (p, v, m), layers, optimum, ratio in rows
    ]
    mean = sum(ratio for *_, ratio in rows) / len(rows) - 1
    print("", *lines, f"mean +{mean:.2%}", sep="\n")  # noqa: T201


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.heavy if seed % 3 else ()) for seed in range(len(SIZES))]
)
def test_balanced_best_is_near_the_optimum(seed: int, table: list[Row]) -> None:
    stages, chunks, microbatches = SIZES[seed]
    instance = draw(seed, stages=stages, chunks=chunks, microbatches=microbatches)
    optimum = ExactModel(instance).solve(seconds=60, workers=2)
    assert optimum.proven
    context = bare_setting(instance)
    ours = search_pipelines(context, context.job.model.modules, chunk_counts={chunks})[0]
    assert ours.layout.chunks == chunks and ours.microbatches == microbatches

    assert step_s(replaced_by(optimum, ours)) == pytest.approx(optimum.makespan, rel=1e-12)
    ratio = step_s(ours) / optimum.makespan
    table.append((SIZES[seed], len(instance.layers), optimum.makespan, ratio))
    assert 1 - 1e-9 <= ratio <= TOLERANCE


def replaced_by(optimum: Optimum, pipeline: PipelineCandidate) -> PipelineCandidate:
    """CP-SAT's cut and order, for our timeline to play."""
    return replace(pipeline, cut=optimum.cut, order_name="exact", explicit_order=optimum.order)


def step_s(pipeline: PipelineCandidate) -> float:
    """As a system is played: kernel by kernel."""
    return simulate_schedule(pipeline.filled.lowered.schedule).step_s
