"""Runs our plan and torch's schedules on ranks that sleep, and compares each with its own replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

from benchmarks.draws import MEANS, Draws
from benchmarks.paced_backend import PacedNetwork
from benchmarks.paced_job import LINK, LINK_OF_REPLICAS, PacedJob, TorchVariant
from benchmarks.paced_plan import PacedPlan, Played
from benchmarks.paced_ranks import run_paced_ranks
from benchmarks.paced_replays import (
    NEAR_S,
    Faults,
    PlanReplay,
    compare_step,
    replay_plan,
    replay_torch,
    torch_s,
)
from benchmarks.paced_steps import DISTURBED_SHARE, Playable, Step, is_disturbed, play_rounds, step_s
from benchmarks.paced_torch import PacedPipeline
from benchmarks.pacing import Link
from benchmarks.report import BenchResult, VariantTime
from benchmarks.torch_cuts import Chosen, choose
from optimus.ir.plan import Plan

OURS = "ours"
SEED = 20_250_101  # of the draws; plans are made without it
ERROR = 0.03  # the most that a step may differ from its replay
ONCE_S, NEVER_S = 20.0, 60.0  # steps of variants that take longer are played once, or only replayed
TIMEOUT_S = 300.0
NO_CALM_STEP = "no step of ours was undisturbed, so its time proves nothing: use a calmer host"
MEANING = "Pacing proves order, dependencies and messaging, not GPU speed: ranks sleep instead of computing."

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every rank is given."""

    plan: Plan
    draws: Draws
    torch_variants: Mapping[str, Chosen[TorchVariant]]
    rounds: Mapping[str, int]  # of each variant; 0: it is only replayed
    sharded: bool = False

    def replay(self, link: Link) -> PlanReplay:
        return replay_plan(self.plan, self.draws, link, traffic="sharded" if self.sharded else "whole")


@dataclass(frozen=True, kw_only=True)
class RankAnswer:
    """What one rank found; lines and phases are those of each of our steps."""

    steps: Mapping[str, list[Step]]
    begun: list[list[int]]
    played: list[list[Played]]


def bench_paced(
    *,
    ranks: int = 16,
    dp: int = 1,
    rounds: int = 3,
    seed: int = SEED,
    progress: Progress = lambda name, done, total: None,
) -> BenchResult:
    """Plans from means, plays drawn durations, and compares with replays of the same draws."""
    job = PacedJob(ranks=ranks, dp=dp, link=LINK if dp == 1 else LINK_OF_REPLICAS)
    progress("planning", 0, 1)
    plan, variants = job.plan(), choose_cuts(job, progress) if dp == 1 else {}
    task = Task(
        plan=plan,
        draws=Draws(seed=seed),
        torch_variants=variants,
        rounds={OURS: rounds, **{name: _rounds(each.variant, rounds) for name, each in variants.items()}},
        sharded=dp > 1,
    )
    total, done = sum(task.rounds.values()), 0

    def hear(name: str) -> None:
        nonlocal done
        done += 1
        progress(name, min(done, total), total)

    progress("starting ranks", 0, total)
    answers = run_paced_ranks(play_task, ranks, job.link, task, timeout_s=TIMEOUT_S, on_report=hear)
    return compare(job, task, answers)


def choose_cuts(job: PacedJob, progress: Progress) -> dict[str, Chosen[TorchVariant]]:
    """For every schedule of torch's, by means, as our plan is made."""
    found, wanted = {}, job.torch_variants()
    for number, (name, cuts) in enumerate(wanted.items()):
        progress(f"cutting for {name}", number, len(wanted))
        found[name] = choose(cuts, job.ranks, partial(replay_torch, draws=MEANS, link=job.link))
    return found


def _rounds(variant: TorchVariant, rounds: int) -> int:
    return 0 if variant.least_s > NEVER_S else 1 if variant.least_s > ONCE_S else rounds


def play_task(rank: int, network: PacedNetwork, task: Task) -> RankAnswer:
    """One rank: all variants, in turn."""
    ours = PacedPlan(task.plan, task.draws, network.clock, timeout_s=TIMEOUT_S, sharded=task.sharded)
    pipelines = {
        name: PacedPipeline(
            each.variant.pipeline, clock=network.clock, seconds=partial(torch_s, each.variant, task.draws)
        )
        for name, each in task.torch_variants.items()
        if task.rounds[name]
    }
    begun: list[list[int]] = []
    played: list[list[Played]] = []

    def after(name: str) -> None:
        if name == OURS:
            begun.append(ours.journal.begun)
            played.append(ours.journal.played)

    everything: dict[str, Playable] = {OURS: ours, **pipelines}
    steps = play_rounds(network, everything, task.rounds, after)
    return RankAnswer(steps=steps, begun=begun, played=played)


# ---------------------------------------------------------------------------- results


def compare(job: PacedJob, task: Task, answers: list[RankAnswer]) -> BenchResult:
    """Medians of the steps that count, beside what replays say."""
    replayed = task.replay(job.link)
    predicted = {OURS: replayed.step_s}
    for name, each in task.torch_variants.items():
        predicted[name] = replay_torch(each.variant, each.programs, draws=task.draws, link=job.link)
    steps = {
        name: [list(step) for step in zip(*(answer.steps[name] for answer in answers), strict=True)]
        for name in answers[0].steps
    }
    ours_s = median(counting(steps[OURS]))
    variants = {name: variant_time(found, predicted[name], ours_s) for name, found in steps.items()}
    faults = our_faults(job, task, answers)
    problems = [*faults]
    never = [name for name, found in steps.items() if all(map(is_disturbed, found))]
    if OURS in never:
        problems.append(NO_CALM_STEP)
    for name, found in variants.items():
        if name not in never and found.error is not None and abs(found.error) > ERROR:
            problems.append(f"{name} is {100 * found.error:+.1f} % off its replay, over {100 * ERROR:g} %")
    claimed = f"claimed from means {task.plan.claims.step_s:.3f} s, with the draws {replayed.step_s:.3f} s"
    notes = [
        f"{job.ranks} ranks, {job.microbatches} microbatches, encoder work half of the LLM's",
        f"ours: {claimed}",
        *([_traffic_note(job, task, replayed)] if task.sharded else []),
        *([] if faults else [order_note(task.plan, len(steps[OURS]))]),
        *disturbance_notes(steps, never),
        *(
            f"{name} was not played: its replay takes {seconds:.1f} s, {seconds / ours_s:.2f} of ours"
            for name, seconds in predicted.items()
            if name not in variants
        ),
        MEANING,
    ]
    return BenchResult(
        bench="paced",
        variants=variants,
        ours=OURS,
        bound_s=job.bound_s,
        ours_over_bound=ours_s / job.bound_s,
        notes=tuple(notes),
        problems=tuple(problems),
    )


def our_faults(job: PacedJob, task: Task, answers: list[RankAnswer]) -> tuple[str, ...]:
    """Of every step of ours, disturbed or not: the order and the time of every op."""
    words: dict[str, None] = {}
    for faults in step_faults(job, task, answers):
        words.update(dict.fromkeys(faults.words()))
    return tuple(words)


def step_faults(job: PacedJob, task: Task, answers: list[RankAnswer]) -> list[Faults]:
    """One entry per step of ours. What each rank's host gave up may delay all: the sum explains lateness."""
    replayed = task.replay(job.link)
    found = []
    for number in range(len(answers[0].begun)):
        mine = [answer.steps[OURS][number] for answer in answers]
        found.append(
            compare_step(
                task.plan,
                replayed,
                [answer.begun[number] for answer in answers],
                [answer.played[number] for answer in answers],
                start_s=min(step.start_s for step in mine),
                given_up_s=sum(step.given_up_s for step in mine),
            )
        )
    return found


def counting(steps: list[list[Step]]) -> list[float]:
    """Seconds of the steps that were not disturbed; of all, if all were."""
    calm = [step_s(step) for step in steps if not is_disturbed(step)]
    return calm or [step_s(step) for step in steps]


def variant_time(steps: list[list[Step]], predicted_s: float, ours_s: float) -> VariantTime:
    """Of the steps that count, beside what was predicted."""
    seconds = counting(steps)
    middle = median(seconds)
    return VariantTime(
        step_s=middle,
        over_ours=middle / ours_s,
        step_low_s=min(seconds),
        step_high_s=max(seconds),
        predicted_s=predicted_s,
        error=middle / predicted_s - 1,
        steps=len(seconds),
        disturbed=sum(map(is_disturbed, steps)),
    )


def _traffic_note(job: PacedJob, task: Task, replayed: PlanReplay) -> str:
    """How much of the data-parallel traffic compute hides, by replays."""
    silent = replay_plan(task.plan, task.draws, job.link, traffic="none")
    costs_s = replayed.step_s - silent.step_s
    moves = f"gathers and reduces take {replayed.traffic_s:.3f} s on the busiest rank"
    return f"ours: {moves}, and make the step {costs_s:.3f} s longer than it is without them"


def order_note(plan: Plan, steps: int) -> str:
    """That every line was played where and when it should be."""
    lines = sum(len(plan.programs[plan.ranks.class_of(rank)]) for rank in range(plan.ranks.world))
    of = (
        f"ours: {lines:,} lines in each of {steps} steps, all in program order; every op over when the replay"
    )
    return f"{of} says to {NEAR_S:g} s, and off by no more than hosts were late for good where they were"


def disturbance_notes(steps: Mapping[str, list[list[Step]]], never: list[str]) -> list[str]:
    """How many steps the host spoilt."""
    everything = [step for found in steps.values() for step in found]
    disturbed = sum(map(is_disturbed, everything))
    late = f"a rank late for good by over {100 * DISTURBED_SHARE:g} %"
    notes = [f"{disturbed} of {len(everything)} steps were disturbed by the host ({late}) and do not count"]
    if never:
        notes.append(f"every step of {', '.join(never)} was disturbed: shown all the same, and not judged")
    return notes
