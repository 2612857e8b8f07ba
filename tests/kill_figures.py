"""Kills ranks and launchers at random points, resumes, and compares with a run that was never disturbed.

`python tests/kill_figures.py 4 20 5` kills 20 times at 4 ranks, five of them while a checkpoint is written.
Every fourth kill hits the launcher; the run then goes on under the other of two plans. Prints a JSON line for
every kill, and one for the run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import ROOT, alive, children

from optimus.engine.checkpoint_folder import list_checkpoints

EVERY = 3  # steps between checkpoints
LIMIT_S = 120.0
LAYOUTS = ("llm=pp2,tp1", "llm=pp1,tp1")
JOB = ROOT / "optimus" / "catalog" / "jobs" / "cpu" / "tiny-vl.yaml"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class DisturbedRun:
    """A run that is started again whenever its launcher was killed."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self.job = folder / "job.yaml"
        text = JOB.read_text().split("layout:")[0].replace("gpus: 2", f"gpus: {ranks}")
        text = text.replace("gpus_per_node: 2", f"gpus_per_node: {ranks}")
        text += "layout: {limits: {microbatch_sequences: [1]}}\nrun: {dtype: float64}\n"
        self.job.write_text(text)
        self.plans = [self._plan(layout) for layout in LAYOUTS]
        self.plan = 0
        self.process = self.start()

    def _plan(self, layout: str) -> Path:
        path = self.folder / f"{layout}.json"
        words = ["plan", str(self.job), "--layout", layout, "--no-sure", "-o", str(path)]
        subprocess.run(optimus(words), env=ENVIRONMENT, check=True, capture_output=True)
        return path

    def start(self) -> subprocess.Popen[bytes]:
        words = ["train", str(self.job), "--plan", str(self.plans[self.plan]), "--steps", "100000"]
        words += ["--run-dir", str(self.run_dir), "--checkpoint-every", str(EVERY), "--resume"]
        with (self.folder / "output").open("ab") as output:
            return subprocess.Popen(
                optimus([*words, "--restarts", "1000", "--quiet"]),
                env=ENVIRONMENT,
                stdout=output,
                stderr=output,
            )

    def lines(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait(self, what: str, ask: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if answer := ask():
                return answer
            time.sleep(0.001)
        raise TimeoutError(f"{what}\n{(self.folder / 'output').read_text()[-3000:]}")


def optimus(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "optimus", *words]


def kill_once(run: DisturbedRun, choose: random.Random, *, launcher: bool, saving: bool) -> dict[str, Any]:
    """Kills one process, waits for the first new step, and says what was lost."""
    checkpoints = run.run_dir / "checkpoints"
    before = len(run.lines())
    run.wait("three steps", lambda: len(run.lines()) >= before + 3)
    if saving:
        run.wait("a checkpoint that is written", lambda: list(checkpoints.glob(".step-*.tmp")))
    else:
        time.sleep(choose.random())
    ranks = children(run.process.pid)
    victim = run.process.pid if launcher else choose.choice(ranks)
    os.kill(victim, signal.SIGKILL)
    killed_s, complete = time.time(), [int(path.name[5:]) for path in list_checkpoints(checkpoints)]
    if launcher:
        run.process.wait()
    # Another rank may still write the step that had just ended.
    run.wait("the end of all ranks", lambda: not any(map(alive, ranks)))
    ended_s = time.time() - killed_s
    if launcher:
        run.plan = 1 - run.plan
        run.process = run.start()
    count = len(run.lines())
    last = run.lines()[-1]["step"]
    new = run.wait("a new step", lambda: run.lines()[count:])[0]
    newest = max(complete, default=0)
    # A checkpoint whose rename was under way when the process died may have become complete.
    return {
        "launcher": launcher,
        "saving": saving,
        "recovered_s": round(new["time"] - killed_s, 2),
        "lost_steps": last + 1 - new["step"],
        "resumed_at_newest": new["step"] in (newest, newest + EVERY),
        "ranks_ended_s": round(ended_s, 2),
    }


def main(ranks: int, kills: int, saving: int) -> None:
    choose = random.Random(ranks)
    with tempfile.TemporaryDirectory() as name:
        run = DisturbedRun(Path(name), ranks)
        found = []
        try:
            for number in range(kills):
                found.append(kill_once(run, choose, launcher=number % 4 == 3, saving=number < saving))
                print(json.dumps(found[-1]), flush=True)  # noqa: T201
        finally:
            run.process.send_signal(signal.SIGTERM)
            run.process.wait(60)
        left = [path.name for path in (run.run_dir / "checkpoints").glob(".step-*.tmp")]
        losses = {line["step"]: line["loss"] for line in run.lines()}
        words = ["train", str(run.job), "--plan", str(run.plans[0]), "--steps", str(len(losses))]
        words += ["--run-dir", str(run.folder / "whole"), "--quiet"]
        subprocess.run(optimus(words), env=ENVIRONMENT, check=True, capture_output=True)
        whole = [json.loads(line)["loss"] for line in (run.folder / "whole" / "metrics.jsonl").open()]
        times = sorted(each["recovered_s"] for each in found)
        print(  # noqa: T201
            json.dumps(
                {
                    "ranks": ranks,
                    "kills": kills,
                    "steps": len(losses),
                    "largest_difference": max(abs(losses[n] / whole[n] - 1) for n in range(len(whole))),
                    "recovered_s_median": times[len(times) // 2],
                    "recovered_s_longest": times[-1],
                    "most_lost": max(each["lost_steps"] for each in found),
                    "resumed_at_newest": all(each["resumed_at_newest"] for each in found),
                    "left_behind": left,
                }
            )
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
