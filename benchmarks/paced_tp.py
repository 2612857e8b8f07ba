"""`benchmarks paced --tp`: ours on ranks that divide layers, what it is made of, and torch's schedules.

Every variant stands beside its own replay: ours beside one of its programs, torch's beside one of its rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import distributed as dist

from benchmarks.divided_job import P2P_LINK, TP, DividedJob, link_of, replicas_on
from benchmarks.divided_plans import DP_BUBBLES, FLOOR, OURS, TP_SLOTS, VARIANTS, Variant, variants_of
from benchmarks.divided_torch import DividedTorch, make_pipelines, torch_variants
from benchmarks.draws import MEANS, Draws
from benchmarks.paced import (
    ERROR,
    MEANING,
    NO_CALM_STEP,
    SEED,
    TIMEOUT_S,
    counting,
    disturbance_notes,
    order_note,
    variant_time,
)
from benchmarks.paced_backend import PacedNetwork
from benchmarks.paced_model import PacedModel, Traffic, replay_model, replay_waiting
from benchmarks.paced_plan import Played
from benchmarks.paced_ranks import run_paced_ranks
from benchmarks.paced_replays import PlanReplay, compare_step
from benchmarks.paced_steps import Playable, Step, is_disturbed, play_rounds
from benchmarks.paced_torch import PacedPipeline
from benchmarks.report import EVENLY, BenchResult
from benchmarks.torch_cuts import Chosen, choose
from optimus.engine.process_groups import make_groups
from optimus.errors import UserError, one_of
from optimus.ir.op import Communicator
from optimus.ir.ranks import LLM

Progress = Callable[[str, int, int], None]
RANKS_IN_TIME = 8  # that two cores wake in time; with more, all goes in slow motion
GAIN_ERROR = 0.01  # the most that the measured gain of slots may differ from the predicted one


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every rank is given."""

    job: DividedJob
    variants: Mapping[str, Variant]
    torch_variants: Mapping[str, Chosen[DividedTorch]]
    draws: Draws
    rounds: int


@dataclass(frozen=True, kw_only=True)
class RankAnswer:
    """What one rank found; lines and phases are those of every step of our variants."""

    steps: Mapping[str, list[Step]]
    begun: Mapping[str, list[list[int]]]
    played: Mapping[str, list[list[Played]]]
    traffic: Mapping[str, Traffic]


def bench_paced_tp(
    *,
    ranks: int = 16,
    dp: int | None = None,
    rounds: int = 3,
    seed: int = SEED,
    against: Sequence[str] = (),
    progress: Progress = lambda name, done, total: None,
) -> BenchResult:
    """Plans from means, plays drawn durations, and compares with replays of the same draws."""
    fits = replicas_on(ranks)
    job = DividedJob(ranks=ranks, dp=dp or next((dp for dp in fits if dp > 1), fits[0]))
    progress("planning", 0, 1)
    beside = torch_variants(job)
    wanted = _chosen([*VARIANTS, *beside], against)
    task = Task(
        job=job,
        variants=variants_of(job, wanted),
        torch_variants={
            name: choose(cuts, job.pp, lambda variant, programs: variant.replayed_s(MEANS, programs))
            for name, cuts in beside.items()
            if name in wanted
        },
        draws=Draws(seed=seed),
        rounds=rounds,
    )
    total, done = rounds * (len(task.variants) + len(task.torch_variants)), 0

    def hear(name: str) -> None:
        nonlocal done
        done += 1
        progress(name, min(done, total), total)

    progress("starting ranks", 0, total)
    slow = max(1.0, ranks / RANKS_IN_TIME)
    limit_s = slow * 4 * TIMEOUT_S
    answers = run_paced_ranks(play_task, ranks, P2P_LINK, task, slow=slow, timeout_s=limit_s, on_report=hear)
    return compare(task, answers, slow)


def _chosen(names: Sequence[str], against: Sequence[str]) -> set[str]:
    """Ours and what it is to be compared with: everything if nothing is said."""
    for name in against:
        if name not in names:
            raise UserError(
                field="--against",
                value=name,
                problem="is not a variant of this bench",
                hint=f"use {one_of(repr(each) for each in names if each != OURS)}",
            )
    return {OURS, *against} if against else set(names)


def play_task(rank: int, network: PacedNetwork, task: Task) -> RankAnswer:
    """One rank: all variants, in turn."""
    torch.manual_seed(0)
    models = {name: _model(task, variant, network) for name, variant in task.variants.items()}
    pipelines = _torch(task, network) if task.torch_variants else {}
    begun: dict[str, list[list[int]]] = {name: [] for name in models}
    played: dict[str, list[list[Played]]] = {name: [] for name in models}

    def after(name: str) -> None:
        if name in models:
            begun[name].append(models[name].journal.begun)
            played[name].append(models[name].journal.played)

    everything: dict[str, Playable] = {**models, **pipelines}
    return RankAnswer(
        steps=play_rounds(network, everything, dict.fromkeys(everything, task.rounds), after),
        begun=begun,
        played=played,
        traffic={name: model.traffic() for name, model in models.items()},
    )


def _model(task: Task, variant: Variant, network: PacedNetwork) -> PacedModel:
    groups = make_groups(
        variant.plan, dist.get_rank(), timeout_s=TIMEOUT_S, backend="paced", options_of=link_of
    )
    return PacedModel(variant.job, variant.plan, task.draws, network, groups, waits=variant.waits)


def _torch(task: Task, network: PacedNetwork) -> dict[str, PacedPipeline]:
    """Of every variant, this rank's stages."""
    plan = next(iter(task.variants.values())).plan
    rank = dist.get_rank()
    groups = make_groups(plan, rank, timeout_s=TIMEOUT_S, backend="paced", options_of=link_of)
    members = plan.ranks.group_of(LLM, Communicator.PP, rank)
    pipeline = dist.new_group(
        list(members), backend="paced", pg_options=P2P_LINK, use_local_synchronization=True
    )
    variants = {name: each.variant for name, each in task.torch_variants.items()}
    return make_pipelines(variants, task.draws, network, groups, pipeline)


# ---------------------------------------------------------------------------- results


def compare(task: Task, answers: list[RankAnswer], slow: float = 1.0) -> BenchResult:
    """Medians of the steps that count, beside what replays say."""
    replays = {name: _replayed(task, name, answers) for name in task.variants}
    predicted = {name: each.step_s for name, each in replays.items()}
    for name, each in task.torch_variants.items():
        predicted[name] = each.variant.replayed_s(task.draws, each.programs)
    steps = {
        name: [list(step) for step in zip(*(answer.steps[name] for answer in answers), strict=True)]
        for name in answers[0].steps
    }
    ours_s = median(counting(steps[OURS]))
    variants = {name: variant_time(found, predicted[name], ours_s) for name, found in steps.items()}
    never = [name for name, found in steps.items() if all(map(is_disturbed, found))]
    faults = _faults(task, replays, answers)
    problems = [*faults]
    if OURS in never:
        problems.append(NO_CALM_STEP)
    for name, found in variants.items():
        if name not in never and found.error is not None and abs(found.error) > ERROR:
            problems.append(f"{name} is {100 * found.error:+.1f} % off its replay, over {100 * ERROR:g} %")
    measured = {name: found.step_s for name, found in variants.items() if name not in never}
    problems += _gain_problem(measured, predicted)
    job = task.job
    layout = f"dp{job.dp} pp{job.pp} tp{TP}, the encoder whole on every rank"
    notes = [
        f"{job.ranks} ranks: {layout}; {job.microbatches} microbatches; encoder and LLM have equal work",
        *_ratios(measured, predicted),
        *([f"in slow motion, a second takes {slow:g}"] if slow > 1 else []),
        "torch's schedules divide the LLM by DTensor; their replicas send each other nothing",
        *([] if faults else [order_note(task.variants[OURS].plan, len(steps[OURS]))]),
        *disturbance_notes(steps, never),
        MEANING,
    ]
    bound, bound_s = bound_of(measured, predicted, job.bound_s)
    return BenchResult(
        bench="paced",
        variants=variants,
        ours=OURS,
        bound=bound,
        bound_s=bound_s,
        ours_over_bound=ours_s / bound_s,
        notes=tuple(notes),
        problems=tuple(problems),
    )


def bound_of(
    measured: Mapping[str, float], predicted: Mapping[str, float], evenly_s: float
) -> tuple[str, float]:
    """The LLM alone: as measured, else as replayed; else all work evenly. What it is, and its seconds."""
    if FLOOR in measured:
        return FLOOR, measured[FLOOR]
    return (f"{FLOOR}, replayed", predicted[FLOOR]) if FLOOR in predicted else (EVENLY, evenly_s)


def _replayed(task: Task, name: str, answers: list[RankAnswer]) -> PlanReplay:
    variant, traffic = task.variants[name], [answer.traffic[name] for answer in answers]
    play = replay_waiting if variant.waits else replay_model
    return play(variant.plan, task.draws, traffic)


def _ratios(measured: Mapping[str, float], predicted: Mapping[str, float]) -> list[str]:
    """What slots gain and how near the floor ours comes: measured and as replayed."""
    found = []
    for words, over, under in (
        ("slots make a step shorter by", DP_BUBBLES, TP_SLOTS),
        ("ours over the LLM alone:", OURS, FLOOR),
    ):
        if over in measured and under in measured:
            pair = (each[over] / each[under] for each in (measured, predicted))
            found.append("{} {:.4f} measured, {:.4f} replayed".format(words, *pair))
    return found


def _gain_problem(measured: Mapping[str, float], predicted: Mapping[str, float]) -> list[str]:
    if not {DP_BUBBLES, TP_SLOTS} <= set(measured):
        return []
    found, wanted = (each[DP_BUBBLES] / each[TP_SLOTS] for each in (measured, predicted))
    return [] if abs(found / wanted - 1) <= GAIN_ERROR else [f"slots gain {found:.4f}, not {wanted:.4f}"]


def _faults(task: Task, replays: Mapping[str, PlanReplay], answers: list[RankAnswer]) -> tuple[str, ...]:
    """Of every step of ours that fills: the order and the time of every op."""
    words: dict[str, None] = {}
    for name, variant in task.variants.items():
        if variant.waits:
            continue  # what waits is known to its end only
        for number in range(len(answers[0].begun[name])):
            mine = [answer.steps[name][number] for answer in answers]
            faults = compare_step(
                variant.plan,
                replays[name],
                [answer.begun[name][number] for answer in answers],
                [answer.played[name][number] for answer in answers],
                start_s=min(step.start_s for step in mine),
                given_up_s=sum(step.given_up_s for step in mine),
            )
            words.update(dict.fromkeys(f"{name}: {each}" for each in faults.words()))
    return tuple(words)
