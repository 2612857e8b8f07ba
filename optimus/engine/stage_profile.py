"""Looks once at modules that a user brings: what travels between them, and how long each takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from optimus.engine.p2p import TensorSpec
from optimus.ir.module_times import Seconds

Specs = tuple[TensorSpec, ...]


@dataclass(frozen=True, kw_only=True)
class StageProfile:
    """One stage or block: what it makes, and its seconds (0 where it was not timed, or is frozen)."""

    output: Specs
    seconds: Seconds
    learns: bool  # whether its output wants a gradient


@dataclass(frozen=True, kw_only=True)
class StageProfiles:
    """All virtual stages of the LLM in order, and all blocks of every encoder."""

    stages: tuple[StageProfile, ...]
    encoders: Mapping[str, tuple[StageProfile, ...]]

    @property
    def stage_seconds(self) -> list[Seconds]:
        return [look.seconds for look in self.stages]

    def block_seconds(self, encoder: str) -> list[Seconds]:
        return [look.seconds for look in self.encoders[encoder]]


def profile_stages(
    stages: Sequence[nn.Module],
    encoders: Mapping[str, Sequence[nn.Module]],
    microbatch: tuple[Tensor, ...],
    pieces: Mapping[str, tuple[Tensor, int]],
    *,
    pp: int,
    repeats: int = 0,
) -> StageProfiles:
    """Every rank calls it with its own stages, all encoder blocks, and one microbatch of inputs.

    `pieces` holds, for every encoder, one of its microbatches and how many of them feed one of the LLM's.
    Ranks look one after another, so that nobody is timed beside others.
    """
    world, device = dist.get_world_size(), microbatch[0].device

    def look_at_encoders() -> dict[str, tuple[StageProfile, ...]]:
        return {name: _blocks(blocks, pieces[name][0], repeats) for name, blocks in encoders.items()}

    looks: dict[str, tuple[StageProfile, ...]] = _told(look_at_encoders, 0)
    rows = [
        _blank(spec, looks[name][-1].learns, device)
        for name, (_, count) in pieces.items()
        for _ in range(count)
        for spec in looks[name][-1].output
    ]
    found: list[StageProfile] = []
    for virtual in range(len(stages) * pp):
        given = (*microbatch, *rows)
        if found:
            given = tuple(_blank(spec, found[-1].learns, device) for spec in found[-1].output)
        owner = virtual % pp * (world // pp)
        look = partial(profile_module, stages[virtual // pp], given, repeats)
        found.append(_told(look, owner))
    return StageProfiles(stages=tuple(found), encoders=looks)


def _told(work: Callable[[], Any], source: int) -> Any:
    """What `work` gives on the rank `source`; an error there is one everywhere."""
    box: list[Any] = [None, ""]
    failure: Exception | None = None
    if dist.get_rank() == source:
        try:
            box[0] = work()
        except Exception as error:
            failure, box[1] = error, f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(box, source)
    if failure is not None:
        raise failure
    if box[1]:
        raise RuntimeError(f"rank {source} could not run its modules on one microbatch: {box[1]}")
    return box[0]


def _blocks(blocks: Sequence[nn.Module], inputs: Tensor, repeats: int) -> tuple[StageProfile, ...]:
    found: list[StageProfile] = []
    given = (inputs,)
    for block in blocks:
        found.append(profile_module(block, given, repeats))
        given = tuple(_blank(spec, found[-1].learns, inputs.device) for spec in found[-1].output)
    return tuple(found)


def _blank(spec: TensorSpec, needs: bool, device: torch.device) -> Tensor:
    found = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    return found.requires_grad_(needs and spec.dtype.is_floating_point)


def profile_module(module: nn.Module, inputs: tuple[Tensor, ...], repeats: int) -> StageProfile:
    """Shapes of what a module makes; its forward and backward, the median of `repeats`."""
    outputs = _tuple(module(*inputs))
    specs = tuple(TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype) for tensor in outputs)
    learns = any(tensor.requires_grad for tensor in outputs)
    forwards, backwards = [], []
    for _ in range(repeats):
        outputs, forward_s = _timed(lambda: _tuple(module(*inputs)))
        forwards.append(forward_s)
        wanted = [tensor for tensor in (*inputs, *module.parameters()) if tensor.requires_grad]
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        if roots and wanted:
            seeds = [torch.ones_like(tensor) for tensor in roots]
            backwards.append(_timed(lambda: torch.autograd.grad(roots, wanted, seeds, allow_unused=True))[1])  # noqa: B023
    seconds = Seconds(
        forward_s=median(forwards) if forwards else 0.0,
        backward_s=median(backwards) if backwards else 0.0,
    )
    return StageProfile(output=specs, seconds=seconds, learns=learns)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    found = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found, time.perf_counter() - begin


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
