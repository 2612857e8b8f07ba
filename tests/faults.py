"""Runs ranks under torchrun, hurts them, and says what happened when; leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

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

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def wait(self, what: str, ask: Callable[[], T | None], limit_s: float) -> T:
        """The answer, when there is one."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if (answer := ask()) is not None:
                return answer
            time.sleep(0.01)
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


def kill(run: Run, attempt: int, rank: int) -> tuple[float, float]:
    """Seconds from `kill -9` of a rank until all ranks have stopped, and until all have made a new step."""
    run.wait_for_step(attempt, 60, more=3)
    killed_s = run.hurt(attempt, rank, signal.SIGKILL)
    stopped_s = run.wait_until_stopped(attempt, 20)
    return stopped_s - killed_s, run.wait_for_step(attempt + 1, 60) - killed_s
