"""Profiles modules that a user brings: the tensors that travel between them, and their seconds.

Every module runs on a rank that holds it, on the real inputs of one microbatch and the real outputs of the
module before it. Ranks run one after another, so that no module is timed while another runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from optimus.engine.p2p import TensorSpec
from optimus.errors import UserError
from optimus.ir.plan import Seconds
from optimus.ir.ranks import LLM
from optimus.models.segment import State

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StageInputs:
    """Inputs of one microbatch that every rank of its replica knows, so that no message carries them.

    The first stage of the LLM, or block of an encoder, is called with `args`; all of them with `kwargs`.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def signature(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, by name."""
        named = {f"argument {at}": value for at, value in enumerate(self.args)} | dict(self.kwargs)
        return {name: tuple(value.shape) for name, value in named.items() if isinstance(value, Tensor)}


def make_inputs(value: Any) -> StageInputs | None:
    """Returns the inputs that a value stands for: one tensor, a tuple of them, or keyword arguments."""
    if value is None or isinstance(value, StageInputs):
        return value
    if isinstance(value, Mapping):
        return StageInputs(kwargs=value)
    return StageInputs(args=value if isinstance(value, tuple) else (value,))


@dataclass(frozen=True, kw_only=True)
class StageProfile:
    """One stage or block: its outputs, and its seconds (0 if it was not timed, or is frozen)."""

    output: tuple[TensorSpec, ...]
    seconds: Seconds
    needs_backward: bool  # whether its output requires a gradient


@dataclass(frozen=True, kw_only=True)
class ProfiledStages:
    """Profiles of all virtual stages of the LLM in order, and of all blocks of every encoder.

    `signatures` are the shapes of the inputs with which they ran, by module.
    """

    stages: tuple[StageProfile, ...]
    encoders: Mapping[str, tuple[StageProfile, ...]]
    signatures: Mapping[str, Mapping[str, tuple[int, ...]]]

    @property
    def stage_seconds(self) -> list[Seconds]:
        return [profile.seconds for profile in self.stages]

    def block_seconds(self, encoder: str) -> list[Seconds]:
        return [profile.seconds for profile in self.encoders[encoder]]


def profile_stages(
    stages: Sequence[nn.Module],
    encoders: Mapping[str, Sequence[nn.Module]],
    microbatch: Any,
    encoder_microbatches: Mapping[str, Sequence[Any]],
    *,
    pp: int,
    repeats: int = 0,
) -> ProfiledStages:
    """Profiles the stages of all ranks and all encoder blocks; every rank calls it and gets the same result.

    A rank passes its own stages and all encoder blocks, of which those of other ranks may be on `meta`.
    `microbatch` has the inputs of one LLM microbatch: a tensor, a tuple of tensors, keyword arguments, or
    `StageInputs`. `encoder_microbatches` has, for every encoder, all of its microbatches that feed that
    one, in the same forms; those without inputs are None.
    """
    device, world = _find_device([*stages, *chain.from_iterable(encoders.values())]), dist.get_world_size()
    inputs = make_inputs(microbatch)
    assert inputs is not None, "an LLM microbatch has inputs"
    stage_owners = [virtual % pp * (world // pp) for virtual in range(len(stages) * pp)]
    block_owners = _find_block_owners(encoders)
    run = partial(_profile_chain, device=device)
    rows: State = ()
    blocks, signatures = dict[str, tuple[StageProfile, ...]](), {LLM: inputs.signature}
    for name, modules in encoders.items():
        microbatches = [make_inputs(value) for value in encoder_microbatches[name]]
        # Other replicas have other data, which is not run: they follow the first.
        is_empty = _run_and_broadcast(partial(_find_empty, microbatches), stage_owners[0])
        timed = next((number for number, empty in enumerate(is_empty) if not empty), None)
        if timed is None:
            raise _missing_inputs(name)
        outputs: dict[int, State] = {}
        for number in sorted(range(len(microbatches)), key=lambda number: number != timed):
            if is_empty[number]:
                outputs[number] = tuple(spec.with_rows(0).empty(device) for spec in blocks[name][-1].output)
                continue
            each = microbatches[number] or StageInputs()
            profiles, outputs[number] = run(
                modules,
                [*block_owners[name], stage_owners[0]],
                each.args,
                each.kwargs,
                repeats=repeats if number == timed else 0,
            )
            if number == timed:
                blocks[name], signatures[name] = profiles, each.signature
        rows += tuple(chain.from_iterable(outputs[number] for number in range(len(microbatches))))
    virtual_stages = [stages[virtual // pp] for virtual in range(len(stages) * pp)]
    owners = [*stage_owners, stage_owners[-1]]
    profiles, _ = run(virtual_stages, owners, (*inputs.args, *rows), inputs.kwargs, repeats=repeats)
    signatures = _run_and_broadcast(lambda: signatures, stage_owners[0])
    return ProfiledStages(stages=profiles, encoders=blocks, signatures=signatures)


def _find_empty(microbatches: Sequence[StageInputs | None]) -> list[bool]:
    return [inputs is None for inputs in microbatches]


def _missing_inputs(encoder: str) -> UserError:
    return UserError(
        field=encoder,
        problem="has no inputs in the microbatch that is profiled",
        hint="choose one that has inputs for every encoder",
    )


def _find_device(modules: Sequence[nn.Module]) -> torch.device:
    parameters = (parameter for module in modules for parameter in module.parameters())
    devices = (parameter.device for parameter in parameters if not parameter.is_meta)
    return next(devices, torch.device("cpu"))


def is_on_meta(module: nn.Module) -> bool:
    """Returns whether a module has parameters or buffers without values."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def _find_block_owners(encoders: Mapping[str, Sequence[nn.Module]]) -> dict[str, list[int]]:
    """Returns, for every block, the first rank on which it has values."""
    held = {name: [not is_on_meta(block) for block in blocks] for name, blocks in encoders.items()}
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, held)
    owners: dict[str, list[int]] = {}
    for name, blocks in encoders.items():
        owners[name] = []
        for at in range(len(blocks)):
            holders = [rank for rank, of_rank in enumerate(by_rank) if of_rank[name][at]]
            if not holders:
                raise UserError(
                    field=f"encoders.{name}[{at}]",
                    problem="is on the meta device on every rank",
                    hint="load it on the ranks that run it",
                )
            owners[name].append(holders[0])
    return owners


def _profile_chain(
    modules: Sequence[nn.Module],
    ranks: Sequence[int],
    state: State,
    kwargs: Mapping[str, Any],
    *,
    repeats: int,
    device: torch.device,
) -> tuple[tuple[StageProfile, ...], State]:
    """Profiles modules that run one after another; returns what the last one sends to the last rank.

    `ranks` are the owners of the modules, and the rank that receives the last outputs.
    """
    profiles: list[StageProfile] = []
    for module, (owner, receiver) in zip(modules, pairwise(ranks), strict=True):
        outputs: State = ()

        def profile(module: nn.Module = module, state: State = state) -> StageProfile:
            nonlocal outputs
            profile, outputs = _profile_module(module, state, kwargs, repeats)
            return profile

        profiles.append(_run_and_broadcast(profile, owner))
        state = _transfer(outputs, profiles[-1], owner, receiver, device)
    return tuple(profiles), state


def _transfer(
    outputs: State, profile: StageProfile, source: int, destination: int, device: torch.device
) -> State:
    """Sends outputs from one rank to another, which returns them; all other ranks return nothing."""
    rank = dist.get_rank()
    if source != destination and rank == source:
        for tensor in outputs:
            dist.send(tensor.detach().contiguous(), destination)
    if rank != destination:
        return ()
    if source != destination:
        outputs = tuple(spec.empty(device) for spec in profile.output)
        for tensor in outputs:
            dist.recv(tensor, source)
    needs_grad = profile.needs_backward
    return tuple(t.detach().requires_grad_(needs_grad and t.is_floating_point()) for t in outputs)


def _run_and_broadcast(work: Callable[[], T], source: int) -> T:
    """Runs `work` on the rank `source` and returns its result, or raises its error, on all ranks."""
    message: list[Any] = [None, ""]
    failure: Exception | None = None
    if dist.get_rank() == source:
        try:
            message[0] = work()
        except Exception as error:
            failure = error
            message[1] = error if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(message, source)
    if failure is not None:
        raise failure
    if isinstance(message[1], UserError):
        raise message[1]
    if message[1]:
        raise RuntimeError(f"rank {source} could not run its modules on one microbatch: {message[1]}")
    result: T = message[0]
    return result


def _profile_module(
    module: nn.Module, inputs: State, kwargs: Mapping[str, Any], repeats: int
) -> tuple[StageProfile, State]:
    """Profiles one module and returns its outputs; seconds are medians of `repeats` runs."""
    outputs = _as_tuple(module(*inputs, **kwargs))
    specs = tuple(TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype) for tensor in outputs)
    needs_backward = any(tensor.requires_grad for tensor in outputs)
    forwards_s, backwards_s = [], []
    for _ in range(repeats):
        timed_outputs, forward_s = _timed(lambda: _as_tuple(module(*inputs, **kwargs)))
        forwards_s.append(forward_s)
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        leaves = [tensor for tensor in (*tensors, *module.parameters()) if tensor.requires_grad]
        roots = [tensor for tensor in timed_outputs if tensor.requires_grad]
        if roots and leaves:
            grads = [torch.ones_like(tensor) for tensor in roots]
            backward = partial(torch.autograd.grad, roots, leaves, grads, allow_unused=True)
            backwards_s.append(_timed(backward)[1])
    seconds = Seconds(
        forward_s=median(forwards_s) if forwards_s else 0.0,
        backward_s=median(backwards_s) if backwards_s else 0.0,
    )
    return StageProfile(output=specs, seconds=seconds, needs_backward=needs_backward), outputs


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    _synchronize()
    begin = time.perf_counter()
    result = work()
    _synchronize()
    return result, time.perf_counter() - begin


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
