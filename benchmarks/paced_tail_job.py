"""The job of `benchmarks paced --long-tail`: images of very different sizes, and loads of every variant."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from benchmarks.paced_torch import PacedTorchVariant
from benchmarks.paced_tp_job import TOKENS, TP, VISION, TpJob, replicas_on
from benchmarks.paced_tp_plans import OURS, variants_of
from optimus.data.dealing import deal_items
from optimus.data.step_samples import WINDOW, StepSamples
from optimus.engine.batch_plan import SampleSizes, plan_batch
from optimus.engine.synthetic_data import SyntheticDataset
from optimus.errors import UserError
from optimus.ir.op import COMPUTE_PHASES, Floats
from optimus.ir.plan import Plan
from optimus.job.job import Job
from optimus.job.workload import PackedSequence
from optimus.planner.batch_assignment import BatchAssignment
from optimus.schedule.plan_schedule import build_plan_schedule
from optimus.schedule.schedule_builder import repeat_for_replicas
from optimus.schedule.simulator import simulate_schedule
from optimus.sensitivity.drawn_batches import deal_batch_to_replicas

UNDEALT, PADDED = "images not dealt", "images not dealt, padded"
PLANS = (OURS, UNDEALT, PADDED)
AS_DRAWN, AGAIN = FEEDS = "as drawn", "re-dealt"
SCHEDULES = ("balanced 1F1B", "balanced Interleaved", "balanced ZBV")
TEXT_ONLY, TOTAL, IMAGE = 0.12, (13.0, 0.67), (3.0, 0.8)  # share; LLM tokens: median, sigma of the logarithm
MAX_TOTAL, MAX_IMAGE = 56, 8  # LLM tokens of images in a sequence, and of one image
STEPS = WINDOW  # an epoch: steps that share their samples
COMPARED_STEPS = 2  # of the epoch
ENCODER_WORK, MICROBATCHES_PER_STAGE = 0.5, 8


def draw_epoch(per_step: int, seed: int = 0) -> tuple[PackedSequence, ...]:
    """Draws sequences whose images, and their sums, are log-normal; steps follow each other.

    Every step has one sequence of each stratum of sums, in random order: its own sum is as near to the mean
    as that of a step with a thousand sequences, and its sequences differ as widely.
    """
    random, drawn = np.random.default_rng(seed), list[PackedSequence]()
    for _ in range(STEPS * per_step):
        left = 0 if random.random() < TEXT_ONLY else min(MAX_TOTAL, round(_log_normal(random, *TOTAL)))
        total, images = left, list[int]()
        while left:
            images.append(min(left, MAX_IMAGE, max(1, round(_log_normal(random, *IMAGE)))))
            left -= images[-1]
        drawn.append(PackedSequence(text=TOKENS - total, items=((VISION, tuple(images)),)))
    strata = random.permuted(np.argsort([each.text for each in drawn]).reshape(per_step, STEPS), axis=1)
    return tuple(drawn[n] for step in strata.T for n in random.permutation(step).tolist())


def _log_normal(random: np.random.Generator, middle: float, sigma: float) -> float:
    return middle * float(np.exp(sigma * random.standard_normal()))


class EpochDataset(SyntheticDataset):
    """Every sequence of the workload once, in order."""

    def _sequence(self, number: int) -> PackedSequence:
        return self.job.workload.sequences[number]


def make_job(ranks: int, dp: int | None = None) -> TpJob:
    """Returns the job of drawn images, by default with as many replicas as fit."""
    even = TpJob(
        ranks=ranks,
        dp=dp or replicas_on(ranks)[-1],
        encoder_work=ENCODER_WORK,
        microbatches_per_stage=MICROBATCHES_PER_STAGE,
    )
    if even.dp == 1:
        raise UserError(
            field="--ranks" if dp is None else "--dp",
            value=ranks if dp is None else dp,
            problem="has one replica, and images are dealt over several",
            hint="use 8, 16, 32 or 64 ranks" if dp is None else "use 2 or more",
        )
    return replace(even, data=draw_epoch(even.sequences))


# ---------------------------------------------------------------------------- loads


class Epoch:
    """Steps of a data set, and the loads of images in them, over the mean of the plan's microbatches."""

    def __init__(self, job: Job, plan: Plan) -> None:
        self._plan, self._module, data = plan, plan.modules[VISION], EpochDataset(job=job)
        workload, encoder = job.workload, job.model.encoder(VISION)
        samples = StepSamples(
            lambda number: {VISION: sum(data.sizes(number).items[VISION])},
            workload.sequences_per_step,
            {VISION: workload.step_capacity(VISION, encoder.merge)},
        )
        self.steps = [[data.sizes(number) for number in samples.numbers(step)] for step in range(STEPS)]
        self._mean = fmean(sum(self._costs(n)) for n in map(data.sizes, range(len(workload.sequences))))

    def _costs(self, sample: SampleSizes) -> list[float]:
        return [self._module.cost_of(tokens) for tokens in sample.items[VISION]]

    def bins(self) -> Floats:
        """Returns the loads of encoder microbatches by step, replica and number, as the engine deals them."""
        plan, replicas = self._plan, self._plan.dealing_replicas
        mean = self._mean / self._module.microbatches_per_llm_microbatch
        loads = []
        for samples in self.steps:
            groups = range(plan.ranks.llm.dp // replicas)
            tables = [plan_batch(plan, samples, group).bins[VISION] for group in groups]
            bins = [[sum(self._module.cost_of(i.tokens) for i in b) for b in of] for t in tables for of in t]
            loads.append(np.array(bins) / mean)
        return np.stack(loads)

    def microbatches(self, dealing: str, *, heaviest_first: bool = False) -> Floats:
        """Returns the loads of whole microbatches by step, replica, TP rank and number.

        Images of a microbatch are dealt to the TP ranks, each of which encodes whole images.
        """
        assignment = BatchAssignment(replicas=self._plan.ranks.llm.dp, microbatches=self._plan.microbatches)
        order = list(range(assignment.microbatches))
        loads = np.empty((STEPS, assignment.replicas, TP, assignment.microbatches))
        for step, samples in enumerate(self.steps):
            totals = np.array([sum(self._costs(sample)) for sample in samples])
            slots = deal_batch_to_replicas(
                totals, assignment, dealing, order if heaviest_first else order[::-1]
            )
            for replica, cells in enumerate(slots):
                costs = [[c for n in cell.tolist() for c in self._costs(samples[n])] for cell in cells]
                dealt = deal_items(costs, [range(TP)] * len(cells))
                loads[step, replica] = np.array(dealt.loads).T * TP / self._mean
        return loads


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedVariant:
    """A schedule of torch with the loads of its microbatches by step, replica, TP rank and number."""

    variant: PacedTorchVariant
    loads: Floats

    def replayed_s(self) -> float:
        """Returns the mean step by the rules alone, if a microbatch takes as long as its fullest TP rank."""
        fullest = self.loads.max(axis=2).tolist()
        steps = [max(self.variant.replayed_s(loads=replica) for replica in step) for step in fullest]
        return fmean(steps)


def load_variants(
    epoch: Epoch, variants: Mapping[str, PacedTorchVariant], wanted: Collection[str]
) -> dict[str, LoadedVariant]:
    """Returns every schedule fed as drawn, and with sequences dealt again in the better of two orders."""
    loaded = {}
    for name, variant in variants.items():
        drawn = LoadedVariant(variant=variant, loads=epoch.microbatches("drawn"))
        again = [
            LoadedVariant(variant=variant, loads=epoch.microbatches("reordered", heaviest_first=first))
            for first in (False, True)
        ]
        loaded[f"{name}, {AS_DRAWN}"] = drawn
        loaded[f"{name}, {AGAIN}"] = min(again, key=LoadedVariant.replayed_s)
    return {name: variant for name, variant in loaded.items() if name in wanted}


# ---------------------------------------------------------------------------- plans


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedPlan:
    """A plan of ours, and by the name of a variant the loads of its encoder microbatches in every step."""

    job: Job
    plan: Plan
    loads: Mapping[str, Floats]

    def replayed_s(self, variant: str) -> list[float]:
        """Returns every step by a replay of all replicas, which wait for each other."""
        schedule = build_plan_schedule(self.plan, self.plan.programs)
        of_encoder = schedule.module == self.plan.names.index(VISION)
        rows = np.flatnonzero(of_encoder & np.isin(schedule.kind, COMPUTE_PHASES))
        repeated = repeat_for_replicas(schedule, self.plan.ranks.llm.dp)
        steps = []
        for of_step in self.loads[variant]:
            seconds = np.tile(schedule.duration_s, (len(of_step), 1))
            seconds[:, rows] *= of_step[:, schedule.microbatch[rows]]
            steps.append(simulate_schedule(replace(repeated, duration_s=seconds.ravel())).step_s)
        return steps


def load_plans(job: TpJob, wanted: Collection[str]) -> list[LoadedPlan]:
    """Returns our plan that deals images over replicas, and one that keeps them in their microbatch.

    The latter deals sequences only. It runs encoder microbatches as they are, and padded to the fullest of
    the data, as an engine must that fixes the sizes of messages in advance.
    """
    dealt = variants_of(job, [OURS])[OURS].plan
    mean = round(fmean(TOKENS - sequence.text for sequence in job.data))
    images = ((VISION, (mean // 2, mean - mean // 2)),)
    alike = replace(job, data=(PackedSequence(text=TOKENS - mean, items=images),))
    kept = variants_of(alike, [OURS])[OURS].plan
    held = Epoch(job.job, kept).bins()
    loads = {
        name: each
        for name, each in {UNDEALT: held, PADDED: np.full_like(held, held.max())}.items()
        if name in wanted
    }
    ours = LoadedPlan(job=job.job, plan=dealt, loads={OURS: Epoch(job.job, dealt).bins()})
    return [ours, LoadedPlan(job=job.job, plan=kept, loads=loads)] if loads else [ours]
