"""What a training run is asked for and what it ends with; read by whoever starts ranks, so without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optimus.errors import UserError, one_of

METRICS = "metrics.jsonl"
DTYPES = ("bfloat16", "float32", "float64")
PLAN = "plan.json"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How to train; what a job file says under `run:`."""

    steps: int = 20
    seed: int = 0
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    clip: float = 1.0  # the largest norm that gradients keep; 0: any
    dtype: str | None = None  # of compute: bfloat16 on GPUs, else float32. Masters have at least float32
    limit_s: float = 8.0  # how long one op may take (or a usual step, if longer) before a rank says why
    run_dir: Path | None = None  # for metrics and, on errors, the last ops
    counts_memory: bool = False  # of the last step: the bytes of all tensors, beside the plan's


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One line of the metrics file."""

    step: int
    loss: float
    gradient_norm: float  # before clipping
    step_s: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of one rank. A component's own peak may be at another line than that of all together.

    `working` are tensors that no line leaves behind. What torch does not allocate (communicators, the
    allocator's reserve) is in neither, nor is the batch.
    """

    rank: int
    planned: Mapping[str, int]  # by component
    counted: Mapping[str, int]
    planned_peak: int
    counted_peak: int
    lines_over: int  # lines while which more is alive than planned
    most_over: int  # bytes, in the one of them that exceeds the plan most
    peak_line: int  # the first while which most is alive
    dtype: str  # in which the rank computes; plans count bfloat16

    @property
    def error(self) -> float:
        """How much more was planned, of what was counted."""
        return self.planned_peak / self.counted_peak - 1


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """What a run ends with."""

    steps: int
    final_loss: float | None
    step_s_median: float | None
    rank: int
    device: str
    memory: MemoryUse | None = None  # of the rank that held most, if it was counted

    def save(self, path: Path) -> None:
        """For the process that started this one."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> TrainingSummary:
        found = json.loads(path.read_text())
        memory = found.pop("memory")
        return cls(**found, memory=None if memory is None else MemoryUse(**memory))


def read_training_config(
    settings: Mapping[str, Any],
    *,
    steps: int | None,
    run_dir: Path | None = None,
    counts_memory: bool = False,
) -> TrainingConfig:
    """What a job's `run:` says, as far as it is known here; `steps` overrides it."""
    default, optimizer = TrainingConfig(), settings.get("optimizer", {})
    if not isinstance(optimizer, Mapping):
        raise UserError(
            field="run.optimizer",
            value=optimizer,
            problem="is not a mapping",
            hint="use optimizer: {lr: 1e-4, weight_decay: 0.01, clip: 1.0}",
        )
    asked = {
        "steps": (settings.get("steps", default.steps), default.steps),
        "seed": (settings.get("seed", default.seed), default.seed),
        "optimizer.lr": (optimizer.get("lr", default.learning_rate), default.learning_rate),
        "optimizer.weight_decay": (optimizer.get("weight_decay", default.weight_decay), default.weight_decay),
        "optimizer.clip": (optimizer.get("clip", default.clip), default.clip),
    }
    for name, (value, usual) in asked.items():
        _check_number(f"run.{name}", value, usual)
    if steps is not None:
        _check_number("--steps", steps, default.steps)
    count = asked["steps"][0] if steps is None else steps
    if counts_memory and count < 2:
        raise UserError(
            field="--memory",
            problem="needs two steps: in the first one the optimizer makes its state",
            hint="use --steps 2",
        )
    return TrainingConfig(
        steps=count,
        seed=asked["seed"][0],
        learning_rate=float(asked["optimizer.lr"][0]),
        weight_decay=float(asked["optimizer.weight_decay"][0]),
        clip=float(asked["optimizer.clip"][0]),
        dtype=_dtype(settings.get("dtype", default.dtype)),
        run_dir=run_dir,
        counts_memory=counts_memory,
    )


def _dtype(name: object) -> str | None:
    if name is not None and name not in DTYPES:
        raise UserError(
            field="run.dtype",
            value=name,
            problem="is not a type to compute in",
            hint=f"use dtype: {one_of(DTYPES)}",
        )
    return None if name is None else str(name)


def _check_number(field: str, value: object, usual: float) -> None:
    """A number of 0 or more, whole if the usual one is."""
    whole = isinstance(usual, int)
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if is_number and 0 <= value < math.inf:  # type: ignore[operator]
        return
    name = field.removeprefix("run.").split(".")[-1]
    raise UserError(
        field=field,
        value=value,
        problem=f"is not a{' whole' if whole else ''} number of 0 or more",
        hint=f"use {name} {usual}" if name.startswith("--") else f"use {name}: {usual}",
    )
