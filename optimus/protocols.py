"""Extension points of Optimus: the protocols that a class of one's own implements, in one file.

| protocol          | implement it to                               | register it in                        |
|-------------------|-----------------------------------------------|---------------------------------------|
| `System`          | simulate and compare another way to run a job | `optimus/planner/systems/registry.py` |
| `SystemCandidate` | describe one configuration of such a system   | returned by `System.candidates`       |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from optimus.cost.memory import Memory
    from optimus.ir.op import Floats, Schedule
    from optimus.job.job import Job
    from optimus.planner.batch_assignment import BatchAssignment
    from optimus.planner.context import PlanningContext
    from optimus.planner.systems.base import SimulatedSystem
    from optimus.planner.systems.llm_only import LlmPipelines


class SystemCandidate(Protocol):
    """One configuration of a system: layouts, layer partition, microbatch size, recomputation."""

    @property
    def context(self) -> PlanningContext:
        """The job, its prices and the LLM's layout."""

    @property
    def memories(self) -> tuple[Memory, ...]:
        """Memory of one rank of every device of the schedule."""

    @property
    def fits(self) -> bool:
        """Whether every rank stays within a GPU's memory."""

    @property
    def estimate_s(self) -> float:
        """A fast estimate of the step time, by which candidates are ranked before any is simulated."""

    @property
    def device_gpus(self) -> Floats | None:
        """GPUs that each device of the schedule represents; None if all represent equally many."""

    def schedule(self) -> Schedule:
        """Returns one training step, kernel by kernel."""

    def batch_assignment(self) -> BatchAssignment:
        """Returns how the sequences of a batch are assigned to replicas, microbatches and encoder bins."""

    def describe(self) -> str:
        """Returns the configuration in one line."""


class System(Protocol):
    """A named way to run a job; `planner.systems.base.BaseSystem` has defaults for all but `candidates`."""

    @property
    def name(self) -> str:
        """The name on the command line and in JSON."""

    @property
    def allowed_as(self) -> str | None:
        """The word in the job's `layout.limits.allow` that permits the system; None if always permitted."""

    @property
    def makes_plan(self) -> bool:
        """Whether its candidates are `SearchResult`s, with a plan that can be saved and run."""

    @property
    def needs_llm_pipeline(self) -> bool:
        """Whether no step is shorter than the LLM's pipeline alone at the same layout."""

    @property
    def searches_layouts(self) -> bool:
        """Whether the system is simulated at every promising layout of the LLM, or at the first only."""

    def applies_to(self, job: Job) -> bool:
        """Returns whether the job states what the system needs."""

    def candidates(self, pipelines: LlmPipelines) -> Iterable[SystemCandidate]:
        """Returns configurations at one layout of the LLM; raises DoesNotFit if there is none."""

    def simulate(self, pipelines: LlmPipelines) -> SimulatedSystem:
        """Simulates the best candidate; raises DoesNotFit if none fits."""
