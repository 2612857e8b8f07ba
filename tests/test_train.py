"""`optimus train`: by itself, under torchrun and from Python; what it writes, prints and refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import ROOT, alive, children
from safetensors.torch import save_file

import optimus
from optimus.cli import run
from optimus.cli.run_ranks import RanksFailed
from optimus.engine.config import TrainingConfig
from optimus.engine.run_section import read_training_config
from optimus.errors import UserError
from optimus.job.data_source import DataSource
from optimus.job.targets import restrict_to_target

TINY = "cpu/tiny-vl"
CATALOG = ROOT / "optimus" / "catalog" / "jobs" / "cpu" / "tiny-vl.yaml"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@dataclass(frozen=True, kw_only=True)
class PlanningResult:
    file: Path
    job: Path


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> PlanningResult:
    """A plan for the job, and a job that it is not for."""
    folder = tmp_path_factory.mktemp("planned")
    job = restrict_to_target(optimus.find_job(TINY), "engine")
    optimus.save_plan(optimus.plan(job).plan, folder / "tiny.plan.json")
    text = CATALOG.read_text()
    assert text.count("vocab: 512") == 1
    (folder / "other.yaml").write_text(text.replace("vocab: 512", "vocab: 640"))
    return PlanningResult(file=folder / "tiny.plan.json", job=folder / "other.yaml")


def call(*words: str | Path, folder: Path, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """`optimus words`, or with `before` (torchrun and its options) in front of it."""
    return subprocess.run(
        [sys.executable, *before, "-m", "optimus", *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )


def metrics_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def build_check_json(text: str) -> None:
    found = json.loads(text)  # one object and nothing else
    assert found["steps"] == 3 and found["final_loss"] > 0 and found["step_s_median"] > 0


@pytest.mark.ci("engine")
def test_memory_is_counted_beside_the_plans(tmp_path: Path, planned: PlanningResult) -> None:
    """Under torchrun and in bf16, as plans count; counting changes no number of the run."""
    (tmp_path / "job.yaml").write_text(CATALOG.read_text() + "run: {dtype: bfloat16}\n")
    words = ("train", "job.yaml", "--plan", planned.file, "--steps", "2", "--run-dir")
    counted = call(*words, "counted", "--memory", folder=tmp_path, before=(*TORCHRUN, "2"))
    assert counted.returncode == 0, counted.stderr
    plain = call(*words, "plain", folder=tmp_path, before=(*TORCHRUN, "2"))
    assert plain.returncode == 0, plain.stderr
    losses = [[line["loss"] for line in metrics_in(tmp_path / name)] for name in ("counted", "plain")]
    assert losses[0] == losses[1]
    assert "memory MB            planned  counted  plan over count" in counted.stdout
    table = re.findall(r"^  ([\w ]+?) +([\d.,]+) +([\d.,]+) +[+-][\d.]+%$", counted.stdout, re.M)
    found = {name: (float(planned), float(counted)) for name, planned, counted in table}
    assert list(found) == [
        "parameters",
        "gradients",
        "optimizer",
        "LLM activations",
        "encoder activations",
        "working",
        "peak",
    ]
    assert found["peak"][0] == pytest.approx(found["peak"][1], rel=0.05)
    assert "the run computes in" not in counted.stdout


def test_memory_needs_a_second_step() -> None:
    with pytest.raises(UserError, match="--memory needs two steps"):
        read_training_config({}, steps=1, count_memory=True)


@pytest.mark.ci("engine")
def test_three_ways_to_train_give_the_same_bits(tmp_path: Path, planned: PlanningResult) -> None:
    alone = call("train", TINY, "--steps", "3", "--json", folder=tmp_path)
    assert alone.returncode == 0, alone.stderr
    build_check_json(alone.stdout)
    first = metrics_in(tmp_path / "optimus-run")
    assert [line["step"] for line in first] == [0, 1, 2]
    assert all(line["step_s"] > 0 and line["tokens_per_s"] > 0 and line["loss"] > 0 for line in first)
    for line in first:  # two ranks in a pipeline, on CPUs
        assert line["tokens_per_s_per_gpu"] == pytest.approx(line["tokens_per_s"] / 2)
        assert 0 < line["bubble_share"] < 1 and line["mfu"] is None and 0.05 < line["peak_memory_gb"] < 8
    assert (tmp_path / "optimus-run" / "plan.json").read_bytes() == planned.file.read_bytes()
    shown = alone.stderr.splitlines()
    assert all(line.startswith(("planning: ", "starting ranks", "step ")) for line in shown)
    assert shown[-1].startswith("step 3 of 3, loss ")

    words = ("train", TINY, "--plan", planned.file, "--steps", "3", "--json", "--run-dir", "ranks")
    started = call(*words, folder=tmp_path, before=(*TORCHRUN, "2"))
    assert started.returncode == 0, started.stderr
    build_check_json(started.stdout)
    assert started.stderr.splitlines()[-1].startswith("step 3 of 3, loss "), started.stderr
    assert (tmp_path / "ranks" / "plan.json").read_bytes() == planned.file.read_bytes()

    summary = optimus.train(
        optimus.find_job(TINY), optimus.load_plan(planned.file), steps=3, run_dir=tmp_path
    )
    again = metrics_in(tmp_path)
    assert summary.steps == 3 and summary.rank == 0 and summary.final_loss == again[-1]["loss"]
    losses = [[line["loss"] for line in lines] for lines in (first, metrics_in(tmp_path / "ranks"), again)]
    assert losses[0] == losses[1] == losses[2]


def test_a_plan_for_another_job_is_refused_by_the_field_that_differs(
    planned: PlanningResult, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(planned.job), "--plan", str(planned.file), "--run-dir", str(tmp_path)]
    assert run(words) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "model.llm.vocab is 640, and the plan was made for 512" in shown.err
    assert shown.err.count("error:") == 1 and "Traceback" not in shown.err
    with pytest.raises(UserError, match=r"model\.llm\.vocab"):
        optimus.train(optimus.load_job(planned.job), optimus.load_plan(planned.file))


@pytest.mark.ci("engine")
def test_ranks_refuse_with_one_voice(planned: PlanningResult, tmp_path: Path) -> None:
    other = call("train", planned.job, "--plan", planned.file, folder=tmp_path, before=(*TORCHRUN, "2"))
    assert other.returncode != 0 and other.stdout == ""
    assert other.stderr.count("model.llm.vocab is 640, and the plan was made for 512") == 1, other.stderr
    assert other.stderr.count("hint: plan again for this job") == 1

    three = call("train", TINY, "--plan", planned.file, folder=tmp_path, before=(*TORCHRUN, "3"))
    assert three.returncode != 0 and three.stdout == ""
    assert three.stderr.count("error: plan is for 2 ranks, and 3 were started") == 1, three.stderr


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"steps": -1}, "run.steps"),
        ({"steps": 2.5}, "run.steps"),
        ({"seed": "x"}, "run.seed"),
        ({"optimizer": {"lr": "fast"}}, "run.optimizer.lr"),
        ({"optimizer": {"lr": float("nan")}}, "run.optimizer.lr"),
        ({"optimizer": {"weight_decay": True}}, "run.optimizer.weight_decay"),
        ({"optimizer": "adamw"}, "run.optimizer"),
        ({"data_seed": -1}, "run.data_seed"),
        ({"accumulate": 4}, "run.accumulate"),
        ({"gradient_accumulation_steps": 4}, "run.gradient_accumulation_steps"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as refused:
        read_training_config(settings, steps=None)
    assert refused.value.field == field


def test_settings_differ_if_data_or_weights_do(tmp_path: Path) -> None:
    """Not by where they are, nor by when they were written."""
    folders = [tmp_path / name for name in ("one", "copy", "other")]
    for folder, number in zip(folders, (1, 1, 2), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        save_file({"weight": torch.full((5000,), float(number))}, folder / "model.safetensors")
        np.savez(folder / "train.index.npz", numbers=np.arange(number))
    configs = [
        TrainingConfig(
            model_dir=folder,
            data=DataSource(
                path=folder / "train.jsonl",
                media_dir=folder,
                index=folder / "train.index.npz",
                model_dir=folder,
                sequence_tokens=8,
                max_pixels=None,
                max_audio_s=None,
                workers=2,
            ),
        ).settings()
        for folder in folders
    ]
    assert configs[0] == configs[1]
    differing = {name for name, value in configs[0].items() if configs[2][name] != value}
    assert differing == {"data (its index)", "weights"}


def test_settings_of_a_run_are_read() -> None:
    found = read_training_config({"steps": 7, "seed": 3, "optimizer": {"lr": 1}}, steps=None)
    assert (found.steps, found.seed, found.optimizer.lr, found.optimizer.weight_decay) == (7, 3, 1.0, 0.01)
    assert found.seed_of_data == 3
    assert read_training_config({"seed": 3, "data_seed": 5}, steps=None).seed_of_data == 5
    assert read_training_config({"steps": 7}, steps=2).steps == 2
    with pytest.raises(UserError, match="--steps"):
        read_training_config({}, steps=-1)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["train", TINY, "--run-dir", str(tmp_path / "none" / "run")]) == 2
    assert "--run-dir" in capfd.readouterr().err


FAILING = """
import os
if os.environ.get("RANK") == "1":
    import optimus.engine.executor as executor
    play = executor.Executor._run
    def failing(self, actions, batch, **how):
        action = next(each for each in actions if each.kind.word == "F" and each.line > 10)
        def mistake():
            raise ValueError("a mistake in an op")
        action.run = mistake
        play(self, actions, batch, **how)
    executor.Executor._run = failing
"""


@pytest.mark.ci("engine")
def test_a_rank_that_raises_ends_the_run_with_its_op(
    planned: PlanningResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    begin_s = time.monotonic()
    with pytest.raises(RanksFailed, match="code 1"):
        optimus.train(optimus.find_job(TINY), optimus.load_plan(planned.file), steps=3, run_dir=tmp_path)
    assert time.monotonic() - begin_s < 30.0
    written = capfd.readouterr().err
    assert "ValueError: a mistake in an op" in written
    assert "rank 1 failed first: it ended with code 1" in written
    op = r"rank 1 failed in \w+\.F chunk \d microbatch \d(, which waits for rank 0)?: a mistake in an op"
    assert re.search(op, written)
    dump = json.loads(next(tmp_path.glob("ring-1-*.json")).read_text())
    assert dump["reason"] == "failure" and dump["ops"][-1]["end_s"] is None


@pytest.mark.ci("engine")
def test_an_interruption_ends_all_ranks_quietly(planned: PlanningResult, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "optimus", "train", TINY, "--plan", planned.file, "--steps", "100000"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        metrics = tmp_path / "optimus-run" / "metrics.jsonl"
        while not metrics.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        ranks = children(process.pid)
        assert len(ranks) == 2
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
        assert process.returncode == 130
        assert not any(map(alive, ranks))
        assert "Traceback" not in err and "failed" not in err
        assert (
            out.startswith(f"job            {TINY} on 2 ranks; balanced-best; predicted step ")
            and len(out.splitlines()) == 1
        )
    finally:
        process.kill()
        process.wait()


def test_without_torch_train_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_torch(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("optimus.cli.run_ranks.find_spec", lambda name: None)
    monkeypatch.setattr("importlib.import_module", no_torch)
    assert run(["train", TINY, "--run-dir", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert shown.err == "error: torch is not installed\nhint: pip install 'optimus-mllm[train]'\n"
