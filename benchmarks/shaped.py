"""Times one plan with bubbles filled and not, with two ranks on two cores over a link that is really slow.

All variants run one plan. Over the link go either gathers and reduces of two replicas, with encoders running
under them or every rank waiting for both; or collectives of tensor-parallel layers, with encoders between
launch and wait or after the wait. A third variant sends nothing, which bounds the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from statistics import median
from typing import Literal

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.ranks import PINNED_TIMEOUT_S, Progress, Report, prioritize_gloo_threads, run_pinned_ranks
from benchmarks.report import BenchResult
from benchmarks.shaped_net import INTERFACE, enter_namespace, shaped_links
from benchmarks.timing import Timings, alternate, check_losses, total_loss, variant_times
from benchmarks.without_tp_slots import remove_tp_slots
from optimus.cost.measured_profile import Profile
from optimus.engine.config import TrainingConfig
from optimus.engine.process_groups import ProcessGroups, make_process_groups
from optimus.engine.rank_trainer import RankTrainer
from optimus.engine.sharded_bucket import ShardedBucket
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.cluster import Link
from optimus.job.job import Job
from optimus.job.layout import PartialLayout
from optimus.job.model import BF16_BYTES
from optimus.job.read import find_job
from optimus.models.collectives import TpGroup
from optimus.planner.plan_replay import replay_plan
from optimus.planner.planning import make_plan
from optimus.profiler.links import measure_links
from optimus.profiler.machine import describe_host_as_cluster
from optimus.profiler.segments import SingleProcessTpGroup, profile_job

JOB = "cpu/bench-vl"
RANKS = 2
SEED, WARM_UP_STEPS, ROUNDS = 0, 2, 14
TIMED_COLLECTIVES = 30
Axis = Literal["dp", "tp"]  # whose traffic goes over the slow link


# ---------------------------------------------------------------------------- variants


class BlockingBucket(ShardedBucket):
    """Sharded bucket without overlap: gathers block, and reduces start when all compute is over."""

    def gather(self) -> None:
        super().gather()
        super().wait_gathered()

    def reduce(self) -> None:
        """Starts nothing: `wait_reduced` does."""

    def wait_reduced(self) -> None:
        super().reduce()
        super().wait_reduced()


class LocalBucket(ShardedBucket):
    """Sharded bucket that sends nothing: every replica keeps its own parameters and gradients."""

    def gather(self) -> None:
        """Sends nothing."""

    def reduce(self) -> None:
        """Sends nothing."""


class LocalTpGroups(ProcessGroups):
    """Process groups whose tensor-parallel collectives send nothing; values are meaningless."""

    def tp_group(self, plan: Plan, module: str) -> TpGroup:
        group = super().tp_group(plan, module)
        return SingleProcessTpGroup(rank=group.rank, size=group.size)


@dataclass(frozen=True, kw_only=True)
class ShapedVariant:
    """One way to run the plan."""

    bucket: type[ShardedBucket] = ShardedBucket
    has_slots: bool = True
    groups: type[ProcessGroups] = ProcessGroups


@dataclass(frozen=True, kw_only=True)
class LinkComparison:
    """Variants to compare over the link: ours, the same unfilled, and one without traffic, in this order."""

    variants: dict[str, ShapedVariant]
    layout: PartialLayout  # of the LLM
    dtype: torch.dtype
    mbit_per_s: float
    sequences: int  # of a step
    images: int  # of a sequence, which share its image tokens
    ranks: str  # description of the two ranks
    traffic: str

    @property
    def ours(self) -> str:
        return next(iter(self.variants))

    @property
    def unfilled(self) -> str:
        return list(self.variants)[1]

    @property
    def no_traffic(self) -> str:
        return list(self.variants)[2]


COMPARISONS: dict[Axis, LinkComparison] = {
    "dp": LinkComparison(
        variants={
            "DP bubbles filled": ShapedVariant(),
            "DP bubbles not filled": ShapedVariant(bucket=BlockingBucket),
            "no DP traffic": ShapedVariant(bucket=LocalBucket),
        },
        layout=PartialLayout(dp=RANKS, pp=1, tp=1),
        dtype=torch.bfloat16,
        mbit_per_s=400.0,
        sequences=8,
        images=1,
        ranks="two replicas",
        traffic="data-parallel",
    ),
    "tp": LinkComparison(
        variants={
            "TP slots filled": ShapedVariant(),
            "TP slots not filled": ShapedVariant(has_slots=False),
            "no TP traffic": ShapedVariant(groups=LocalTpGroups),
        },
        layout=PartialLayout(dp=1, pp=1, tp=RANKS),
        dtype=torch.float32,  # faster than bf16 on CPUs, so that traffic weighs as it does on GPUs
        mbit_per_s=600.0,
        sequences=8,
        images=2,  # one for each rank, whose kernels then fit into slots
        ranks="one tensor-parallel group of two ranks",
        traffic="tensor-parallel",
    ),
}


# ---------------------------------------------------------------------------- on every rank


@dataclass(frozen=True, kw_only=True)
class ShapedSetup:
    """Decisions that precede the start of ranks."""

    comparison: LinkComparison
    job: Job
    plans: dict[str, Plan]
    predicted_s: dict[str, float]


class VariantRank:
    """One variant on this rank, with parameters of its own."""

    def __init__(self, setup: ShapedSetup, name: str) -> None:
        rank, plan, variant = dist.get_rank(), setup.plans[name], setup.comparison.variants[name]
        groups = make_process_groups(plan, rank, timeout_s=PINNED_TIMEOUT_S)
        self._trainer = RankTrainer(
            setup.job,
            plan,
            TrainingConfig(seed=SEED),
            variant.groups(rank=rank, members=groups.members, groups=groups.groups),
            dtype=setup.comparison.dtype,
            device=torch.device("cpu"),
            bucket_type=variant.bucket,
        )
        self.executor, self._batch = self._trainer.executor, self._trainer.batch(0)

    def step(self) -> Tensor | None:
        return self.executor.step(self._batch)

    def loss_and_norm(self) -> tuple[float, float]:
        """Runs a step and returns its loss and gradient norm."""
        loss = total_loss(self.step())
        optimizer = self._trainer.optimizer
        assert optimizer is not None and optimizer.grad_norm is not None
        return loss, float(optimizer.grad_norm)


def time_variants(rank: int, setup: ShapedSetup, rounds: int, report: Report) -> Timings:
    """Times every variant once a round, on every rank."""
    variants = {name: VariantRank(setup, name) for name in setup.comparison.variants}
    losses: dict[str, tuple[float, float]] = {}
    for _ in range(WARM_UP_STEPS):
        losses = {name: variant.loss_and_norm() for name, variant in variants.items()}
    prioritize_gloo_threads()
    steps = {name: variant.step for name, variant in variants.items()}
    return alternate(steps, rounds, report, losses)


def enter_link(rank: int, namespaces: Sequence[str]) -> None:
    """Puts this rank behind its shaped link, before gloo looks for an interface."""
    enter_namespace(namespaces[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


# ---------------------------------------------------------------------------- before any rank is timed


def bench_shaped(
    *,
    axis: Axis = "dp",
    rounds: int = ROUNDS,
    mbit_per_s: float | None = None,
    progress: Progress = lambda name, done, total: None,
) -> BenchResult:
    """Profiles, plans for the link, times all variants over it, and compares."""
    comparison = COMPARISONS[axis]
    if mbit_per_s is not None:
        comparison = replace(comparison, mbit_per_s=mbit_per_s)
    with shaped_links(RANKS, mbit_per_s=comparison.mbit_per_s) as namespaces:
        setup = prepare(comparison, namespaces, progress)
        progress("starting ranks", 0, rounds)
        timings = run_pinned_ranks(
            time_variants,
            RANKS,
            setup,
            rounds,
            on_report=lambda done: progress("timing", done, rounds),
            before=partial(enter_link, namespaces=namespaces),
        )[0]
    equal = {name: values for name, values in timings.losses.items() if name != comparison.no_traffic}
    check_losses(equal, comparison.ours)
    return compare(setup, timings, rounds)


def prepare(comparison: LinkComparison, namespaces: Sequence[str], progress: Progress) -> ShapedSetup:
    """Plans for two ranks over this link, with segments and link measured in the dtype of the variants."""
    job, tp = _job(comparison), comparison.layout.tp or 1
    progress("profile", 0, 1)
    # Both ranks profile at the same time, as they will run.
    profile, _ = run_pinned_ranks(partial(_profile, job, comparison), RANKS)
    machine = describe_host_as_cluster(measure_links(), ranks=RANKS)
    link = Link(
        bandwidth_bytes_per_s=comparison.mbit_per_s * 1e6 / 8,
        latency_s=machine.within_node.latency_s,
        source=f"{comparison.mbit_per_s:g} Mbit/s by tbf",
    )
    if tp > 1:  # small messages take longer than their bytes say: measured
        shape = (job.workload.sequence_tokens, job.model.llm.stack.hidden)
        before = partial(enter_link, namespaces=namespaces)
        measure = partial(_collective_s, shape, comparison.dtype)
        seconds = run_pinned_ranks(measure, RANKS, before=before)[0]
        moved_bytes = prod(shape) * BF16_BYTES / RANKS  # as plans count activations
        link = replace(link, bandwidth_bytes_per_s=moved_bytes / seconds, latency_s=0.0)
    cluster = replace(machine, gpus_per_node=tp, within_node=link, between_nodes=link)
    replicated = {encoder.name: PartialLayout(pp=1, tp=1) for encoder in job.model.encoders}
    layout = replace(job.layout, modules={LLM: comparison.layout, **replicated})
    job = replace(job, cluster=cluster, layout=layout)
    plan = make_plan(job, profile=replace(profile, name="of this machine"), systems=()).plan
    slotless = plan if tp == 1 else remove_tp_slots(plan).plan
    plans = {name: plan if each.has_slots else slotless for name, each in comparison.variants.items()}
    return ShapedSetup(comparison=comparison, job=job, plans=plans, predicted_s=predict(comparison, plans))


def _job(comparison: LinkComparison) -> Job:
    """Returns the job with every image cut into as many as the comparison has in a sequence."""
    job, images = find_job(JOB), comparison.images
    sequences = [
        replace(
            sequence,
            items=tuple(
                (name, tuple(length // images for length in lengths for _ in range(images)))
                for name, lengths in sequence.items
            ),
        )
        for sequence in job.workload.sequences
    ]
    workload = replace(job.workload, sequences_per_step=comparison.sequences, sequences=tuple(sequences))
    return replace(job, workload=workload)


def _profile(job: Job, comparison: LinkComparison, rank: int, report: Report) -> Profile:
    tps = tuple(sorted({1, comparison.layout.tp or 1}))
    return profile_job(job, dtype=comparison.dtype, tps=tps)


def _collective_s(shape: tuple[int, int], dtype: torch.dtype, rank: int, report: Report) -> float:
    """Returns the median seconds of an all-gather or reduce-scatter of the rows of all ranks."""
    rows = torch.zeros(shape, dtype=dtype)
    shard = rows[: shape[0] // RANKS].clone()
    group = TpGroup(rank=rank, size=RANKS, group=dist.group.WORLD)
    dist.barrier()
    prioritize_gloo_threads()
    seconds = []
    for number in range(TIMED_COLLECTIVES):
        dist.barrier()
        begin = time.perf_counter()
        (group.reduce_scatter(rows) if number % 2 else group.all_gather(shard)).wait()
        seconds.append(time.perf_counter() - begin)
    return median(seconds)


# ---------------------------------------------------------------------------- results


def predict(comparison: LinkComparison, plans: dict[str, Plan]) -> dict[str, float]:
    """Returns replayed steps of all variants."""
    plan = plans[comparison.ours]
    no_traffic_s = replay_plan(_without_traffic(plan)).timeline.step_s
    if comparison.layout.tp != 1:
        unfilled_s = plans[comparison.unfilled].claims.step_s
    else:
        unfilled_s = no_traffic_s + max(
            sum(
                bucket.gather_s + bucket.reduce_s
                for name, module in plan.modules.items()
                for bucket in module.buckets[plan.ranks.stage_of(name, device)]
            )
            for device in range(plan.ranks.num_classes)
        )
    return {
        comparison.ours: plan.claims.step_s,
        comparison.unfilled: unfilled_s,
        comparison.no_traffic: no_traffic_s,
    }


def _without_traffic(plan: Plan) -> Plan:
    """Returns the plan with gathers, reduces and tensor-parallel collectives that take no time."""
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


def compare(setup: ShapedSetup, timings: Timings, rounds: int) -> BenchResult:
    """Returns medians with their predictions, and the share of traffic that compute hides."""
    comparison, planned = setup.comparison, setup.predicted_s
    variants = {
        name: replace(time, predicted_s=planned[name])
        for name, time in variant_times(timings.seconds, comparison.ours).items()
    }
    measured = {name: variant.step_s for name, variant in variants.items()}
    count, dtype = setup.plans[comparison.ours].microbatches, str(comparison.dtype).removeprefix("torch.")
    link = f"{comparison.mbit_per_s:g} Mbit/s both ways"
    shares = _hidden_share(comparison, measured), _hidden_share(comparison, planned)
    notes = (
        f"{comparison.ranks}, one core each, {link}; {count} microbatches; {dtype}",
        f"of the {comparison.traffic} traffic {shares[0]:.0%} are hidden, {shares[1]:.0%} as planned",
        f"{rounds} rounds; {timings.describe()}",
    )
    return BenchResult(
        bench="shaped",
        variants=variants,
        ours=comparison.ours,
        bound=comparison.no_traffic,
        bound_s=measured[comparison.no_traffic],
        ours_over_bound=measured[comparison.ours] / measured[comparison.no_traffic],
        notes=notes,
    )


def _hidden_share(comparison: LinkComparison, seconds: dict[str, float]) -> float:
    """Returns the seconds that filling saves over the seconds that traffic costs."""
    unfilled_s, no_traffic_s = seconds[comparison.unfilled], seconds[comparison.no_traffic]
    return (unfilled_s - seconds[comparison.ours]) / (unfilled_s - no_traffic_s)
