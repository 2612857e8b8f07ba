"""Looks once at modules that a user brings: what travels between them, and how long each takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from optimus.engine.mail import TensorSpec
from optimus.program.module_times import Seconds

Specs = tuple[TensorSpec, ...]


@dataclass(frozen=True, kw_only=True)
class Look:
    """One stage or block: what it makes, and its seconds (0 where it was not timed, or is frozen)."""

    output: Specs
    seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class Survey:
    """All virtual stages of the LLM in order, and all blocks of every encoder."""

    stages: tuple[Look, ...]
    encoders: Mapping[str, tuple[Look, ...]]

    @property
    def stage_seconds(self) -> list[Seconds]:
        return [look.seconds for look in self.stages]

    def block_seconds(self, encoder: str) -> list[Seconds]:
        return [look.seconds for look in self.encoders[encoder]]


def survey(
    stages: Sequence[nn.Module],
    encoders: Mapping[str, Sequence[nn.Module]],
    microbatch: tuple[Tensor, ...],
    pieces: Mapping[str, tuple[Tensor, int]],
    *,
    pp: int,
    repeats: int = 0,
) -> Survey:
    """Every rank calls it with its own stages, all encoder blocks, and one microbatch of inputs.

    `pieces` holds, for every encoder, one of its microbatches and how many of them feed one of the LLM's.
    Ranks look one after another, so that nobody is timed beside others.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    looks: dict[str, tuple[Look, ...]] = {}
    if rank == 0:
        looks = {name: _blocks(blocks, pieces[name][0], repeats) for name, blocks in encoders.items()}
    looks = _told(looks, 0)
    rows = [
        _blank(spec, True)
        for name, (_, count) in pieces.items()
        for _ in range(count)
        for spec in looks[name][-1].output
    ]
    found: list[Look] = []
    for virtual in range(len(stages) * pp):
        stage, owner = virtual % pp, (virtual % pp) * (world // pp)
        look = None
        if rank == owner:
            given = [_blank(spec, True) for spec in found[-1].output] if found else [*microbatch, *rows]
            look = look_at(stages[virtual // pp], tuple(given), repeats)
        found.append(_told(look, owner))
        assert stage == owner // (world // pp)
    return Survey(stages=tuple(found), encoders=looks)


def _told(value: Any, source: int) -> Any:
    """What the rank `source` has."""
    box = [value]
    dist.broadcast_object_list(box, source)
    return box[0]


def _blocks(blocks: Sequence[nn.Module], inputs: Tensor, repeats: int) -> tuple[Look, ...]:
    found: list[Look] = []
    given, learns = (inputs,), False
    for block in blocks:
        learns = learns or any(parameter.requires_grad for parameter in block.parameters())
        found.append(look_at(block, given, repeats))
        given = tuple(_blank(spec, learns) for spec in found[-1].output)
    return tuple(found)


def _blank(spec: TensorSpec, needs: bool) -> Tensor:
    return torch.zeros(spec.shape, dtype=spec.dtype).requires_grad_(needs and spec.dtype.is_floating_point)


def look_at(module: nn.Module, inputs: tuple[Tensor, ...], repeats: int) -> Look:
    """Shapes of what a module makes; its forward and backward, the median of `repeats`."""
    outputs = _tuple(module(*inputs))
    specs = tuple(TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype) for tensor in outputs)
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
    return Look(output=specs, seconds=seconds)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    found = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found, time.perf_counter() - begin


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
