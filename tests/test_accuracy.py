"""Published steps are complete, each is predicted as it was run, and errors are counted by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optimus.cli import run
from optimus.cli.flags import OK, USER_ERROR
from optimus.cost.assumptions import get_preset
from optimus.job.catalog_files import CATALOG
from optimus.job.measured_runs import MeasuredRun, load_measured_runs
from optimus.planner.compare import compare_systems
from optimus.sensitivity.accuracy import (
    PredictedRun,
    group_runs,
    predict_run,
    rank_layouts,
    sum_up_memory,
)

RUNS = {run.id: run for run in load_measured_runs()}


def test_runs_are_complete() -> None:
    text = (CATALOG / "measured" / "steps.csv").read_text()
    assert len(RUNS) == len(load_measured_runs()) == 135
    for each in RUNS.values():
        assert each.dp * each.pp * each.tp * each.cp == each.gpus, each.id
        assert each.sequences_per_step % (each.dp * each.microbatch_sequences) == 0, each.id
        stack = each.job.model.llm.stack
        uneven = each.source in ("nvidia-dgxc", "bridge-tuned", "bridge-functional")
        assert stack.layers % (each.pp * each.chunks) == 0 or uneven, each.id
        assert stack.attention.heads % each.tp == 0 and each.recompute != "auto", each.id
        assert (each.images > 0) == bool(each.job.model.encoders), each.id
        assert re.search(rf"^# .*\b{each.source}\b.*: ", text, re.MULTILINE), each.id


def test_no_model_of_a_source_is_both_fitted_and_held_out() -> None:
    def model(each: MeasuredRun) -> tuple[str, str]:
        name, dash, layers = each.model.rpartition("-")
        return each.source, name if dash and layers[:-1].isdigit() and layers.endswith("l") else each.model

    by_split = {
        split: {model(each) for each in RUNS.values() if each.split == split} for split in ("fit", "held-out")
    }
    assert not by_split["fit"] & by_split["held-out"]
    assert ("simumax", "llama3-405b") in by_split["held-out"], "proxies go with their model"
    for key in ("gpu", "system"):
        kinds = {
            split: {getattr(each, key) for each in RUNS.values() if each.split == split} for split in by_split
        }
        assert kinds["fit"] == kinds["held-out"]


@pytest.mark.parametrize("name", ["dgxc-nem15b-16", "korthi-gpt-22b-full", "mpt-h100-7b-2048-8"])
def test_a_run_is_predicted_as_the_command_simulates_it(name: str) -> None:
    """`optimus simulate` of the same job searches a floor, too, and must not change the step."""
    each = RUNS[name]
    assumed = replace(
        get_preset("default"),
        fused_attention=each.fused_attention,
        gather_copies=each.gather_copies is not False,
    )
    system = compare_systems(each.job, names=["today"], assumptions=assumed).systems["today"]
    predicted = predict_run(each, get_preset("default"))
    assert predicted.step_s == system.step_s and predicted.peak_bytes == system.memory.total
    assert each.layout.replace(" ", "").startswith(f"dp{each.dp}")


@pytest.mark.parametrize(
    "name",
    [
        "dgxc-8b-8",
        "dgxc-70b-64",
        "dgxc-nem15b-16",
        "simumax-70b-tp1pp2-8",
        "simumax-70b-tp2pp1-8",
    ],
)
def test_tuned_pipelines_are_met(name: str) -> None:
    """Runs of two sources on two GPUs are met, to which nothing is fitted; others are further off."""
    assert abs(predict_run(RUNS[name], get_preset(RUNS[name].preset)).error) < 0.08


@pytest.mark.parametrize("name", ["automodel-qwen3-30b-8", "automodel-gpt-oss-120b-64"])
def test_experts_under_fsdp_are_met(name: str) -> None:
    """Tuned, with balanced experts; others are further off."""
    assert abs(predict_run(RUNS[name], get_preset(RUNS[name].preset)).error) < 0.08


def test_the_exchange_of_experts_is_as_stated() -> None:
    each, base = RUNS["qwen3-30b-tuned-16"], get_preset("default")
    step_s = predict_run(each, base).step_s
    overlapped_s = predict_run(replace(each, ep_overlapped=1.0), base).step_s
    assert predict_run(replace(each, ep_overlapped=0.5), base).step_s == pytest.approx(
        (step_s + overlapped_s) / 2, rel=0.01
    )
    assert predict_run(replace(each, token_dispatcher="alltoall"), base).step_s > 1.3 * step_s
    assert RUNS["qwen3-30b-overlap-16"].step_s < each.step_s and overlapped_s < step_s


@pytest.mark.ci
def test_no_system_is_below_the_floor_of_a_pipeline_with_experts() -> None:
    """DeepSeek-V3 at 256 microbatches, whose floor was once sought among too few recomputations."""
    each = RUNS["dsv3-1024"]
    job = replace(each.job, today=None)
    systems = compare_systems(job, names=["stage0", "llm-only"]).systems
    assert systems["llm-only"].step_s <= systems["stage0"].step_s * (1 + 1e-9)


def test_the_recipe_is_what_is_simulated() -> None:
    """Each part of it changes the step, in the direction that it must."""
    each, base = RUNS["dgxc-405b8l-32"], get_preset("default")
    step_s = predict_run(each, base).step_s
    changes: list[tuple[dict[str, Any], bool]] = [
        ({"recompute": "full"}, True),
        ({"tp_overlapped": 0.0}, True),
        ({"fused_attention": False, "recompute": "selective"}, True),
        ({"sequences_per_step": each.sequences_per_step // 2}, False),
        ({"memory_tb_per_s": 1.0}, True),
    ]
    for change, is_slower in changes:
        other_s = predict_run(replace(each, **change), base).step_s
        assert (other_s > step_s) is is_slower and other_s != step_s, change
    sharded = RUNS["mpt-h100-7b-2048-8"]
    assert (
        predict_run(replace(sharded, microbatch_sequences=2), base).step_s
        != predict_run(sharded, base).step_s
    )


def test_a_run_that_our_memory_refuses_is_simulated_all_the_same() -> None:
    run = RUNS["mpt-h100-7b-2048-8"]
    each = replace(run, microbatch_sequences=64, sequences_per_step=512, gather_copies=True)
    predicted = predict_run(each, get_preset("default"))
    assert predicted.peak_bytes > 80e9 and predicted.step_s > 0
    system = compare_systems(each.job, names=["today"]).systems["today"]
    assert not system.fits and system.step_s == predicted.step_s
    alone = replace(each, tp=8, dp=1, sequences_per_step=64)
    assert "fsdp has no plan at dp1" in compare_systems(alone.job, names=["today"]).missing["today"]


def off_by(errors: list[float], **fields: Any) -> list[PredictedRun]:
    """Runs of 1 s that are predicted with these errors."""
    base = replace(RUNS["dgxc-8b-8"], step_s=1.0, **fields)
    return [
        PredictedRun(run=base, step_s=1 + error, peak_bytes=0.0, allocated_bytes=(1 + error) * 2**30)
        for error in errors
    ]


def test_errors_by_hand() -> None:
    (group, *_) = group_runs(off_by([-0.2, 0.1, 0.0, -0.3, 0.4]))
    assert group.runs == 5 and group.bias == pytest.approx(0.0) and group.median == pytest.approx(0.2)
    assert group.p90 == pytest.approx(0.3 + 0.6 * 0.1)
    both = [*off_by([0.1], gpu="h100"), *off_by([-0.3], gpu="a100", split="fit", system="fsdp")]
    found = {group.name: group for group in group_runs(both)}
    assert list(found) == [
        "all",
        "fit",
        "held-out",
        "dense",
        "a100",
        "h100",
        "fsdp",
        "pipeline",
        "default",
        "nvidia-dgxc",
    ]
    assert found["a100"].bias == pytest.approx(-0.3) and found["all"].bias == pytest.approx(-0.1)


def test_memory_by_hand() -> None:
    assert sum_up_memory(off_by([0.1])) is None
    memory = sum_up_memory([*off_by([0.1, 0.3], peak_gib=1.0), *off_by([0.5])])
    assert memory is not None and memory.runs == 2 and memory.bias == pytest.approx(0.2)
    stated = [each for each in RUNS.values() if each.peak_gib is not None]
    assert len(stated) == 25 and {each.source for each in stated} == {"simumax", "megatron-mimo"}


def test_orders_by_hand() -> None:
    """Published 1, 2, 3, 4 s; predicted in the order 2, 1, 3, 4: correlation 1 - 6 * 2 / 60."""
    steps = ((1.0, 0.9), (2.0, 0.8), (3.0, 2.0), (4.0, 2.5))
    predicted = [
        PredictedRun(
            run=replace(RUNS["dgxc-8b-8"], tp=tp, step_s=published),
            step_s=ours,
            peak_bytes=0.0,
            allocated_bytes=0.0,
        )
        for tp, (published, ours) in enumerate(steps, start=1)
    ]
    (ranked,) = rank_layouts(predicted)
    assert ranked.layouts == 4 and ranked.correlation == pytest.approx(0.8)
    assert ranked.lost == pytest.approx(0.5), "2 s where 1 s was possible"
    assert not list(rank_layouts(predicted[:3]))
    again = [replace(each, run=replace(each.run, dp=1)) for each in predicted]  # more microbatches
    assert [each.layouts for each in rank_layouts([*predicted, *again])] == [4, 4]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["accuracy", "--only", "torchtitan", "compiled", "fit", "--json"]) == OK
    result = json.loads(capsys.readouterr().out)
    assert {each["id"] for each in result["runs"]} == {"titan-8b-8", "titan-8b-128", "titan-8b-64-tp8"}
    assert result["groups"][0]["runs"] == 3 and result["assumptions"] is None
    for each in result["runs"]:
        assert each["error"] == pytest.approx(each["predicted_s"] / each["step_s"] - 1)
    assert run(["accuracy", "--only", "torchtitan", "--runs"]) == OK
    assert "titan-70b-256" in capsys.readouterr().out
    assert run(["accuracy", "--only", "nemo"]) == USER_ERROR
    assert "is no group of published runs" in capsys.readouterr().err
    assert run(["accuracy", "--only", "a100", "b200"]) == USER_ERROR
    assert "leave no published run" in capsys.readouterr().err
