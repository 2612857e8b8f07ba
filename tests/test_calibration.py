"""A measured step calibrates everything by one number: today's system takes what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_profiles import made_profile
from test_batches import few_layers

from optimus.cli.comparison import build_comparison_json, format_comparison
from optimus.cost.measured_profile import ANALYTIC
from optimus.job.job import CurrentRun, Job
from optimus.job.layout import PartialLayout
from optimus.planner.compare import Calibration, compare_systems
from optimus.planner.planning import make_plan

SYSTEMS = ("today", "three-phase", "separate-gpus", "fsdp", "paper")


def job(measured_s: float | None = None) -> Job:
    today = CurrentRun(llm=PartialLayout(dp=4, pp=1, tp=2), measured_step_s=measured_s)
    return replace(few_layers(), today=today)


def test_every_second_of_every_system_carries_the_same_number() -> None:
    plain = compare_systems(job(), names=SYSTEMS)
    measured_s = 1.37 * plain.systems["today"].step_s
    found = compare_systems(job(measured_s), names=SYSTEMS)
    assert found.calibration is not None and found.calibration.scale == pytest.approx(1.37, rel=1e-12)
    assert found.systems["today"].step_s == pytest.approx(measured_s, rel=1e-9)
    for name, system in plain.systems.items():
        other = found.systems[name]
        assert other.how == system.how, name
        assert other.step_s == pytest.approx(1.37 * system.step_s, rel=1e-9), name
        assert other.schedule.duration_s == pytest.approx(1.37 * system.schedule.duration_s, abs=1e-11), name
        assert other.memory == system.memory, name
    assert found.floor_s == pytest.approx(1.37 * plain.floor_s, rel=1e-9)
    assert found.assumptions.launch_s == pytest.approx(1.37 * plain.assumptions.launch_s)


def test_today_calibrates_whether_or_not_it_is_compared() -> None:
    plain = compare_systems(job(), names=["today", "fsdp"]).systems
    found = compare_systems(job(2 * plain["today"].step_s), names=["fsdp"]).systems
    assert set(found) == {"fsdp"}
    assert found["fsdp"].step_s == pytest.approx(2 * plain["fsdp"].step_s, rel=1e-9)


def test_results_say_what_they_were_calibrated_on() -> None:
    plain = compare_systems(job(), names=["today"])
    assert plain.source == ANALYTIC and "calibration" not in str(build_comparison_json(plain)["cost_model"])
    assert "time_scale" not in plain.assumptions.describe()
    measured_s = plain.systems["today"].step_s / 0.94
    found = compare_systems(job(measured_s), names=["today"])
    text = "\n".join(format_comparison(found))
    assert f"analytic, calibrated on your measured {measured_s:.3g} s (was 6 % low before)" in text
    assert "uncalibrated" not in text and "measured step is 6% above the computed one" in text
    said = build_comparison_json(found)["cost_model"]
    assert isinstance(said, dict) and said["calibration"]["scale"] == pytest.approx(1 / 0.94)
    assert found.assumptions.describe()["time_scale"] == pytest.approx(1 / 0.94)


def test_the_words() -> None:
    found = Calibration(measured_s=17.9, modelled_s=16.826)
    assert found.describe(ANALYTIC) == "analytic, calibrated on your measured 17.9 s (was 6 % low before)"
    high = Calibration(measured_s=2.0, modelled_s=2.5)
    assert high.describe("profile a100") == (
        "profile a100, calibrated on your measured 2 s (was 25 % high before)"
    )


def test_a_profile_is_calibrated_by_the_same_rule() -> None:
    profile = made_profile(job())
    plain = compare_systems(job(), names=["today", "three-phase"], profile=profile)
    measured_s = 3 * plain.systems["today"].step_s
    found = compare_systems(job(measured_s), names=["today", "three-phase"], profile=profile)
    for name, system in plain.systems.items():
        # Seconds of a plan are whole picoseconds: two kernels that would end together may not.
        assert found.systems[name].step_s == pytest.approx(3 * system.step_s, rel=1e-3), name
    assert found.source.startswith("profile ") and "calibrated on your measured" in found.source


@pytest.mark.ci
def test_a_calibrated_plan_holds_and_says_its_scale() -> None:
    plain = make_plan(job(), systems=["today"])
    planned = make_plan(job(1.25 * plain.systems["today"].step_s), systems=["today"])
    assert planned.report.ok
    assert planned.systems["today"].step_s == pytest.approx(1.25 * plain.systems["today"].step_s, rel=1e-9)
    # Seconds of a plan are whole picoseconds: two kernels that would end together may not.
    assert planned.step_s == pytest.approx(1.25 * plain.step_s, rel=1e-3)
    assert planned.plan.notes["preset"]["time_scale"] == pytest.approx(1.25)
    assert planned.system.how == plain.system.how


def test_a_system_that_cannot_be_calibrates_nothing() -> None:
    odd = replace(few_layers(), today=CurrentRun(llm=PartialLayout(pp=3, tp=2), measured_step_s=1.0))
    found = compare_systems(odd, names=["fsdp"])
    assert found.calibration is None and found.source == ANALYTIC
