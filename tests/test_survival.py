"""A run ends with its launcher, its ranks agree, NaN stops it, and a full disk leaves files whole."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import ROOT, alive, children

import optimus
from optimus.cli.run_ranks import RanksFailed
from optimus.errors import UserError
from optimus.ir.files import ABANDONED_S, PREFIX, SUFFIX, open_atomically, write_file_atomically

TINY = "cpu/tiny-vl"
ENDS_WITHIN_S = 5.0

# ---------------------------------------------------------------- files


def temporaries(folder: Path) -> list[Path]:
    return list(folder.glob(f"{PREFIX}*{SUFFIX}"))


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    write_file_atomically(path, "old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call != "write":
        monkeypatch.setattr(os, call, fail)

    def write() -> None:
        with open_atomically(path) as stream:
            stream.write(b"new")
            if call == "write":
                fail()

    with pytest.raises(UserError, match="No space left on device"):
        write()
    assert path.read_text() == "old" and not temporaries(tmp_path)


def test_another_error_in_the_block_is_that_error(tmp_path: Path) -> None:
    def write() -> None:
        with open_atomically(tmp_path / "a") as stream:
            stream.write(b"half")
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        write()
    assert not list(tmp_path.iterdir())


def test_a_planted_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "report.html"
    victim.write_text("precious")
    path.symlink_to(victim)
    write_file_atomically(path, "page")
    assert victim.read_text() == "precious" and path.read_text() == "page" and not path.is_symlink()


def test_names_of_temporaries_cannot_be_guessed(tmp_path: Path) -> None:
    names = set()
    for _ in range(3):
        with open_atomically(tmp_path / "a"):
            names |= {path.name for path in temporaries(tmp_path)}
    assert len(names) == 3


def test_what_a_killed_writer_left_is_swept(tmp_path: Path) -> None:
    old, young = (tmp_path / f"{PREFIX}{name}{SUFFIX}" for name in ("old", "young"))
    for path in (old, young):
        path.write_text("half")
    past_s = time.time() - ABANDONED_S - 60
    os.utime(old, (past_s, past_s))
    write_file_atomically(tmp_path / "a", "whole")
    assert temporaries(tmp_path) == [young]


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "nowhere/a", "."])
def test_a_name_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        write_file_atomically(tmp_path / name, "text")
    assert not temporaries(tmp_path)


def test_a_device_is_not_replaced_by_a_file() -> None:
    with pytest.raises(UserError, match="a directory or a device"):
        write_file_atomically(Path("/dev/null"), "text")


# ---------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "tiny.plan.json"
    optimus.save_plan(optimus.plan(optimus.find_job(TINY), systems=()).plan, path)
    return path


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of a test, which end with it."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        for pid in [*descendants(process.pid), process.pid]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def descendants(pid: int) -> list[int]:
    own = children(pid)
    return own + [later for child in own for later in descendants(child)]


@pytest.mark.ci("survival")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("launcher", ["optimus", "torchrun"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_no_rank_outlives_its_launcher(
    launcher: str, number: int, plan: Path, started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2") * (launcher == "torchrun")
    words = ("-m", "optimus", "train", TINY, "--plan", str(plan), "--steps", "1000000")
    process = subprocess.Popen(
        [sys.executable, *run, *words, "--run-dir", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,  # a pipe that breaks with its reader
    )
    started.append(process)
    metrics, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text().count("\n") > 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    ranks = descendants(process.pid)
    assert len(ranks) >= 2
    assert process.stderr is not None
    process.stderr.close()
    process.send_signal(number)
    deadline = time.monotonic() + ENDS_WITHIN_S
    while left := [pid for pid in ranks if alive(pid)]:
        assert time.monotonic() < deadline, f"{len(left)} of {len(ranks)} processes train on"
        time.sleep(0.05)


DIFFERENT = """
import os
if os.environ.get("RANK") == "1":
    from dataclasses import replace
    from optimus.engine import config
    config.TrainingConfig.settings_of = config.TrainingConfig.settings
    config.TrainingConfig.settings = lambda self: replace(self, seed=self.seed + 1).settings_of()
"""


@pytest.mark.ci("survival")
@pytest.mark.timeout(180)
def test_ranks_with_other_settings_do_not_train_together(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(DIFFERENT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    with pytest.raises(RanksFailed):
        optimus.train(optimus.find_job(TINY), optimus.load_plan(plan), steps=3, run_dir=tmp_path)
    assert "run.seed = 1 on rank 1 differs from 0 on rank 0" in capfd.readouterr().err
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.ci("survival")
@pytest.mark.timeout(180)
def test_a_loss_that_is_not_finite_stops_the_run(
    plan: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "optimus" / "catalog" / "jobs" / "cpu" / "tiny-vl.yaml").read_text()
    (tmp_path / "job.yaml").write_text(text + "\nrun: {optimizer: {lr: 1.0e+30, clip: 0}}\n")
    job = optimus.load_job(tmp_path / "job.yaml")
    with pytest.raises(RanksFailed):
        optimus.train(job, optimus.load_plan(plan), steps=50, run_dir=tmp_path)
    assert "is not finite, so training has stopped" in capfd.readouterr().err

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line, parse_constant=refuse) for line in lines]
    tries = [step for step in steps if step["loss"] is None or step["gradient_norm"] is None]
    assert len(steps) < 50 and tries == steps[-2:] and tries[0]["step"] == tries[1]["step"]


FULL = """
import os, pathlib
if "RANK" in os.environ:
    path_open = pathlib.Path.open
    def full(path, mode="r", *args, **kwargs):
        path = pathlib.Path("/dev/full") if path.name == "metrics.jsonl" else path
        return path_open(path, mode, *args, **kwargs)
    pathlib.Path.open = full
"""


@pytest.mark.ci("survival")
@pytest.mark.timeout(180)
def test_a_full_disk_for_metrics_does_not_end_the_run(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FULL)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    summary = optimus.train(optimus.find_job(TINY), optimus.load_plan(plan), steps=3, run_dir=tmp_path)
    assert summary.steps == 3
    written = capfd.readouterr().err
    assert written.count("cannot be written: No space left on device; training goes on without it") == 1


@pytest.mark.ci("survival")
@pytest.mark.timeout(180)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a process 1")
def test_the_launcher_may_be_process_1(plan: Path, tmp_path: Path) -> None:
    """In a container the parent of all ranks has the number of the process that elsewhere adopts orphans."""
    words = ["train", TINY, "--plan", str(plan), "--steps", "2", "--run-dir", str(tmp_path)]
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m", "optimus", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare failed" in done.stderr:
        pytest.skip("this container makes no namespaces")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2
