"""What each idea is worth: plans of one job that fill more and more of the LLM's idle time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.divided_job import TP, VISION, DividedJob
from optimus.ir.plan import Plan
from optimus.job.job import Job
from optimus.job.layout import Layout
from optimus.job.model import Encoder
from optimus.planner.context import PlanningContext
from optimus.planner.filled_plan import FilledPlan, finish_plan
from optimus.planner.listed import list_plan, llm_pipeline
from optimus.planner.systems.colocated import ColocatedEncoder
from optimus.planner.systems.colocation_candidate import Beside, Trial
from optimus.planner.systems.pipeline import InlinePipeline
from optimus.planner.systems.slots import SlotlessTrial
from optimus.schedule.expand_tp_blocks import unfold
from optimus.schedule.fill import coarse_orders

OURS, FLOOR = "ours", "the LLM alone"
NOTHING, COARSE, GAPS, DP_BUBBLES, TP_SLOTS = (
    "no filling",
    "coarse",
    "+ pipeline gaps",
    "+ DP bubbles",
    "+ TP slots",
)
VARIANTS = (OURS, TP_SLOTS, DP_BUBBLES, GAPS, COARSE, NOTHING, FLOOR)
WAITING = (GAPS, COARSE, NOTHING)
SHIFTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4)  # of the LLM, as shares of its own step: the best is taken
ORDERS = ("1f1b", "zero-bubble")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to play the job; one that `waits` moves parameters before and gradients after all compute."""

    job: Job
    plan: Plan
    waits: bool = False


def variants_of(job: DividedJob, wanted: Collection[str] = VARIANTS) -> dict[str, Variant]:
    """Ours, what it is made of step by step, and the LLM without encoders: those that are wanted."""
    plans = _Plans(job)
    found: dict[str, Callable[[], FilledPlan]] = {
        OURS: lambda: min(plans.slots, plans.split, key=_step_s),
        TP_SLOTS: lambda: plans.slots,
        DP_BUBBLES: lambda: plans.gaps,
        GAPS: lambda: plans.gaps,
        COARSE: lambda: plans.coarse[1],
        NOTHING: lambda: plans.coarse[0],
        FLOOR: plans.floor,
    }
    return {
        name: Variant(
            job=job.alone if name == FLOOR else job.job, plan=found[name]().plan, waits=name in WAITING
        )
        for name in VARIANTS
        if name in wanted
    }


class _Plans:
    """Made when they are asked for."""

    def __init__(self, job: DividedJob) -> None:
        self._job, self._setting = job, job.context(job.job)
        self._plain = llm_pipeline(self._setting, order_name="1f1b")

    @cached_property
    def coarse(self) -> tuple[FilledPlan, FilledPlan]:
        return _coarse_plans(self._job, self._setting, self._plain)

    @cached_property
    def gaps(self) -> FilledPlan:
        return _best(SlotlessTrial(self._setting, self._plain, _beside(self._job)))

    @cached_property
    def slots(self) -> FilledPlan:
        return _best(Trial(self._setting, self._plain, _beside(self._job)))

    @cached_property
    def split(self) -> FilledPlan:
        return min((_best(trial) for trial in _split_trials(self._job, self._setting)), key=_step_s)

    def floor(self) -> FilledPlan:
        context = self._job.context(self._job.alone)
        plans = (list_plan(context, llm_pipeline(context, order_name=order), {}) for order in ORDERS)
        return min(plans, key=_step_s)


def _beside(job: DividedJob, *, split: bool = False) -> dict[str, Beside]:
    """An encoder whole on every rank, each TP block with a piece of every microbatch."""
    layout = Layout(dp=job.ranks, pp=1, tp=1)
    return {VISION: Beside(layout=layout, recompute="none", pieces=TP, split=split)}


def _split_trials(job: DividedJob, context: PlanningContext) -> Iterator[Trial]:
    """Gradients of weights apart: the LLM's, the encoder's, or both."""
    for order in ORDERS:
        for split in (False, True):
            if split or order != "1f1b":
                yield Trial(context, llm_pipeline(context, order_name=order), _beside(job, split=split))


def _best(trial: Trial) -> FilledPlan:
    """Over shifts of the LLM."""
    step_s = trial.base.step_s
    return min((trial.plan(trial.fill.arrange(share * step_s)) for share in SHIFTS), key=_step_s)


def _step_s(plan: FilledPlan) -> float:
    return plan.step_s


# ---------------------------------------------------------------------------- before and after the LLM


class _Dealt(Trial):
    """Encoder microbatches dealt in given numbers to pipelines."""

    counts: tuple[int, ...] = ()

    def _encoder(self, encoder: Encoder, *, folded: bool) -> ColocatedEncoder:
        found = super()._encoder(encoder, folded=folded)
        return replace(found, pipelines=_deal(self.counts)) if folded else found

    def coarse(self) -> FilledPlan:
        orders = list(coarse_orders(self.header, self.base))
        header, orders = unfold(self._whole.header(strategy="optimus"), self.header, orders)
        return finish_plan(header, orders, self._whole.fixed_bytes(), estimate_s=0.0)


def _coarse_plans(
    job: DividedJob, context: PlanningContext, llm: InlinePipeline
) -> tuple[FilledPlan, FilledPlan]:
    """All forwards of encoders before the LLM and all backwards after it: dealt evenly, and at best."""
    found = {}
    for counts in _counts(job.microbatches, job.pp):
        trial = _Dealt(context, llm, _beside(job))
        trial.counts = counts
        found[counts] = trial.coarse()
    even = found[(job.microbatches // job.pp,) * job.pp]
    return even, min(found.values(), key=_step_s)


def _counts(total: int, parts: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """All ways to deal so many; later stages, which wait longer for the LLM, never get less."""
    if parts == 1:
        yield (total,)
        return
    for first in range(least, total // parts + 1):
        yield from ((first, *others) for others in _counts(total - first, parts - 1, first))


def _deal(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Who gets each microbatch: all have as much of their own as far as the batch has come."""
    given = [0] * len(counts)
    found = []
    for _ in range(sum(counts)):
        at = min(range(len(counts)), key=lambda pipeline: (given[pipeline] + 1) / counts[pipeline])
        given[at] += 1
        found.append(at)
    return tuple(found)
