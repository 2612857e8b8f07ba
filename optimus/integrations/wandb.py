"""Writes the metrics of a run to Weights & Biases; WANDB_MODE, WANDB_PROJECT and the others apply."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from optimus.protocols import MetricsWriter


class WandbWriter:
    """One value per metric and step, by the names of the metrics file."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def open_writer(run_dir: Path, run_id: str, settings: Mapping[str, object]) -> MetricsWriter:
    """Begins a run, or goes on with the one of this id. It captures no output."""
    run = wandb.init(
        dir=str(run_dir),
        id=run_id,
        resume="allow",
        config=dict(settings),
        settings=wandb.Settings(console="off", silent=True),
    )
    return WandbWriter(run)
