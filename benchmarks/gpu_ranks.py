"""Runs the sections of the GPU benchmark on ranks, so that the failure of one affects no other.

Ranks are processes, one on each GPU, or on a core where there are no GPUs. When one of them fails, hangs or
dies, all are ended, and new ones run the remaining sections.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import takewhile
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.ranks import (
    GROUP_TIMEOUT_S,
    Progress,
    Report,
    drop_report,
    host_barrier,
    pin_to_core,
    run_processes,
)
from optimus.environment import keep_gloo_on_loopback

PRELOADED = ["benchmarks.gpu_step", "benchmarks.gpu_overlap"]
TRACE_LINES = 30  # of a failure
NOT_MEASURED = "not measured on cpu"
TOO_LATE = "not started: the sections before it took too long"
SECTION_LIMIT_S = 120.0  # without a report of a section
TOTAL_LIMIT_S = 420.0  # after which no further section starts


@dataclass(frozen=True, kw_only=True)
class Worker:
    """This process among the ranks; `host_group` is a group for CPU tensors."""

    rank: int
    world: int
    device: torch.device
    host_group: dist.ProcessGroup
    report: Report  # of (done, total); only reports of rank 0 are shown

    @property
    def on_gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    def synchronize(self) -> None:
        """Waits for all work enqueued on the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Waits until the devices of all ranks are idle."""
        self.synchronize()
        host_barrier(self.host_group)

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in their order."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.host_group)
        return values


Section = Callable[[Worker], dict[str, Any]]  # returns figures that JSON can hold


# ---------------------------------------------------------------------------- in the parent process


@dataclass
class _Progress:
    """Figures that rank 0 reported, and the section that runs."""

    progress: Progress
    names: list[str]
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: str | None = None

    def on_report(self, message: tuple[str, Any]) -> None:
        kind, content = message
        if kind == "begin":
            self.running = content
            self.progress(content, self.names.index(content), len(self.names))
        elif kind == "figures":
            assert self.running is not None
            self.figures[self.running], self.running = content, None
        else:
            self.progress(f"{self.running} {content[0]}/{content[1]}", *content)


def run_sections(
    sections: Mapping[str, Section],
    world: int,
    *,
    on_gpu: bool,
    in_new_ranks: Collection[str] = (),
    section_limit_s: float = SECTION_LIMIT_S,
    total_limit_s: float = TOTAL_LIMIT_S,
    progress: Progress = lambda name, done, total: None,
) -> dict[str, dict[str, Any]]:
    """Returns rank 0's figures of every section, or `error` where it failed. Sections are pickled.

    Sections named in `in_new_ranks` start with new ranks.
    """
    begin, waiting = time.monotonic(), dict(sections)
    state = _Progress(progress, list(sections))
    while waiting:
        remaining_s = total_limit_s - (time.monotonic() - begin)
        if remaining_s <= 0:
            state.figures |= {name: {"error": TOO_LATE} for name in waiting}
            break
        first, *later = waiting
        names = [first, *takewhile(lambda name: name not in in_new_ranks, later)]
        batch = {name: waiting.pop(name) for name in names}
        failed = _run_ranks(batch, world, on_gpu, min(section_limit_s, remaining_s), remaining_s, state)
        unfinished = [name for name in batch if name not in state.figures]
        if failed is not None:
            culprit = state.running or unfinished[0]
            state.figures[culprit], state.running = failed, None
            unfinished.remove(culprit)
        waiting = {name: batch[name] for name in unfinished} | waiting
    return {name: state.figures[name] for name in sections}


def _run_ranks(
    sections: Mapping[str, Section],
    world: int,
    on_gpu: bool,
    limit_s: float,
    remaining_s: float,
    state: _Progress,
) -> dict[str, Any] | None:
    """Starts ranks for these sections; returns the failure if one came before the last section's figures."""
    rank_args = dict(sections), on_gpu, remaining_s
    context = _context(on_gpu)
    try:
        run_processes(context, _rank_main, world, *rank_args, timeout_s=limit_s, on_report=state.on_report)
    except (RuntimeError, TimeoutError) as error:
        return None if sections.keys() <= state.figures.keys() else failure(str(error))
    return None


def _context(on_gpu: bool) -> BaseContext:
    """Returns `spawn` where there is CUDA, which does not survive a fork, else a server that has torch."""
    if on_gpu:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def failure(text: str) -> dict[str, Any]:
    """Returns the last line of a traceback as `error`, and its last lines as `trace`."""
    lines = [line for line in text.splitlines() if line.strip()]
    figures: dict[str, Any] = {"error": lines[-1].strip() if lines else "failed without a word"}
    if len(lines) > 1:
        figures["trace"] = lines[-TRACE_LINES:]
    return figures


# ---------------------------------------------------------------------------- on every rank


def _rank_main(
    rank: int,
    world: int,
    store: str,
    report: Report,
    sections: dict[str, Section],
    on_gpu: bool,
    remaining_s: float,
) -> None:
    begin = time.monotonic()
    os.dup2(2, 1)  # NCCL may write to standard output, which belongs to the result
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        pin_to_core(rank)
    keep_gloo_on_loopback()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        device_id=device if on_gpu else None,
    )
    host_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    send = report if rank == 0 else drop_report

    def report_done(done: tuple[int, int]) -> None:
        send(("done", done))

    worker = Worker(rank=rank, world=world, device=device, host_group=host_group, report=report_done)
    for name, section in sections.items():
        is_late = worker.all_gather(time.monotonic() - begin > remaining_s)[0]  # as rank 0 says
        send(("begin", name))
        host_barrier(host_group)  # no rank fails in a section before the parent knows that it runs
        figures = {"error": TOO_LATE} if is_late else section(worker)
        worker.barrier()
        if on_gpu:
            torch.cuda.empty_cache()
        send(("figures", json.loads(json.dumps(figures, allow_nan=False))))
    host_barrier(host_group)
    dist.destroy_process_group()
