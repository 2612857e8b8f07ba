"""Builds and steps one rank of a job at its full size on one CPU, before a GPU is booked.

All of the engine's own code runs: groups, model, buckets, optimizer, and every line of the rank's program.
But tensors have shapes and no numbers, so that they take no memory, and of all ranks this one alone is there:
what it sends, gathers and sums ends at once. What is left is what the rank will do, and the bytes it takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from optimus.engine.compile import MessageSpecs, describe
from optimus.engine.config import MemoryUse, TrainingConfig
from optimus.engine.memory_tracker import count_step
from optimus.engine.process_groups import ProcessGroups, make_groups
from optimus.engine.rank_trainer import RankTrainer
from optimus.engine.torch_private import FakeTensorMode, fake_world
from optimus.errors import UserError
from optimus.ir.op import COLLECTIVE_PHASES, RECVS, SEAMS, SENDS, OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM, RankCoordinates
from optimus.job.job import Job
from optimus.models.kernels import GPU_LINEAR, Kernels

# Tensors without numbers of another device cannot learn where torch has no such device.
CPU = torch.device("cpu")
DTYPE = "bfloat16"  # as on GPUs
TIMEOUT_S = 60.0  # of groups that never wait
PLANNED_ONLY = ("communicators", "reserve")  # no tensors


@dataclass(frozen=True, kw_only=True)
class Communicator:
    """A process group of the rank."""

    axis: str
    size: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class MessageCount:
    """What goes to or comes from another stage, so many times a step."""

    module: str
    verb: str
    times: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int  # each time


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of a module on the rank."""

    count: int
    trained: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What one rank does in a step, and what that takes beside what its plan says."""

    job: str
    rank: int
    world: int
    device_class: int
    class_name: str
    places: Mapping[str, RankCoordinates]
    communicators: tuple[Communicator, ...]
    groups_made: int  # calls that make them: the same number in every world
    program: Mapping[str, Mapping[str, int]]  # lines by module and kind
    actions: int  # lines that do something
    encoder_phases: int  # compute alone
    encoder_phases_in_slots: int
    travels: tuple[MessageCount, ...]
    parameters: Mapping[str, ParameterCount]
    memory: MemoryUse
    peak_at: str
    planned_only: Mapping[str, int]  # bytes, by component
    capacity_bytes: int

    @property
    def needed_bytes(self) -> int:
        """As counted, with what only plans know."""
        return self.memory.counted_peak + sum(self.planned_only.values())

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.capacity_bytes


def dry_run(
    job: Job, plan: Plan, training: TrainingConfig, rank: int, *, kernels: Kernels | None = None
) -> DryRun:
    """Steps a rank of a plan that holds. `kernels` are those of GPUs if none are given."""
    check_rank(rank, plan.ranks.world)
    with fake_world(rank, plan.ranks.world):
        groups = make_groups(plan, rank, timeout_s=TIMEOUT_S)
        one, memory = _step(job, plan, training, groups, kernels or Kernels(linear=GPU_LINEAR))
    device = plan.ranks.class_of(rank)
    fixed = plan.memory[device].fixed
    phases, in_slots = count_slots(plan, device)
    return DryRun(
        job=job.name,
        rank=rank,
        world=plan.ranks.world,
        device_class=device,
        class_name=plan.ranks.class_name(device),
        places={name: plan.ranks.place(name, rank) for name in plan.modules},
        communicators=tuple(_communicators(groups)),
        groups_made=len(groups.members) + (groups.control is not None),
        program=_lines(plan, device),
        actions=len(one.executor.actions),
        encoder_phases=phases,
        encoder_phases_in_slots=in_slots,
        travels=tuple(_travels(plan, device, one.model.specs)),
        parameters={name: _held(one, name) for name in plan.modules},
        memory=memory,
        peak_at=describe(plan, device, memory.peak_line),
        planned_only={name: fixed[name] for name in PLANNED_ONLY},
        capacity_bytes=plan.capacity_bytes,
    )


def check_rank(rank: int, world: int) -> None:
    """Whether there is such a rank."""
    if not 0 <= rank < world:
        raise UserError(
            field="--rank",
            value=rank,
            problem=f"is none of the job's {world} ranks",
            hint=f"use 0 to {world - 1}" if world > 1 else "use 0",
        )


def _step(
    job: Job, plan: Plan, training: TrainingConfig, groups: ProcessGroups, kernels: Kernels
) -> tuple[RankTrainer, MemoryUse]:
    """One that is not the first: the optimizer has its state."""
    mode, dtype = FakeTensorMode(), getattr(torch, training.dtype or DTYPE)
    with mode:
        one = RankTrainer(job, plan, training, groups, dtype=dtype, device=CPU, kernels=kernels)
        if one.optimizer is not None and one.optimizer.adamw is not None:
            one.optimizer.adamw.step()
    batch = one.batch(0, place=mode.from_tensor)  # made as ever: the host reads sizes from it
    with mode:
        _, memory = count_step(one, batch)
    return one, memory


# ---------------------------------------------------------------------------- what the rank does


def _communicators(groups: ProcessGroups) -> Iterator[Communicator]:
    for axis in groups.groups:
        members = groups.members[axis]
        yield Communicator(axis=axis, size=len(members), first=members[0], last=members[-1])


def _lines(plan: Plan, device: int) -> dict[str, dict[str, int]]:
    """How often each kind of line stands in a program, by module."""
    program = plan.programs[device]
    counted = Counter(zip(program.module.tolist(), program.kind.tolist(), strict=True))
    found: dict[str, dict[str, int]] = {name: {} for name in plan.names}
    for (module, kind), times in sorted(counted.items()):
        found[plan.names[module]][OpKind(kind).word] = times
    return found


def count_slots(plan: Plan, device: int) -> tuple[int, int]:
    """Compute phases of encoders; and those of them between a launch of the LLM and its wait."""
    program, on_their_way, phases, inside = plan.programs[device], 0, 0, 0
    for module, op, chunk, _, place in program.rows[program.kind <= OpKind.WEIGHT_GRAD].tolist():
        name = plan.names[module]
        template = plan.template_of(name, OpKind(op), plan.ranks.stage_of(name, device), chunk)
        kind = template[place].kind
        if name == LLM:
            on_their_way += (kind == OpKind.LAUNCH) - (kind == OpKind.WAIT)
        elif kind not in COLLECTIVE_PHASES:
            phases, inside = phases + 1, inside + (on_their_way > 0)
    return phases, inside


def _travels(plan: Plan, device: int, messages: MessageSpecs) -> Iterator[MessageCount]:
    for module, times in _lines(plan, device).items():
        for kind in (*SENDS, *RECVS):
            if kind.word not in times:
                continue
            specs = messages.rows[module] if kind in SEAMS else messages.inputs[module][0]
            for spec in specs:
                yield MessageCount(
                    module=module,
                    verb=kind.word,
                    times=times[kind.word],
                    shape=spec.shape,
                    dtype=str(spec.dtype).removeprefix("torch."),
                    bytes=torch.Size(spec.shape).numel() * spec.dtype.itemsize,
                )


def _held(one: RankTrainer, module: str) -> ParameterCount:
    mine = [each for name, each in one.model.parameters.items() if name.startswith(f"{module}.")]
    return ParameterCount(
        count=sum(each.numel() for each in mine),
        trained=sum(each.numel() for each in mine if each.requires_grad),
        bytes=sum(each.nbytes for each in mine),
    )
