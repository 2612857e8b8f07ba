"""Runs steps of images with a long tail on paced ranks: dealt over replicas, and kept in their microbatch.

An encoder microbatch takes as long as its images cost; everything else takes its mean. A plan claims the step
of the mean, and an epoch of steps is measured: in all of them together every sequence of the data set is
read once. torch's schedules get sequences as drawn, or dealt again so that replicas are even.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median

import numpy as np
from torch import distributed as dist

from benchmarks.paced import MAX_ERROR, MEANING, TIMEOUT_S, PacedTask, RankResult, run_task, step_progress
from benchmarks.paced_backend import PacedNetwork, run_paced_ranks
from benchmarks.paced_clock import MEANS
from benchmarks.paced_plan import PhaseRecorder, count_out_of_order
from benchmarks.paced_steps import StepTime, counted_s, is_disturbed
from benchmarks.paced_torch import PacedPipeline, PacedTorchVariant
from benchmarks.paced_tp import MAX_RANKS_IN_TIME, choose_variants
from benchmarks.paced_tp_job import P2P_LINK, TOKENS, TP, VISION, TpJob, replicas_on
from benchmarks.paced_tp_model import PacedModel
from benchmarks.paced_tp_plans import OURS, variants_of
from benchmarks.paced_tp_torch import make_pipelines, torch_variants
from benchmarks.ranks import Progress
from benchmarks.report import EVENLY, BenchResult, VariantTime
from optimus.data.dealing import deal_items
from optimus.data.step_samples import WINDOW, StepSamples
from optimus.engine.batch_plan import SampleSizes, plan_batch
from optimus.engine.synthetic_data import SyntheticDataset
from optimus.errors import UserError
from optimus.ir.op import Floats
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.job.workload import PackedSequence
from optimus.planner.batch_assignment import BatchAssignment
from optimus.sensitivity.drawn_batches import deal_batch_to_replicas

UNDEALT, PADDED = "images not dealt", "images not dealt, padded"
PLANS = (OURS, UNDEALT, PADDED)
AS_DRAWN, AGAIN = FEEDS = "as drawn", "re-dealt"
SCHEDULES = ("balanced 1F1B", "balanced Interleaved", "balanced ZBV")
TEXT_ONLY, TOTAL, IMAGE = 0.12, (13.0, 0.67), (3.0, 0.8)  # share; LLM tokens: median, sigma of the logarithm
MAX_TOTAL, MAX_IMAGE = 56, 8  # LLM tokens of images in a sequence, and of one image
STEPS = WINDOW  # an epoch: steps that share their samples


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


# ---------------------------------------------------------------------------- on every rank


class EpochStep:
    """One step of a variant on this rank; the first of them connects the ranks for all."""

    def __init__(self, number: int, rank: PacedModel | LoadedPipeline) -> None:
        self._number, self._rank = number, rank

    @property
    def recorder(self) -> PhaseRecorder:
        assert isinstance(self._rank, PacedModel), "torch's schedules have no lines"
        return self._rank.recorder

    def prepare(self) -> None:
        if self._number == 0:
            self._rank.prepare()

    def step(self) -> None:
        self._rank.step()

    def traffic(self) -> None:
        """Returns nothing: steps are compared with claims, not with replays."""


@dataclass(kw_only=True)
class LoadedPipeline:
    """A rank of a schedule of torch with the loads of a step; `current` is what its stages read."""

    pipeline: PacedPipeline
    loads: Floats
    current: list[Floats]

    def prepare(self) -> None:
        self.pipeline.prepare()

    def step(self) -> None:
        self.current[:] = [self.loads]
        self.pipeline.step()


def _step_name(variant: str, step: int) -> str:
    return f"{variant}, step {step + 1}"


def _make_models(plans: Sequence[LoadedPlan], network: PacedNetwork) -> dict[str, EpochStep]:
    steps = {}
    for each in plans:
        data = EpochDataset(job=each.job)
        model = PacedModel(each.job, each.plan, MEANS, network, timeout_s=TIMEOUT_S, dataset=data)
        replica = each.plan.ranks.place(LLM, dist.get_rank()).dp
        for name, loads in each.loads.items():
            for number in range(STEPS):
                loaded = model.with_batch(number, loads[number, replica])
                steps[_step_name(name, number)] = EpochStep(number, loaded)
    return steps


def _make_pipelines(
    job: TpJob, plan: Plan, variants: Mapping[str, LoadedVariant], network: PacedNetwork
) -> dict[str, EpochStep]:
    place, current = plan.ranks.place(LLM, dist.get_rank()), list[Floats]()
    pipelines = make_pipelines(
        job,
        {name: each.variant for name, each in variants.items()},
        lambda variant, kind, stage, microbatch: variant.loaded_s(float(current[0][microbatch]), kind, stage),
        network,
        plan,
        timeout_s=TIMEOUT_S,
    )
    return {
        _step_name(name, number): EpochStep(
            number,
            LoadedPipeline(
                pipeline=pipeline, loads=variants[name].loads[number, place.dp, place.tp], current=current
            ),
        )
        for name, pipeline in pipelines.items()
        for number in range(STEPS)
    }


# ---------------------------------------------------------------------------- the benchmark


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedPlan:
    """A plan of ours, and by the name of a variant the loads of its encoder microbatches in every step."""

    job: Job
    plan: Plan
    loads: Mapping[str, Floats]


def bench_paced_tail(
    *,
    ranks: int = 16,
    dp: int | None = None,
    rounds: int = 1,
    against: Sequence[str] = (),
    progress: Progress = lambda name, done, total: None,
) -> BenchResult:
    """Plans for the mean of drawn images, runs an epoch of them, and compares with the claim."""
    wanted = choose_variants([*PLANS, *(f"{name}, {fed}" for name in SCHEDULES for fed in FEEDS)], against)
    progress("planning", 0, 1)
    job = make_job(ranks, dp)
    plans, searches = load_plans(job, wanted), torch_variants(job)
    variants = {name: searches[name].best(job.pp) for name in SCHEDULES}
    loaded = load_variants(Epoch(job.job, plans[0].plan), variants, wanted)
    names = [*(name for each in plans for name in each.loads), *loaded]
    counts = {_step_name(name, step): rounds for name in names for step in range(STEPS)}
    task = PacedTask(
        plans=partial(_make_models, plans),
        pipelines=partial(_make_pipelines, job, plans[-1].plan, loaded),
        rounds=counts,
    )
    time_scale = max(1.0, ranks / MAX_RANKS_IN_TIME)
    results = run_paced_ranks(
        run_task,
        ranks,
        P2P_LINK,
        task,
        time_scale=time_scale,
        timeout_s=time_scale * 8 * TIMEOUT_S,
        on_report=step_progress(progress, counts),
    )
    claims = {name: each.plan.claims.step_s for each in plans for name in each.loads}
    claims |= {name: each.variant.replayed_s() for name, each in loaded.items()}
    return _result(job, plans, results, claims, time_scale)


def make_job(ranks: int, dp: int | None = None) -> TpJob:
    """Returns the job of drawn images, by default with as many replicas as fit."""
    even = TpJob(ranks=ranks, dp=dp or replicas_on(ranks)[-1])
    if even.dp == 1:
        raise UserError(
            field="--ranks" if dp is None else "--dp",
            value=ranks if dp is None else dp,
            problem="has one replica, and images are dealt over several",
            hint="use 8, 16, 32 or 64 ranks" if dp is None else "use 2 or more",
        )
    return replace(even, data=draw_epoch(even.sequences))


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
    kept_loads = {UNDEALT: held, PADDED: np.full_like(held, held.max())}
    return [
        LoadedPlan(job=job.job, plan=dealt, loads={OURS: Epoch(job.job, dealt).bins()}),
        LoadedPlan(
            job=job.job,
            plan=kept,
            loads={name: loads for name, loads in kept_loads.items() if name in wanted},
        ),
    ]


def _result(
    job: TpJob,
    plans: Sequence[LoadedPlan],
    results: Sequence[RankResult],
    claims: Mapping[str, float],
    time_scale: float,
) -> BenchResult:
    steps_s: dict[str, list[float]] = {}
    disturbed: dict[str, int] = {}
    for name in claims:
        attempts = [_attempts(results, _step_name(name, step)) for step in range(STEPS)]
        steps_s[name] = [median(counted_s(of_step)) for of_step in attempts]
        disturbed[name] = sum(all(map(is_disturbed, of_step)) for of_step in attempts)
    means_s = {name: fmean(steps) for name, steps in steps_s.items()}
    variants = {
        name: VariantTime(
            step_s=means_s[name],
            over_ours=means_s[name] / means_s[OURS],
            step_low_s=min(steps),
            step_high_s=max(steps),
            predicted_s=claims[name],
            error=means_s[name] / claims[name] - 1,
            steps=STEPS,
            disturbed=disturbed[name],
        )
        for name, steps in steps_s.items()
    }
    error, problems = variants[OURS].error or 0.0, _order_problems(plans, results)
    if abs(error) > MAX_ERROR:
        problems.append(f"ours is {100 * error:+.1f} % off its claim, over {100 * MAX_ERROR:g} %")
    layout = f"dp{job.dp} pp{job.pp} tp{TP}, images dealt over {plans[0].plan.dealing_replicas} replicas"
    return BenchResult(
        bench="paced",
        variants=variants,
        ours=OURS,
        bound=EVENLY,
        bound_s=job.bound_s,
        ours_over_bound=means_s[OURS] / job.bound_s,
        notes=(
            f"{job.ranks} ranks: {layout}; {job.microbatches} microbatches of one sequence",
            _describe_data(job),
            "`predicted` is what each claims for images of mean size; a step is the mean of the epoch",
            *([f"in slow motion, a second takes {time_scale:g}"] if time_scale > 1 else []),
            MEANING,
        ),
        problems=tuple(problems),
    )


def _attempts(results: Sequence[RankResult], name: str) -> list[list[StepTime]]:
    """Returns the times of a step on all ranks, attempt by attempt."""
    return [list(ranks) for ranks in zip(*(result.steps[name] for result in results), strict=True)]


def _describe_data(job: TpJob) -> str:
    images = [tokens for sequence in job.data for tokens in sequence.lengths(VISION)]
    totals = [TOKENS - sequence.text for sequence in job.data]
    return (
        f"{len(images):,} images of {min(images)} to {max(images)} tokens in {len(totals)} sequences, "
        f"{min(totals)} to {max(totals)} in each and {fmean(totals):.1f} in the mean; "
        f"an epoch of {STEPS} steps"
    )


def _order_problems(plans: Sequence[LoadedPlan], results: Sequence[RankResult]) -> list[str]:
    """Describes variants of ours whose lines did not run in the order of their program."""
    problems = []
    for each in plans:
        for name in each.loads:
            wrong = sum(
                count_out_of_order(each.plan, each.plan.ranks.class_of(rank), lines, phases)
                for rank, result in enumerate(results)
                for step in range(STEPS)
                for lines, phases in zip(
                    result.begun[_step_name(name, step)],
                    result.phase_ends[_step_name(name, step)],
                    strict=True,
                )
            )
            if wrong:
                problems.append(f"{name}: {wrong} lines ran out of program order")
    return problems
