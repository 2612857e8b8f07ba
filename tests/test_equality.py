"""What a plan computes is what one process computes: loss, every gradient, parameters after training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engine_bugs import BUGS
from engine_cases import CASES, CURVES, DEALT, SIXTEEN, SYSTEMS
from equality_figures import list_cases
from sharding_bugs import SHARDING_BUGS
from tensor_parallel_bugs import TP_BUGS
from worker_lines import run_worker

LOSS, GRADIENT, LEARNED = 1e-12, 1e-12, 1e-9
CURVE = 1e-10  # of losses over 50 steps of AdamW
QUICK = (
    "interleaved",
    "zero-bubble",
    "three encoders",
    "frozen trunk, trained projector",
    "pieces",
    "zero-bubble, tied, dropout, two encoders",
    "eight: pp 2 interleaved, three encoders",
)


def check(found: dict[str, Any]) -> None:
    assert "error" not in found, f"{found['name']}: {found['error']}"
    assert found["loss"] <= LOSS, found
    assert found["gradients"] <= GRADIENT, found
    assert found["parameters"] <= LEARNED, found


def check_cases(steps: int, *names: str, timeout_s: float) -> list[str]:
    """Cases compared with one process, each as it should be; their names."""
    lines = run_worker("engine_worker.py", str(steps), *names, timeout_s=timeout_s)
    for line in lines:
        check(line)
    return [line["name"] for line in lines]


@pytest.mark.ci("engine")
@pytest.mark.timeout(240)
def test_a_few_plans_compute_what_one_process_does() -> None:
    assert set(check_cases(3, *QUICK, timeout_s=230)) == set(QUICK)


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_all_plans_compute_what_one_process_does_also_after_twenty_steps() -> None:
    assert len(check_cases(20, timeout_s=1700)) == len(CASES) >= 24


@pytest.mark.ci("engine")
@pytest.mark.timeout(240)
def test_plans_of_other_systems_compute_what_one_process_does() -> None:
    names = (
        "stage0: interleaved, two encoders",
        "balanced: four stages, three encoders",
        "balanced-best: four stages, two encoders",
        "three-phase: tp 2, three microbatches",
        "fsdp: four ranks, frozen trunk",
        "fsdp: four: tp 2 x dp 2",
    )
    assert set(check_cases(2, *names, timeout_s=230)) == set(names)


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_all_plans_of_other_systems_compute_what_one_process_does() -> None:
    assert len(check_cases(20, "systems", timeout_s=1700)) == len(SYSTEMS) >= 30


@pytest.mark.ci("engine")
@pytest.mark.timeout(240)
def test_a_plan_on_sixteen_ranks_computes_what_one_process_does() -> None:
    name = "optimus: sixteen: cp 2 x tp 2 x pp 2 x dp 2, dealt"
    assert check_cases(2, name, timeout_s=230) == [name]


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_plans_of_all_systems_on_sixteen_ranks_compute_what_one_process_does() -> None:
    assert len(check_cases(20, "sixteen", timeout_s=1700)) == len(SIXTEEN) >= 13


def test_the_printed_table_has_every_system_that_the_engine_runs_on_4_to_16_ranks() -> None:
    cases = list_cases()
    assert len(cases) >= 24 and {case.ranks for case in cases} == {4, 8, 16}
    runs = {"optimus", "paper", "stage0", "balanced", "balanced-best", "three-phase", "fsdp"}
    for chosen in (cases, SIXTEEN):
        assert {case.system for case in chosen} == runs
        assert any(case.cp > 1 for case in chosen)


@pytest.mark.ci("engine")
@pytest.mark.timeout(320)
def test_the_same_plan_gives_the_same_bits() -> None:
    twice = ["two by two interleaved"] * 2
    first, second = run_worker("engine_worker.py", "2", *twice, timeout_s=300)
    assert first["digests"] == second["digests"]


def caught(found: dict[str, Any], check: Callable[[dict[str, Any]], None] = check) -> bool:
    """Whether the comparison would fail, by what was planted and not by how."""
    error = found.get("error", "")
    assert "_bugs.py" not in error and "mock.py" not in error, f"not planted: {found['name']}\n{error}"
    try:
        check(found)
    except AssertionError:
        return True
    return False


def test_every_bug_finds_what_it_changes() -> None:
    """What was renamed or moved since a bug was written."""
    for bugs in (BUGS, SHARDING_BUGS, TP_BUGS):
        for _, plant in bugs.values():
            with plant():
                pass


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_every_planted_bug_is_noticed() -> None:
    lines = run_worker("engine_worker.py", "bugs", timeout_s=850)
    missed = [line["name"] for line in lines if not caught(line)]
    assert len(lines) == len(BUGS) >= 25
    assert not missed


@pytest.mark.ci("engine")
@pytest.mark.timeout(120)
def test_a_planted_bug_is_noticed() -> None:
    names = ["the seam's gradient is lost", "averaged twice"]
    lines = run_worker("engine_worker.py", "bugs", *names, timeout_s=100)
    assert [line["name"] for line in lines] == names and all(map(caught, lines))


# ---------------------------------------------------------------------------- images dealt over replicas

QUICK_DEALT = (
    "dealt: four, in pairs",
    "dealt: two by two interleaved, two encoders",
    "dealt: eight: pp 2 x tp 2 x dp 2, three encoders",
)


def check_dealt(steps: int, *names: str, timeout_s: float) -> int:
    """Cases compared with one process, in which images moved between replicas and samples between steps."""
    lines = run_worker("engine_worker.py", str(steps), *names, timeout_s=timeout_s)
    for line in lines:
        check(line)
    assert all(line["moved"] for line in lines)
    assert sum(line["carried"] for line in lines) > 0
    return len(lines)


@pytest.mark.ci("engine")
@pytest.mark.timeout(240)
def test_images_dealt_over_replicas_change_no_gradient() -> None:
    assert check_dealt(3, *QUICK_DEALT, timeout_s=230) == len(QUICK_DEALT)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_images_dealt_over_replicas_change_no_gradient_on_4_8_and_16_ranks() -> None:
    assert check_dealt(10, "dealt", timeout_s=850) == len(DEALT) >= 16


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_losses_agree_under_four_plans_and_three_dealings() -> None:
    lines = run_worker("engine_worker.py", "curves", "curves", timeout_s=1700)
    assert len(lines) == len(CURVES) == 12 and all(line["carried"] == lines[0]["carried"] for line in lines)
    expected = lines[0]["one process"]
    assert len(expected) == 50 and expected[-1] < expected[0] and lines[0]["carried"]
    for line in lines:
        for ours, theirs in zip(line["losses"], expected, strict=True):
            assert abs(ours - theirs) <= CURVE * abs(theirs), line["name"]
