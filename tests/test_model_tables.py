"""The figures in docs/models.md are the ones the code computes today, and none of them is impossible."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.docs.model_tables import (
    ALL_CASES,
    BATCHES,
    MEDIANS,
    MODELS,
    OTHERS,
    PAGE,
    SECONDS,
    SEQUENCES,
    TABLES,
    ModelCase,
    figures,
    fill,
    job_of,
    missing,
    read_stored,
)  # fmt: skip
from benchmarks.docs.pages import Figures
from optimus.job.read import add_stated_layouts, load_job
from optimus.planner.compare import compare_systems

REFRESH = "run python -m benchmarks.docs.model_tables and read what changed"
REL, ABS = 1e-4, 2e-6  # figures are stored to a millionth
POINTS = 0.02  # by which a row's mean share of images may differ from the share of its median
SEARCHED = 0.01  # share of a step by which a search may be luckier with more images than with fewer

by_stored_case = pytest.mark.parametrize(
    "case", [case for case in ALL_CASES if case.key in read_stored()], ids=lambda case: case.key
)


def test_the_page_shows_what_is_stored() -> None:
    page = PAGE.read_text()
    assert fill(page, read_stored()) == page, REFRESH


@pytest.mark.parametrize("name", [name for name in TABLES if name != "missing"])
def test_tables_are_rectangular(name: str) -> None:
    rows = TABLES[name](read_stored()).splitlines()
    assert len(rows) >= 2  # of a table without a case only its head
    assert len({row.count("|") for row in rows}) == 1


def test_cases_are_stored_in_their_order_and_the_page_names_the_others() -> None:
    stored = list(read_stored())
    assert stored == [case.key for case in ALL_CASES if case.key in stored] != []
    absent = [case.key for case in ALL_CASES if case.key not in stored]
    assert re.findall(r"`([^`]+)`", missing(read_stored())) == absent


@by_stored_case
def test_no_figure_is_impossible(case: ModelCase) -> None:
    """fsdp has no pipeline: the floor, the best pipeline of the LLM alone, does not bind it."""
    found = read_stored()[case.key]
    assert found["proved"]
    assert {*found["systems"], *found["missing"]} == {"optimus", *OTHERS}
    for name, made in found["systems"].items():
        assert made["fits"] == (made["memory_gb"] <= found["capacity_gb"]), name
        assert made["step_s"] >= found["floor"]["s"] or name == "fsdp", name
        for mean_s, p95_s in made["batches"].values():
            assert mean_s <= p95_s, name
    assert found["systems"]["optimus"]["fits"]
    assert found["systems"]["optimus"]["step_s"] >= found["bounds"]["bound_s"] * (1 - ABS)


@pytest.mark.parametrize("model", MODELS)
def test_more_images_never_make_a_step_shorter(model: str) -> None:
    stored = read_stored()
    for name in ("optimus", *OTHERS):
        keys = [ModelCase(model=model, share=share).key for share in sorted(MEDIANS)]
        rows = [stored[key]["systems"].get(name) for key in keys if key in stored]
        for fewer, more in pairwise([row for row in rows if row is not None and row["fits"]]):
            assert fewer["step_s"] <= (1 + SEARCHED) * more["step_s"], name


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.key)
def test_the_mean_share_of_images_is_what_the_row_says(case: ModelCase) -> None:
    workload = job_of(case).workload
    encoder_tokens = sum(sum(map(sum, (n for _, n in s.items))) for s in workload.sequences)
    share = encoder_tokens / sum(sequence.tokens for sequence in workload.sequences)
    assert share == pytest.approx(case.share / 100, abs=POINTS)
    if case.key in read_stored():
        assert read_stored()[case.key]["mean_share"] == pytest.approx(share, abs=ABS)


def test_the_job_file_on_the_page_is_a_row_of_the_table(tmp_path: Path) -> None:
    shown = re.search(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    path = tmp_path / "job.yaml"
    path.write_text(shown[1])
    written, computed = load_job(path), job_of(ModelCase(model="internvl3-78b", share=40))
    assert (written.model, written.cluster, written.workload) == (
        computed.model,
        computed.cluster,
        computed.workload,
    )
    assert computed.workload.sequences_per_step == SEQUENCES and BATCHES >= 100


@pytest.mark.heavy
def test_fewer_images_still_fit() -> None:
    """Weight gradients are deferred further than with 40 %, and each keeps what was recomputed."""
    job = job_of(ModelCase(model="qwen2.5-vl-72b", share=20))
    stated = add_stated_layouts(job.layout, ["llm=dp32,pp4,tp4,chunks7"], job.model)
    found = compare_systems(replace(job, layout=stated), names=["optimus"])
    assert found.missing == {} and found.systems["optimus"].fits


@pytest.mark.heavy
@pytest.mark.timeout(900)
@by_stored_case
def test_all_of_it_is_what_is_computed(case: ModelCase) -> None:
    recomputed, stored = _flat(figures(case)), _flat(read_stored()[case.key])
    assert recomputed == {
        name: pytest.approx(value, rel=REL, abs=ABS) if isinstance(value, float) else value
        for name, value in stored.items()
    }, REFRESH


def _flat(found: Figures, path: str = "") -> Figures:
    """Every figure by its path, without the seconds of a search; pairs become two."""
    result: Figures = {}
    for name, value in found.items():
        if isinstance(value, list):
            value = {str(place): each for place, each in enumerate(value)}
        if isinstance(value, dict):
            result |= _flat(value, f"{path}{name}.")
        elif name != SECONDS:
            result[f"{path}{name}"] = value
    return result
