"""What `bench gpu` decides before any rank starts: a job, our plan, and cuts for torch's schedules."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.real_job import layer_seconds, stage0_cut
from benchmarks.torch_stages import Cut, Prepared, Variant
from optimus.job import catalog
from optimus.job.cluster import Cluster
from optimus.job.job import Job
from optimus.job.read import find_job, load_cluster
from optimus.models.build import layer_count
from optimus.planner.planning import make_plan
from optimus.planner.systems.layer_partition import smallest_maximum_cut

GPU_JOB, CPU_JOB = "gpu/bench-vl", "cpu/tiny-vl"
CPU_SEQUENCES = 4  # of a smoke test
USUAL_GPU = "h100"  # what plans take an unknown one for
MEMORY_SHARE = 0.75  # for our plan: parameters of all variants lie beside each other
STAGE0_BYTES = 45e9  # of that share: with less, eight microbatches do not fit behind an encoder in stage 0

Cutter = Callable[[Sequence[float], int, int], Cut]  # seconds of layers, those of encoders, ranks
TORCH_VARIANTS: dict[str, tuple[str, Cutter]] = {
    "stage0 1F1B": ("1F1B", stage0_cut),
    "balanced 1F1B": ("1F1B", lambda weights, _, ranks: smallest_maximum_cut(weights, ranks)),
    "balanced Interleaved": (
        "Interleaved1F1B",
        lambda weights, _, ranks: smallest_maximum_cut(weights, 2 * ranks),
    ),
    "balanced ZBV": ("ZBVZeroBubble", lambda weights, _, ranks: smallest_maximum_cut(weights, 2 * ranks)),
}
ON_CPU = ("balanced 1F1B", "balanced ZBV")  # a smoke test


def step_job(world: int, gpu: str | None, memory_bytes: int | None, layouts: Sequence[str]) -> Job:
    """On GPUs a model of 1.5 B parameters, on a cluster that has their name; on CPUs a tiny one."""
    stated = list(layouts) or [f"llm=pp{world},tp1"]
    if gpu is None:
        return find_job(CPU_JOB, None, stated).replace(sequences_per_step=CPU_SEQUENCES)
    job = find_job(GPU_JOB, f"{cluster_name(gpu)}:{world}", stated)
    if memory_bytes is None:
        return job
    chip = replace(job.cluster.gpu, memory_bytes=MEMORY_SHARE * memory_bytes)
    return replace(job, cluster=replace(job.cluster, gpu=chip))


def divided_layout(world: int) -> tuple[str, ...]:
    """Tensor parallelism as wide as leaves two stages; over two ranks, without a pipeline."""
    return ("llm=pp1,tp2",) if world == 2 else (f"llm=pp2,tp{world // 2}",)


def cluster_name(gpu: str) -> str:
    """The catalog's cluster of these GPUs, or the usual one."""
    known = re.findall(r"\w+", gpu.lower())
    return next((alias for alias in catalog.aliases() if alias in known), USUAL_GPU)


def cluster_of(gpu: str, world: int) -> Cluster:
    """What plans assume of such a node."""
    return load_cluster(f"{cluster_name(gpu)}:{world}")


def prepare_step(job: Job, *, on_gpu: bool, against_torch: bool = True) -> Prepared:
    """Our plan, and cuts of the same layers for torch's schedules by the same cost model."""
    planned = make_plan(job, systems=())
    plan, context = planned.plan, planned.comparison.context
    weights = layer_seconds(context)
    encoder = sum(layer_count(module) for module in job.model.encoders)
    ranks = plan.ranks.world // plan.ranks.llm.dp
    large = job.cluster.gpu.memory_bytes >= STAGE0_BYTES
    names = [name for name in TORCH_VARIANTS if large or "stage0" not in name] if on_gpu else ON_CPU
    chosen = {name: TORCH_VARIANTS[name] for name in names if against_torch}
    variants = [
        Variant(name=name, schedule=schedule, cut=cut(weights, encoder, ranks))
        for name, (schedule, cut) in chosen.items()
    ]
    return Prepared(
        job=job,
        plan=plan,
        variants=tuple(variants),
        bound_s=sum(weights) * plan.microbatches / ranks,
        encoder_share=sum(weights[:encoder]) / sum(weights[encoder:]),
        how="; ".join(f"{name} {layout}" for name, layout in plan.ranks.layouts.items()),
    )
