"""What plans assume of NCCL and of CUDA streams, and what our engine makes of it, on the GPUs of one node.

Without GPUs the same sections run on two cores over gloo: that shows that they run, and no more.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.alternating import unequal_losses
from benchmarks.gpu_job import cluster_name, cluster_of, divided_layout, prepare_step, step_job
from benchmarks.gpu_links import collectives
from benchmarks.gpu_order import FAIL, communicator_order
from benchmarks.gpu_overlap import reduce_scatter_under_compute
from benchmarks.gpu_ranks import Progress, Section, failure, run_sections
from benchmarks.gpu_slots import compute_slowdown, slot_entry_delay
from benchmarks.gpu_step import step, train
from benchmarks.ranks import Tell, run_processes
from benchmarks.result import EVENLY, VariantTime
from benchmarks.variants import OURS
from optimus import __version__
from optimus.environment import tuning
from optimus.errors import OptimusError, UserError
from optimus.job.job import Job

WORLDS = (8, 4, 2)  # ranks; as many as there are GPUs for
CPU_RANKS = 2
DESCRIBED_S = 60.0
TRAINED = {"train": f"{OURS} with AdamW", "train_tp": f"{OURS} with AdamW, divided"}
STREAMS: dict[str, Section] = {
    "communicator_order": communicator_order,
    "slot_entry_delay_s": slot_entry_delay,
    "compute_slowdown": compute_slowdown,
    "reduce_scatter_under_compute": reduce_scatter_under_compute,
}


@dataclass(frozen=True, kw_only=True)
class GpuResult:
    """Sections by name, each with what it found or its `error`; variants and bound are those of `step`."""

    environment: Mapping[str, Any]
    sections: Mapping[str, Mapping[str, Any]]
    variants: Mapping[str, VariantTime]
    bound_s: float | None
    ours_over_bound: float | None
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    bench: str = "gpu"
    bound: str = EVENLY
    ours: str = OURS

    @property
    def ok(self) -> bool:
        return not self.problems


def bench_gpu(
    *,
    rounds: int | None = None,
    layout: Sequence[str] = (),
    progress: Progress = lambda name, done, total: None,
) -> GpuResult:
    """Every section, whatever becomes of the others; `layout` states that of the job of `step`."""
    count = torch.cuda.device_count()
    world = _world(count)
    progress("environment", 0, 1)
    environment = _environment(count > 0, world)
    gpu = environment.get("gpu")
    memory_bytes = environment.get("memory_bytes")
    job = step_job(world, gpu, memory_bytes, layout)
    divided = step_job(world, gpu, memory_bytes, divided_layout(world))
    progress("plan", 0, 1)
    sections, unplanned = _sections(job, divided, world, gpu, rounds)
    apart = tuple(TRAINED) if count else ()  # torch names split groups by how many a rank has: make them once
    found = run_sections(sections, world, on_gpu=count > 0, apart=apart, progress=progress)
    every = {**found, **unplanned}
    return conclude(environment, {name: every[name] for name in (*STREAMS, "collectives", "step", *TRAINED)})


def _world(gpus: int) -> int:
    if gpus == 1:
        raise UserError(
            field="gpu",
            problem="needs two GPUs or more, and sees one",
            hint="run it on a node with more, or hide this one (CUDA_VISIBLE_DEVICES=) for a smoke test",
        )
    return next((world for world in WORLDS if world <= gpus), CPU_RANKS)


def _sections(
    job: Job, divided: Job, world: int, gpu: str | None, rounds: int | None
) -> tuple[dict[str, Section], dict[str, dict[str, Any]]]:
    """What ranks are to play, and what cannot be played because there is no plan."""
    links = partial(collectives, cluster=None if gpu is None else cluster_of(gpu, world))
    sections: dict[str, Section] = {**STREAMS, "collectives": links}
    unplanned: dict[str, dict[str, Any]] = {}
    on_gpu = gpu is not None
    try:
        prepared = prepare_step(job, on_gpu=on_gpu)
        sections["step"] = partial(step, prepared=prepared, rounds=rounds)
        sections["train"] = partial(train, prepared=prepared)
    except OptimusError as error:
        unplanned |= dict.fromkeys(("step", "train"), failure(str(error).splitlines()[0]))
    try:
        shared = prepare_step(divided, on_gpu=on_gpu, against_torch=False)
        sections["train_tp"] = partial(train, prepared=shared)
    except OptimusError as error:
        unplanned["train_tp"] = failure(str(error).splitlines()[0])
    return sections, unplanned


# ---------------------------------------------------------------------------- where


def _environment(on_gpu: bool, world: int) -> dict[str, Any]:
    """Versions, devices, and variables that matter; a GPU is looked at by a process that ends again."""
    found = {
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
            found |= run_processes(context, _describe_gpus, 1, world, timeout_s=DESCRIBED_S)[0]
        except (RuntimeError, TimeoutError) as error:
            found |= {"gpu": "unknown GPU", **failure(str(error))}
    return found


def _describe_gpus(rank: int, ranks: int, store: str, tell: Tell, world: int) -> dict[str, Any]:
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
    """As the kernel tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\d{3,}\.\d+(?:\.\d+)?", text)
    return found.group() if found else None


# ---------------------------------------------------------------------------- results


def conclude(environment: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> GpuResult:
    """Variants with their bound, what is wrong, and what to know beside the figures."""
    stepped = sections["step"]
    return GpuResult(
        environment=environment,
        sections=sections,
        variants=_variants(sections),
        bound_s=stepped.get("bound_s"),
        ours_over_bound=stepped.get("ours_over_bound"),
        notes=tuple(_notes(environment, stepped)),
        problems=tuple(_problems(environment, sections)),
    )


def _variants(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, VariantTime]:
    """With an optimizer it is what was planned; without, what torch's schedules do."""
    found = {name: VariantTime(**times) for name, times in sections["step"].get("variants", {}).items()}
    for section, name in TRAINED.items():
        trained = sections[section]
        if OURS in found and "step_s" in trained:
            step_s, planned_s = trained["step_s"], trained["planned_step_s"]
            found[name] = VariantTime(
                step_s=step_s,
                over_ours=step_s / found[OURS].step_s,
                predicted_s=planned_s,
                error=step_s / planned_s - 1,
            )
    return found


def _problems(environment: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Errors everywhere; rules of NCCL where there is NCCL."""
    found = [f"{name}: {section['error']}" for name, section in sections.items() if "error" in section]
    checks = sections["communicator_order"].get("checks", {})
    if environment["backend"] == "nccl":
        found += [f"not so: {check['rule']}" for check in checks.values() if check["verdict"] == FAIL]
    for section, name in TRAINED.items():
        found += _unequal(sections["step"], sections[section], name)
    return found + list(sections["step"].get("unequal", ()))


def _unequal(stepped: Mapping[str, Any], trained: Mapping[str, Any], name: str) -> list[str]:
    """What is computed otherwise with an optimizer, in the first step or the last."""
    if "losses" not in stepped or "loss" not in trained:
        return []
    ours = stepped["losses"][OURS]
    losses = {
        OURS: (ours["loss"], ours["squares"]),
        name: (trained["loss"], trained["squares"]),
        f"{name}, last step": (trained["last_loss"], trained["squares"]),
    }
    return unequal_losses(losses, OURS, tolerance=stepped["tolerance"])


def _notes(environment: Mapping[str, Any], stepped: Mapping[str, Any]) -> list[str]:
    found = []
    gpu = environment.get("gpu")
    if gpu is None:
        found.append(
            "no GPUs here: a smoke test on gloo and two cores; its figures mean nothing, only that it runs"
        )
    elif cluster_name(gpu) not in gpu.lower():
        found.append(f"the catalog does not know {gpu}: planned as if it were {cluster_name(gpu)}")
    if "rounds" in stepped:
        layouts = "; ".join(f"{name} {layout}" for name, layout in stepped["layouts"].items())
        found.append(f"{stepped['job']}: {layouts}; {stepped['microbatches']} microbatches")
        found.append(f"{stepped['rounds']} rounds; {stepped['quiet']}")
    return found
