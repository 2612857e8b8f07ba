"""Times every segment of a job's modules on this machine: forward, input gradient, weight gradient, backward.

Segments run as in the executor, phase by phase through a chunk, so their time includes the host's overhead.
The CPU time of this thread is measured: other processes on the machine do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor

from optimus.cost.measured_profile import (
    LayerClass,
    Profile,
    SegmentMeasurement,
    first_layer_of_each_class,
    hash_module_shape,
)
from optimus.engine.sharded_bucket import ShardedBucket
from optimus.engine.synthetic_data import SyntheticDataset
from optimus.errors import UserError
from optimus.ir.op import KernelName, OpKind
from optimus.job.job import Job
from optimus.job.model import Encoder, Llm, Model
from optimus.models.build import build_layers, count_layers, insert_collectives, segment_name
from optimus.models.chunk import SegmentedChunk, trainable_parameters
from optimus.models.collectives import AsyncCollective, TpGroup
from optimus.models.deepstack import list_passed_rows
from optimus.models.microbatch_inputs import (
    LlmMicrobatchContext,
    SeamRoute,
    build_encoder_inputs,
    build_llm_inputs,
)
from optimus.models.phase_order import ChunkPhase
from optimus.models.sample import PlacedItem, Sample, list_placed_items
from optimus.models.segment import Segment
from optimus.profiler.machine import describe_measurement, limit_torch_to_one_thread

REPETITIONS = 24
WARM_UP_REPETITIONS = 3
DTYPE = torch.float32
Progress = Callable[[str, int, int], None]
# Segments of tensor-parallel layers without a kernel in plans: the kernel to which their time is added.
MEASURED_WITH = {"residual_add": KernelName.NORM1, "place_rows": KernelName.EMBEDDING}


class SingleProcessTpGroup(TpGroup):
    """Tensor-parallel group with one real rank: its compute is real, and collectives complete at once.

    Rows of other ranks are copies of its own, so that values stay in a normal range.
    """

    def all_gather(self, part: Tensor) -> AsyncCollective:
        rows = part.detach()
        return AsyncCollective(None, lambda: rows.repeat(self.size, *(1,) * (rows.dim() - 1)))

    def all_gather_into(self, whole: Tensor, part: Tensor) -> AsyncCollective:
        rows = part.shape[0]
        for place in range(self.size):
            whole[place * rows : (place + 1) * rows] = part
        return AsyncCollective(None, lambda: whole)

    def reduce_scatter(self, parts: Tensor) -> AsyncCollective:
        rows = parts.detach()[self.rows(len(parts))]
        return AsyncCollective(None, rows.clone)

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> AsyncCollective:
        came = rows.new_zeros(sum(received), *rows.shape[1:])
        return AsyncCollective(None, lambda: came)


@dataclass(frozen=True, kw_only=True)
class _Load:
    """Module at one size: the input of its first layer, and the context of all layers."""

    module: Encoder | Llm
    tokens: int
    inputs: tuple[Tensor, ...]
    context: Any
    dtype: torch.dtype
    tp_group: TpGroup = SingleProcessTpGroup()


def profile_job(
    job: Job,
    *,
    dtype: torch.dtype = DTYPE,
    tps: Sequence[int] = (1,),
    progress: Progress = lambda name, done, total: None,
) -> Profile:
    """Times the segments of all modules at the sizes of their microbatches, for every TP size of `tps`."""
    if torch.cuda.is_available():
        raise UserError(
            field="profile",
            problem="measures CPU time, and this machine has a GPU",
            hint="hide it (CUDA_VISIBLE_DEVICES=) to profile the CPU; GPUs are not measured yet",
        )
    rows: list[SegmentMeasurement] = []
    with limit_torch_to_one_thread():
        parts = [
            (load, sort, layer)
            for unsharded in _loads(job, dtype)
            for load in (_shard(unsharded, tp) for tp in tps)
            for sort, layer in _layers_to_measure(load.module)
        ]
        for done, (load, sort, layer) in enumerate(parts):
            progress(f"{load.module.name} {sort}", done, len(parts))
            rows += _measure(load, sort, layer)
    return Profile(
        measured=describe_measurement("CPU time of one thread", dtype=str(dtype).removeprefix("torch.")),
        modules=tuple((module.name, hash_module_shape(module)) for module in job.model.modules),
        segments=tuple(rows),
        issue_s=0.0,
    )


# ---------------------------------------------------------------------------- what to measure


def _layers_to_measure(module: Encoder | Llm) -> Iterator[tuple[LayerClass, int]]:
    """Yields both ends and the first layer of every sort; layers are counted with the ends."""
    yield "embedding", 0
    for sort, layer in first_layer_of_each_class(module.stack).items():
        yield sort, layer + 1
    yield ("head" if isinstance(module, Llm) else "projector"), count_layers(module) - 1


def _loads(job: Job, dtype: torch.dtype) -> Iterator[_Load]:
    """Yields every module at the microbatch sizes that the job allows, and at half of one."""
    data = SyntheticDataset(job=job)
    sizes = sorted(set(job.layout.limits.microbatch_sequences))
    samples = [data.sample(number) for number in range(max(sizes))]
    for encoder in job.model.encoders:
        items = [placed for sample in samples for placed in list_placed_items(sample, encoder.name)]
        per_sequence = max(1, round(len(items) / len(samples)))
        counts = {per_sequence * size for size in sizes} | {max(1, per_sequence // 2)}
        for count in sorted(count for count in counts if count <= len(items)):
            yield _encoder_load(encoder, items[:count], dtype)
    for size in sizes:
        yield _llm_load(job.model, samples[:size], dtype)


def _encoder_load(encoder: Encoder, items: list[PlacedItem], dtype: torch.dtype) -> _Load:
    tokens = sum(item.tokens for _, _, item in items)
    inputs, context = build_encoder_inputs(encoder, items, tokens, seed=0, step=0, dtype=dtype)
    return _Load(module=encoder, tokens=tokens, inputs=(inputs,), context=context, dtype=dtype)


def _llm_load(model: Model, samples: list[Sample], dtype: torch.dtype) -> _Load:
    ids, context = build_llm_inputs(
        model.llm, samples, (), 1.0, seed=0, step=0, dtype=dtype, encoders=model.encoders
    )
    return _Load(module=model.llm, tokens=len(ids), inputs=(ids,), context=context, dtype=dtype)


def _shard(load: _Load, tp: int) -> _Load:
    """Returns the share of the first of `tp` ranks."""
    if tp == 1:
        return load
    tp_group = SingleProcessTpGroup(size=tp)
    rows = tp_group.rows(load.tokens)
    if isinstance(load.context, LlmMicrobatchContext):
        nothing = torch.empty(0, dtype=torch.int64)
        seam = SeamRoute(pieces=(), leaving=nothing, sent=(0,) * tp, received=(0,) * tp)
        context = replace(load.context.shard(rows), routes={"tp": seam}, targets=(nothing,))
        return replace(load, context=context, tp_group=tp_group)
    inputs = tuple(tensor[rows] for tensor in load.inputs)
    return replace(load, inputs=inputs, context=load.context.shard(rows), tp_group=tp_group)


# ---------------------------------------------------------------------------- measuring


def _measure(load: _Load, sort: LayerClass, layer: int) -> list[SegmentMeasurement]:
    """Times the segments of one layer: whole and split backwards in turn; tensor-parallel: split only."""
    module, tp = load.module, load.tp_group.size
    (built,) = build_layers(
        _trained(module), dtype=load.dtype, first=layer, end=layer + 1, tp_group=load.tp_group
    )
    ShardedBucket(trainable_parameters(built), None).begin_step()  # accumulates in float32, as in training
    names = _names(load, layer, built)
    parts = built if tp == 1 else insert_collectives(built)
    rows_in, rows_out = (list_passed_rows(module, boundary) for boundary in (layer, layer + 1))
    op_sequences = (
        ((OpKind.FORWARD, OpKind.BACKWARD), (OpKind.FORWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD))
        if tp == 1
        else ((OpKind.FORWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD),)
    )
    times: dict[tuple[str, OpKind], list[float]] = {}
    for repetition in range(WARM_UP_REPETITIONS + REPETITIONS):
        for kinds in op_sequences:
            timed: dict[tuple[str, OpKind], float] = {}
            for kind, phase, seconds in _run_microbatch(
                SegmentedChunk([parts], rows_in=rows_in, rows_out=rows_out), kinds, load, first=layer == 0
            ):
                key = names[_base(phase)], kind
                timed[key] = timed.get(key, 0.0) + seconds
            if repetition >= WARM_UP_REPETITIONS:
                for key, seconds in timed.items():
                    times.setdefault(key, []).append(seconds)
    kernels = {name: tuple(base for base, own in names.items() if own == name) for name in names.values()}
    return [
        _row(load, sort, name, kernels[name], kind, seconds)
        for (name, kind), seconds in times.items()
        if not (
            sort == "embedding" and kind == OpKind.INPUT_GRAD
        )  # the input of a first layer needs no gradient
    ]


def _names(load: _Load, layer: int, segments: Sequence[Segment]) -> dict[str, str]:
    """Returns the segment of each kernel of the plan; of a tensor-parallel layer, each is its own."""
    if load.tp_group.size > 1:
        return {base: base for segment in segments for base in segment.kernels}
    return {
        base: segment_name(load.module, layer, place).split(".")[-1]
        for place, segment in enumerate(segments)
        for base in segment.kernels
    }


def _base(phase: ChunkPhase) -> str:
    name = phase.kernels[0].partition(".")[0]
    return MEASURED_WITH.get(name, name)


def _trained(module: Encoder | Llm) -> Encoder | Llm:
    """Returns the module with all gradients, whatever the job trains."""
    if isinstance(module, Llm):
        return replace(module, train=True)
    return replace(module, train=True, projector=replace(module.projector, train=True))


def _run_microbatch(
    chunk: SegmentedChunk, kinds: tuple[OpKind, ...], load: _Load, *, first: bool
) -> Iterator[tuple[OpKind, ChunkPhase, float]]:
    """Runs one microbatch through one layer; yields the op's kind, the phase and its seconds."""
    rows = load.tokens // load.tp_group.size
    hidden, count = load.module.stack.hidden, 1 + len(chunk.rows_in)
    state = load.inputs if first else tuple(torch.randn(rows, hidden, dtype=load.dtype) for _ in range(count))
    chunk.begin_forward(0, state, (not first,) * len(state), load.context)
    for kind in kinds:
        if kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD):
            chunk.begin_backward(0, tuple(torch.ones_like(tensor) for tensor in chunk.output(0)))
        for phase in chunk.phases(kind, 0):
            begin = time.thread_time()
            phase.run()
            seconds = time.thread_time() - begin
            if phase.kind not in (OpKind.LAUNCH, OpKind.WAIT):
                yield kind, phase, seconds


def _row(
    load: _Load, sort: LayerClass, name: str, kernels: tuple[str, ...], kind: OpKind, seconds: list[float]
) -> SegmentMeasurement:
    p25, middle, p75 = quantiles(seconds, n=4)
    return SegmentMeasurement(
        module=load.module.name,
        layers=sort,
        segment=name,
        kernels=kernels,
        kind=kind,
        tokens=load.tokens,
        tp=load.tp_group.size,
        median_s=middle,
        p25_s=p25,
        p75_s=p75,
        repetitions=len(seconds),
    )
