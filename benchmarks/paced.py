"""Runs our plan and torch's schedules on paced ranks, and compares each step with its replay.

`paced_tp` uses the same task, results and comparison for tensor-parallel plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Protocol

from benchmarks.paced_backend import PacedNetwork, run_paced_ranks
from benchmarks.paced_clock import Draws
from benchmarks.paced_job import LINK, REPLICAS_LINK, PacedJob
from benchmarks.paced_plan import (
    TOLERANCE_S,
    PacedPlan,
    PhaseEnd,
    PhaseRecorder,
    PlanReplay,
    find_faults,
    replay_plan,
)
from benchmarks.paced_steps import (
    DISTURBED_SHARE,
    Steppable,
    StepTime,
    counted_s,
    is_disturbed,
    run_rounds,
    variant_time,
)
from benchmarks.paced_torch import PacedPipeline, PacedTorchVariant
from benchmarks.ranks import Progress
from benchmarks.report import BenchResult, VariantTime
from optimus.ir.plan import Plan

OURS = "ours"
SEED = 20_250_101  # of the draws; plans are made without it
MAX_ERROR = 0.03  # of a step over its replay
RUN_ONCE_S, REPLAY_ONLY_S = 20.0, 60.0  # variants with longer steps run once, or are only replayed
TIMEOUT_S = 300.0
ALL_DISTURBED = "no step of ours was undisturbed, so its time proves nothing: use a calmer host"
MEANING = "Pacing proves order, dependencies and messaging, not GPU speed: ranks sleep instead of computing."


# ---------------------------------------------------------------------------- on every rank


class PlanRank(Steppable, Protocol):
    """One rank of a plan of ours."""

    @property
    def recorder(self) -> PhaseRecorder:
        """Lines and phases of the last step."""

    def traffic(self) -> Any:
        """Returns seconds of transfers that a replay needs and a plan does not know."""


@dataclass(frozen=True, kw_only=True)
class PacedTask:
    """Variants that every rank builds and runs in turn: plans of ours, then torch's schedules."""

    plans: Callable[[PacedNetwork], Mapping[str, PlanRank]]
    pipelines: Callable[[PacedNetwork], Mapping[str, Steppable]]
    rounds: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """Steps of one rank by variant; of plans also lines begun and phases run in every step."""

    steps: Mapping[str, list[StepTime]]
    begun: Mapping[str, list[list[int]]]
    phase_ends: Mapping[str, list[list[PhaseEnd]]]
    traffic: Mapping[str, Any] = field(default_factory=dict)


def run_task(rank: int, network: PacedNetwork, task: PacedTask) -> RankResult:
    """Runs all variants on one rank."""
    plans = task.plans(network)
    begun: dict[str, list[list[int]]] = {name: [] for name in plans}
    phase_ends: dict[str, list[list[PhaseEnd]]] = {name: [] for name in plans}

    def after_step(name: str) -> None:
        if name in plans:
            begun[name].append(plans[name].recorder.begun)
            phase_ends[name].append(plans[name].recorder.phase_ends)

    variants: dict[str, Steppable] = {**plans, **task.pipelines(network)}
    return RankResult(
        steps=run_rounds(network, variants, task.rounds, after_step),
        begun=begun,
        phase_ends=phase_ends,
        traffic={name: plan.traffic() for name, plan in plans.items()},
    )


# ---------------------------------------------------------------------------- results


def faults_of(
    plan: Plan, replay: PlanReplay, results: Sequence[RankResult], name: str = OURS
) -> tuple[str, ...]:
    """Describes faults of all steps of a plan, disturbed or not: order and end of every op."""
    faults: dict[str, None] = {}
    for number in range(len(results[0].begun[name])):
        times = [result.steps[name][number] for result in results]
        step_faults = find_faults(
            plan,
            replay,
            [result.begun[name][number] for result in results],
            [result.phase_ends[name][number] for result in results],
            start_s=min(time.start_s for time in times),
            lost_s=sum(time.lost_s for time in times),  # time lost on one host may delay all ranks
        )
        faults.update(dict.fromkeys(step_faults))
    return tuple(faults)


class PacedComparison:
    """Measured steps of all variants beside their replays; `faults` are those of our plans."""

    def __init__(
        self,
        results: Sequence[RankResult],
        predicted_s: Mapping[str, float],
        faults: Sequence[str],
        ours: str = OURS,
    ) -> None:
        self.predicted_s, self.faults, self._ours = predicted_s, faults, ours
        self._steps = {
            name: [list(ranks) for ranks in zip(*(result.steps[name] for result in results), strict=True)]
            for name in results[0].steps
        }
        self.ours_s = median(counted_s(self._steps[ours]))
        self.variants: dict[str, VariantTime] = {
            name: variant_time(steps, predicted_s[name], self.ours_s) for name, steps in self._steps.items()
        }
        self._all_disturbed = [name for name, steps in self._steps.items() if all(map(is_disturbed, steps))]

    @property
    def measured_s(self) -> dict[str, float]:
        """Steps of variants with an undisturbed one."""
        return {name: time.step_s for name, time in self.variants.items() if name not in self._all_disturbed}

    def problems(self) -> list[str]:
        """Returns faults, and steps too far from their replay."""
        problems = list(self.faults)
        if self._ours in self._all_disturbed:
            problems.append(ALL_DISTURBED)
        for name in self.measured_s:
            error = self.variants[name].error
            if error is not None and abs(error) > MAX_ERROR:
                problems.append(f"{name} is {100 * error:+.1f} % off its replay, over {100 * MAX_ERROR:g} %")
        return problems

    def notes(self, plan: Plan) -> list[str]:
        """Describes the order of our plan, and disturbances by the host."""
        notes = []
        if not self.faults:
            lines = sum(len(plan.programs[plan.ranks.class_of(rank)]) for rank in range(plan.ranks.world))
            steps = len(self._steps[self._ours])
            notes.append(
                f"{self._ours}: {lines:,} lines in each of {steps} steps, all in program order; every op "
                f"ended when the replay says to {TOLERANCE_S:g} s, and off by no more than hosts lost where "
                "they did"
            )
        all_steps = [ranks for steps in self._steps.values() for ranks in steps]
        disturbed = sum(map(is_disturbed, all_steps))
        lost = f"a rank lost over {100 * DISTURBED_SHARE:g} %"
        notes.append(
            f"{disturbed} of {len(all_steps)} steps were disturbed by the host ({lost}) and do not count"
        )
        if self._all_disturbed:
            names = ", ".join(self._all_disturbed)
            notes.append(f"every step of {names} was disturbed: shown all the same, and not judged")
        return notes


# ---------------------------------------------------------------------------- the benchmark


def bench_paced(
    *,
    ranks: int = 16,
    dp: int = 1,
    rounds: int = 3,
    seed: int = SEED,
    progress: Progress = lambda name, done, total: None,
) -> BenchResult:
    """Plans from means, runs drawn durations, and compares with replays of the same draws."""
    job = PacedJob(ranks=ranks, dp=dp, link=LINK if dp == 1 else REPLICAS_LINK)
    progress("planning", 0, 1)
    plan, draws = job.plan(), Draws(seed=seed)
    variants = {} if dp > 1 else search_cuts(job, progress)
    counts = {OURS: rounds, **{name: _rounds(variant, rounds) for name, variant in variants.items()}}
    timed = {name: variant for name, variant in variants.items() if counts[name]}
    task = PacedTask(
        plans=partial(_make_plan, plan, draws, sharded=dp > 1),
        pipelines=partial(make_pipelines, timed, draws),
        rounds=counts,
    )
    results = run_paced_ranks(
        run_task, ranks, job.link, task, timeout_s=TIMEOUT_S, on_report=step_progress(progress, counts)
    )
    replay = replay_plan(plan, draws, job.link, traffic="sharded" if dp > 1 else "replicated")
    predicted_s = {OURS: replay.step_s, **{name: each.replayed_s(draws) for name, each in variants.items()}}
    comparison = PacedComparison(results, predicted_s, faults_of(plan, replay, results))
    claimed = f"claimed from means {plan.claims.step_s:.3f} s, with the draws {replay.step_s:.3f} s"
    notes = [
        f"{job.ranks} ranks, {job.microbatches} microbatches, encoder work half of the LLM's",
        f"ours: {claimed}",
        *([_traffic_note(plan, draws, job, replay)] if dp > 1 else []),
        *comparison.notes(plan),
        *(
            f"{name} was only replayed: {seconds:.1f} s, {seconds / comparison.ours_s:.2f} of ours"
            for name, seconds in predicted_s.items()
            if name not in comparison.variants
        ),
        MEANING,
    ]
    return BenchResult(
        bench="paced",
        variants=comparison.variants,
        ours=OURS,
        bound_s=job.bound_s,
        ours_over_bound=comparison.ours_s / job.bound_s,
        notes=tuple(notes),
        problems=tuple(comparison.problems()),
    )


def _make_plan(plan: Plan, draws: Draws, network: PacedNetwork, *, sharded: bool) -> dict[str, PacedPlan]:
    return {OURS: PacedPlan(plan, draws, network, timeout_s=TIMEOUT_S, sharded=sharded)}


def search_cuts(job: PacedJob, progress: Progress) -> dict[str, PacedTorchVariant]:
    """Returns the best cut of every schedule of torch, by means."""
    variants, searches = {}, job.torch_variants()
    for number, (name, search) in enumerate(searches.items()):
        progress(f"cutting for {name}", number, len(searches))
        variants[name] = search.best(job.ranks)
    return variants


def _rounds(variant: PacedTorchVariant, rounds: int) -> int:
    return 0 if variant.least_s > REPLAY_ONLY_S else 1 if variant.least_s > RUN_ONCE_S else rounds


def make_pipelines(
    variants: Mapping[str, PacedTorchVariant], draws: Draws, network: PacedNetwork
) -> dict[str, PacedPipeline]:
    """Returns this rank's stages of every variant."""
    return {
        name: PacedPipeline(variant.pipeline, clock=network.clock, seconds=partial(variant.drawn_s, draws))
        for name, variant in variants.items()
    }


def step_progress(progress: Progress, rounds: Mapping[str, int]) -> Callable[[str], None]:
    """Returns a callback for reports of ranks that counts steps."""
    total, done = sum(rounds.values()), 0

    def on_report(name: str) -> None:
        nonlocal done
        done += 1
        progress(name, min(done, total), total)

    progress("starting ranks", 0, total)
    return on_report


def _traffic_note(plan: Plan, draws: Draws, job: PacedJob, replay: PlanReplay) -> str:
    """Describes how much of the data-parallel traffic compute hides, by replays."""
    without = replay_plan(plan, draws, job.link, traffic="none")
    moves = f"gathers and reduces take {replay.traffic_s:.3f} s on the busiest rank"
    return f"ours: {moves}, and make the step {replay.step_s - without.step_s:.3f} s longer"
