"""The figures in docs/questions.md are the ones the code computes today, and they hold together."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.docs.pages import DOCS, Figures
from benchmarks.docs.question_figures import (
    CAPACITIES,
    RATIOS,
    ROOMY_GB,
    SWEEP_SEQUENCE,
    TOKENS,
    QuestionCase,
    all_cases,
    gain,
    simpler,
    swept,
    triple,
)  # fmt: skip
from benchmarks.docs.question_pictures import PICTURES, REGIMES, regime
from benchmarks.docs.question_tables import PAGE, PARTS, TABLES, WORK, fill, frugal, read_stored

REFRESH = "run python -m benchmarks.docs.question_tables and read what changed"
REL, ABS = 1e-4, 2e-6
CASES = tuple(all_cases())
CHEAP = tuple(case for case in CASES if case.key == "memory ViT-6B + GPT-11B default")
GPU_GB = {"roomy": float(ROOMY_GB)}  # of a part; 80 elsewhere


def test_the_page_shows_what_is_stored() -> None:
    page = PAGE.read_text()
    assert fill(page, read_stored()) == page, REFRESH


@pytest.mark.parametrize("file", PICTURES)
def test_pictures_show_what_is_stored(file: str) -> None:
    drawn = PICTURES[file](read_stored())
    assert (DOCS / "images" / file).read_text() == drawn, REFRESH
    assert ElementTree.fromstring(drawn).find("{*}title") is not None
    assert f"images/{file}" in PAGE.read_text()


def test_what_is_stored_is_whole() -> None:
    assert list(read_stored()) == [case.key for case in CASES]


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_rectangular(name: str) -> None:
    rows = TABLES[name](read_stored()).splitlines()
    assert len(rows) > 2
    assert len({row.count("|") for row in rows}) == 1


def made_systems(value: Any) -> list[Figures]:
    """Every system among stored figures, at whatever depth."""
    if not isinstance(value, dict):
        return []
    own = [value] if "peak_gb" in value else []
    return own + [made for each in value.values() for made in made_systems(each)]


def test_what_fits_is_within_the_gpu() -> None:
    for case in CASES:
        made = made_systems(read_stored()[case.key])
        assert made or case.part == "bubbles"
        for system in made:
            room = GPU_GB.get(case.part, 80.0)
            assert system["fits"] == (system["peak_gb"] <= room), system["how"]
            assert sum(system["gb"].values()) <= system["peak_gb"] + 1e-3


def test_less_memory_is_never_exceeded() -> None:
    for case in CASES:
        if case.part == "capacity":
            found = read_stored()[case.key]
            for gigabytes in CAPACITIES:
                assert all(made["peak_gb"] <= gigabytes for made in found[str(gigabytes)].values())


def test_a_step_is_the_sum_of_its_parts() -> None:
    """Idle time by cause and compute by module, before and after; so the change of the step adds up too."""
    for case in CASES:
        if case.part == "bubbles":
            found = read_stored()[case.key]
            for when in ("before", "after"):
                seconds = found[when]
                parts = sum(seconds[part] for part in (*PARTS, *WORK))
                assert parts == pytest.approx(seconds["step_s"], rel=1e-9)
            assert found["before"]["encoders"] == 0 < found["after"]["encoders"]
            assert found["after"]["step_s"] >= found["bound_s"] - ABS


def test_regimes() -> None:
    """Two per cent decide, in both directions; of the simpler systems the fastest that fits counts."""

    def point(ours_s: float | None, **others: float) -> Figures:
        made = {name: {"step_s": step_s, "fits": step_s < 9} for name, step_s in others.items()}
        systems = made if ours_s is None else {**made, "optimus": {"step_s": ours_s, "fits": True}}
        return {"systems": systems}

    found = point(1.0, fsdp=1.1, **{"three-phase": 1.03})
    assert simpler(found)[0] == "three-phase"
    assert gain(found) == pytest.approx(0.03)
    steps = {1.03: REGIMES[0], 1.019: REGIMES[1], 0.99: REGIMES[1], 0.97: REGIMES[2]}
    for step_s, name in steps.items():
        assert regime(point(1.0, fsdp=step_s)) == name
    assert regime(point(None, fsdp=1.0)) == REGIMES[3]


def test_the_most_frugal_baseline_fits() -> None:
    small, large = {"peak_gb": 70.0, "fits": True}, {"peak_gb": 60.0, "fits": False}
    assert frugal({"optimus": {"peak_gb": 1.0, "fits": True}, "fsdp": small, "stage0": large}) == small


@pytest.mark.parametrize("ratio", RATIOS)
def test_swept_jobs_are_what_was_asked_for(ratio: float) -> None:
    for tokens in TOKENS:
        job = swept(ratio, tokens)
        (encoder,) = job.model.encoders
        assert encoder.parameters() / job.model.llm.parameters() == pytest.approx(ratio, rel=0.12)
        assert job.workload.encoder_load(encoder.name, encoder.projector.merge).tokens == tokens
        assert [sequence.tokens for sequence in job.workload.sequences] == [SWEEP_SEQUENCE]


def test_three_encoders_share_a_sequence() -> None:
    job = triple()
    (sequence,) = job.workload.sequences
    assert sequence.tokens == job.workload.sequence_tokens
    assert [sum(sequence.lengths(encoder.name)) for encoder in job.model.encoders] == [512] * 3


def compare(case: QuestionCase) -> None:
    recomputed, stored = flat(case.make()), flat(read_stored()[case.key])
    assert recomputed == {
        name: pytest.approx(value, rel=REL, abs=ABS) if isinstance(value, float) else value
        for name, value in stored.items()
    }, REFRESH


def flat(found: Figures, path: str = "") -> Figures:
    result: Figures = {}
    for name, value in found.items():
        result |= flat(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}": value}
    return result


@pytest.mark.ci("search")
@pytest.mark.parametrize("case", CHEAP, ids=lambda case: case.key)
def test_a_cheap_part_is_what_is_computed(case: QuestionCase) -> None:
    compare(case)


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [c for c in CASES if c not in CHEAP], ids=lambda case: case.key)
def test_all_of_it_is_what_is_computed(case: QuestionCase) -> None:
    compare(case)
