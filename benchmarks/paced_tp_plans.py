"""Makes plans of one job that fill more and more of the LLM's idle time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.paced_tp_job import TP, VISION, TpJob
from benchmarks.without_tp_slots import SlotlessCandidate
from optimus.ir.plan import Plan
from optimus.job.job import Job
from optimus.job.layout import Layout
from optimus.job.model import Encoder
from optimus.planner.context import PlanningContext
from optimus.planner.filled_plan import FilledPlan
from optimus.planner.systems.colocated_plan import ColocatedEncoder
from optimus.planner.systems.colocation_candidate import ColocationCandidate, EncoderPlacement
from optimus.planner.systems.llm_only import build_llm_pipeline
from optimus.planner.systems.pipeline import PipelineCandidate
from optimus.schedule.fill import expand_orders_to_tp_blocks, order_encoders_around_llm

OURS, FLOOR = "ours", "the LLM alone"
NOTHING, COARSE, GAPS, DP_BUBBLES, TP_SLOTS = (
    "no filling",
    "coarse",
    "+ pipeline gaps",
    "+ DP bubbles",
    "+ TP slots",
)
VARIANTS = (OURS, TP_SLOTS, DP_BUBBLES, GAPS, COARSE, NOTHING, FLOOR)
BLOCKING = (GAPS, COARSE, NOTHING)
ORDERS = ("1f1b", "zero-bubble")


@dataclass(frozen=True, kw_only=True)
class PlanVariant:
    """A plan of the job; a `blocking` one moves parameters before and gradients after all compute."""

    job: Job
    plan: Plan
    blocking: bool = False


def variants_of(job: TpJob, wanted: Collection[str] = VARIANTS) -> dict[str, PlanVariant]:
    """Returns the wanted plans: ours, those that fill less, and the LLM without encoders."""
    plans = _Plans(job)
    makers: dict[str, Callable[[], FilledPlan]] = {
        OURS: lambda: min(plans.slots, plans.split, key=_step_s),
        TP_SLOTS: lambda: plans.slots,
        DP_BUBBLES: lambda: plans.gaps,
        GAPS: lambda: plans.gaps,
        COARSE: lambda: plans.coarse[1],
        NOTHING: lambda: plans.coarse[0],
        FLOOR: plans.floor,
    }
    return {
        name: PlanVariant(
            job=job.llm_only if name == FLOOR else job.job,
            plan=makers[name]().plan,
            blocking=name in BLOCKING,
        )
        for name in VARIANTS
        if name in wanted
    }


class _Plans:
    """Plans, each made on first use."""

    def __init__(self, job: TpJob) -> None:
        self._job, self._context = job, job.context(job.job)
        self._plain = build_llm_pipeline(self._context, order_name="1f1b")

    @cached_property
    def coarse(self) -> tuple[FilledPlan, FilledPlan]:
        return _coarse_plans(self._job, self._context, self._plain)

    @cached_property
    def gaps(self) -> FilledPlan:
        return SlotlessCandidate(self._context, self._plain, _placement(self._job)).best_shifted()

    @cached_property
    def slots(self) -> FilledPlan:
        return ColocationCandidate(self._context, self._plain, _placement(self._job)).best_shifted()

    @cached_property
    def split(self) -> FilledPlan:
        return min(
            (candidate.best_shifted() for candidate in _split_trials(self._job, self._context)), key=_step_s
        )

    def floor(self) -> FilledPlan:
        context = self._job.context(self._job.llm_only)
        plans = (
            ColocationCandidate(context, build_llm_pipeline(context, order_name=order), {}).best_shifted()
            for order in ORDERS
        )
        return min(plans, key=_step_s)


def _placement(job: TpJob, *, split: bool = False) -> dict[str, EncoderPlacement]:
    """Returns an encoder replicated on every rank, with a piece of every microbatch per TP block."""
    layout = Layout(dp=job.ranks, pp=1, tp=1)
    return {VISION: EncoderPlacement(layout=layout, recompute="none", pieces=TP, split_backward=split)}


def _split_trials(job: TpJob, context: PlanningContext) -> Iterator[ColocationCandidate]:
    """Yields candidates with separate weight gradients: of the LLM, the encoder, or both."""
    for order in ORDERS:
        for split in (False, True):
            if split or order != "1f1b":
                yield ColocationCandidate(
                    context, build_llm_pipeline(context, order_name=order), _placement(job, split=split)
                )


def _step_s(plan: FilledPlan) -> float:
    return plan.step_s


# ---------------------------------------------------------------------------- before and after the LLM


class _Dealt(ColocationCandidate):
    """Candidate with a given number of encoder microbatches per pipeline."""

    counts: tuple[int, ...] = ()

    def _encoder(self, encoder: Encoder, *, folded: bool) -> ColocatedEncoder:
        placed = super()._encoder(encoder, folded=folded)
        return replace(placed, pipelines=_deal(self.counts)) if folded else placed

    def coarse(self) -> FilledPlan:
        orders = list(order_encoders_around_llm(self.header, self.base.rows_of_llm(self.header)))
        header, orders = expand_orders_to_tp_blocks(
            self._unfolded.header(strategy="optimus"), self.header, orders
        )
        return FilledPlan(header=header, orders=orders, fixed=self._unfolded.fixed_bytes(), estimate_s=0.0)


def _coarse_plans(
    job: TpJob, context: PlanningContext, llm: PipelineCandidate
) -> tuple[FilledPlan, FilledPlan]:
    """Returns plans with encoders before and after the LLM: dealt evenly, and at best."""
    plans = {}
    for counts in _counts(job.microbatches, job.pp):
        candidate = _Dealt(context, llm, _placement(job))
        candidate.counts = counts
        plans[counts] = candidate.coarse()
    even = plans[(job.microbatches // job.pp,) * job.pp]
    return even, min(plans.values(), key=_step_s)


def _counts(total: int, parts: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """Yields all ways to deal microbatches; later stages, which wait longer for the LLM, never get fewer."""
    if parts == 1:
        yield (total,)
        return
    for first in range(least, total // parts + 1):
        yield from ((first, *others) for others in _counts(total - first, parts - 1, first))


def _deal(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the pipeline of each microbatch, at equal progress of all pipelines."""
    dealt = [0] * len(counts)
    pipelines = []
    for _ in range(sum(counts)):
        at = min(range(len(counts)), key=lambda pipeline: (dealt[pipeline] + 1) / counts[pipeline])
        dealt[at] += 1
        pipelines.append(at)
    return tuple(pipelines)
