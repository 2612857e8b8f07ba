"""The figures in docs/paper.md are the ones the code computes today, and the paper's are in their place."""

from __future__ import annotations

import pytest

from benchmarks.docs.pages import Figures
from benchmarks.docs.paper_tables import (
    PAGE,
    SECONDS,
    TABLE_5,
    TABLE_7,
    TABLES,
    PaperCase,
    all_cases,
    figures,
    fill,
    read_stored,
    without_seconds,
)  # fmt: skip

CHEAP = tuple(case for case in all_cases() if case.job == "small-a100")
REFRESH = "run python -m benchmarks.docs.paper_tables and read what changed"
REL, ABS = 1e-4, 2e-6  # figures are stored to a millionth


def test_the_page_shows_what_is_stored() -> None:
    page = PAGE.read_text()
    assert fill(page, read_stored()) == page, REFRESH


def test_what_is_stored_is_whole() -> None:
    stored = read_stored()
    assert list(stored) == [case.key for case in all_cases()]
    for case in all_cases():
        found = stored[case.key]
        assert ("best_estimate" in found) == case.both
        assert isinstance(found[SECONDS], int)
        for choice in (found["chosen"], found.get("best_estimate", found["chosen"])):
            assert 0 <= choice["coarse"] <= choice["fine"] <= 1 + 1e-6
            assert choice["strict"] <= 1
            assert choice["llm_s"] <= choice["estimate_s"]
            assert choice["bare_s"] <= choice["step_s"]


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_rectangular(name: str) -> None:
    rows = TABLES[name](read_stored()).splitlines()
    assert len(rows) > 2
    assert len({row.count("|") for row in rows}) == 1


def test_the_papers_speedups_follow_from_its_seconds() -> None:
    """The abstract's 21.3 % is 1.213x the speed at 3,072 GPUs."""
    megatron, _, optimus, _ = TABLE_5[3072]
    assert megatron / optimus == pytest.approx(1.213, abs=1e-3)
    assert all(coarse < fine for coarse, fine, _ in TABLE_7.values())


def compare(case: PaperCase) -> None:
    recomputed, stored = without_seconds(figures(case)), without_seconds(read_stored()[case.key])
    assert flat(recomputed) == {
        name: pytest.approx(value, rel=REL, abs=ABS) if isinstance(value, float) else value
        for name, value in flat(stored).items()
    }, REFRESH


def flat(found: Figures, path: str = "") -> Figures:
    result: Figures = {}
    for name, value in found.items():
        result |= flat(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}": value}
    return result


@pytest.mark.ci("plan file")
@pytest.mark.parametrize("case", CHEAP, ids=lambda case: case.key)
def test_a_cheap_part_is_what_is_computed(case: PaperCase) -> None:
    compare(case)


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [c for c in all_cases() if c not in CHEAP], ids=lambda case: case.key)
def test_all_of_it_is_what_is_computed(case: PaperCase) -> None:
    compare(case)
