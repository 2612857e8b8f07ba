"""`optimus doctor --bundle`: what a bug report holds, and what it never holds."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest

from optimus.cli import run
from optimus.cli.bug_report import make_cleaner
from optimus.environment import NCCL_VARIABLES, REPORTED, TUNING, reported

JOB = """\
workload: {sequence_tokens: 256, vision_tokens: {p50: 64}}
run:
  log: [wandb]
  hf_token: %s
  tracker: {api_key: '%s', password: "%s"}
  proxy: https://me:%s@proxy:80/a
data: {path: HOME/photos/train.jsonl}
"""
SECRETS = ["hf_" + "a1" * 17, "b2" * 20, "pass word", "c3c3c3c3"]
LEAKED = "d4" * 20


def bundle(folder: Path, *words: str) -> dict[str, str]:
    assert run(["doctor", "--bundle", str(folder / "bug.zip"), "--run-dir", str(folder), *words]) == 0
    with zipfile.ZipFile(folder / "bug.zip") as archive:
        assert archive.testzip() is None
        return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_API_KEY", LEAKED)
    monkeypatch.setenv("OPTIMUS_CACHE_DIR", f"{home}/cache")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    (tmp_path / "job.yaml").write_text(JOB.replace("HOME", str(home)) % tuple(SECRETS))
    (tmp_path / "plan.json").write_text('{"schema": "optimus.plan/3", "tokens": [1, 2]}')
    lines = [json.dumps({"step": step, "loss": 1.5, "tokens_per_s": 7.0}) for step in range(500)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for number in range(20):
        path = tmp_path / f"ring-{number}-7-9.json"
        path.write_text(f'{{"rank": {number}, "where": "{home}/x"}}')
        os.utime(path, (number, number))
    (tmp_path / "ring-99-7-9.json").symlink_to("/etc/passwd")
    (tmp_path / "other-secret.txt").write_text(LEAKED)
    return tmp_path


def test_a_bundle_holds_what_a_bug_report_needs(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = bundle(run_dir, "--job", str(run_dir / "job.yaml"))
    shown = capsys.readouterr().out
    rings = [f"ring-{number}-7-9.json" for number in range(4, 20)]  # the newest
    assert list(files) == ["doctor.txt", "environment.json", "job.yaml", "plan.json", "metrics.jsonl", *rings]
    assert all(f" {name}\n" in shown for name in files)
    assert files["plan.json"] == (run_dir / "plan.json").read_text()
    assert [json.loads(line)["step"] for line in files["metrics.jsonl"].splitlines()] == list(range(300, 500))
    assert shown.startswith(files["doctor.txt"]) and "torch 2." in files["doctor.txt"]
    assert json.loads(files["environment.json"])["NCCL_DEBUG"] == "INFO"


def test_a_bundle_holds_no_secret_and_no_home(run_dir: Path) -> None:
    files = bundle(run_dir, "--job", str(run_dir / "job.yaml"))
    for name, text in files.items():
        assert not any(secret in text for secret in (*SECRETS, LEAKED)), name
        assert str(run_dir / "home") not in text, name
    assert "sequence_tokens: 256, vision_tokens: {p50: 64}" in files["job.yaml"]
    assert "~/photos/train.jsonl" in files["job.yaml"]
    assert json.loads(files["environment.json"])["OPTIMUS_CACHE_DIR"] == "~/cache"


def test_only_variables_on_the_list_are_reported() -> None:
    names = {*TUNING, *NCCL_VARIABLES, *REPORTED}
    everything = dict.fromkeys([*names, "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PATH"], "x")
    assert set(reported(everything)) == names
    assert not any(word in name for name in names for word in ("TOKEN", "KEY", "SECRET", "PASS", "AUTH"))


def test_cleaning_keeps_json_and_other_names() -> None:
    clean = make_cleaner("/home/me")
    assert json.loads(clean('{"api_key": "abc", "path": "/home/me/a", "b": 1}')) == {
        "api_key": "(removed)",
        "path": "~/a",
        "b": 1,
    }
    kept = "tokens_per_s: 5, image_tokens: 3, /home/me2/a, /home/me.d, secrets of the trade"
    assert clean(kept) == kept


def test_what_cannot_be_packed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--bundle", str(tmp_path / "a.tar")]) == 2
    assert "is not a .zip file" in capsys.readouterr().err
    assert run(["doctor", "--bundle", str(tmp_path / "a.zip"), "--job", str(tmp_path / "none.yaml")]) == 2
    assert "--job" in capsys.readouterr().err and not (tmp_path / "a.zip").exists()


def test_json_has_the_same(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = bundle(run_dir, "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "optimus.doctor/1" and found["optimus"] in files["doctor.txt"]
    assert set(found["bundle"]) == set(files)
