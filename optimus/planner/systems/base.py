"""Selects the fastest candidate of a system and simulates its step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from optimus.cost.assumptions import Assumptions
from optimus.cost.flops import step_flops
from optimus.cost.memory import RankMemory
from optimus.errors import DoesNotFit
from optimus.ir.op import Communicator, Floats, Schedule
from optimus.job.job import Job
from optimus.planner.context import PlanningContext
from optimus.planner.filled_plan import SearchResult
from optimus.protocols import System, SystemCandidate
from optimus.schedule.bubbles import BubbleSeconds, average_bubbles, sum_bubbles_by_cause
from optimus.schedule.simulator import Timeline, simulate_schedule

if TYPE_CHECKING:
    from optimus.planner.systems.llm_only import LlmPipelines

SIMULATE_WITHIN = 1.001  # most that a step is, times its estimate, which is exact for most candidates
SIMULATE_AT_MOST = 4  # candidates with such estimates that are simulated kernel by kernel,
SIMULATE_OPS = 800_000  # as long as their schedules have no more ops together
OVERLAPPED_TP_SHARE = 0.7  # of TP traffic, which a framework with fused or pipelined collectives may hide


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedSystem:
    """A system's best candidate, simulated kernel by kernel."""

    name: str
    how: str  # the candidate in one line
    step_s: float
    overlapped_step_s: float  # of the same schedule with OVERLAPPED_TP_SHARE of the TP traffic hidden
    mfu: float
    tokens_per_s_per_gpu: float
    memory: RankMemory  # of the worst rank, at the mean of the data
    peak_bytes: float  # of the fullest rank: at p99 of steps, if there is a plan
    worst_rank: str
    bubbles: BubbleSeconds
    fits: bool
    candidate: SystemCandidate
    schedule: Schedule
    timeline: Timeline
    measured_step_s: float | None = None
    measured_memory_bytes: float | None = None

    @property
    def search_result(self) -> SearchResult | None:
        """The search and its plan, of a system that makes one."""
        return self.candidate.search_result()

    @property
    def full_schedule(self) -> Schedule:
        """The schedule with every device class of the plan, also where TP blocks do the same."""
        result = self.search_result
        return self.schedule if result is None else result.filled.lowered.schedule


class BaseCandidate(ABC):
    """Defaults of a candidate that has a context and the memory of every device."""

    context: PlanningContext

    @property
    @abstractmethod
    def memories(self) -> tuple[RankMemory, ...]:
        """Memory of one rank of every device of the schedule."""

    @property
    def peak_bytes(self) -> float:
        """Memory of the fullest rank."""
        return max(memory.total for memory in self.memories)

    @property
    def fits(self) -> bool:
        """True if every rank stays within a GPU's memory."""
        return self.peak_bytes <= self.context.capacity_bytes

    @property
    def device_gpus(self) -> Floats | None:
        """None: every device of the schedule represents equally many GPUs."""
        return None

    @property
    def llm_pipeline(self) -> SystemCandidate | None:
        """The LLM of the plan, if there is one."""
        result = self.search_result()
        return None if result is None else result.llm_pipeline

    def search_result(self) -> SearchResult | None:
        """None: no plan describes the configuration."""
        return None


class BaseSystem(ABC):
    """Defaults of a system: it always applies, and its fastest candidate that fits is simulated."""

    name: ClassVar[str]
    allowed_as: ClassVar[str | None] = None
    makes_plan: ClassVar[bool] = False
    needs_llm_pipeline: ClassVar[bool] = True
    searches_layouts: ClassVar[bool] = True
    takes_sharded: ClassVar[bool] = False
    runs_encoders: ClassVar[bool] = True
    contains: ClassVar[Sequence[str]] = ()
    simulate_within: ClassVar[float] = SIMULATE_WITHIN

    def applies_to(self, job: Job) -> bool:
        """Returns whether the job states what the system needs."""
        return True

    def keeps_layout(self, job: Job) -> bool:
        """Returns whether the system can have the layout of the LLM that the job states."""
        return True

    def looking_below(self, step_s: float, *, again: bool = False) -> System:
        """Returns the system itself: all its candidates are listed."""
        return self

    def first_step_s(self, pipelines: LlmPipelines) -> float:
        """Returns 0: layouts are searched in the order of what is known of them."""
        return 0.0

    @abstractmethod
    def candidates(self, pipelines: LlmPipelines) -> Iterable[SystemCandidate]:
        """Returns configurations at one layout of the LLM; raises DoesNotFit if there is none."""

    def simulate(self, pipelines: LlmPipelines) -> SimulatedSystem:
        """Simulates the fastest candidate that fits, also by the exact memory of its plan."""
        candidates = list(pipelines.candidates(self))
        while True:
            fastest = select_fastest(pipelines.context, self.name, candidates, within=self.simulate_within)
            simulated = self.simulate_candidate(fastest)
            if simulated.fits:
                return simulated
            candidates.remove(fastest)

    def simulate_candidate(self, candidate: SystemCandidate) -> SimulatedSystem:
        """Simulates one candidate and derives the figures that systems are compared by."""
        context, (schedule, timeline) = candidate.context, candidate.simulated()
        job = context.job
        with ThreadPoolExecutor(1) as beside:  # compiled loops release the GIL
            overlapped = beside.submit(_simulate_overlapped, context.cost_model.assumptions, schedule)
            result = candidate.search_result()
            memories = candidate.memories if result is None else result.memories
            bubbles = average_bubbles(sum_bubbles_by_cause(schedule, timeline), candidate.device_gpus)
        at_p99 = None if result is None else result.peak_bytes_at_p99
        worst = max(range(len(memories)), key=lambda device: memories[device].total)
        peak_bytes = max(memories[worst].total, at_p99 or 0.0)
        model = job.model if self.runs_encoders else replace(job.model, encoders=())
        peak_flops = job.cluster.gpu.peak_flops * job.cluster.gpus
        tokens = job.workload.sequence_tokens * job.workload.sequences_per_step
        return SimulatedSystem(
            name=self.name,
            how=candidate.describe(),
            step_s=timeline.step_s,
            overlapped_step_s=overlapped.result(),
            mfu=step_flops(model, job.workload) / (timeline.step_s * peak_flops),
            tokens_per_s_per_gpu=tokens / timeline.step_s / job.cluster.gpus,
            memory=memories[worst],
            worst_rank=schedule.device_name(worst)
            if result is None
            else result.filled.header.ranks.class_name(worst),
            bubbles=bubbles,
            peak_bytes=peak_bytes,
            fits=peak_bytes <= context.capacity_bytes,
            candidate=candidate,
            schedule=schedule,
            timeline=timeline,
        )


C = TypeVar("C", bound=SystemCandidate)


def simulate_step_s(candidate: SystemCandidate) -> float:
    """Returns the step time of a candidate, simulated kernel by kernel."""
    return candidate.simulated()[1].step_s


def select_fastest(
    context: PlanningContext, name: str, candidates: Iterable[C], *, within: float = SIMULATE_WITHIN
) -> C:
    """Returns the fastest candidate that fits.

    All are ranked by estimate. If a step may be `within` times its estimate, and thus another be the fastest,
    they are simulated in this order, while the next estimate is about as short as the shortest step so far.
    Of the largest schedules only the first is simulated, since that takes too long.
    """
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        raise DoesNotFit(
            f"{name} fits in {context.capacity_bytes / 1e9:.0f} GB in no way that was tried",
            "use another system, more GPUs, or recompute: full",
        )
    best, *others = sorted(fitting, key=lambda candidate: candidate.estimate_s)
    if not others or others[0].estimate_s > within * best.estimate_s:
        return best
    (schedule, timeline), count = best.simulated(), 1
    step_s = timeline.step_s
    for other in others:
        count += 1
        too_many = count > SIMULATE_AT_MOST or count * len(schedule) > SIMULATE_OPS
        if too_many or other.estimate_s > SIMULATE_WITHIN * step_s:
            break
        other_s = simulate_step_s(other)
        best, step_s = (other, other_s) if other_s < step_s else (best, step_s)
    return best


def _simulate_overlapped(assumptions: Assumptions, schedule: Schedule) -> float:
    """Returns the step of a schedule with at least OVERLAPPED_TP_SHARE of its TP traffic hidden."""
    hidden = assumptions.tp_overlapped_share
    factor = min(1.0, (1.0 - OVERLAPPED_TP_SHARE) / (1.0 - hidden)) if hidden < 1.0 else 1.0
    scale = np.where(schedule.communicator == Communicator.TP, factor, 1.0)
    return simulate_schedule(
        replace(schedule, duration_s=schedule.duration_s * scale),
        slowdown=assumptions.residence_slowdown,
        launch_s=assumptions.launch_s,
    ).step_s
