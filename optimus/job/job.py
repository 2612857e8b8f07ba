"""A job: what to train, on what, with which data, and what is already decided."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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

    def replace(self, *, gpus: int | None = None, sequences_per_step: int | None = None) -> Job:
        """The same job on other GPUs, where dp follows anew, or with another batch; not checked yet."""
        job = self
        if gpus is not None and gpus != self.cluster.gpus:
            layout, today = elsewhere(self.layout, self.today)
            job = replace(job, cluster=replace(job.cluster, gpus=gpus), layout=layout, today=today)
        if sequences_per_step is not None and sequences_per_step != self.workload.sequences_per_step:
            workload = replace(job.workload, sequences_per_step=sequences_per_step)
            job = replace(job, workload=workload, today=_unmeasured(job.today))
        return job


def elsewhere(layout: Constraints, today: Today | None) -> tuple[Constraints, Today | None]:
    """On another cluster dp follows anew, and what was measured was measured elsewhere."""
    modules = {name: replace(choice, dp=None) for name, choice in layout.modules.items()}
    if today is not None:
        today = replace(today, llm=replace(today.llm, dp=None))
    return replace(layout, modules=modules), _unmeasured(today)


def _unmeasured(today: Today | None) -> Today | None:
    return today and replace(today, measured_step_s=None, measured_memory_bytes=None)
