"""A job: what to train, on what, with which data, and what is already decided."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from optimus.job.cluster import Cluster
from optimus.job.layout import Constraints, LayoutChoice
from optimus.job.model import Model
from optimus.job.run import Run
from optimus.job.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Today:
    """How the job runs now: becomes the system `today`, and what was measured calibrates the model."""

    framework: str = ""
    llm: LayoutChoice = field(default_factory=LayoutChoice)
    placement: str = "stage0"  # where the encoders live
    measured_step_s: float | None = None
    measured_memory_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything the planner is told."""

    name: str
    model: Model
    cluster: Cluster
    workload: Workload
    layout: Constraints = field(default_factory=Constraints)
    today: Today | None = None
    run: Run = field(default_factory=Run)
    notes: tuple[str, ...] = field(default=(), compare=False)  # what was assumed because it was left out

    def replace(self, *, gpus: int) -> Job:
        """The same job on another number of GPUs."""
        return replace(self, cluster=replace(self.cluster, gpus=gpus))

    def fingerprint(self) -> str:
        """Hash over what decides a plan: model, cluster and workload; never `run`."""
        decides = {
            "model": asdict(self.model),
            "cluster": asdict(self.cluster),
            "workload": asdict(self.workload),
        }
        text = json.dumps(_without_sources(decides), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _without_sources(value: Any) -> Any:
    """Where a number comes from does not change a plan."""
    if isinstance(value, dict):
        return {key: _without_sources(item) for key, item in value.items() if key != "source"}
    if isinstance(value, list | tuple):
        return [_without_sources(item) for item in value]
    return value
