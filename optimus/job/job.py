"""Defines a job: the model, the cluster, the data and the layouts already decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optimus.job.cluster import Cluster
from optimus.job.data_source import DataSource
from optimus.job.layout import LayoutConstraints, PartialLayout, TokenDispatcher
from optimus.job.model import Model, Recompute
from optimus.job.workload import Workload


@dataclass(frozen=True, kw_only=True)
class CurrentRun:
    """The job as it runs now: the system `today`; its measurements calibrate the cost model.

    What is None is chosen as for other systems.
    """

    framework: str = ""
    llm: PartialLayout = field(default_factory=PartialLayout)
    placement: str = "stage0"  # of the encoders: a `CurrentPlacement`
    microbatch_sequences: int | None = None
    schedule: str | None = None  # a `CurrentSchedule`, of `stage0` and `balanced`
    reshard_after_forward: bool | None = None  # of `fsdp`: ZeRO-3, else ZeRO-2
    recompute: Mapping[str, Recompute] = field(default_factory=dict)  # by module
    tp_overlapped: float | None = None  # share of the TP traffic
    ep_overlapped: float | None = None  # share of the exchange of experts
    token_dispatcher: TokenDispatcher | None = None
    measured_step_s: float | None = None
    measured_memory_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """Input of the planner: model, cluster, workload and constraints on layouts."""

    name: str
    model: Model
    cluster: Cluster
    workload: Workload
    layout: LayoutConstraints = field(default_factory=LayoutConstraints)
    today: CurrentRun | None = None
    # Settings of the trainer (data, optimizer, paths); never part of a plan's hash.
    run: dict[str, Any] = field(default_factory=dict)
    data: DataSource | None = None
    model_dir: Path | None = None  # the folder of `model.hf`, which may have weights
    notes: tuple[str, ...] = field(default=(), compare=False)  # assumptions about values that were left out

    def replace(self, *, gpus: int | None = None, sequences_per_step: int | None = None) -> Job:
        """Returns the job on other GPUs, where dp is searched again, or with another batch; unchecked."""
        job = self
        if gpus is not None and gpus != self.cluster.gpus:
            layout, today = adapt_to_other_cluster(self.layout, self.today)
            job = replace(job, cluster=replace(job.cluster, gpus=gpus), layout=layout, today=today)
        if sequences_per_step is not None and sequences_per_step != self.workload.sequences_per_step:
            workload = replace(job.workload, sequences_per_step=sequences_per_step)
            job = replace(job, workload=workload, today=_unmeasured(job.today))
        return job


def adapt_to_other_cluster(
    layout: LayoutConstraints, today: CurrentRun | None
) -> tuple[LayoutConstraints, CurrentRun | None]:
    """Drops what another cluster changes: dp is searched again, and measurements do not hold there."""
    modules = {name: replace(choice, dp=None) for name, choice in layout.modules.items()}
    if today is not None:
        today = replace(today, llm=replace(today.llm, dp=None))
    return replace(layout, modules=modules), _unmeasured(today)


def _unmeasured(today: CurrentRun | None) -> CurrentRun | None:
    return today and replace(today, measured_step_s=None, measured_memory_bytes=None)
