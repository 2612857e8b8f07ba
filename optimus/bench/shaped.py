"""Two ranks on two cores and a link that is really slow, timed: data-parallel bubbles filled and not.

Both variants play one plan, two replicas of everything: encoders run while the LLM's parameters are gathered
and while its gradients are reduced, or every rank waits for both. A third sends nothing, which bounds them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.bench.alternating import Timed, alternate, check_losses, total_loss, variant_times
from optimus.bench.real_ranks import TIMEOUT_S, run_pinned_ranks
from optimus.bench.result import BenchResult
from optimus.bench.shaped_net import INTERFACE, enter_namespace, shaped_links
from optimus.engine.batch_table import make_table
from optimus.engine.batches import SampleBatch
from optimus.engine.buckets import Buckets
from optimus.engine.executor import Executor
from optimus.engine.groups import make_groups
from optimus.engine.optimizer import Optimizer
from optimus.engine.rank_model import build_rank
from optimus.engine.sharding import Sharded
from optimus.engine.synthetic import Synthetic
from optimus.job.cluster import Link
from optimus.job.job import Job
from optimus.job.layout import LayoutChoice
from optimus.job.read import find_job
from optimus.profiler.links import measure_links
from optimus.profiler.machine import describe_machine
from optimus.profiler.segments import profile_job
from optimus.program.plan import Plan
from optimus.program.ranks import LLM
from optimus.search.planning import make_plan
from optimus.search.replaying import replay_plan

JOB, RANKS = "cpu/bench-vl", 2
OURS, UNFILLED, SILENT = "DP bubbles filled", "DP bubbles not filled", "no DP traffic"
SEED, WARM_UP, ROUNDS, MBIT_PER_S = 0, 2, 14, 400.0
DTYPE = torch.bfloat16
Progress = Callable[[str, int, int], None]


class Waiting(Sharded):
    """Nobody computes while parameters are gathered; gradients are reduced when all compute is over."""

    def gather(self) -> None:
        super().gather()
        super().wait_gathered()

    def reduce(self) -> None:
        """When it is waited for."""

    def wait_reduced(self) -> None:
        super().reduce()
        super().wait_reduced()


class Silent(Sharded):
    """Replicas that do not know of each other."""

    def gather(self) -> None:
        """Every replica goes on with what it has."""

    def reduce(self) -> None:
        """Every replica learns from its own part of the batch."""


WAYS: dict[str, type[Sharded]] = {OURS: Sharded, UNFILLED: Waiting, SILENT: Silent}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is measured and decided before any rank starts."""

    job: Job
    plan: Plan
    predicted_s: dict[str, float]


# ---------------------------------------------------------------------------- on every rank


class _Variant:
    """One way to play the plan on this rank, with parameters of its own."""

    def __init__(self, job: Job, plan: Plan, way: type[Sharded]) -> None:
        rank, data = dist.get_rank(), Synthetic(job=job, seed=SEED)
        count = job.workload.sequences_per_step
        llm_tokens = count // plan.ranks.llm.dp // plan.microbatches * job.workload.sequence_tokens
        groups = make_groups(plan, rank, timeout_s=TIMEOUT_S)
        model = build_rank(job.model, plan, groups, llm_tokens=llm_tokens, dtype=DTYPE, seed=SEED)
        buckets: Buckets[Sharded] = Buckets(plan, groups, model.chunks, way, model.tied, model.partial)
        self.optimizer = Optimizer(buckets, learning_rate=1e-4, weight_decay=0.01, clip=1.0)
        self._executor = Executor(
            plan,
            groups,
            model.chunks,
            model.shapes,
            device=torch.device("cpu"),
            tied=model.tied,
            buckets=buckets,
            optimizer=self.optimizer,
        )
        own = count // plan.ranks.llm.dp
        first = plan.ranks.place(LLM, rank).dp * own
        self._batch = SampleBatch(
            job.model,
            plan,
            rank,
            make_table(plan, [data.sizes(number) for number in range(first, first + own)]),
            data.sample,
            scale=1.0 / sum(data.labels(number) for number in range(count)),
            seed=SEED,
            step=0,
            dtype=DTYPE,
        )

    def step(self) -> Tensor | None:
        return self._executor.step(self._batch)

    def seen(self) -> tuple[float, float]:
        """Loss and gradient norm of a step."""
        loss = total_loss(self.step())
        assert self.optimizer.norm is not None
        return loss, float(self.optimizer.norm)


def time_ways(rank: int, prepared: Prepared, rounds: int, tell: Callable[[int], None]) -> Timed:
    """Every way once a round."""
    variants = {name: _Variant(prepared.job, prepared.plan, way) for name, way in WAYS.items()}
    losses: dict[str, tuple[float, float]] = {}
    for _ in range(WARM_UP):
        losses = {name: variant.seen() for name, variant in variants.items()}
    steps = {name: variant.step for name, variant in variants.items()}
    return alternate(steps, rounds, tell, losses)


def _enter(rank: int, namespaces: Sequence[str]) -> None:
    """Before gloo looks for an interface."""
    enter_namespace(namespaces[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


# ---------------------------------------------------------------------------- results


def bench_shaped(
    *,
    rounds: int = ROUNDS,
    mbit_per_s: float = MBIT_PER_S,
    progress: Progress = lambda name, done, total: None,
) -> BenchResult:
    """Profiles, plans for the link, runs all ways over it, and compares."""
    prepared = prepare(mbit_per_s, progress)
    with shaped_links(RANKS, mbit_per_s=mbit_per_s) as names:
        progress("starting ranks", 0, rounds)
        timed = run_pinned_ranks(
            time_ways,
            RANKS,
            prepared,
            rounds,
            hear=lambda done: progress("timing", done, rounds),
            before=partial(_enter, namespaces=names),
        )[0]
    equal = {name: found for name, found in timed.losses.items() if name != SILENT}
    check_losses(equal, OURS)
    return compare(prepared, timed, rounds, mbit_per_s)


def prepare(mbit_per_s: float, progress: Progress) -> Prepared:
    """A plan for two replicas over this link, with segments measured in the type that will run."""
    job = find_job(JOB)
    progress("profile", 0, 1)
    profile, _ = run_pinned_ranks(partial(_profile, job), RANKS)  # at the same time, as they will run
    machine = describe_machine(measure_links(), ranks=RANKS)
    link = Link(
        bandwidth_bytes_per_s=mbit_per_s * 1e6 / 8,
        latency_s=machine.within_node.latency_s,
        source=f"{mbit_per_s:g} Mbit/s by tbf",
    )
    cluster = replace(machine, gpus_per_node=1, within_node=link, between_nodes=link)
    layout = replace(job.layout, modules={LLM: LayoutChoice(dp=RANKS, pp=1, tp=1)})
    job = replace(job, cluster=cluster, layout=layout)
    plan = make_plan(job, profile=replace(profile, name="of this machine"), systems=()).plan
    return Prepared(job=job, plan=plan, predicted_s=predict(plan))


def _profile(job: Job, rank: int, tell: Any) -> Any:
    return profile_job(job, dtype=DTYPE)


def predict(plan: Plan) -> dict[str, float]:
    """Replayed steps: as planned, with all traffic before and after compute, and without any."""
    silent_s = replay_plan(_without_traffic(plan)).timeline.step_s
    exposed_s = max(
        sum(
            bucket.gather_s + bucket.reduce_s
            for name, module in plan.modules.items()
            for bucket in module.buckets[plan.ranks.stage_of(name, device)]
        )
        for device in range(plan.ranks.num_classes)
    )
    return {OURS: plan.claims.step_s, UNFILLED: silent_s + exposed_s, SILENT: silent_s}


def _without_traffic(plan: Plan) -> Plan:
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
    return replace(plan, modules=modules)


def compare(prepared: Prepared, timed: Timed, rounds: int, mbit_per_s: float) -> BenchResult:
    """Medians, predictions beside them, and the share of traffic that compute hides."""
    variants = {
        name: replace(found, predicted_s=prepared.predicted_s[name])
        for name, found in variant_times(timed.seconds, OURS).items()
    }
    measured = {name: variant.step_s for name, variant in variants.items()}
    count, planned = prepared.plan.microbatches, prepared.predicted_s
    notes = (
        f"two replicas, one core each, {mbit_per_s:g} Mbit/s both ways; {count} microbatches; bf16",
        f"of the data-parallel traffic {_hidden(measured):.0%} are hidden, {_hidden(planned):.0%} as planned",
        f"{rounds} rounds; {timed.words}",
    )
    return BenchResult(
        bench="shaped",
        variants=variants,
        ours=OURS,
        bound_s=measured[SILENT],
        ours_over_bound=measured[OURS] / measured[SILENT],
        notes=notes,
    )


def _hidden(seconds: dict[str, float]) -> float:
    """What filling saves, of all that traffic costs."""
    return (seconds[UNFILLED] - seconds[OURS]) / (seconds[UNFILLED] - seconds[SILENT])
