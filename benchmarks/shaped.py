"""Two ranks on two cores and a link that is really slow, timed: bubbles filled and not.

All variants play one plan. Either there are two replicas of everything: encoders run while the LLM's
parameters are gathered and while its gradients are reduced, or every rank waits for both. Or the two ranks
divide the LLM's layers: encoders run between the launch of a collective and its wait, or after the wait. A
third variant sends nothing, which bounds the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.alternating import Timed, alternate, check_losses, total_loss, variant_times
from benchmarks.contests import CONTESTS, RANKS, Axis, Contest, Way
from benchmarks.real_ranks import TIMEOUT_S, put_communication_first, run_pinned_ranks
from benchmarks.result import BenchResult
from benchmarks.shaped_net import INTERFACE, enter_namespace, shaped_links
from optimus.engine.config import TrainingConfig
from optimus.engine.process_groups import make_groups
from optimus.engine.rank_trainer import RankTrainer
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.cluster import Link
from optimus.job.job import Job
from optimus.job.layout import LayoutChoice
from optimus.job.model import BF16_BYTES
from optimus.job.read import find_job
from optimus.models.tensor_parallel import TpGroup
from optimus.planner.planning import make_plan
from optimus.planner.replaying import replay_plan
from optimus.planner.systems.slots import without_slots
from optimus.profiler.links import measure_links
from optimus.profiler.machine import describe_machine
from optimus.profiler.segments import profile_job

JOB = "cpu/bench-vl"
SEED, WARM_UP, ROUNDS = 0, 2, 14
EXCHANGES = 30  # to know how long one takes
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is measured and decided before any rank starts."""

    contest: Contest
    job: Job
    plans: dict[str, Plan]
    predicted_s: dict[str, float]


# ---------------------------------------------------------------------------- on every rank


class _Variant:
    """One way to play the plan on this rank, with parameters of its own."""

    def __init__(self, job: Job, plan: Plan, way: Way, dtype: torch.dtype) -> None:
        rank, device = dist.get_rank(), torch.device("cpu")
        made = make_groups(plan, rank, timeout_s=TIMEOUT_S)
        groups = way.groups(rank=rank, members=made.members, groups=made.groups)
        self.one = RankTrainer(
            job, plan, TrainingConfig(seed=SEED), groups, dtype=dtype, device=device, bucket_type=way.buckets
        )
        self._batch = self.one.batch(0, self.one.table(0))

    def step(self) -> Tensor | None:
        return self.one.executor.step(self._batch)

    def seen(self) -> tuple[float, float]:
        """Loss and gradient norm of a step."""
        loss = total_loss(self.step())
        optimizer = self.one.optimizer
        assert optimizer is not None and optimizer.norm is not None
        return loss, float(optimizer.norm)


def time_ways(rank: int, prepared: Prepared, rounds: int, tell: Callable[[int], None]) -> Timed:
    """Every way once a round."""
    contest, job, plans = prepared.contest, prepared.job, prepared.plans
    variants = {name: _Variant(job, plans[name], way, contest.dtype) for name, way in contest.ways.items()}
    losses: dict[str, tuple[float, float]] = {}
    for _ in range(WARM_UP):
        losses = {name: variant.seen() for name, variant in variants.items()}
    put_communication_first()
    steps = {name: variant.step for name, variant in variants.items()}
    return alternate(steps, rounds, tell, losses)


def _enter(rank: int, namespaces: Sequence[str]) -> None:
    """Before gloo looks for an interface."""
    enter_namespace(namespaces[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


# ---------------------------------------------------------------------------- results


def bench_shaped(
    *,
    axis: Axis = "dp",
    rounds: int = ROUNDS,
    mbit_per_s: float | None = None,
    progress: Progress = lambda name, done, total: None,
) -> BenchResult:
    """Profiles, plans for the link, runs all ways over it, and compares."""
    contest = CONTESTS[axis]
    contest = contest if mbit_per_s is None else replace(contest, mbit_per_s=mbit_per_s)
    with shaped_links(RANKS, mbit_per_s=contest.mbit_per_s) as names:
        prepared = prepare(contest, names, progress)
        progress("starting ranks", 0, rounds)
        timed = run_pinned_ranks(
            time_ways,
            RANKS,
            prepared,
            rounds,
            hear=lambda done: progress("timing", done, rounds),
            before=partial(_enter, namespaces=names),
        )[0]
    equal = {name: found for name, found in timed.losses.items() if name != contest.silent}
    check_losses(equal, contest.ours)
    return compare(prepared, timed, rounds)


def prepare(contest: Contest, namespaces: Sequence[str], progress: Progress) -> Prepared:
    """A plan for two ranks over this link, with segments and link measured in the type that will run."""
    job, tp = _job(contest), contest.layout.tp or 1
    progress("profile", 0, 1)
    # At the same time, as they will run.
    profile, _ = run_pinned_ranks(partial(_profile, job, contest), RANKS)
    machine = describe_machine(measure_links(), ranks=RANKS)
    link = Link(
        bandwidth_bytes_per_s=contest.mbit_per_s * 1e6 / 8,
        latency_s=machine.within_node.latency_s,
        source=f"{contest.mbit_per_s:g} Mbit/s by tbf",
    )
    if tp > 1:  # small messages take longer than their bytes: measured
        shape = (job.workload.sequence_tokens, job.model.llm.stack.hidden)
        enter = partial(_enter, namespaces=namespaces)
        seconds = run_pinned_ranks(partial(_exchange_s, shape, contest.dtype), RANKS, before=enter)[0]
        moved = prod(shape) * BF16_BYTES / RANKS  # as plans count activations
        link = replace(link, bandwidth_bytes_per_s=moved / seconds, latency_s=0.0)
    cluster = replace(machine, gpus_per_node=tp, within_node=link, between_nodes=link)
    whole = LayoutChoice(pp=1, tp=1)  # encoders send nothing but gradients
    layout = replace(job.layout, modules={LLM: contest.layout, **dict.fromkeys(_encoders(job), whole)})
    job = replace(job, cluster=cluster, layout=layout)
    plan = make_plan(job, profile=replace(profile, name="of this machine"), systems=()).plan
    slotless = plan if tp == 1 else without_slots(plan).plan
    plans = {name: plan if way.slots else slotless for name, way in contest.ways.items()}
    return Prepared(contest=contest, job=job, plans=plans, predicted_s=predict(contest, plans))


def _job(contest: Contest) -> Job:
    """The images of every sequence in as many parts as ranks can take."""
    job = find_job(JOB)
    sequences = [
        replace(each, items=tuple((name, _cut(lengths, contest.images)) for name, lengths in each.items))
        for each in job.workload.sequences
    ]
    workload = replace(job.workload, sequences_per_step=contest.sequences, sequences=tuple(sequences))
    return replace(job, workload=workload)


def _cut(lengths: Sequence[int], parts: int) -> tuple[int, ...]:
    return tuple(length // parts for length in lengths for _ in range(parts))


def _exchange_s(shape: tuple[int, int], dtype: torch.dtype, rank: int, tell: Any) -> float:
    """Of rows of all ranks, half of them gathered and half of them summed: the median."""
    whole, tp_group, found = (
        torch.zeros(shape, dtype=dtype),
        TpGroup(rank=rank, size=RANKS, group=dist.group.WORLD),
        [],
    )
    part = whole[: shape[0] // RANKS].clone()
    dist.barrier()
    put_communication_first()
    for number in range(EXCHANGES):
        dist.barrier()
        begin = time.perf_counter()
        (tp_group.reduce_scatter(whole) if number % 2 else tp_group.all_gather(part)).wait()
        found.append(time.perf_counter() - begin)
    return median(found)


def _encoders(job: Job) -> list[str]:
    return [encoder.name for encoder in job.model.encoders]


def _profile(job: Job, contest: Contest, rank: int, tell: Any) -> Any:
    return profile_job(job, dtype=contest.dtype, tps=contest.widths)


def predict(contest: Contest, plans: dict[str, Plan]) -> dict[str, float]:
    """Replayed steps: as planned, not filled, and without traffic."""
    plan = plans[contest.ours]
    silent_s = replay_plan(_without_traffic(plan)).timeline.step_s
    if contest.layout.tp != 1:
        unfilled_s = plans[contest.unfilled].claims.step_s
        return {
            contest.ours: plan.claims.step_s,
            contest.unfilled: unfilled_s,
            contest.silent: silent_s,
        }
    exposed_s = max(
        sum(
            bucket.gather_s + bucket.reduce_s
            for name, module in plan.modules.items()
            for bucket in module.buckets[plan.ranks.stage_of(name, device)]
        )
        for device in range(plan.ranks.num_classes)
    )
    return {
        contest.ours: plan.claims.step_s,
        contest.unfilled: silent_s + exposed_s,
        contest.silent: silent_s,
    }


def _without_traffic(plan: Plan) -> Plan:
    """Gathers, reduces and the collectives of divided layers take no time."""
    templates = {
        name: tuple(
            replace(phase, duration_s=0.0) if phase.kind == OpKind.LAUNCH else phase for phase in phases
        )
        for name, phases in plan.templates.items()
    }
    modules = {
        name: replace(
            module,
            buckets=tuple(
                tuple(replace(bucket, gather_s=0.0, reduce_s=0.0) for bucket in stage)
                for stage in module.buckets
            ),
        )
        for name, module in plan.modules.items()
    }
    return replace(plan, modules=modules, templates=templates)


def compare(prepared: Prepared, timed: Timed, rounds: int) -> BenchResult:
    """Medians, predictions beside them, and the share of traffic that compute hides."""
    contest, planned = prepared.contest, prepared.predicted_s
    variants = {
        name: replace(found, predicted_s=planned[name])
        for name, found in variant_times(timed.seconds, contest.ours).items()
    }
    measured = {name: variant.step_s for name, variant in variants.items()}
    count, dtype = prepared.plans[contest.ours].microbatches, str(contest.dtype).removeprefix("torch.")
    link = f"{contest.mbit_per_s:g} Mbit/s both ways"
    hidden = f"{_hidden(contest, measured):.0%} are hidden, {_hidden(contest, planned):.0%} as planned"
    notes = (
        f"{contest.words}, one core each, {link}; {count} microbatches; {dtype}",
        f"of the {contest.traffic} traffic {hidden}",
        f"{rounds} rounds; {timed.words}",
    )
    return BenchResult(
        bench="shaped",
        variants=variants,
        ours=contest.ours,
        bound=contest.silent,
        bound_s=measured[contest.silent],
        ours_over_bound=measured[contest.ours] / measured[contest.silent],
        notes=notes,
    )


def _hidden(contest: Contest, seconds: dict[str, float]) -> float:
    """What filling saves, of all that traffic costs."""
    unfilled_s, silent_s = seconds[contest.unfilled], seconds[contest.silent]
    return (unfilled_s - seconds[contest.ours]) / (unfilled_s - silent_s)
