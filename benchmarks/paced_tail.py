"""Runs steps of images with a long tail on paced ranks: dealt over replicas, and kept in their microbatch.

An encoder microbatch takes as long as its images cost; everything else takes its mean. A plan claims the step
of the mean, and an epoch of steps is measured: in all of them together every sequence of the data set is
read once. What ours is compared with runs the first of these steps: images that stay in their microbatch, and
torch's schedules, which get sequences as drawn, or dealt again so that replicas are even.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

from torch import distributed as dist

from benchmarks.paced import (
    ALL_DISTURBED,
    MAX_ERROR,
    MEANING,
    TIMEOUT_S,
    PacedTask,
    RankResult,
    run_task,
    step_progress,
)
from benchmarks.paced_backend import PacedNetwork, run_paced_ranks
from benchmarks.paced_clock import MEANS
from benchmarks.paced_plan import PhaseRecorder, count_out_of_order
from benchmarks.paced_steps import StepTime, counted_s, is_disturbed
from benchmarks.paced_tail_job import (
    COMPARED_STEPS,
    FEEDS,
    PLANS,
    SCHEDULES,
    STEPS,
    Epoch,
    EpochDataset,
    LoadedPlan,
    LoadedVariant,
    load_plans,
    load_variants,
    make_job,
)
from benchmarks.paced_torch import PacedPipeline
from benchmarks.paced_tp import MAX_RANKS_IN_TIME, choose_variants
from benchmarks.paced_tp_job import P2P_LINK, TOKENS, TP, VISION, TpJob
from benchmarks.paced_tp_model import PacedModel
from benchmarks.paced_tp_plans import OURS
from benchmarks.paced_tp_torch import make_pipelines, torch_variants
from benchmarks.ranks import Progress
from benchmarks.report import EVENLY, BenchResult, VariantTime
from optimus.ir.op import Floats
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM

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
    counts = {
        _step_name(name, step): rounds if name == OURS or step < COMPARED_STEPS else 0
        for name in names
        for step in range(STEPS)
    }
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
        steps_s[name] = [median(counted_s(of_step)) for of_step in attempts if of_step]
        disturbed[name] = sum(all(map(is_disturbed, of_step)) for of_step in attempts if of_step)
    ours_s = steps_s[OURS]
    variants = {
        name: VariantTime(
            step_s=fmean(steps),
            over_ours=fmean(steps) / fmean(ours_s[: len(steps)]),
            step_low_s=min(steps),
            step_high_s=max(steps),
            predicted_s=claims[name],
            error=fmean(steps) / claims[name] - 1,
            steps=len(steps),
            disturbed=disturbed[name],
        )
        for name, steps in steps_s.items()
    }
    error, problems = variants[OURS].error or 0.0, _order_problems(plans, results)
    if disturbed[OURS] == STEPS:
        problems.append(ALL_DISTURBED)
    if abs(error) > MAX_ERROR:
        problems.append(f"ours is {100 * error:+.1f} % off its claim, over {100 * MAX_ERROR:g} %")
    layout = f"dp{job.dp} pp{job.pp} tp{TP}, images dealt over {plans[0].plan.dealing_replicas} replicas"
    return BenchResult(
        bench="paced",
        variants=variants,
        ours=OURS,
        bound=EVENLY,
        bound_s=job.bound_s,
        ours_over_bound=fmean(ours_s) / job.bound_s,
        notes=(
            f"{job.ranks} ranks: {layout}; {job.microbatches} microbatches of one sequence",
            _describe_data(job),
            "`replayed` is what each claims for images of mean size; a step is the mean of all that were run",
            _describe_replay(plans, steps_s),
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


def _describe_replay(plans: Sequence[LoadedPlan], steps_s: Mapping[str, list[float]]) -> str:
    """Compares steps of ours with replays that know the images: so far the engine itself is off."""
    parts = []
    for each in plans:
        for name in each.loads:
            replayed_s = fmean(each.replayed_s(name)[: len(steps_s[name])])
            off = fmean(steps_s[name]) / replayed_s - 1
            parts.append(f"{name} {replayed_s:.3f} s (measured {100 * off:+.1f} %)")
    return "replays that know the images: " + ", ".join(parts)


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
