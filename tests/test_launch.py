"""`optimus launch --slurm`: what its batch file runs, requeues and quotes, by bash and by a real Slurm."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tyro
from faults import ROOT
from slurm_cluster import NODES, SlurmCluster, missing_programs, slurm_cluster

import optimus
from optimus.cli import run
from optimus.cli.sbatch import SlurmJob
from optimus.cli.train import TrainCommand
from optimus.environment import NCCL_VARIABLES
from optimus.errors import UserError

TINY = "cpu/tiny-vl"
HOSTILE = "a b'\"$(touch pwned)`touch pwned`;touch pwned;#\\ %j é"
START_S = 120.0  # of a job that imports torch on two busy cores


def slurm_job(folder: Path, **changes: Any) -> SlurmJob:
    values: dict[str, Any] = {
        "name": "a job",
        "nodes": 2,
        "ranks_per_node": 4,
        "gpus_per_node": 4,
        "run_dir": folder / "run",
        "work_dir": folder,
        "python": str(folder / "python"),
        "command": ["optimus", "train", "job.yaml"],
    }
    return SlurmJob(**{**values, **changes})


# ---------------------------------------------------------------------------- by bash alone


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def play(
    folder: Path,
    job: SlurmJob,
    *,
    python: str = "exit 0",
    state: str = "RUNNING",
    restarts: int = 0,
    code: int | None = None,
) -> list[list[str]]:
    """Runs a batch file with stand-ins for Slurm and Python; returns the calls of both, in order.

    The file must end with `code`, if one is given.
    """
    (folder / "run").mkdir(exist_ok=True)
    programs = folder / "programs"
    programs.mkdir()
    log = f'printf "%s\\0" "$(basename "$0")" "$@" >> {folder}/calls; printf "\\n" >> {folder}/calls'
    write_program(programs / "srun", 'while [[ "$1" == --* ]]; do shift; done; exec "$@"')
    write_program(programs / "scontrol", log)
    write_program(programs / "scancel", f"{log}; kill -TERM $(cat {folder}/agent)")
    write_program(programs / "squeue", f"echo {state}")
    write_program(Path(job.python), f"{log}; {python}")
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_NODEID": "0",
        **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
    }
    script = folder / "script"
    script.write_text(job.text())
    with (folder / "stderr").open("w") as stderr:
        words = ["bash", str(script)]
        ended = subprocess.run(words, cwd=folder, env=variables, stderr=stderr, check=False, timeout=20)
    assert code is None or ended.returncode == code
    return [line.split("\0")[:-1] for line in (folder / "calls").read_text().splitlines()]


def test_every_node_runs_torchrun_with_the_command(tmp_path: Path) -> None:
    (agent,) = play(tmp_path, slurm_job(tmp_path))
    module = agent.index("-m", 3)
    assert agent[:3] == ["python", "-m", "torch.distributed.run"]
    assert agent[module:] == ["-m", "optimus", "train", "job.yaml"]
    options = dict(zip(agent[3:module:2], agent[4:module:2], strict=True))
    assert options.pop("--rdzv-endpoint").endswith(":20007")
    assert options == {
        "--rdzv-backend": "c10d",
        "--rdzv-id": "7-0",
        "--rdzv-conf": "is_host=1",
        "--nnodes": "2",
        "--nproc-per-node": "4",
        "--max-restarts": "3",
    }


def test_nothing_in_a_batch_file_is_run_but_what_is_meant_to(tmp_path: Path) -> None:
    words = ["optimus", "train", HOSTILE, "--run-dir", f"{HOSTILE}/..", "--plan", "-n"]
    job = slurm_job(
        tmp_path, name=HOSTILE, command=words, partition=HOSTILE, account=HOSTILE, time=HOSTILE,
        options=[f"comment={HOSTILE}"], work_dir=tmp_path / HOSTILE,
    )  # fmt: skip
    (agent,) = play(tmp_path, job)
    assert agent[-len(words) :] == words
    assert not (tmp_path / "pwned").exists()
    lines = [line for line in job.text().splitlines() if line.startswith("#SBATCH")]
    options = [shlex.split(line)[1].replace("\\\\", "\\") for line in lines]  # as sbatch does within quotes
    assert sorted(option.partition("=")[0] for option in options if HOSTILE in option) == [
        "--account", "--chdir", "--comment", "--job-name", "--partition", "--time",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "a\n#SBATCH --uid=0"},
        {"partition": "a\rb"},
        {"account": "a\x1b[2J"},
        {"options": ["qos=a\nb"]},
        {"options": ["--qos=a"]},
        {"options": ["qos a"]},
        {"options": [""]},
        {"setup": ["a\nb"]},
        {"command": ["optimus", "a\0b"]},
        {"run_dir": Path("/a\nb")},
    ],
)
def test_what_would_end_a_line_or_is_no_option_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        slurm_job(tmp_path, **changes).text()


TRAINS, FAILS = "sleep 0.02; touch run/metrics.jsonl", "exit 1"


@pytest.mark.parametrize(
    ("python", "others", "is_requeued"),
    [
        (f"{TRAINS}; {FAILS}", {}, True),
        (FAILS, {}, False),  # before its first step: it would fail again
        (f"{TRAINS}; exit 0", {}, False),
        (f"{TRAINS}; {FAILS}", {"state": "COMPLETING"}, False),  # cancelled
        (f"{TRAINS}; {FAILS}", {"restarts": 9}, True),
        (f"{TRAINS}; {FAILS}", {"restarts": 10}, False),
    ],
)
def test_a_job_that_trained_and_failed_is_requeued(
    tmp_path: Path, python: str, others: dict[str, Any], is_requeued: bool
) -> None:
    calls = play(tmp_path, slurm_job(tmp_path), python=python, **others)
    assert (["scontrol", "requeue", "7"] in calls) == is_requeued


@pytest.mark.parametrize("trains", [TRAINS, "sleep 0.02"])
@pytest.mark.parametrize("restarts", [0, 10])
def test_before_the_time_limit_ranks_are_signalled_and_the_job_is_requeued(
    tmp_path: Path, trains: str, restarts: int
) -> None:
    """The batch script is signalled, as by --signal=B:TERM; an agent that was stopped fails no other node.

    A job that may not be requeued any more has not succeeded.
    """
    signals = "kill -TERM $(ps -o ppid= -p $PPID); trap 'echo saved; exit 1' TERM;"
    python = f"echo $$ $PPID > agent; {trains}; {signals} while :; do sleep 0.05; done"
    _, *calls = play(tmp_path, slurm_job(tmp_path), python=python, restarts=restarts, code=143)
    assert calls[0] == ["scancel", "--signal=TERM", "7"]
    assert calls[1:] == ([] if restarts else [["scontrol", "requeue", "7"]])
    stderr = (tmp_path / "stderr").read_text()
    assert restarts or "requeued after SIGTERM and code 0\n" in stderr


def test_the_environment_of_nccl_can_be_overridden(tmp_path: Path) -> None:
    play(tmp_path, slurm_job(tmp_path, setup=["export NCCL_DEBUG=INFO"]), python="env > found")
    found = dict(line.split("=", 1) for line in (tmp_path / "found").read_text().splitlines() if "=" in line)
    expected = {**NCCL_VARIABLES, "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}
    assert {name: found[name] for name in expected} == expected


# ---------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "tiny.plan.json"
    optimus.save_plan(optimus.plan(optimus.find_job(TINY), systems=()).plan, path)
    return path


def test_a_dry_run_prints_the_file_and_submits_nothing(
    tmp_path: Path, plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan and every option of training reach the ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")  # where no sbatch is
    given = ["--steps", "7", "--first-step", "2", "--run-dir", "a run", "--quiet", "--layout", "llm=pp2,tp1"]
    words = ["launch", "--slurm", TINY, "--plan", str(plan_file), "--nodes", "2", *given, "--time", "1:00"]
    assert run([*words, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "a run" / "launch.sbatch").read_text()
    assert "#SBATCH --time=1:00\n" in printed and "--gpus-per-node" not in printed
    command = shlex.split(printed.partition("-m optimus ")[2].partition(" &\n")[0])
    plan = tmp_path / "a run" / "plan.json"
    assert plan.read_bytes() == plan_file.read_bytes()
    started = tyro.cli(TrainCommand, args=command[1:])
    assert started == tyro.cli(TrainCommand, args=[TINY, "--plan", str(plan), *given])

    assert run(words) == 2
    assert "sbatch is not on PATH" in capsys.readouterr().err


def test_a_job_that_saves_checkpoints_resumes_whenever_it_starts_again(
    tmp_path: Path, plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first start must find none: those of another run are refused before it is submitted."""
    monkeypatch.chdir(tmp_path)
    words = ["launch", "--slurm", TINY, "--plan", str(plan_file), "--dry-run"]
    assert run(words) == 0 and "--resume" not in capsys.readouterr().out
    (tmp_path / "optimus-run" / "metrics.jsonl").write_text("{}")
    assert run([*words, "--checkpoint-every", "5"]) == 0
    assert capsys.readouterr().out.count(" --checkpoint-every 5 --resume &\n") == 1
    assert not (tmp_path / "optimus-run" / "metrics.jsonl").exists()
    (tmp_path / "optimus-run" / "checkpoints" / "step-00000005").mkdir(parents=True)
    assert run([*words, "--checkpoint-every", "5"]) == 2
    assert "has checkpoints of an earlier run" in capsys.readouterr().err
    assert run([*words, "--checkpoint-every", "5", "--resume"]) == 0
    assert capsys.readouterr().out.count(" --checkpoint-every 5 --resume &\n") == 1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "--slurm is missing"),
        (("--slurm", "--nodes", "3"), "--nodes = 3 does not divide the 2 ranks"),
        (("--slurm", "--nodes", "0"), "--nodes = 0 is too few"),
        (("--slurm", "--max-requeues", "-1"), "--max-requeues = -1 is too few"),
    ],
)
def test_what_cannot_be_launched_is_refused(
    words: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", TINY, *words]) == 2
    assert problem in capsys.readouterr().err


def test_gpus_are_asked_for_as_the_cluster_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["launch", "--slurm", TINY, "--plan", str(plan_file), "--dry-run"]
    assert run([*words, "--gpus-per-node", "2"]) == 0
    assert "#SBATCH --gpus-per-node=2\n" in capsys.readouterr().out
    assert not optimus.find_job("paper/strong-3072").cluster.gpu.is_cpu


# ---------------------------------------------------------------------------- a real Slurm


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    if missing := missing_programs():
        pytest.skip(f"needs root, slurm-wlm and munge; {missing[0]} is missing")
    if os.geteuid():
        pytest.skip("needs root: slurmd starts jobs of other users")
    with slurm_cluster(tmp_path / "slurm") as started:
        yield started


def launch(cluster: SlurmCluster, folder: Path, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "optimus", "launch", "--slurm", TINY, "--nodes", "2", "--json", *words],
        cwd=folder,
        env={**cluster.env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float, log: Path) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, log.read_text()[-3000:] if log.exists() else "no log"
        time.sleep(0.2)


def metrics_in(folder: Path) -> list[dict[str, Any]]:
    path = folder / "optimus-run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def resumed_steps(log: Path) -> list[int]:
    """Returns the steps that a run went on with, from a checkpoint of the same number."""
    found = re.findall(r"/step-(\d{8}): step (\d+) is next", log.read_text())
    assert all(int(saved) == int(step) for saved, step in found)
    return [int(step) for _, step in found]


@pytest.mark.heavy
@pytest.mark.timeout(480)
def test_slurm_trains_on_two_nodes_and_requeues_a_job_that_lost_one(
    cluster: SlurmCluster, tmp_path: Path, plan_file: Path
) -> None:
    words = ("--plan", str(plan_file), "--time", "60", "--sbatch", f"job-name={HOSTILE}")
    short = launch(cluster, tmp_path, *words, "--steps", "3")
    job, log = short["job_id"], Path(short["log"])
    wait_until(lambda: cluster.job_field(job, "JobState") == "COMPLETED", START_S, log)
    assert len(metrics_in(tmp_path)) == 3 and "loss " in log.read_text()
    assert cluster.job_field(job, "NumNodes") == "2"
    assert f"JobName={HOSTILE}\n" in cluster.run("scontrol", "show", "job", job)
    assert not list(tmp_path.rglob("pwned"))

    submitted = launch(cluster, tmp_path, *words, "--steps", "100000", "--checkpoint-every", "2")
    job, log = submitted["job_id"], Path(submitted["log"])
    wait_until(lambda: cluster.job_field(job, "JobState") == "RUNNING", START_S, log)
    saved = tmp_path / "optimus-run" / "checkpoints" / "step-00000004"
    wait_until(saved.exists, START_S, log)

    os.kill(cluster.ranks_of(NODES[1])[0], signal.SIGKILL)  # torchrun starts all ranks again
    wait_until(lambda: len(resumed_steps(log)) == 1, START_S, log)
    wait_until(lambda: [line["restart"] for line in metrics_in(tmp_path)].count(1) > 2, START_S, log)

    cluster.kill_node(NODES[1])
    wait_until(lambda: cluster.job_field(job, "Restarts") == "1", START_S, log)
    cluster.start_node(NODES[1])
    wait_until(lambda: len(resumed_steps(log)) == 2, START_S, log)
    resumed = resumed_steps(log)[-1]
    assert resumed >= 4 and resumed % 2 == 0
    wait_until(lambda: metrics_in(tmp_path)[-1]["step"] > resumed + 2, START_S, log)
    steps = [line["step"] for line in metrics_in(tmp_path)]
    assert sorted(set(steps)) == list(range(steps[-1] + 1)), "a step was lost"

    cluster.run("scancel", "--batch", "--signal=TERM", job)  # as before the time limit
    wait_until(lambda: len(resumed_steps(log)) == 3, START_S, log)
    resumed = resumed_steps(log)[-1]
    wait_until(lambda: metrics_in(tmp_path)[-1]["step"] > resumed, START_S, log)
    steps = [line["step"] for line in metrics_in(tmp_path)]
    assert steps[steps.index(resumed) - 1] == resumed - 1 and steps.count(resumed) == 1, (
        "no step was repeated"
    )

    cluster.run("scancel", job)  # what trained and was cancelled does not come back
    wait_until(lambda: cluster.job_field(job, "JobState") == "CANCELLED", START_S, log)
    time.sleep(5.0)
    assert cluster.job_field(job, "JobState") == "CANCELLED"
    assert cluster.job_field(job, "Restarts") == "2"
