"""Makes plans of orders of phases, and holds results of a search: plan, scheduled and rejected layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from optimus.cost.memory import RankMemory
from optimus.cost.network import Collective
from optimus.ir.op import Schedule
from optimus.ir.plan import DeviceClassMemory, Plan, PlanClaims, Program
from optimus.ir.ranks import LLM
from optimus.job.layout import Layout
from optimus.planner.batch_assignment import BatchAssignment, EncoderBins
from optimus.planner.context import PlanningContext
from optimus.schedule.lower import LoweredPlan, lower_to_programs
from optimus.schedule.op_phases import SECONDS_DIGITS
from optimus.schedule.plan_claims import (
    compute_device_class_memory,
    encoder_seconds_by_region,
    simulate_lagging_encoders,
)
from optimus.schedule.simulator import Timeline

if TYPE_CHECKING:
    from optimus.planner.systems.pipeline import PipelineCandidate


@dataclass(frozen=True, kw_only=True, eq=False)
class FilledPlan:
    """Orders of phases, the programs that they are lowered to, and the plan that they make with its header.

    Where TP blocks of a group do the same, `folded` has one device class for all of them. It takes as long
    and holds as much, and is what is simulated while plans are compared.
    """

    header: Plan
    orders: Sequence[Program]  # of every device class
    fixed: Sequence[Mapping[str, int]]  # bytes that every device class holds all the time
    estimate_s: float  # the algorithm's own
    folded: FilledPlan | None = None

    @cached_property
    def lowered(self) -> LoweredPlan:
        """Programs of all classes, with their schedule and timeline."""
        return lower_to_programs(self.header, self.orders)

    @property
    def compared(self) -> LoweredPlan:
        """Programs with one class for TP blocks that do the same."""
        return self.lowered if self.folded is None else self.folded.lowered

    @property
    def step_s(self) -> float:
        return round(self.compared.timeline.step_s, SECONDS_DIGITS)

    @cached_property
    def plan(self) -> Plan:
        """The plan with its claims: step, memory, encoder seconds."""
        header, lowered = self.header, self.lowered
        claims = PlanClaims(
            step_s=round(lowered.timeline.step_s, SECONDS_DIGITS),
            lagged_s=round(simulate_lagging_encoders(header, lowered).step_s, SECONDS_DIGITS),
            estimate_s=round(self.estimate_s, SECONDS_DIGITS),
            encoder_s={region: round(each, SECONDS_DIGITS) for region, each in self._encoder_s.items()},
        )
        return replace(header, programs=lowered.programs, claims=claims, memory=self.memory)

    @cached_property
    def memory(self) -> tuple[DeviceClassMemory, ...]:
        """Memory of one rank of every device class, as the plan states it."""
        if self.folded is None:
            return compute_device_class_memory(self.header, self.lowered.programs, self.fixed)
        ranks, folded = self.header.ranks, self.folded
        places = map(ranks.coordinates, range(ranks.num_classes))
        alike = [folded.memory[folded.header.ranks.class_at(stage, cp, 0)] for stage, cp, _ in places]
        return tuple(replace(held, fixed=dict(own)) for held, own in zip(alike, self.fixed, strict=True))

    @property
    def memories(self) -> tuple[RankMemory, ...]:
        """Memory of one rank of every device class, by the components that systems are compared by."""
        return tuple(_to_rank_memory(held) for held in self.memory)

    @property
    def fits(self) -> bool:
        return max(held.peak for held in self.memory) <= self.header.capacity_bytes

    @cached_property
    def _encoder_s(self) -> Mapping[str, float]:
        return encoder_seconds_by_region(self.header, self.lowered)

    @property
    def hidden_share(self) -> float:
        """Share of encoder compute that lies in slots of, or between, the LLM's phases."""
        seconds = self._encoder_s
        total = sum(seconds.values())
        return (seconds["slots"] + seconds["between"]) / total if total else 1.0


def _to_rank_memory(held: DeviceClassMemory) -> RankMemory:
    """Converts a device class's bytes to the components that systems are compared by."""
    fixed = held.fixed
    return RankMemory(
        parameters=fixed["parameters"] + held.gathered,
        gradients=fixed["gradients"],
        optimizer=fixed["optimizer"],
        logits=held.logits,
        communicators=fixed["communicators"],
        reserve=fixed["reserve"],
        llm_activations=held.llm_activations + fixed["working"],
        encoder_activations=held.encoder_activations,
        seam=held.seam,
    )


@dataclass(frozen=True, kw_only=True)
class ScheduledLayout:
    """An encoder layout that fits and was scheduled."""

    layout: Layout
    module: str
    step_s: float
    peak_bytes: float
    replayed: bool  # if not, its seconds are an estimate and its bytes an upper bound


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchResult:
    """The best plan of a strategy."""

    filled: FilledPlan
    llm: PipelineCandidate
    how: str  # the chosen layouts in one line
    considered: int
    notes: Mapping[str, Any] = field(default_factory=dict)  # for readers of the plan file
    estimate_includes_traffic: bool = (
        True  # transfers and encoder traffic are in the algorithm's own estimate
    )
    own_hidden_share: float | None = None  # by the search's own estimate, if it has one
    peak_bytes_at_p99: float | None = None  # of the fullest rank in a heavy step, where it is computed
    remarks: tuple[str, ...] = ()  # on the search, printed with its result
    assignment: BatchAssignment | None = None  # of a batch, where it does not follow from the plan
    rejected: list[RejectedLayout] = field(default_factory=list)
    tried: list[ScheduledLayout] = field(default_factory=list)

    @property
    def context(self) -> PlanningContext:
        """The context of the LLM's pipeline."""
        return self.llm.context

    @property
    def plan(self) -> Plan:
        """The plan, before it is bound to the job."""
        return self.filled.plan

    @property
    def memories(self) -> tuple[RankMemory, ...]:
        """Memory of one rank of every device class."""
        return self.filled.memories

    @property
    def fits(self) -> bool:
        """True if every rank stays within a GPU's memory."""
        return self.filled.fits

    @property
    def hidden_share(self) -> float:
        """Share of the encoder compute inside the LLM's bubbles."""
        return self.filled.hidden_share if self.own_hidden_share is None else self.own_hidden_share

    @property
    def estimate_s(self) -> float:
        """The step time by the search's own estimate."""
        return self.filled.estimate_s

    @property
    def llm_pipeline(self) -> PipelineCandidate:
        """The pipeline of the LLM alone."""
        return self.llm

    @property
    def device_gpus(self) -> None:
        """None: every device class represents equally many GPUs."""
        return None

    def search_result(self) -> SearchResult:
        """Returns this result."""
        return self

    def simulated(self) -> tuple[Schedule, Timeline]:
        """Returns the plan's programs with their dependencies, and when they run."""
        return self.filled.compared.schedule, self.filled.compared.timeline

    def describe(self) -> str:
        """Returns the chosen layouts in one line."""
        return self.how

    def batch_assignment(self) -> BatchAssignment:
        """Returns encoder microbatches as parts of an LLM microbatch, of any replica of a dealing group."""
        if self.assignment is not None:
            return self.assignment
        context, plan = self.context, self.plan
        replicas = plan.modules[LLM].layout.dp
        dealing = context.dealing_replicas(replicas)
        bins = {}
        for encoder in context.job.model.encoders:
            module = plan.modules[encoder.name]
            count, across = (
                module.microbatches_per_llm_microbatch,
                plan.modules[LLM].layout.tp // module.layout.tp,
            )
            priced = context.sequences_per_piece(encoder, self.llm.sequences, count, across)
            bins[encoder.name] = EncoderBins(
                bins=count, sharing="pieces", priced_sequences=priced, pipelines=module.pipelines
            )
        return BatchAssignment(
            replicas=replicas,
            microbatches=plan.microbatches,
            encoders=bins,
            locked=plan.locked,
            dealing_replicas=dealing,
            exchange_s=0.0 if plan.dealing_replicas > 1 else self._exchange_s(dealing),
        )

    def _exchange_s(self, replicas: int) -> float:
        """Returns the time of a microbatch's rows to other replicas' stages 0, and of their gradients back.

        It is that of a plan without the exchange, if its images were dealt all the same. Each rank of stage 0
        sends its part to the same rank of the other replicas, over the NIC.
        """
        plan, llm = self.plan, self.plan.modules[LLM].layout
        stride, size = llm.cp * llm.tp, 0.0
        for module in plan.encoders.values():
            size += module.seam_bytes * module.layout.tp * module.microbatches_per_llm_microbatch / stride
        trains = any(e.train or e.projector.train for e in self.context.job.model.encoders)
        return (1 + trains) * self.context.cost_model.group_s(
            Collective.ALL_TO_ALL, size, ranks=replicas, stride=stride
        )


# ---------------------------------------------------------------------------- rejected layouts


@dataclass(frozen=True, kw_only=True)
class RejectedLayout:
    """A rejected layout with the reason, which begins with its kind: `memory: ...`."""

    layout: Layout
    reason: str
    module: str = "llm"
    peak_bytes: float | None = None  # that it would need, where memory is the reason

    @property
    def label(self) -> str:
        """Name in printed results: `vision dp96 pp4 tp8`, or for the LLM `dp96 pp4 tp8`."""
        return str(self.layout) if self.module == "llm" else f"{self.module} {self.layout}"


def summarize_rejections(rejected: Sequence[RejectedLayout]) -> list[str]:
    """Counts rejections by kind of reason: `3 memory (e.g. vision dp96 pp4 tp8, 88.4 of 80 GB)`."""
    by_kind: dict[str, list[str]] = {}
    for each in rejected:
        kind, _, rest = each.reason.partition(":")
        by_kind.setdefault(kind, []).append(f"{each.label}, {rest.strip()}")
    return [f"{len(layouts)} {kind} (e.g. {layouts[-1]})" for kind, layouts in sorted(by_kind.items())]
