"""Times a whole step of a multimodal job by our engine and by torch's own schedules over the same layers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_ranks import Worker
from benchmarks.gpu_streams import timer_of
from benchmarks.ranks import GROUP_TIMEOUT_S
from benchmarks.real import layer_seconds, stage0_cut
from benchmarks.timing import Timings, alternate, total_loss, unequal_losses, variant_times
from benchmarks.variants import (
    OURS,
    SEED,
    Cut,
    StepSetup,
    TorchBatch,
    TorchVariant,
    Variants,
    layers_in_order,
    stage_of_layers,
    summed_loss,
)
from optimus.engine.config import TrainingConfig
from optimus.engine.optimizer_config import OptimizerConfig
from optimus.engine.process_groups import make_process_groups
from optimus.engine.rank_trainer import RankTrainer
from optimus.job.catalog_files import list_cluster_aliases
from optimus.job.cluster import Cluster
from optimus.job.job import Job
from optimus.job.read import find_job, load_cluster
from optimus.models.build import count_layers
from optimus.planner.planning import make_plan
from optimus.planner.systems.pipeline_search import minimize_largest_stage

GPU_JOB, CPU_JOB = "gpu/bench-vl", "cpu/tiny-vl"
CPU_SEQUENCES = 4  # of a smoke test
DEFAULT_GPU = "h100"  # for plans, where the catalog does not know the GPU
MEMORY_SHARE = 0.75  # for our plan: parameters of all variants are resident together
MIN_STAGE0_BYTES = 45e9  # of that share: eight microbatches do not fit behind an encoder in stage 0 with less
WARM_UP_STEPS = 2
MIN_ROUNDS, MAX_ROUNDS, MAX_ROUNDS_S = 2, 14, 60.0
SINGLE_DEVICE_RUNS = 5  # of all layers on one device
TRAIN_STEPS = 6
TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-3}  # relative, of losses and gradients

Cutter = Callable[[Sequence[float], int, int], Cut]  # of seconds by layer, encoder layers, ranks
TORCH_VARIANTS: dict[str, tuple[str, Cutter]] = {
    "stage0 1F1B": ("1F1B", stage0_cut),
    "balanced 1F1B": ("1F1B", lambda weights, _, ranks: minimize_largest_stage(weights, ranks)),
    "balanced Interleaved": (
        "Interleaved1F1B",
        lambda weights, _, ranks: minimize_largest_stage(weights, 2 * ranks),
    ),
    "balanced ZBV": ("ZBVZeroBubble", lambda weights, _, ranks: minimize_largest_stage(weights, 2 * ranks)),
}
CPU_VARIANTS = ("balanced 1F1B", "balanced ZBV")  # of a smoke test


def step_job(world: int, gpu: str | None, memory_bytes: int | None, layouts: Sequence[str]) -> Job:
    """Returns a job of 1.5 B parameters on a cluster of these GPUs, or a tiny one on CPUs."""
    stated = list(layouts) or [f"llm=pp{world},tp1"]
    if gpu is None:
        return find_job(CPU_JOB, None, stated).replace(sequences_per_step=CPU_SEQUENCES)
    job = find_job(GPU_JOB, f"{cluster_name(gpu)}:{world}", stated)
    if memory_bytes is None:
        return job
    chip = replace(job.cluster.gpu, memory_bytes=MEMORY_SHARE * memory_bytes)
    return replace(job, cluster=replace(job.cluster, gpu=chip))


def tp_layout(world: int) -> tuple[str, ...]:
    """Returns the widest tensor parallelism with two stages; on two ranks, without a pipeline."""
    return ("llm=pp1,tp2",) if world == 2 else (f"llm=pp2,tp{world // 2}",)


def cluster_name(gpu: str) -> str:
    """Returns the catalog's name of a cluster of these GPUs, or the default."""
    words = re.findall(r"\w+", gpu.lower())
    return next((alias for alias in list_cluster_aliases() if alias in words), DEFAULT_GPU)


def cluster_of(gpu: str, world: int) -> Cluster:
    """Returns the cluster that plans assume for a node of these GPUs."""
    return load_cluster(f"{cluster_name(gpu)}:{world}")


def prepare_step(job: Job, *, on_gpu: bool, against_torch: bool = True) -> StepSetup:
    """Plans, and cuts the same layers for torch's schedules by the same cost model."""
    planned = make_plan(job, systems=())
    plan, context = planned.plan, planned.comparison.context
    weights = layer_seconds(context)
    encoder_layers = sum(count_layers(module) for module in job.model.encoders)
    ranks = plan.ranks.world // plan.ranks.llm.dp
    fits_stage0 = job.cluster.gpu.memory_bytes >= MIN_STAGE0_BYTES
    names = (
        [name for name in TORCH_VARIANTS if fits_stage0 or "stage0" not in name] if on_gpu else CPU_VARIANTS
    )
    chosen = {name: TORCH_VARIANTS[name] for name in names if against_torch}
    variants = [
        TorchVariant(name=name, schedule=schedule, cut=cut(weights, encoder_layers, ranks))
        for name, (schedule, cut) in chosen.items()
    ]
    return StepSetup(
        job=job,
        plan=plan,
        variants=tuple(variants),
        bound_s=sum(weights) * plan.microbatches / ranks,
        encoder_share=sum(weights[:encoder_layers]) / sum(weights[encoder_layers:]),
        how="; ".join(f"{name} {layout}" for name, layout in plan.ranks.layouts.items()),
    )


# ---------------------------------------------------------------------------- on every rank


def step(worker: Worker, setup: StepSetup, rounds: int | None) -> dict[str, Any]:
    """Times forward and backward of one batch, every variant once a round.

    The bound is the work of one replica on as many devices: all layers of a microbatch, timed on one device
    without other work, times microbatches, over the ranks of the replica.
    """
    plan, dtype = setup.plan, _dtype(worker)
    bound_s = _single_device_s(worker, setup) * plan.microbatches * plan.ranks.llm.dp / plan.ranks.world
    timings = _time_variants(worker, setup, rounds)
    times = variant_times(timings.seconds, OURS)
    return {
        "variants": {name: time.stated() for name, time in times.items()},
        "bound_s": bound_s,
        "ours_over_bound": times[OURS].step_s / bound_s,
        "planned_bound_s": setup.bound_s,
        "losses": {name: {"loss": loss, "squares": sums} for name, (loss, sums) in timings.losses.items()},
        "unequal": unequal_losses(timings.losses, OURS, tolerance=TOLERANCE[dtype]),
        "tolerance": TOLERANCE[dtype],
        "job": setup.job.name,
        "layouts": {name: str(layout) for name, layout in plan.ranks.layouts.items()},
        "microbatches": plan.microbatches,
        "encoder_share": setup.encoder_share,
        "rounds": len(timings.seconds[OURS]),
        "quiet": timings.describe(),
    }


def _time_variants(worker: Worker, setup: StepSetup, rounds: int | None) -> Timings:
    """Runs `rounds` rounds, or as many as fit."""
    built: list[str] = []

    def report_built(name: str) -> None:
        built.append(name)
        worker.report((len(built), len(setup.variants) + 1))

    variants = Variants(setup, device=worker.device, dtype=_dtype(worker), on_built=report_built)
    losses: dict[str, tuple[float, float]] = {}
    round_s = 0.0
    for _ in range(WARM_UP_STEPS if worker.on_gpu else 1):
        begin = time.perf_counter()
        losses = {
            name: (total_loss(run(), worker.device), variants.grad_squares(name))
            for name, run in variants.steps.items()
        }
        round_s = worker.all_gather(time.perf_counter() - begin)[0]
    fitting = min(MAX_ROUNDS, int(MAX_ROUNDS_S / round_s)) if worker.on_gpu else 0
    count = rounds or max(MIN_ROUNDS, fitting)
    return alternate(
        variants.steps,
        count,
        lambda done: worker.report((done, count)),
        losses,
        host_group=worker.host_group,
        synchronize=worker.synchronize,
        attempts=1,  # other processes on the CPU do not disturb GPUs
    )


def _dtype(worker: Worker) -> torch.dtype:
    return torch.bfloat16 if worker.on_gpu else torch.float32


def _single_device_s(worker: Worker, setup: StepSetup) -> float:
    """Times forward and backward of one microbatch through all layers on one device, with plain autograd."""
    timer, dtype = timer_of(worker), _dtype(worker)
    batch = TorchBatch(setup.job, setup.plan, device=worker.device, dtype=dtype)
    model = stage_of_layers(
        layers_in_order(setup.job.model), batch.contexts(), dtype=dtype, device="meta"
    ).to_empty(device=worker.device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    pixels, ids, labels = (tensor[: len(tensor) // len(batch.samples)] for tensor in batch.tensors())
    seconds = []
    for _ in range(SINGLE_DEVICE_RUNS):
        model.zero_grad(set_to_none=True)
        worker.barrier()
        begin = timer.record()
        summed_loss(model(pixels, ids=ids), labels).backward()
        end = timer.record()
        worker.synchronize()
        seconds.append(timer.elapsed_s(begin, end))
    return float(median(worker.all_gather(median(seconds))))


def train(worker: Worker, setup: StepSetup) -> dict[str, Any]:
    """Times a plan as `optimus train` runs it: sharded, float32 masters, norm and AdamW.

    At a learning rate of 0 every step has the loss and the gradients of the first.
    """
    trainer = _trainer(worker, setup)
    batch, seconds, losses = trainer.batch(0), [], []
    steps = TRAIN_STEPS if worker.on_gpu else 2
    for number in range(steps):
        worker.barrier()
        begin = time.perf_counter()
        loss = trainer.executor.step(batch)
        worker.barrier()
        seconds.append(time.perf_counter() - begin)
        losses.append(total_loss(loss, worker.device))
        worker.report((number + 1, steps))
    assert trainer.optimizer is not None and trainer.optimizer.grad_norm is not None
    return {
        "step_s": median(seconds[1:]),
        "planned_step_s": setup.plan.claims.step_s,
        "loss": losses[0],
        "last_loss": losses[-1],
        "squares": float(trainer.optimizer.grad_norm) ** 2,
        "layouts": {name: str(layout) for name, layout in setup.plan.ranks.layouts.items()},
        **_memory(worker, setup),
    }


def _trainer(worker: Worker, setup: StepSetup) -> RankTrainer:
    return RankTrainer(
        setup.job,
        setup.plan,
        TrainingConfig(optimizer=OptimizerConfig(lr=0.0, weight_decay=0.0, clip=0.0), seed=SEED),
        make_process_groups(setup.plan, worker.rank, timeout_s=GROUP_TIMEOUT_S),
        dtype=_dtype(worker),
        device=worker.device,
    )


def _memory(worker: Worker, setup: StepSetup) -> dict[str, Any]:
    """Returns the largest peak of any rank's allocator, and the plan's."""
    if not worker.on_gpu:
        return {}
    most = max(worker.all_gather(torch.cuda.max_memory_allocated(worker.device)))
    planned = max(held.peak for held in setup.plan.memory)
    return {"peak_memory_bytes": most, "planned_peak_memory_bytes": planned}
