"""Writes the metrics of a run for TensorBoard, to its folder `tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from optimus.protocols import MetricsWriter

FOLDER = "tensorboard"


class TensorBoardWriter:
    """One scalar per metric, by the names of the metrics file."""

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def open_writer(run_dir: Path, run_id: str, settings: Mapping[str, object]) -> MetricsWriter:
    """Opens a new event file; TensorBoard joins it with those of earlier attempts of the run."""
    writer = SummaryWriter(log_dir=str(run_dir / FOLDER / run_id))
    writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in settings.items()))
    return TensorBoardWriter(writer)
