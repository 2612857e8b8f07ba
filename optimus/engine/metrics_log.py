"""Writes the metrics of every step: lines of JSON always, and trackers that a run asks for by name."""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import secrets
import sys
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.engine.config import METRICS, StepMetrics
from optimus.ir.files import write_file_atomically
from optimus.protocols import MetricsWriter

MAX_LINE_BYTES = 1 << 16  # of the metrics of a step
RUN_ID = "run-id"  # a file of the run's folder, if it has trackers
ADAPTERS = "optimus.integrations"  # a module for each tracker, with `open_writer`, loaded if asked for


def count_left_out(steps: Sequence[StepMetrics]) -> int:
    """Returns how many steps were left out for good: not those that were trained again with success."""
    last = {metrics.step: metrics.skipped_steps for metrics in steps}
    return sum(last.values())


def find_last_finite(backwards: Iterable[float | None]) -> float | None:
    """Returns the first finite value of an order that begins with the last step."""
    return next((value for value in backwards if value is not None and math.isfinite(value)), None)


def append_whole_line(path: Path, text: str) -> None:
    """Appends a line or nothing, and removes the part of one that a crash or a full disk has left."""
    with path.open("ab+", buffering=0) as file:  # a buffer would be written once more when it is closed
        size = file.seek(0, os.SEEK_END)
        length = min(size, MAX_LINE_BYTES)
        file.seek(size - length)
        if cut := length - (file.read(length).rfind(b"\n") + 1):
            size -= cut
            file.truncate(size)
        try:
            line = f"{text}\n".encode()
            while line:
                line = line[file.write(line) :]
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


class MetricsLog:
    """The metrics file of a run and its trackers, on rank 0. What fails warns once; training goes on."""

    def __init__(
        self,
        run_dir: Path,
        trackers: tuple[str, ...],
        *,
        settings: Mapping[str, object],
        restart: int = 0,
        goes_on: bool = False,
    ) -> None:
        self._file, self._restart = run_dir / METRICS, restart
        self.goodput = Goodput(self._file if goes_on or restart > 0 else None)
        self._warned: set[str] = set()
        self._writers: dict[str, MetricsWriter] = {}
        run_id = _name_run(run_dir, goes_on or restart > 0) if trackers else ""
        for name in trackers:
            try:
                adapter = importlib.import_module(f"{ADAPTERS}.{name}")
                self._writers[name] = adapter.open_writer(run_dir, run_id, settings)
            except Exception as error:
                self._warn(name, f"{name} cannot be started: {_describe(error)}")

    def write(self, metrics: StepMetrics, *, begins: bool) -> None:
        """Appends a step; if it `begins` a run, what the metrics file holds is of another."""
        values = {name: value if _is_json(value) else None for name, value in asdict(metrics).items()}
        self.goodput.add(metrics.step, 0.0 if metrics.skipped_steps else metrics.step_s, time.time())
        values["goodput"] = self.goodput.share
        line: dict[str, Any] = {**values, "restart": self._restart, "time": time.time()}
        try:
            if begins:
                self._file.write_bytes(b"")
            append_whole_line(self._file, json.dumps(line, allow_nan=False))
        except OSError as error:
            self._warn(METRICS, f"{self._file} cannot be written: {error.strerror}")
        numbers = {name: float(value) for name, value in values.items() if value is not None}
        del numbers["step"]
        for name, writer in tuple(self._writers.items()):
            try:
                writer.write(metrics.step, numbers)
            except Exception as error:
                self._drop(name, error)

    def close(self) -> None:
        """Writes what trackers still hold back."""
        for name, writer in tuple(self._writers.items()):
            try:
                writer.close()
            except Exception as error:
                self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        del self._writers[name]
        self._warn(name, f"{name} has failed: {_describe(error)}")

    def _warn(self, name: str, problem: str) -> None:
        """Says what is lost, once for each destination, without ending the run."""
        if name not in self._warned:
            sys.stderr.write(f"warning: {problem}; training goes on without it\n")
            self._warned.add(name)


class Goodput:
    """The share of a run's wall clock that its useful steps took, restarts included.

    A step that is trained again takes the place of the lost one and of all behind it. `file` has the metrics
    of a run that goes on.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._first_step, self._useful_s, self._sum_s = 0, array("d"), 0.0
        self._begin_s = self._now_s = time.time()
        if file is not None and file.exists():
            for line in file.read_text().splitlines():
                with suppress(ValueError, KeyError, TypeError):  # cut when the run was killed
                    values = json.loads(line)
                    if not self._useful_s:
                        self._begin_s = values["time"] - values["step_s"]
                    useful_s = 0.0 if values.get("skipped_steps") else values["step_s"]
                    self.add(values["step"], useful_s, values["time"])

    def add(self, step: int, useful_s: float, now_s: float) -> None:
        """Adds a step that has ended now."""
        if not self._useful_s:
            self._first_step = step
        kept = max(0, step - self._first_step)
        self._sum_s += useful_s - sum(self._useful_s[kept:])
        del self._useful_s[kept:]
        self._useful_s.append(useful_s)
        self._now_s = now_s

    @property
    def share(self) -> float:
        return min(1.0, self._sum_s / max(self._now_s - self._begin_s, 1e-9))


def _name_run(run_dir: Path, goes_on: bool) -> str:
    """Returns the name of this run for trackers: that of the folder's last one if it goes on."""
    file = run_dir / RUN_ID
    if not goes_on or not file.exists():
        write_file_atomically(file, f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}")
    return file.read_text()


def read_peak_memory_bytes(device: torch.device) -> float:
    """Returns the most that torch has allocated on a GPU, or that this process has held on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(resident if sys.platform == "darwin" else resident * 1024)


def reduce_metrics(
    loss: Tensor | None, sums: Sequence[float], maxima: Sequence[float], device: torch.device
) -> tuple[list[float], list[float]]:
    """Returns loss and sums over ranks, and what is largest on any rank.

    That is the wait for data, since a step waits as long as its slowest rank does, and the signal that stops
    a rank, since all ranks stop after the same step.
    """
    totals = torch.tensor([0.0, *sums], dtype=torch.float64, device=device)
    largest = torch.tensor(maxima, dtype=torch.float64, device=device)
    if loss is not None:
        totals[0] = loss
    dist.all_reduce(totals)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return totals.tolist(), largest.tolist()


def _describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _is_json(value: object) -> bool:
    """Tells if a figure is a number that JSON knows: not NaN, not infinite."""
    return not isinstance(value, float) or math.isfinite(value)
