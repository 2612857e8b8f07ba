"""A run reports its steps: lines of JSON, TensorBoard and W&B read back, and trackers that fail."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faults import ROOT

import optimus
from optimus.cli import console
from optimus.cli.train_inputs import add_folders
from optimus.engine import watchdog
from optimus.engine.config import StepMetrics
from optimus.engine.metrics_log import Goodput, MetricsLog, append_whole_line
from optimus.engine.run_section import read_training_config
from optimus.errors import UserError

TINY = "cpu/tiny-vl"
ONE_GB = 1e9


def metrics(step: int, **changes: Any) -> StepMetrics:
    values = {"loss": 6.0 - step / 8, "gradient_norm": 0.5, "lr": 1e-4, "step_s": 0.25, "tokens_per_s": 64.0}
    return StepMetrics(step=step, **{**values, **changes})


def lines_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(step: StepMetrics) -> dict[str, float]:
    """The metrics that a tracker gets: known and finite."""
    return {name: value for name, value in asdict(step).items() if name != "step" and value is not None}


def write_run(folder: Path, *trackers: str) -> list[StepMetrics]:
    """Writes three steps, one with a loss that is not finite, and two more after a restart."""
    steps = [metrics(number, mfu=0.5) for number in range(5)]
    steps[1] = metrics(1, loss=float("nan"), mfu=0.5)
    for restart, part in enumerate((steps[:3], steps[3:])):
        log = MetricsLog(folder, trackers, settings={"job": "a", "run.seed": 3}, restart=restart)
        for step in part:
            log.write(step, begins=step.step == 0)
        log.close()
    return steps


def test_goodput_counts_steps_that_were_trained_again_once(tmp_path: Path) -> None:
    """Ten steps of a second; three are lost with a crash that takes 20 s, and trained again."""
    lines = [{"step": n, "step_s": 1.0, "time": 100.0 + n} for n in range(7)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 7,'
    )
    goodput = Goodput(tmp_path / "metrics.jsonl")
    assert goodput.share == pytest.approx(1.0)
    for step in range(4, 10):
        goodput.add(step, 1.0, 106.0 + 20.0 + step - 3)
    assert goodput.share == pytest.approx(10 / (7 + 20 + 6))


# ---------------------------------------------------------------------------- trackers read back


def test_tensorboard_reads_what_was_written(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = write_run(tmp_path, "tensorboard")
    (folder,) = (tmp_path / "tensorboard").iterdir()  # of both attempts
    events = EventAccumulator(str(folder))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {*numbers(steps[0]), "goodput"} - {"bubble_share"}
    for name in numbers(steps[0]).keys() - {"bubble_share"}:
        expected = [step for step in steps if name != "loss" or step.step != 1]
        assert [event.step for event in events.Scalars(name)] == [step.step for step in expected]
        for event, step in zip(events.Scalars(name), expected, strict=True):
            assert event.value == pytest.approx(numbers(step)[name])
    (text,) = events.Tensors("settings/text_summary")[:1]
    assert b"run.seed: 3" in text.tensor_proto.string_val[0]


@pytest.mark.ci("foundation")
def test_wandb_reads_what_was_written_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network or an account; a restart goes on in the same run."""
    for name in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    script = "import sys; sys.path[:0] = sys.argv[1:2]; import test_metrics_log as t; "
    script += "from pathlib import Path; t.write_run(Path(sys.argv[2]), 'wandb')"
    words = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    read = subprocess.run(
        [sys.executable, "-c", READ_WANDB, *map(str, sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert read.returncode == 0, read.stderr
    ids, history = json.loads(read.stdout)
    expected = [step for number in range(5) for step in [metrics(number, mfu=0.5)]]
    assert len(set(ids)) == 1 and [row.pop("_step") for row in history] == list(range(5))
    for row, step in zip(history, expected, strict=True):
        assert 0 < row.pop("goodput") <= 1
        values = {name: value for name, value in row.items() if not name.startswith("_")}
        wanted = numbers(step)
        if step.step == 1:
            del wanted["loss"]
        assert values == pytest.approx(wanted)


READ_WANDB = """
import json, struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2

BLOCK, HEADER = 32768, 7  # a log as LevelDB writes it, with one more header in front: ":W&B", magic, version

def scan(data):
    assert data[:4] == b":W&B"
    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # no header begins so late in a block
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""

ids, history = [], []
for path in sys.argv[1:]:
    for data in scan(Path(path).read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            ids.append(record.run.run_id)
        if record.HasField("history"):
            items = record.history.item
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            history.append({**row, "_step": record.history.step.num})
print(json.dumps([ids, history]))
"""


# ---------------------------------------------------------------------------- trackers that fail


class Tracker:
    """Fails where it is told to."""

    def __init__(self, fails: str) -> None:
        self.fails, self.steps = fails, list[int]()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self.fails == "write":
            raise ConnectionError("no\nnetwork")
        self.steps.append(step)

    def close(self) -> None:
        if self.fails == "close":
            raise OSError("no space")


@pytest.mark.parametrize("fails", ["open", "write", "close", "import"])
def test_a_tracker_that_fails_warns_once_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: str
) -> None:
    trackers = {"good": Tracker(""), "bad": Tracker(fails)}

    def import_module(name: str) -> Any:
        tracker = trackers[name.rpartition(".")[2]]
        if tracker.fails == "import":
            raise ModuleNotFoundError("no module")

        def open_writer(*_: object) -> Tracker:
            if tracker.fails == "open":
                raise RuntimeError("no account")
            return tracker

        return SimpleNamespace(open_writer=open_writer)

    monkeypatch.setattr("importlib.import_module", import_module)
    log = MetricsLog(tmp_path, ("bad", "good"), settings={})
    for step in range(3):
        log.write(metrics(step), begins=step == 0)
    log.close()
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: bad ") and warning.endswith("training goes on without it")
    assert trackers["good"].steps == [0, 1, 2]
    assert [line["step"] for line in lines_in(tmp_path)] == [0, 1, 2]


@pytest.mark.ci("foundation")
def test_trackers_are_loaded_only_if_they_are_asked_for() -> None:
    script = "import sys, optimus.engine.trainer; print({'tensorboard', 'wandb'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_trackers_are_named_in_the_job_or_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_training_config({"log": ["tensorboard"]}, steps=1).log == ("tensorboard",)
    assert read_training_config({"log": ["tensorboard"]}, steps=1, log=("wandb",)).log == ("wandb",)
    with pytest.raises(UserError, match=r"run.log = wandbb is no tracker"):
        read_training_config({"log": ["wandbb"]}, steps=1)
    with pytest.raises(UserError, match=r"run.log = wandb is not a list"):
        read_training_config({"log": "wandb"}, steps=1)
    monkeypatch.setattr("optimus.engine.run_section.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"wandb is not installed\n.*optimus-mllm\[wandb\]"):
        read_training_config({"log": ["wandb"]}, steps=1)


# ---------------------------------------------------------------------------- figures


def test_waiting_is_what_lines_that_wait_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(watchdog, "NOW_S", lambda: now_s[0])
    recorder = watchdog.FlightRecorder(2)  # smaller than a step
    recorder.waiting_lines = frozenset({1, 3})
    for line, seconds in enumerate((1.0, 2.0, 4.0, 8.0, 16.0)):
        recorder.begin(line)
        now_s[0] += seconds
        recorder.end(line)
    assert recorder.waited_s == 10.0


@pytest.mark.ci("foundation")
def test_mfu_counts_as_the_planner_does() -> None:
    """A step that takes as long as a plan claims has the MFU that the plan claims."""
    job = optimus.find_job(TINY)
    plan = optimus.plan(job, systems=()).plan
    flops = add_folders(read_training_config(job.run, steps=1), job, None, None).step_flops
    assert flops is not None
    found = flops / (plan.claims.step_s * job.cluster.gpus * job.cluster.gpu.peak_flops)
    assert found == pytest.approx(plan.notes["mfu"])


# ---------------------------------------------------------------------------- progress


def test_piped_progress_says_how_long_it_still_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the steps of this run: it goes on from step 1000. A null loss is shown as not finite."""
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    with console.training_progress(1200) as report:
        for step in range(1000, 1010):
            now_s += 10.0
            line = asdict(metrics(step, mfu=0.4321 if step > 1005 else None))
            report({**line, "loss": None} if step == 1003 else line)
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 10
    assert shown[3] == "step 1004 of 1200, loss not finite, 0.250 s, 64 tokens/s, 33 min left"
    assert shown[9].endswith("64 tokens/s, MFU 43.2 %, 32 min left")


@pytest.mark.parametrize("room", range(1, 60, 7))
def test_a_line_is_whole_or_not_in_the_file(room: int, tmp_path: Path) -> None:
    """The kernel writes as much of a line as there is room for, and then refuses."""
    file, limits = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = [json.dumps({"step": step, "words": "x" * 40}) for step in range(4)]
    append_whole_line(file, lines[0])
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + room, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            append_whole_line(file, lines[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_text().splitlines() == lines[:1]
    with file.open("a") as torn:  # as a process leaves it that is killed while it writes
        torn.write(lines[2][:room])
    append_whole_line(file, lines[3])
    assert file.read_text().splitlines() == [lines[0], lines[3]]
