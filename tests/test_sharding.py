"""Masters in parts on replicas: the same training as one process, in float64 and in bf16."""

from __future__ import annotations

from typing import Any

import pytest
from engine_cases import HALF, SHARDED, Case
from sharding_bugs import SHARDING_BUGS
from test_equality import caught, check, check_cases
from worker_lines import run_worker

QUICK = (
    "sharded: two by two",
    "sharded: zero-bubble, tied, dropout, two encoders",
    "sharded: eight: recompute, frozen trunk",
)
MOST_ERROR = 1.1  # of gradients in bf16, over that of one process in bf16 with wide gradients
MOST_MOVED = 0.08  # of what three steps change, where masters and gradients are wide
LOG = 1e-12


def check_half(found: dict[str, Any]) -> None:
    assert "error" not in found, f"{found['name']}: {found['error']}"
    assert not found["narrow"], found
    assert found["ours"] <= MOST_ERROR * found["one process"], found
    assert found["moved"] <= MOST_MOVED, found


@pytest.mark.ci("engine")
@pytest.mark.timeout(240)
def test_a_few_sharded_plans_compute_what_one_process_does() -> None:
    assert set(check_cases(3, *QUICK, timeout_s=230)) == set(QUICK)


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_all_sharded_plans_compute_what_one_process_does_also_after_twenty_steps() -> None:
    assert len(check_cases(20, "sharded", timeout_s=1700)) == len(SHARDED) >= 16


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(HALF[:1], id="one", marks=pytest.mark.ci("engine")),
        pytest.param(HALF, id="all", marks=pytest.mark.heavy),
    ],
)
def test_gradients_are_wide_and_as_good_as_those_of_one_process_in_bf16(cases: list[Case]) -> None:
    names = [case.name for case in cases]
    lines = run_worker("engine_worker.py", "bf16", *names, timeout_s=230)
    assert [line["name"] for line in lines] == names
    for line in lines:
        check_half(line)


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_sharded_and_whole_runs_have_one_loss_log() -> None:
    (line,) = run_worker("engine_worker.py", "logs", "sharded: two by two interleaved", timeout_s=500)
    assert len(line["sharded"]) == 50
    for ours, whole in zip(line["sharded"], line["whole"], strict=True):
        assert ours == pytest.approx(whole, rel=LOG)


def is_noticed(found: dict[str, Any]) -> bool:
    """Whether one of the comparisons above would fail."""
    return caught(found, check_half if "ours" in found else check)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_every_planted_bug_of_sharding_is_noticed() -> None:
    lines = run_worker("engine_worker.py", "sharding-bugs", timeout_s=850)
    missed = [line["name"] for line in lines if not is_noticed(line)]
    assert len(lines) == len(SHARDING_BUGS) >= 25
    assert not missed


@pytest.mark.ci("engine")
@pytest.mark.timeout(120)
def test_a_planted_bug_of_sharding_is_noticed() -> None:
    names = ["parameters are gathered in the first step only", "a tied parameter is counted twice"]
    lines = run_worker("engine_worker.py", "sharding-bugs", *names, timeout_s=100)
    assert [line["name"] for line in lines] == names and all(map(is_noticed, lines))
