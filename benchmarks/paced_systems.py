"""Runs the plans of all systems of one job on paced ranks, and torch's FSDP2 and schedules of the same kind.

The engine's own layers run, as in `paced_tp`, without tensor parallelism. Every step is compared with its
own replay, and the ranking of measured steps with that of replays. Torch runs the plan's stages or layers
with the seconds that the same draws give to the plan's lines. Its pipelines gather no parameters and
reduce no gradients: what ours take without them is in a note. `separate-gpus` makes no plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import distributed as dist

from benchmarks.paced import (
    MEANING,
    SEED,
    TIMEOUT_S,
    PacedComparison,
    PacedTask,
    RankResult,
    run_task,
    step_progress,
)
from benchmarks.paced_backend import PacedNetwork, run_paced_ranks
from benchmarks.paced_clock import MEANS, Draws
from benchmarks.paced_fsdp import FsdpReplay, PacedFsdp
from benchmarks.paced_plan import PlanReplay, drawn_s
from benchmarks.paced_steps import Steppable
from benchmarks.paced_torch import PacedPipeline, PacedTorchVariant, TorchPipeline, list_programs
from benchmarks.paced_tp import (
    MAX_RANKS_IN_TIME,
    choose_variants,
    find_plan_faults,
    make_models,
    replay_variant,
)
from benchmarks.paced_tp_job import ASSUMPTIONS, P2P_LINK, TOKENS, WIDTH, TpJob, profile_of, replicas_on
from benchmarks.paced_tp_model import DTYPE, RankTraffic, replay_model
from benchmarks.paced_tp_plans import PlanVariant
from benchmarks.ranks import Progress
from benchmarks.report import BenchResult
from optimus.ir.op import Communicator, OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.job.job import Job
from optimus.job.layout import PartialLayout
from optimus.planner.planning import build_plan, compare_for_plan
from optimus.planner.systems.registry import load_system

OURS, FSDP = "optimus", "fsdp"
SYSTEMS = (OURS, "paper", "three-phase", "balanced-best", "balanced", "stage0", FSDP)
PIPELINES = ("balanced-best", "balanced", "stage0")  # systems of one pipeline, as torch's schedules
# Torch's schedules of the same kind, by the plan's order of ops and whether a rank has several chunks. Torch
# has none of a searched order, `greedy`: the plain one runs its stages.
SCHEDULES: Mapping[tuple[str, bool], tuple[str, ...]] = {
    ("1f1b", False): ("1F1B",),
    ("greedy", False): ("1F1B",),
    ("greedy", True): ("Interleaved1F1B",),
    ("interleaved", True): ("Interleaved1F1B",),
    ("zero-bubble", False): ("InterleavedZeroBubble",),
    ("zero-bubble", True): ("InterleavedZeroBubble", "ZBVZeroBubble"),
}
KINDS: Mapping[str, tuple[OpKind, ...]] = {
    "F": (OpKind.FORWARD,),
    "B": (OpKind.BACKWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD),
    "I": (OpKind.INPUT_GRAD,),
    "W": (OpKind.WEIGHT_GRAD,),
}


def bench_paced_systems(
    *,
    ranks: int = 16,
    dp: int | None = None,
    rounds: int = 3,
    seed: int = SEED,
    against: Sequence[str] = (),
    progress: Progress = lambda name, done, total: None,
) -> BenchResult:
    """Plans from means, runs drawn durations, and compares with replays of the same draws."""
    job, draws = make_job(ranks, dp), Draws(seed=seed)
    wanted = choose_variants(SYSTEMS, against, OURS)
    plans = plan_systems(job, [name for name in SYSTEMS if name in wanted], progress)
    pipelines = {
        name: variant
        for system in PIPELINES
        if system in plans
        for name, variant in list_pipelines(system, plans[system].plan).items()
    }
    fsdp = {f"{FSDP}: torch FSDP2": plans[FSDP].plan} if FSDP in plans else {}
    counts = dict.fromkeys((*plans, *pipelines, *fsdp), rounds)
    time_scale = max(1.0, ranks / MAX_RANKS_IN_TIME)
    results = run_paced_ranks(
        run_task,
        ranks,
        P2P_LINK,
        PacedTask(
            plans=partial(make_models, plans, draws),
            pipelines=partial(make_torch_variants, plans[OURS].plan, pipelines, fsdp, draws),
            rounds=counts,
        ),
        time_scale=time_scale,
        timeout_s=time_scale * 4 * TIMEOUT_S,
        on_report=step_progress(progress, counts),
    )
    replays = {name: replay_variant(variant, draws, name, results) for name, variant in plans.items()}
    predicted_s = {name: replay.step_s for name, replay in replays.items()}
    predicted_s |= {name: variant.replayed_s(draws) for name, variant in pipelines.items()}
    predicted_s |= {name: FsdpReplay(plan, draws).step_s() for name, plan in fsdp.items()}
    comparison = PacedComparison(results, predicted_s, find_plan_faults(plans, replays, results), OURS)
    notes = [
        *([f"in slow motion, a second takes {time_scale:g}"] if time_scale > 1 else []),
        *_traffic_notes(plans, draws, replays, results),
    ]
    return _result(job, comparison, plans, notes)


def make_job(ranks: int, dp: int | None = None) -> TpJob:
    """Returns a job with a sequence per rank, as where GPUs outnumber sequences.

    Encoder and LLM have equal work. A layer's parameters have 26 times the bytes of its activations, as those
    of a layer of hidden size 8192 have at 4096 tokens.
    """
    fits = replicas_on(ranks, tp=1)
    dp = dp or next((count for count in fits if count > 1), fits[0])
    return TpJob(ranks=ranks, dp=dp, tp=1, mlp_over_hidden=16, microbatches_per_stage=1)


# ---------------------------------------------------------------------------- plans


def plan_systems(job: TpJob, names: Sequence[str], progress: Progress) -> dict[str, PlanVariant]:
    """Plans every system: at the layout of the LLM that the job states, or fully sharded over all ranks."""
    sharded = PartialLayout(dp=job.ranks, pp=1, cp=1, ep=1, tp=1)
    fully = replace(job.job, layout=replace(job.job.layout, modules={LLM: sharded}))
    plans: dict[str, PlanVariant] = {}
    for stated in (job.job, fully):
        mine = [name for name in names if (name == FSDP) == (stated is fully)]
        if mine:
            plans |= _plan(stated, mine, progress)
    return {name: plans[name] for name in names}


def _plan(job: Job, names: Sequence[str], progress: Progress) -> dict[str, PlanVariant]:
    assert all(load_system(name).makes_plan for name in names)
    comparison = compare_for_plan(
        job, names, assumptions=ASSUMPTIONS, profile=profile_of(job), systems=(), progress=progress
    )
    plans = {name: build_plan(comparison, name) for name in names}
    assert all(result.report.ok for result in plans.values()), "every plan keeps all rules"
    return {name: PlanVariant(job=job, plan=result.plan) for name, result in plans.items()}


# ---------------------------------------------------------------------------- torch


@dataclass(frozen=True, kw_only=True)
class PlannedPipeline(PacedTorchVariant):
    """A schedule of torch over the stages of a plan; an op takes what its lines in the plan take."""

    plan: Plan

    def drawn_s(self, draws: Draws, kind: str, stage: int, microbatch: int) -> float:
        """Returns the compute seconds of one op."""
        return op_s(self.plan, draws, kind, stage, microbatch)


def op_s(plan: Plan, draws: Draws, kind: str, virtual: int, microbatch: int) -> float:
    """Returns the seconds of one op of all modules in a virtual stage."""
    return sum(
        drawn_s(plan, draws, module=name, kind=op, virtual=virtual, microbatch=microbatch, place=place)
        for name, module in plan.modules.items()
        for op in KINDS[kind]
        if op in module.chunks[virtual].templates
        for place in range(len(plan.templates[module.chunks[virtual].templates[op]]))
    )


def list_pipelines(system: str, plan: Plan) -> dict[str, PlannedPipeline]:
    """Returns torch's schedules of the kind of a plan, over its stages."""
    layout = plan.modules[LLM].layout
    lacks = ", no DP traffic" if layout.dp > 1 else ""
    variants = {}
    for schedule in SCHEDULES[plan.order, layout.chunks > 1]:
        if schedule == "ZBVZeroBubble" and layout.chunks != 2:
            continue
        pipeline = TorchPipeline(
            schedule=schedule,
            num_microbatches=plan.microbatches,
            chunks=layout.chunks,
            rows=TOKENS,
            width=WIDTH,
            dtype=DTYPE,
        )
        stages = range(layout.pp * layout.chunks)
        variants[f"{system}: torch {schedule}{lacks}"] = PlannedPipeline(
            pipeline=pipeline,
            programs=list_programs(pipeline, layout.pp),
            link=P2P_LINK,
            layers=tuple(range(stage, stage + 1) for stage in stages),
            compute_s={kind: tuple(op_s(plan, MEANS, kind, stage, 0) for stage in stages) for kind in KINDS},
            plan=plan,
        )
    return variants


def make_torch_variants(
    plan: Plan,
    pipelines: Mapping[str, PlannedPipeline],
    fsdp: Mapping[str, Plan],
    draws: Draws,
    network: PacedNetwork,
) -> dict[str, Steppable]:
    """Returns this rank of torch's variants; `plan` has the groups of all pipelines."""
    group = dist.new_group(
        list(plan.ranks.group_of(LLM, Communicator.PP, dist.get_rank())),
        backend="paced",
        pg_options=P2P_LINK,
        use_local_synchronization=True,
    )
    variants: dict[str, Steppable] = {
        name: PacedPipeline(
            variant.pipeline, clock=network.clock, seconds=partial(variant.drawn_s, draws), group=group
        )
        for name, variant in pipelines.items()
    }
    return variants | {name: PacedFsdp(plan, draws, network) for name, plan in fsdp.items()}


# ---------------------------------------------------------------------------- results


def _traffic_notes(
    plans: Mapping[str, PlanVariant],
    draws: Draws,
    replays: Mapping[str, PlanReplay],
    results: Sequence[RankResult],
) -> list[str]:
    """Describes what pipelines take without parameters and gradients, as torch's do."""
    notes = []
    for name in PIPELINES:
        if name in plans and plans[name].plan.ranks.llm.dp > 1:
            silent = [_without_buckets(result.traffic[name]) for result in results]
            step_s = replay_model(plans[name].plan, draws, silent).step_s
            notes.append(
                f"{name} without DP traffic, as torch's schedules have none: {step_s:.3f} s instead of "
                f"{replays[name].step_s:.3f} s, by replay"
            )
    return notes


def _without_buckets(traffic: RankTraffic) -> RankTraffic:
    return replace(traffic, bucket_s=dict.fromkeys(traffic.bucket_s, (0.0, 0.0)))


def rank_by(seconds: Mapping[str, float], names: Sequence[str]) -> tuple[str, ...]:
    """Returns the systems with a step, the shortest first."""
    return tuple(sorted((name for name in names if name in seconds), key=seconds.__getitem__))


def _result(
    job: TpJob, comparison: PacedComparison, plans: Mapping[str, PlanVariant], notes: Sequence[str]
) -> BenchResult:
    measured = rank_by(comparison.measured_s, list(plans))
    replayed = rank_by(comparison.predicted_s, measured)
    layout = f"dp{job.dp} pp{job.pp}; {job.microbatches} microbatches"
    is_same = "replays rank them the same" if measured == replayed else "replays rank them otherwise"
    return BenchResult(
        bench="paced",
        variants=comparison.variants,
        ours=OURS,
        bound_s=job.bound_s,
        ours_over_bound=comparison.ours_s / job.bound_s,
        rankings={"measured": measured, "replayed": replayed},
        notes=(
            f"{job.ranks} ranks: {layout}; {FSDP} dp{job.ranks}; encoder and LLM have equal work",
            f"measured, the shortest first: {', '.join(measured)}; {is_same}",
            *notes,
            *comparison.notes(plans[OURS].plan),
            MEANING,
        ),
        problems=(
            *comparison.problems(),
            *([] if measured == replayed else [f"replays rank systems {', '.join(replayed)}"]),
        ),
    )
