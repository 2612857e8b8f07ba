"""Times every segment of a job's modules on this machine: forward, input gradient, weight gradient, backward.

Segments are played as the executor plays them, phase by phase through a chunk, so what the host spends around
them is part of their time. CPU time of this thread is taken: other tenants of the machine do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor

from optimus.cost.measured import Layers, Profile, SegmentTime, fingerprint, representative_layers
from optimus.engine.sharding import Sharded
from optimus.engine.synthetic import Synthetic
from optimus.errors import UserError
from optimus.job.job import Job
from optimus.job.model import Encoder, Llm
from optimus.models.build import build_layers, layer_count, segment_name
from optimus.models.chunk import SegmentedChunk, parameters_of
from optimus.models.context import encoder_inputs, llm_inputs
from optimus.models.sample import Placed, Sample, placed_items
from optimus.profiler.machine import conditions, one_thread
from optimus.program.op import Kind

REPETITIONS = 24
WARM_UP = 3
DTYPE = torch.float32
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class _Load:
    """A module at one size: what its first layer reads, and the context of all layers."""

    module: Encoder | Llm
    tokens: int
    inputs: tuple[Tensor, ...]
    context: Any
    dtype: torch.dtype


def profile_job(
    job: Job,
    *,
    dtype: torch.dtype = DTYPE,
    progress: Progress = lambda name, done, total: None,
) -> Profile:
    """Segments of all modules, at the sizes of their microbatches."""
    if torch.cuda.is_available():
        raise UserError(
            field="profile",
            problem="measures CPU time, and this machine has a GPU",
            hint="hide it (CUDA_VISIBLE_DEVICES=) to profile the CPU; GPUs are not measured yet",
        )
    rows: list[SegmentTime] = []
    with one_thread():
        parts = [
            (load, sort, layer)
            for load in _loads(job, dtype)
            for sort, layer in _layers_to_measure(load.module)
        ]
        for done, (load, sort, layer) in enumerate(parts):
            progress(f"{load.module.name} {sort}", done, len(parts))
            rows += _measure(load, sort, layer)
    return Profile(
        measured=conditions("CPU time of one thread", dtype=str(dtype).removeprefix("torch.")),
        modules=tuple((module.name, fingerprint(module)) for module in job.model.modules),
        segments=tuple(rows),
        issue_s=0.0,
    )


# ---------------------------------------------------------------------------- what to measure


def _layers_to_measure(module: Encoder | Llm) -> Iterator[tuple[Layers, int]]:
    """Both ends and the first layer of every sort, counted with the ends."""
    yield "embedding", 0
    for sort, layer in representative_layers(module.stack).items():
        yield sort, layer + 1
    yield ("head" if isinstance(module, Llm) else "projector"), layer_count(module) - 1


def _loads(job: Job, dtype: torch.dtype) -> Iterator[_Load]:
    """Every module at the sizes of the microbatches that the job allows, and of half of one."""
    data = Synthetic(job=job)
    sizes = sorted(set(job.layout.limits.microbatch_sequences))
    samples = [data.sample(number) for number in range(max(sizes))]
    for encoder in job.model.encoders:
        items = [placed for sample in samples for placed in placed_items(sample, encoder.name)]
        per_sequence = max(1, round(len(items) / len(samples)))
        counts = {per_sequence * size for size in sizes} | {max(1, per_sequence // 2)}
        for count in sorted(count for count in counts if count <= len(items)):
            yield _encoder_load(encoder, items[:count], dtype)
    for size in sizes:
        yield _llm_load(job.model.llm, samples[:size], dtype)


def _encoder_load(encoder: Encoder, items: list[Placed], dtype: torch.dtype) -> _Load:
    tokens = sum(item.tokens for _, _, item in items)
    inputs, context = encoder_inputs(encoder, items, tokens, seed=0, step=0, dtype=dtype)
    return _Load(module=encoder, tokens=tokens, inputs=(inputs,), context=context, dtype=dtype)


def _llm_load(llm: Llm, samples: list[Sample], dtype: torch.dtype) -> _Load:
    ids, context = llm_inputs(llm, samples, (), 1.0, seed=0, step=0, dtype=dtype)
    return _Load(module=llm, tokens=len(ids), inputs=(ids,), context=context, dtype=dtype)


# ---------------------------------------------------------------------------- measuring


def _measure(load: _Load, sort: Layers, layer: int) -> list[SegmentTime]:
    """The segments of one layer: whole backwards and split ones in turn."""
    module = load.module
    layers = build_layers(_trained(module), dtype=load.dtype, first=layer, end=layer + 1)
    Sharded(parameters_of(layers[0]), None).reset()  # gradients are added up as in training, in float32
    names = [segment_name(module, layer, place).split(".")[-1] for place in range(len(layers[0]))]
    times: dict[tuple[str, Kind], list[float]] = {}
    for repetition in range(WARM_UP + REPETITIONS):
        for kinds in ((Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W)):
            timed = list(_play(SegmentedChunk(layers), kinds, load, first=layer == 0))
            if repetition >= WARM_UP:
                for kind, place, seconds in timed:
                    times.setdefault((names[place], kind), []).append(seconds)
    kernels = dict(zip(names, (segment.kernels for segment in layers[0]), strict=True))
    return [
        _row(load, sort, name, kernels[name], kind, seconds)
        for (name, kind), seconds in times.items()
        if not (sort == "embedding" and kind == Kind.I)  # a first layer has no input that wants a gradient
    ]


def _trained(module: Encoder | Llm) -> Encoder | Llm:
    """What is trained is the plan's business: all gradients are measured."""
    if isinstance(module, Llm):
        return replace(module, train=True)
    return replace(module, train=True, projector=replace(module.projector, train=True))


def _play(
    chunk: SegmentedChunk, kinds: tuple[Kind, ...], load: _Load, *, first: bool
) -> Iterator[tuple[Kind, int, float]]:
    """One microbatch through one layer: kind, place of the segment, seconds."""
    state = load.inputs if first else (torch.randn(load.tokens, load.module.stack.hidden, dtype=load.dtype),)
    chunk.begin(0, state, (not first,) * len(state), load.context)
    for kind in kinds:
        if kind in (Kind.B, Kind.I):
            chunk.begin_backward(0, tuple(torch.ones_like(tensor) for tensor in chunk.output(0)))
        phases = chunk.phases(kind, 0)
        for at, phase in enumerate(phases):
            begin = time.thread_time()
            phase.run()
            seconds = time.thread_time() - begin
            yield kind, at if kind == Kind.F else len(phases) - 1 - at, seconds


def _row(
    load: _Load, sort: Layers, name: str, kernels: tuple[str, ...], kind: Kind, seconds: list[float]
) -> SegmentTime:
    p25, middle, p75 = quantiles(seconds, n=4)
    return SegmentTime(
        module=load.module.name,
        layers=sort,
        segment=name,
        kernels=kernels,
        kind=kind,
        tokens=load.tokens,
        tp=1,
        median_s=middle,
        p25_s=p25,
        p75_s=p75,
        repetitions=len(seconds),
    )
