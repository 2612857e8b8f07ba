"""Runs ranks under torchrun, hurts them, and says what happened when; leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import optimus
from optimus.engine.trainer import EXTRA_OPS, describe_status_line
from optimus.ir.plan import Plan

WORKER = (str(Path(__file__).with_name("fault_worker.py")),)
LINE = re.compile(r"rank (\d+) pid (\d+) restart (\d+) (joined|step (\d+)) at ([\d.]+)")
ROOT = Path(__file__).parent.parent

T = TypeVar("T")


def alive(pid: int) -> bool:
    """Runs, sleeps or is stopped; one that only waits for its parent is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Run:
    """`worker` (a script, its arguments; prints lines as in `LINE`) on `ranks` ranks under torchrun."""

    def __init__(
        self, ranks: int, *, worker: Sequence[str] = WORKER, restarts: int = 0, rendezvous: Sequence[str] = ()
    ) -> None:
        self.ranks = ranks
        self.lines: list[str] = []
        self.pids: dict[tuple[int, int], int] = {}  # of (restart, rank)
        self.steps: dict[tuple[int, int], tuple[int, float]] = {}  # (restart, rank): last step, when
        self.first_step_s: dict[tuple[int, int], float] = {}
        self.stepped: list[int] = []  # processes that made a step, in the order of their first
        rendezvous = rendezvous or ("--standalone",)
        options = ("--nproc-per-node", str(ranks), "--max-restarts", str(restarts))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *rendezvous, *options, *worker],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if not (match := LINE.search(line)):
                continue
            rank, pid, restart = map(int, match.group(1, 2, 3))
            self.pids[restart, rank] = pid
            if match.group(5):
                if pid not in self.stepped:
                    self.stepped.append(pid)
                self.steps[restart, rank] = int(match.group(5)), float(match.group(6))
                self.first_step_s.setdefault((restart, rank), float(match.group(6)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.look()
        if self.process.poll() is None:
            self.process.terminate()
        for pid in self.pids.values():
            if alive(pid):
                try:
                    os.kill(pid, signal.SIGKILL)  # one that we stopped would keep torchrun waiting
                except ProcessLookupError:
                    pass
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        left = [pid for pid in self.pids.values() if alive(pid)]
        if error is not None:
            os.write(2, "\n".join(self.lines[-60:]).encode())
        assert not left, f"processes left: {left}"

    def look(self) -> None:
        """For what ranks do not print."""

    def wait(self, what: str, ask: Callable[[], T | None], limit_s: float) -> T:
        """The answer, when there is one."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if (answer := ask()) is not None:
                return answer
            time.sleep(0.02)
        raise TimeoutError(f"not within {limit_s} s: {what}")

    def wait_for_step(self, restart: int, limit_s: float, more: int = 1) -> float:
        """When the last rank has made so many steps of this attempt (the first one's time if 1)."""

        def ask() -> float | None:
            done = [self.steps.get((restart, rank)) for rank in range(self.ranks)]
            first = [self.first_step_s.get((restart, rank), 0.0) for rank in range(self.ranks)]
            return max(first) if all(step is not None and step[0] + 1 >= more for step in done) else None

        return self.wait(f"step {more} of attempt {restart}", ask, limit_s)

    def hurt(self, restart: int, rank: int, number: int) -> float:
        """Sends a signal to a rank and says when."""
        os.kill(self.pids[restart, rank], number)
        return time.monotonic()

    def wait_until_stopped(self, restart: int, limit_s: float, apart_from: int = -1) -> float:
        """When none of an attempt's processes runs."""
        pids = [self.pids[restart, rank] for rank in range(self.ranks) if rank != apart_from]

        def ask() -> float | None:
            return None if any(map(alive, pids)) else time.monotonic()

        return self.wait("all ranks stopped", ask, limit_s)

    def wait_for_words(self, words: str, limit_s: float) -> tuple[str, float]:
        """The first line that matches, and when."""

        def ask() -> tuple[str, float] | None:
            found = next((line for line in list(self.lines) if re.search(words, line)), None)
            return None if found is None else (found, time.monotonic())

        return self.wait(words, ask, limit_s)


# ---------------------------------------------------------------------------- the trainer


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A job and its plan, in files."""

    ranks: int
    job: Path
    plan: Path
    loaded: Plan

    def lines_of(self, rank: int) -> set[str]:
        """Words of everything that a rank does in a step."""
        lines = len(self.loaded.programs[self.loaded.ranks.class_of(rank)])
        return {describe_status_line(self.loaded, rank, line) for line in range(lines + len(EXTRA_OPS))}


def prepare(folder: Path, ranks: int, *, encoder_pp: int = 2) -> Prepared:
    """The catalog's smallest job on 4 or 8 cores: an LLM of 4 stages, once or twice."""
    text = (ROOT / "optimus" / "catalog" / "jobs" / "cpu" / "tiny-vl.yaml").read_text()
    for old, new in (
        ("  gpus: 2\n  gpus_per_node: 2\n", f"  gpus: {ranks}\n  gpus_per_node: {ranks}\n"),
        ("  llm: {pp: 2, tp: 1}\n", f"  llm: {{pp: 4, tp: 1}}\n  vision: {{pp: {encoder_pp}, tp: 1}}\n"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    job, plan = folder / f"{ranks}.yaml", folder / f"{ranks}.plan.json"
    job.write_text(text)
    planned = optimus.plan(optimus.load_job(job), systems=())
    optimus.save_plan(planned.plan, plan)
    return Prepared(ranks=ranks, job=job, plan=plan, loaded=planned.plan)


class Trainer(Run):
    """`optimus train` under torchrun: processes are found in /proc, steps in the file of metrics."""

    def __init__(self, prepared: Prepared, folder: Path, *, restarts: int = 0) -> None:
        self.metrics = folder / "metrics.jsonl"
        self.seen_s: dict[int, float] = {}  # when an attempt's processes were first seen
        self.step_s: list[float] = []  # of every step of every attempt
        self._known: set[int] = set()
        self._read_lines = 0
        words = ("train", str(prepared.job), "--plan", str(prepared.plan), "--run-dir", str(folder))
        worker = ("-m", "optimus", *words, "--steps", "1000000")
        super().__init__(prepared.ranks, worker=worker, restarts=restarts)

    def look(self) -> None:
        """Finds new processes and new steps."""
        for pid in children(self.process.pid):
            if pid not in self._known and "RANK" in (told := variables(pid)):
                restart = int(told.get("TORCHELASTIC_RESTART_COUNT", "0"))
                self.pids[restart, int(told["RANK"])] = pid
                self.seen_s.setdefault(restart, time.monotonic())
                self._known.add(pid)
        if not self.metrics.exists():
            return
        ahead_s = time.monotonic() - time.time()
        lines = self.metrics.read_text().rpartition("\n")[0].splitlines()
        for found in map(json.loads, lines[self._read_lines :]):
            self.step_s.append(found["step_s"])
            for rank in range(self.ranks):  # a step ends with the sum of all ranks' losses
                key = found["restart"], rank
                self.steps[key] = found["step"], found["time"] + ahead_s
                self.first_step_s.setdefault(key, found["time"] + ahead_s)
        self._read_lines = len(lines)

    def wait(self, what: str, ask: Callable[[], T | None], limit_s: float) -> T:
        def look_and_ask() -> T | None:
            self.look()
            return ask()

        return super().wait(what, look_and_ask, limit_s)

    def wait_for_processes(self, restart: int, limit_s: float) -> float:
        """When all ranks of an attempt had been started."""

        def ask() -> float | None:
            there = all((restart, rank) in self.pids for rank in range(self.ranks))
            return self.seen_s[restart] if there else None

        return self.wait(f"processes of attempt {restart}", ask, limit_s)


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def variables(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def kill(
    run: Trainer, attempt: int, rank: int, *, joining_s: float | None, into_step_s: float
) -> tuple[float, float]:
    """Seconds from `kill -9` of a rank until all ranks have stopped, and until all have made a new step.

    It is killed so long after its start, while ranks still come together, or in the middle of a step.
    """
    if joining_s is None:
        run.wait_for_step(attempt, 60, more=2)
        time.sleep(into_step_s)
    else:
        began_s = run.wait_for_processes(attempt, 60)
        time.sleep(max(0.0, began_s + joining_s - time.monotonic()))
    run.look()
    killed_s = run.hurt(attempt, rank, signal.SIGKILL)
    stopped_s = run.wait_until_stopped(attempt, 20)
    return stopped_s - killed_s, run.wait_for_step(attempt + 1, 60) - killed_s
