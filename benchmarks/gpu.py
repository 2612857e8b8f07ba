"""Measures what plans assume of NCCL and CUDA streams, and steps of our engine, on the GPUs of one node.

Without GPUs the same sections run on two cores over gloo, as a smoke test.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_order import FAIL, communicator_order
from benchmarks.gpu_overlap import compute_slowdown, reduce_scatter_under_compute, slot_entry_delay
from benchmarks.gpu_ranks import Section, failure, run_sections
from benchmarks.gpu_step import cluster_name, cluster_of, prepare_step, step, step_job, tp_layout, train
from benchmarks.gpu_streams import collectives
from benchmarks.ranks import Progress, Report, run_processes
from benchmarks.report import BenchResult, Figures, VariantTime
from benchmarks.timing import unequal_losses
from benchmarks.variants import OURS
from optimus import __version__
from optimus.environment import tuning
from optimus.errors import OptimusError, UserError
from optimus.job.job import Job

WORLDS = (8, 4, 2)  # ranks: the most for which there are GPUs
CPU_RANKS = 2
DESCRIBE_TIMEOUT_S = 60.0
TRAINED = {"train": f"{OURS} with AdamW", "train_tp": f"{OURS} with AdamW, divided"}
STREAMS: dict[str, Section] = {
    "communicator_order": communicator_order,
    "slot_entry_delay_s": slot_entry_delay,
    "compute_slowdown": compute_slowdown,
    "reduce_scatter_under_compute": reduce_scatter_under_compute,
}


def bench_gpu(
    *,
    rounds: int | None = None,
    layout: Sequence[str] = (),
    progress: Progress = lambda name, done, total: None,
) -> BenchResult:
    """Runs every section, also if others fail; `layout` states layouts of the job of `step`."""
    count = torch.cuda.device_count()
    world = _world(count)
    progress("environment", 0, 1)
    environment = _environment(count > 0, world)
    gpu, memory_bytes = environment.get("gpu"), environment.get("memory_bytes")
    job = step_job(world, gpu, memory_bytes, layout)
    tp_job = step_job(world, gpu, memory_bytes, tp_layout(world))
    progress("plan", 0, 1)
    sections, failures = _sections(job, tp_job, world, gpu, rounds)
    # torch names a split group by the number of groups on a rank: a process makes those of one plan only.
    in_new_ranks = tuple(TRAINED) if count else ()
    figures = run_sections(sections, world, on_gpu=count > 0, in_new_ranks=in_new_ranks, progress=progress)
    figures |= failures
    names = (*STREAMS, "collectives", "step", *TRAINED)
    return conclude(environment, {name: figures[name] for name in names})


def _world(gpus: int) -> int:
    if gpus == 1:
        raise UserError(
            field="gpu",
            problem="needs two GPUs or more, and sees one",
            hint="run it on a node with more, or hide this one (CUDA_VISIBLE_DEVICES=) for a smoke test",
        )
    return next((world for world in WORLDS if world <= gpus), CPU_RANKS)


def _sections(
    job: Job, tp_job: Job, world: int, gpu: str | None, rounds: int | None
) -> tuple[dict[str, Section], dict[str, dict[str, Any]]]:
    """Returns the sections for ranks, and the failures of those without a plan."""
    cluster = None if gpu is None else cluster_of(gpu, world)
    sections: dict[str, Section] = {**STREAMS, "collectives": partial(collectives, cluster=cluster)}
    failures: dict[str, dict[str, Any]] = {}
    try:
        setup = prepare_step(job, on_gpu=gpu is not None)
        sections["step"] = partial(step, setup=setup, rounds=rounds)
        sections["train"] = partial(train, setup=setup)
    except OptimusError as error:
        failures |= dict.fromkeys(("step", "train"), failure(str(error).splitlines()[0]))
    try:
        setup = prepare_step(tp_job, on_gpu=gpu is not None, against_torch=False)
        sections["train_tp"] = partial(train, setup=setup)
    except OptimusError as error:
        failures["train_tp"] = failure(str(error).splitlines()[0])
    return sections, failures


# ---------------------------------------------------------------------------- environment


def _environment(on_gpu: bool, world: int) -> dict[str, Any]:
    """Returns versions, devices and tuning variables; a process of its own looks at the GPUs, and ends."""
    environment = {
        "optimus": __version__,
        "date": datetime.now(UTC).date().isoformat(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "backend": "nccl" if on_gpu else "gloo",
        "world": world,
        "cores": os.cpu_count(),
        "variables": tuning(),
    }
    if on_gpu:
        context = multiprocessing.get_context("spawn")
        try:
            environment |= run_processes(context, _describe_gpus, 1, world, timeout_s=DESCRIBE_TIMEOUT_S)[0]
        except (RuntimeError, TimeoutError) as error:
            environment |= {"gpu": "unknown GPU", **failure(str(error))}
    return environment


def _describe_gpus(rank: int, ranks: int, store: str, report: Report, world: int) -> dict[str, Any]:
    first = torch.cuda.get_device_properties(0)
    names = sorted({torch.cuda.get_device_name(number) for number in range(world)})
    pairs = [(a, b) for a in range(world) for b in range(world) if a != b]
    return {
        "gpu": " + ".join(names),
        "gpus": torch.cuda.device_count(),
        "memory_bytes": first.total_memory,
        "multiprocessors": first.multi_processor_count,
        "capability": f"{first.major}.{first.minor}",
        "peer_access": all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": _driver(),
    }


def _driver() -> str | None:
    """Returns the version that the kernel module states."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\d{3,}\.\d+(?:\.\d+)?", text)
    return match.group() if match else None


# ---------------------------------------------------------------------------- results


def conclude(environment: Figures, sections: Mapping[str, Figures]) -> BenchResult:
    """Returns the variants with their bound, problems and notes."""
    step_figures = sections["step"]
    return BenchResult(
        bench="gpu",
        ours=OURS,
        environment=environment,
        sections=sections,
        variants=_variants(sections),
        bound_s=step_figures.get("bound_s"),
        ours_over_bound=step_figures.get("ours_over_bound"),
        notes=tuple(_notes(environment, step_figures)),
        problems=tuple(_problems(environment, sections)),
    )


def _variants(sections: Mapping[str, Figures]) -> dict[str, VariantTime]:
    """Returns the times of `step`, where no variant has an optimizer, and of our plans with AdamW."""
    variants = {name: VariantTime(**times) for name, times in sections["step"].get("variants", {}).items()}
    for section, name in TRAINED.items():
        trained = sections[section]
        if OURS in variants and "step_s" in trained:
            step_s, planned_s = trained["step_s"], trained["planned_step_s"]
            variants[name] = VariantTime(
                step_s=step_s,
                over_ours=step_s / variants[OURS].step_s,
                predicted_s=planned_s,
                error=step_s / planned_s - 1,
            )
    return variants


def _problems(environment: Figures, sections: Mapping[str, Figures]) -> list[str]:
    """Returns errors of sections, broken rules of NCCL, and unequal losses."""
    problems = [f"{name}: {section['error']}" for name, section in sections.items() if "error" in section]
    checks = sections["communicator_order"].get("checks", {})
    if environment["backend"] == "nccl":
        problems += [f"not so: {check['rule']}" for check in checks.values() if check["verdict"] == FAIL]
    for section, name in TRAINED.items():
        problems += _unequal(sections["step"], sections[section], name)
    return problems + list(sections["step"].get("unequal", ()))


def _unequal(step_figures: Figures, trained: Figures, name: str) -> list[str]:
    """Describes losses and gradients that differ with an optimizer, in the first step or the last."""
    if "losses" not in step_figures or "loss" not in trained:
        return []
    ours = step_figures["losses"][OURS]
    losses = {
        OURS: (ours["loss"], ours["squares"]),
        name: (trained["loss"], trained["squares"]),
        f"{name}, last step": (trained["last_loss"], trained["squares"]),
    }
    return unequal_losses(losses, OURS, tolerance=step_figures["tolerance"])


def _notes(environment: Figures, step_figures: Figures) -> list[str]:
    notes = []
    gpu = environment.get("gpu")
    if gpu is None:
        notes.append(
            "no GPUs here: a smoke test on gloo and two cores; its figures mean nothing, only that it runs"
        )
    elif cluster_name(gpu) not in gpu.lower():
        notes.append(f"the catalog does not know {gpu}: planned as if it were {cluster_name(gpu)}")
    if "rounds" in step_figures:
        layouts = "; ".join(f"{name} {layout}" for name, layout in step_figures["layouts"].items())
        notes.append(f"{step_figures['job']}: {layouts}; {step_figures['microbatches']} microbatches")
        notes.append(f"{step_figures['rounds']} rounds; {step_figures['quiet']}")
    return notes
