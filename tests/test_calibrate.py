"""Factors fitted to measured steps: found where they are known, tested on each other, used as a preset."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from optimus.cli import run
from optimus.cli.flags import OK, USER_ERROR
from optimus.cost.assumptions import get_preset
from optimus.job.job import Job
from optimus.job.measured_runs import OwnStep, load_own_steps
from optimus.job.read import find_job
from optimus.sensitivity.accuracy import find_recipe
from optimus.sensitivity.calibrate import (
    FACTORS,
    STEP_DEVIATION,
    calibrate_stack,
    fit_factors,
    with_factors,
)

STEPS = (
    OwnStep(tp=2, microbatch_sequences=1, recompute="full", step_s=1.0),
    OwnStep(tp=8, microbatch_sequences=1, recompute="full", step_s=1.0),
    OwnStep(placement="fsdp", tp=1, microbatch_sequences=1, recompute="full", step_s=1.0),
    OwnStep(tp=4, pp=2, microbatch_sequences=2, recompute="full", step_s=1.0),
)
TRUE = np.log([0.8, 1.5])  # efficiency and traffic of a cluster


@pytest.fixture(scope="module")
def job() -> Job:
    return find_job("siglip-so400m-8b", "h100:8")


def simulate_s(job: Job, logs: object) -> float:
    assumed = with_factors(get_preset("default"), np.asarray(logs))
    return find_recipe(job, assumed).simulated()[1].step_s


@pytest.mark.ci("search")
def test_known_factors_are_found(job: Job) -> None:
    jobs = [step.job_at(job) for step in STEPS]
    measured = [simulate_s(each, TRUE) for each in jobs]
    fitted = calibrate_stack(jobs, measured, get_preset("default"))
    assert fitted.assumptions.efficiency == pytest.approx(0.8, rel=0.03)
    assert fitted.assumptions.traffic_scale == pytest.approx(1.5, rel=0.1)
    assert fitted.accuracy("before_s").median > 0.15
    assert fitted.accuracy("after_s").median < 0.01
    assert fitted.accuracy("left_out_s").median < 0.03
    for each, own in zip(fitted.steps, jobs, strict=True):
        assert each.before_s == pytest.approx(simulate_s(own, [0, 0]))
        assert each.after_s == pytest.approx(
            find_recipe(own, fitted.assumptions).simulated()[1].step_s, rel=1e-9
        )


def test_a_step_without_traffic_tells_nothing_of_it() -> None:
    """On one GPU nothing is sent: only the factor of compute moves."""
    alone = find_job("cpu/tiny-vl", None)
    step = OwnStep(gpus=1, pp=1, microbatch_sequences=1, step_s=1.0)
    one = step.job_at(alone)
    fitted = calibrate_stack([one], [2 * simulate_s(one, [0, 0])], get_preset("default"))
    assert fitted.assumptions.traffic_scale == pytest.approx(1.0, abs=1e-6)
    assert fitted.assumptions.efficiency < 0.7
    assert fitted.steps[0].left_out_s == pytest.approx(fitted.steps[0].before_s)


@pytest.mark.parametrize(("stack", "preset"), [("megatron", "default"), ("torchtitan", "compiled")])
def test_trainers_name_their_presets(stack: str, preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert get_preset(stack) is get_preset(preset)
    assert run(["simulate", "cpu/tiny-vl", "--stack", stack, "--system", "stage0"]) == OK
    assert f"preset {preset}" in capsys.readouterr().out
    assert run(["simulate", "cpu/tiny-vl", "--stack", f"{stack}x"]) == USER_ERROR
    assert stack in capsys.readouterr().err


def test_the_most_probable_factors_are_those_of_a_grid() -> None:
    random = np.random.default_rng(0)
    slopes, left = random.normal(size=(3, 2)), random.normal(scale=0.1, size=3)
    found = fit_factors(slopes, left)
    deviations = np.array(list(FACTORS.values()))

    def unlikely(logs: np.ndarray) -> float:
        off = (left - slopes @ logs) / STEP_DEVIATION
        return float((off**2).sum() + ((logs / deviations) ** 2).sum())

    around = [found + move for move in 1e-3 * random.normal(size=(200, 2))]
    assert all(unlikely(found) < unlikely(other) for other in around)


def test_a_recipe_is_that_of_the_row(tmp_path: Path, job: Job) -> None:
    path = tmp_path / "results.csv"
    path.write_text(
        "# ours\nname,placement,gpus,tp,pp,sequences_per_step,recompute,reshard_after_forward,step_s\n"
        "a,fsdp,16,2,,64,full,yes,3.5\n\n,,,4,2,,,,2\n"
    )
    (first, at), (second, other) = load_own_steps(path, job)
    assert (first.label, second.label, first.step_s) == ("a", "stage0 pp2 tp4", 3.5)
    assert at.cluster.gpus == 16 and at.workload.sequences_per_step == 64 and at.today is not None
    assert at.today.placement == "fsdp" and at.today.reshard_after_forward and at.today.llm.tp == 2
    assert at.today.recompute == {"vision": "full", "llm": "full"}
    assert other.cluster.gpus == 8 and other.today is not None and other.today.placement == "stage0"
    assert other.workload.sequences_per_step == job.workload.sequences_per_step


def test_axes_that_are_left_out_are_those_of_the_job() -> None:
    stated = find_job("siglip-so400m-8b", "h100:8", ["llm=pp2,tp4"])
    for step, pp, tp in ((OwnStep(step_s=1.0), 2, 4), (OwnStep(tp=2, step_s=1.0), 2, 2)):
        today = step.job_at(stated).today
        assert today is not None and (today.llm.pp, today.llm.tp, today.llm.cp) == (pp, tp, 1)
    alone = OwnStep(step_s=1.0).job_at(find_job("siglip-so400m-8b", "h100:8")).today
    assert alone is not None and (alone.llm.pp, alone.llm.tp) == (1, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp,step_s\n", "has no measured step"),
        ("tp,steps\n2,1\n", "results.csv:1 steps is no column of measured steps"),
        ("tp,step_s\n2\n", "results.csv:2 row has 1 cells, the line of names 2"),
        ("tp,step_s\n1,1\n\n0,1\n", "results.csv:4 tp = 0"),
        ("tp,step_s\n2,-1\n", "results.csv:2 step_s = -1"),
        ("tp,placement,step_s\n2,stage1,1\n", "results.csv:2 placement = stage1"),
        ("tp\n2\n", "results.csv:2 step_s"),
        ("tp,pp,step_s\n3,1,1\n", "results.csv:2 row has 3 GPUs a replica, which do not divide 2 GPUs"),
    ],
)
def test_files_that_cannot_be_read_are_refused_by_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("results.csv").write_text(text)
    assert run(["calibrate", "cpu/tiny-vl", "--run", "results.csv"]) == USER_ERROR
    error = " ".join(capsys.readouterr().err.split())
    assert said in error and "hint:" in error, error
    assert not Path("stack.yaml").exists()


@pytest.mark.ci("search")
def test_the_file_is_a_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("results.csv").write_text("name,gpus,tp,pp,step_s\n'one' \"a\",2,1,1,0.4\nb,2,2,1,0.5\n")
    assert run(["calibrate", "cpu/tiny-vl", "--run", "results.csv", "-o", "mine.yaml", "--json"]) == OK
    result = json.loads(capsys.readouterr().out)
    assert result["points"] == 2 and len(result["steps"]) == 2
    assert set(result["held_out"]) == {"median_error", "bias"} and result["median_error"] >= 0
    stack = get_preset("mine.yaml")
    assert stack.name == "mine" and stack.efficiency == pytest.approx(result["efficiency"], rel=1e-5)
    assert replace(stack, name="default", efficiency=1.0, traffic_scale=1.0) == get_preset("default")
    assert run(["simulate", "cpu/tiny-vl", "--preset", "mine.yaml", "--system", "stage0"]) == OK
    assert "preset mine" in capsys.readouterr().out
    Path("mine.yaml").write_text(
        "format: optimus.stack/1\nname: x\nbase: default\nefficiency: -1\ntraffic_scale: 1\n"
    )
    assert run(["simulate", "cpu/tiny-vl", "--preset", "mine.yaml"]) == USER_ERROR
    assert "mine.yaml:4 efficiency = -1" in capsys.readouterr().err
    words = "format: optimus.stack/1\nname: x\nbase: mine.yaml\nefficiency: 1\ntraffic_scale: 1\n"
    Path("mine.yaml").write_text(words)
    assert run(["simulate", "cpu/tiny-vl", "--preset", "mine.yaml"]) == USER_ERROR
    assert "mine.yaml:3 base = mine.yaml is a file" in capsys.readouterr().err
    again = ["calibrate", "cpu/tiny-vl", "--run", "results.csv", "--preset", "mine.yaml"]
    assert run(again) == USER_ERROR
    assert "is a file of factors" in capsys.readouterr().err


def test_the_dispatcher_of_experts_is_that_of_the_step() -> None:
    job = find_job("qwen3-vl-235b", "h100:64", ["llm=pp8,tp1,ep8"])
    steps = [
        OwnStep(pp=8, ep=8, microbatch_sequences=1, recompute="full", token_dispatcher=kind, step_s=1.0)
        for kind in ("alltoall", "flex")
    ]
    estimates = [find_recipe(step.job_at(job), get_preset("default")).estimate_s for step in steps]
    assert estimates[1] < estimates[0], "a token is sent once to a rank and node, not to every expert"
