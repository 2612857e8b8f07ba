"""Ranks that play the sections of a bench one after another; a section that fails takes no other with it.

Ranks are processes, one on each GPU, or on a core where there are no GPUs. When one of them fails, hangs or
dies, all are ended, and new ones play the sections that are left.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.communicators import TIMEOUT_S, meet
from benchmarks.ranks import Tell, run_processes
from optimus.environment import keep_gloo_on_loopback

PRELOADED = ["benchmarks.gpu_step", "benchmarks.gpu_slots"]
TRACE_LINES = 30  # of a failure
Progress = Callable[[str, int, int], None]
NOT_MEASURED = "not measured on cpu"
TOO_LATE = "not begun: what came before it took too long"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a section may say nothing, and after how long no further one begins."""

    section_s: float = 120.0
    total_s: float = 420.0


LIMITS = Limits()


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process among the ranks; `host` is a group for tensors of the CPU."""

    rank: int
    world: int
    device: torch.device
    host: dist.ProcessGroup
    tell: Tell  # (done, of how many): only rank 0 is heard

    @property
    def on_gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    def idle(self) -> None:
        """Returns when the device has done what it was given."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def settle(self) -> None:
        """Nobody goes on before the devices of all are idle."""
        self.idle()
        meet(self.host)

    def gathered(self, mine: Any) -> list[Any]:
        """What every rank has to say, in their order."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine, group=self.host)
        return found


Section = Callable[[Place], dict[str, Any]]


# ---------------------------------------------------------------------------- in the process that asks


@dataclass
class _Heard:
    """What rank 0 told: the section that runs, and what was found."""

    progress: Progress
    names: list[str]
    found: dict[str, dict[str, Any]]
    running: str | None = None

    def hear(self, told: tuple[str, Any]) -> None:
        word, what = told
        if word == "begin":
            self.running = what
            self.progress(what, self.names.index(what), len(self.names))
        elif word == "found":
            assert self.running is not None
            self.found[self.running], self.running = what, None
        else:
            self.progress(f"{self.running} {what[0]}/{what[1]}", *what)


def run_sections(
    sections: Mapping[str, Section],
    world: int,
    *,
    on_gpu: bool,
    apart: Collection[str] = (),
    limits: Limits = LIMITS,
    progress: Progress = lambda name, done, total: None,
) -> dict[str, dict[str, Any]]:
    """What every section found, on rank 0; `error` instead, if it failed. Sections are pickled.

    New ranks begin with those that are to stand `apart` from what ran before.
    """
    begin, left = time.monotonic(), dict(sections)
    heard = _Heard(progress, list(sections), {})
    while left:
        remaining_s = limits.total_s - (time.monotonic() - begin)
        if remaining_s <= 0:
            heard.found |= {name: {"error": TOO_LATE} for name in left}
            break
        first, *others = left
        together = [first, *takewhile(lambda name: name not in apart, others)]
        playing = {name: left.pop(name) for name in together}
        failed = _play(playing, world, on_gpu, min(limits.section_s, remaining_s), remaining_s, heard)
        again = [name for name in playing if name not in heard.found]
        if failed is not None:
            blamed = heard.running or again[0]
            heard.found[blamed], heard.running = failed, None
            again.remove(blamed)
        left = {name: playing[name] for name in again} | left
    return {name: heard.found[name] for name in sections}


def _play(
    sections: Mapping[str, Section],
    world: int,
    on_gpu: bool,
    limit_s: float,
    remaining_s: float,
    heard: _Heard,
) -> dict[str, Any] | None:
    """Starts ranks for these sections; how they failed, if before the last one was over."""
    given = dict(sections), on_gpu, remaining_s
    try:
        run_processes(_context(on_gpu), _rank_main, world, *given, timeout_s=limit_s, hear=heard.hear)
    except (RuntimeError, TimeoutError) as error:
        return None if sections.keys() <= heard.found.keys() else failure(str(error))
    return None


def _context(on_gpu: bool) -> BaseContext:
    """Where there is CUDA, which survives no fork, anew; else from a process that has imported torch."""
    if on_gpu:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def failure(text: str) -> dict[str, Any]:
    """A traceback as a result: its last line, which says what happened, and where."""
    lines = [line for line in text.splitlines() if line.strip()]
    found: dict[str, Any] = {"error": lines[-1].strip() if lines else "failed without a word"}
    if len(lines) > 1:
        found["trace"] = lines[-TRACE_LINES:]
    return found


# ---------------------------------------------------------------------------- in the ranks


def _rank_main(
    rank: int,
    world: int,
    store: str,
    tell: Tell,
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
        _take_core(rank)
    keep_gloo_on_loopback()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=device if on_gpu else None,
    )
    host = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
    speak = tell if rank == 0 else _quiet

    def done(step: tuple[int, int]) -> None:
        speak(("done", step))

    place = Place(rank=rank, world=world, device=device, host=host, tell=done)
    for name, section in sections.items():
        late = place.gathered(time.monotonic() - begin > remaining_s)[0]  # as rank 0 says
        speak(("begin", name))
        meet(host)  # nobody fails in a section of which the bench has not heard
        found = {"error": TOO_LATE} if late else section(place)
        place.settle()
        if on_gpu:
            torch.cuda.empty_cache()
        speak(("found", json.loads(json.dumps(found, allow_nan=False))))
    meet(host)
    dist.destroy_process_group()


def _take_core(rank: int) -> None:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _quiet(told: Any) -> None:
    """Rank 0 speaks for all."""
