"""Trains for an hour at 4 ranks and hits the run every three minutes: `python tests/soak_figures.py 60`.

Kills a rank, stops one, fills the disk, breaks a batch once and cuts the network, in turn. The loss of every
step must be that of a run without faults. Prints a JSON line for every fault and one for the run. Arguments
are minutes, and seconds between faults. Needs root for the disk.
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

from faults import ROOT, children

EVERY = 20  # steps between checkpoints
JOB = ROOT / "optimus" / "catalog" / "jobs" / "cpu" / "tiny-vl.yaml"
DISK_BYTES = 400_000_000
HOOK = """
import os
if "RANK" in os.environ:
    from dataclasses import replace
    from pathlib import Path
    from optimus.engine.synthetic_data import SyntheticDataset
    sample_of, flag = SyntheticDataset.sample, Path(os.environ["SOAK_FLAG"])
    def sample(self, number, items=None):
        sample = sample_of(self, number, items)
        try:
            flag.unlink()
        except FileNotFoundError:
            return sample
        items = {name: tuple(replace(item, inputs=item.inputs * float("nan")) for item in of)
                 for name, of in sample.items.items()}
        return replace(sample, items=items, tokens=sample.tokens)
    SyntheticDataset.sample = sample
"""


class Soak:
    """A run on a small disk of its own, started again by its launcher."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.disk, self.flag = folder, folder / "disk", folder / "break-a-batch"
        self.disk.mkdir()
        size = f"size={DISK_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self.disk)], check=True)
        text = JOB.read_text().replace("gpus: 2", "gpus: 4").replace("gpus_per_node: 2", "gpus_per_node: 4")
        self.job, self.plan = folder / "job.yaml", folder / "plan.json"
        self.job.write_text(text)
        (folder / "sitecustomize.py").write_text(HOOK)
        self.environment = {
            **os.environ,
            "PYTHONPATH": f"{folder}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "SOAK_FLAG": str(self.flag),
        }
        self.run(["plan", str(self.job), "--no-sure", "-o", str(self.plan)])

    def command(self, words: list[str]) -> list[str]:
        return [sys.executable, "-m", "optimus", *words]

    def run(self, words: list[str]) -> None:
        subprocess.run(self.command(words), env=self.environment, check=True, capture_output=True)

    def start(self) -> subprocess.Popen[bytes]:
        words = ["train", str(self.job), "--plan", str(self.plan), "--steps", "1000000", "--quiet"]
        words += ["--run-dir", str(self.disk), "--checkpoint-every", str(EVERY), "--restarts", "1000"]
        with (self.folder / "output").open("ab") as output:
            return subprocess.Popen(self.command(words), env=self.environment, stdout=output, stderr=output)

    def lines(self, name: str = "disk") -> list[dict[str, Any]]:
        path = self.folder / name / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def kill(soak: Soak, launcher: int, choose: random.Random) -> None:
    os.kill(choose.choice(children(launcher)), signal.SIGKILL)


def stop(soak: Soak, launcher: int, choose: random.Random) -> None:
    """Stops a rank for good: the watchdogs of the others end the run."""
    os.kill(choose.choice(children(launcher)), signal.SIGSTOP)


def fill_disk(soak: Soak, launcher: int, choose: random.Random) -> None:
    """Leaves no byte for metrics and checkpoints, for 20 s."""
    filler = soak.disk / "filler"
    try:
        with filler.open("wb") as file:
            while True:
                file.write(bytes(65536))
                file.flush()
    except OSError:
        pass
    time.sleep(20)
    filler.unlink()


def break_batch(soak: Soak, launcher: int, choose: random.Random) -> None:
    soak.flag.touch()


def cut_network(soak: Soak, launcher: int, choose: random.Random) -> None:
    """Shuts the connections of a rank to all others, as a lost link does."""
    rank = choose.choice(children(launcher))
    sockets = subprocess.run(["ss", "-tnpH"], capture_output=True, text=True, check=True).stdout
    ports = [line.split()[3].rsplit(":", 1)[1] for line in sockets.splitlines() if f"pid={rank}," in line]
    for port in ports:
        subprocess.run(["ss", "-K", "sport", "=", f":{port}"], capture_output=True, check=False)


FAULTS: tuple[Callable[[Soak, int, random.Random], None], ...] = (
    kill,
    stop,
    fill_disk,
    break_batch,
    cut_network,
)


def main(minutes: float, every_s: float) -> None:
    choose = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        soak = Soak(Path(name))
        process, begin_s, faults = soak.start(), time.time(), 0
        try:
            while time.time() + every_s < begin_s + 60 * minutes:
                time.sleep(every_s)
                fault = FAULTS[faults % len(FAULTS)]
                fault(soak, process.pid, choose)
                faults += 1
                done = soak.lines()
                print(json.dumps({"fault": fault.__name__, "step": done[-1]["step"]}), flush=True)  # noqa: T201
            time.sleep(max(0.0, begin_s + 60 * minutes - time.time()))
            process.send_signal(signal.SIGTERM)
            code = process.wait(180)
            lines = soak.lines()
            losses = {line["step"]: line["loss"] for line in lines}
            words = ["train", str(soak.job), "--plan", str(soak.plan), "--steps", str(max(losses) + 1)]
            soak.run([*words, "--run-dir", str(soak.folder / "whole"), "--quiet"])
            whole = {line["step"]: line["loss"] for line in soak.lines("whole")}
            print(  # noqa: T201
                json.dumps(
                    {
                        "minutes": minutes,
                        "faults": faults,
                        "code": code,
                        "steps": max(losses) + 1,
                        "steps_without_a_line": max(losses) + 1 - len(losses),
                        "goodput": lines[-1]["goodput"],
                        "different_losses": sum(losses[step] != whole[step] for step in losses),
                    }
                )
            )
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(180)
            subprocess.run(["umount", str(soak.disk)], check=False)


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 180.0)
