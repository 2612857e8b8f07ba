"""Profiles modules that a user brings: the shapes that travel between them, and their seconds."""

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
from optimus.ir.plan import Seconds


@dataclass(frozen=True, kw_only=True)
class StageProfile:
    """One stage or block: its outputs, and its seconds (0 if it was not timed, or is frozen)."""

    output: tuple[TensorSpec, ...]
    seconds: Seconds
    needs_backward: bool  # whether its output requires a gradient


@dataclass(frozen=True, kw_only=True)
class ProfiledStages:
    """Profiles of all virtual stages of the LLM in order, and of all blocks of every encoder."""

    stages: tuple[StageProfile, ...]
    encoders: Mapping[str, tuple[StageProfile, ...]]

    @property
    def stage_seconds(self) -> list[Seconds]:
        return [profile.seconds for profile in self.stages]

    def block_seconds(self, encoder: str) -> list[Seconds]:
        return [profile.seconds for profile in self.encoders[encoder]]


def profile_stages(
    stages: Sequence[nn.Module],
    encoders: Mapping[str, Sequence[nn.Module]],
    microbatch: tuple[Tensor, ...],
    encoder_microbatches: Mapping[str, tuple[Tensor, int]],
    *,
    pp: int,
    repeats: int = 0,
) -> ProfiledStages:
    """Profiles the stages of all ranks and all encoder blocks; every rank calls it and gets the same result.

    A rank passes its own stages, all encoder blocks, and the inputs of one microbatch. `encoder_microbatches`
    has, for every encoder, one of its microbatches and how many of them feed one of the LLM's. Ranks run
    one after another, so that no module is timed while another runs.
    """
    world, device = dist.get_world_size(), microbatch[0].device

    def profile_encoders() -> dict[str, tuple[StageProfile, ...]]:
        return {
            name: _profile_blocks(blocks, encoder_microbatches[name][0], repeats)
            for name, blocks in encoders.items()
        }

    blocks: dict[str, tuple[StageProfile, ...]] = _run_and_broadcast(profile_encoders, 0)
    rows = [
        _zeros(spec, blocks[name][-1].needs_backward, device)
        for name, (_, count) in encoder_microbatches.items()
        for _ in range(count)
        for spec in blocks[name][-1].output
    ]
    profiles: list[StageProfile] = []
    for virtual in range(len(stages) * pp):
        inputs = _outputs_of(profiles[-1], device) if profiles else (*microbatch, *rows)
        owner = virtual % pp * (world // pp)
        profile = partial(_profile_module, stages[virtual // pp], inputs, repeats)
        profiles.append(_run_and_broadcast(profile, owner))
    return ProfiledStages(stages=tuple(profiles), encoders=blocks)


def _run_and_broadcast(work: Callable[[], Any], source: int) -> Any:
    """Runs `work` on the rank `source` and returns its result, or raises its error, on all ranks."""
    message: list[Any] = [None, ""]
    failure: Exception | None = None
    if dist.get_rank() == source:
        try:
            message[0] = work()
        except Exception as error:
            failure, message[1] = error, f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(message, source)
    if failure is not None:
        raise failure
    if message[1]:
        raise RuntimeError(f"rank {source} could not run its modules on one microbatch: {message[1]}")
    return message[0]


def _profile_blocks(blocks: Sequence[nn.Module], inputs: Tensor, repeats: int) -> tuple[StageProfile, ...]:
    profiles: list[StageProfile] = []
    for block in blocks:
        state = _outputs_of(profiles[-1], inputs.device) if profiles else (inputs,)
        profiles.append(_profile_module(block, state, repeats))
    return tuple(profiles)


def _outputs_of(profile: StageProfile, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(_zeros(spec, profile.needs_backward, device) for spec in profile.output)


def _zeros(spec: TensorSpec, requires_grad: bool, device: torch.device) -> Tensor:
    tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    return tensor.requires_grad_(requires_grad and spec.dtype.is_floating_point)


def _profile_module(module: nn.Module, inputs: tuple[Tensor, ...], repeats: int) -> StageProfile:
    """Profiles one module; its seconds are medians of `repeats` forwards and backwards."""
    outputs = _as_tuple(module(*inputs))
    specs = tuple(TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype) for tensor in outputs)
    needs_backward = any(tensor.requires_grad for tensor in outputs)
    forwards_s, backwards_s = [], []
    for _ in range(repeats):
        outputs, forward_s = _timed(lambda: _as_tuple(module(*inputs)))
        forwards_s.append(forward_s)
        leaves = [tensor for tensor in (*inputs, *module.parameters()) if tensor.requires_grad]
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        if roots and leaves:
            grads = [torch.ones_like(tensor) for tensor in roots]
            backward = partial(torch.autograd.grad, roots, leaves, grads, allow_unused=True)
            backwards_s.append(_timed(backward)[1])
    seconds = Seconds(
        forward_s=median(forwards_s) if forwards_s else 0.0,
        backward_s=median(backwards_s) if backwards_s else 0.0,
    )
    return StageProfile(output=specs, seconds=seconds, needs_backward=needs_backward)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - begin


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
