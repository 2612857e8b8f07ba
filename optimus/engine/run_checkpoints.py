"""Connects the training of a rank with its checkpoints: resumes, saves on time, and stops on a signal."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import __version__ as torch_version
from torch import distributed as dist

from optimus import __version__
from optimus.engine.checkpoint import CheckpointWriter, find_newest, load_state, take_folder
from optimus.engine.checkpoint_folder import CHECKPOINTS, Manifest, damaged
from optimus.engine.checkpoint_state import collect_rank_state
from optimus.engine.rank_trainer import RankTrainer
from optimus.errors import UserError, show_value

SAVE_TIMEOUT_S = 3600.0  # of one message between the threads that write
FIXED = ("run.seed", "run.data_seed", "run.eval.batches", "run.dtype", "data (its index)")  # decide the steps


class RunCheckpoints:
    """The checkpoints of a run; every rank makes one and calls every method at the same steps."""

    def __init__(self, rank: RankTrainer, plan_hash: str, *, resume: bool) -> None:
        assert rank.config.run_dir is not None
        self._rank, self._resume, self._plan_hash = rank, resume, plan_hash
        self._folder = rank.config.run_dir / CHECKPOINTS
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=SAVE_TIMEOUT_S))
        self._lock = take_folder(self._folder, self._group)
        self._writer = CheckpointWriter(self._folder, rank.config.checkpoint, self._group)

    def load(self) -> int:
        """Loads the newest checkpoint, if the run goes on; returns the number of the first step."""
        config = self._rank.config
        newest = find_newest(self._folder, self._group) if self._resume else None
        if newest is None:
            return config.first_step
        path, manifest = newest
        self._check(manifest)
        self._rank.step_samples.leave_out(manifest.facts["left_out"])
        return self._go_on_from(path, manifest)

    def rewind(self, step: int) -> int | None:
        """Goes back to the newest checkpoint and leaves out the batch of a step.

        Returns the number of the next step, or None if there is no checkpoint.
        """
        self.wait()
        newest = find_newest(self._folder, self._group)
        if newest is None:
            return None
        self._rank.step_samples.leave_out([self._rank.step_samples.batch(step)])
        return self._go_on_from(*newest)

    def _go_on_from(self, path: Path, manifest: Manifest) -> int:
        load_state(path, collect_rank_state(self._rank, saving=False), self._group)
        if dist.get_rank() == 0:
            sys.stderr.write(f"goes on from {path}: step {manifest.step} is next\n")
        return manifest.step

    def save(self, step: int) -> None:
        """Begins to save the state after `step` steps."""
        self._writer.save(step, self._facts, collect_rank_state(self._rank, saving=True))

    def wait(self) -> None:
        """Waits until nothing is written."""
        self._writer.wait()

    @property
    def last_saved(self) -> str:
        """The last checkpoint that this run has completed, if any."""
        return str(self._writer.last_saved or "")

    @property
    def _facts(self) -> dict[str, Any]:
        plan, settings = self._rank.plan, self._rank.config.settings()
        return {
            "optimus": __version__,
            "torch": str(torch_version),
            "plan": self._plan_hash,
            "ranks": plan.ranks.world,
            "left_out": self._rank.step_samples.left_out,
            "settings": {name: value for name, value in settings.items() if not name.startswith("--")},
            "model": plan.bound_to.get("model", {}),
            "workload": plan.bound_to.get("workload", {}),
        }

    def _check(self, manifest: Manifest) -> None:
        """Raises if a checkpoint is one of another model, workload or seed; says what else has changed."""
        saved, now = manifest.facts, json.loads(json.dumps(self._facts))
        if not now.keys() <= saved.keys():
            raise damaged(self._folder, "has checkpoints that `optimus train` has not written")
        for part in ("model", "workload"):
            differing = _list_differing(saved[part], now[part])
            if differing:
                name, was, given = differing[0]
                raise damaged(self._folder, f"is of a run with {part}.{name} {was}, not {given}")
        for name, was, given in _list_differing(saved["settings"], now["settings"]):
            if name in FIXED:
                raise UserError(
                    field=name,
                    value=given,
                    problem=f"is {was} in the checkpoints of {self._folder}",
                    hint=f"use {was} to go on with that run, or name another --run-dir",
                )
            if dist.get_rank() == 0:
                sys.stderr.write(f"note: {name} was {was}, and is {given} from here on\n")


def _list_differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the names of unequal values, and both values as text."""
    names = [*was, *(name for name in now if name not in was)]
    return [
        (name, show_value(was.get(name)), show_value(now.get(name)))
        for name in names
        if was.get(name) != now.get(name)
    ]


# ---------------------------------------------------------------------------- signals


class StopRequest:
    """The signal that asked this rank to save a checkpoint and end, or 0."""

    number = 0


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Notes SIGTERM and SIGHUP, of a cluster that takes its nodes back, instead of dying of them."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, _: object) -> None:
        request.number = number

    numbers = (signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.signal(number, note) for number in numbers]
    try:
        yield request
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
