"""Builds and steps one rank of a job at its full size on one CPU, before a GPU is booked.

All of the engine's own code runs: groups, model, buckets, optimizer, and every line of the rank's program.
But tensors are fake, so that they take no memory, and no other rank exists: what this one sends, gathers and
reduces completes at once. The result is what the rank will do, and the bytes it takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from optimus.engine.compile import describe_line
from optimus.engine.config import MemoryUse, TrainingConfig
from optimus.engine.memory_tracker import measure_step_memory
from optimus.engine.p2p import BatchMessageSpecs
from optimus.engine.process_groups import ProcessGroups, make_process_groups
from optimus.engine.rank_trainer import RankTrainer
from optimus.engine.torch_private import FakeTensorMode, fake_process_group
from optimus.errors import UserError
from optimus.ir.op import COLLECTIVE_PHASES, RECVS, SEAMS, SENDS, OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM, RankCoordinates
from optimus.job.job import Job
from optimus.models.kernels import KernelSet, kernels_of_gpus

# Fake tensors of another device cannot compute gradients where torch has no such device.
CPU = torch.device("cpu")
DTYPE = "bfloat16"  # as on GPUs
TIMEOUT_S = 60.0  # of process groups, which never wait here
PLANNED_ONLY = ("communicators", "reserve")  # components that are not tensors


@dataclass(frozen=True, kw_only=True)
class CommunicatorSummary:
    """Axis, size, first and last member of a process group of the rank."""

    axis: str
    size: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class MessageCount:
    """Messages of one kind between this rank and other stages in a step."""

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
    """Result of a dry run: what one rank does in a step, and the memory that it counted and planned."""

    job: str
    rank: int
    world: int
    device_class: int
    class_name: str
    places: Mapping[str, RankCoordinates]
    communicators: tuple[CommunicatorSummary, ...]
    groups_made: int  # calls that make them, equally many for every number of ranks
    program: Mapping[str, Mapping[str, int]]  # lines by module and kind
    actions: int  # lines with an effect on this rank
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
        """Counted peak, with the components that only the plan knows."""
        return self.memory.counted_peak + sum(self.planned_only.values())

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.capacity_bytes


def dry_run_rank(
    job: Job, plan: Plan, training: TrainingConfig, rank: int, *, kernels: KernelSet | None = None
) -> DryRun:
    """Runs one step of a rank with fake tensors; `kernels` are those of GPUs by default."""
    check_rank_exists(rank, plan.ranks.world)
    with fake_process_group(rank, plan.ranks.world):
        groups = make_process_groups(plan, rank, timeout_s=TIMEOUT_S)
        trainer, memory = _step(job, plan, training, groups, kernels)
    device = plan.ranks.class_of(rank)
    fixed = plan.memory[device].fixed
    phases, in_slots = count_encoder_phases_in_tp_slots(plan, device)
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
        actions=len(trainer.executor.actions),
        encoder_phases=phases,
        encoder_phases_in_slots=in_slots,
        travels=tuple(_travels(plan, device, trainer.model.specs)),
        parameters={name: _count_parameters(trainer, name) for name in plan.modules},
        memory=memory,
        peak_at=describe_line(plan, device, memory.peak_line),
        planned_only={name: fixed[name] for name in PLANNED_ONLY},
        capacity_bytes=plan.capacity_bytes,
    )


def check_rank_exists(rank: int, world: int) -> None:
    """Raises if the world has no such rank."""
    if not 0 <= rank < world:
        raise UserError(
            field="--rank",
            value=rank,
            problem=f"is none of the job's {world} ranks",
            hint=f"use 0 to {world - 1}" if world > 1 else "use 0",
        )


def _step(
    job: Job, plan: Plan, training: TrainingConfig, groups: ProcessGroups, kernels: KernelSet | None
) -> tuple[RankTrainer, MemoryUse]:
    """Runs a step that is not the first: the optimizer has its state."""
    mode, dtype = FakeTensorMode(), getattr(torch, training.dtype or DTYPE)
    kernels = kernels or kernels_of_gpus(dtype)
    with mode:
        trainer = RankTrainer(job, plan, training, groups, dtype=dtype, device=CPU, kernels=kernels)
        if trainer.optimizer is not None and trainer.optimizer.adamw is not None:
            trainer.optimizer.adamw.step()
    batch = trainer.batch(0, place=mode.from_tensor)  # real tensors: the host reads sizes from it
    with mode:
        _, memory = measure_step_memory(trainer, batch)
    return trainer, memory


# ---------------------------------------------------------------------------- what the rank does


def _communicators(groups: ProcessGroups) -> Iterator[CommunicatorSummary]:
    for axis in groups.groups:
        members = groups.members[axis]
        yield CommunicatorSummary(axis=axis, size=len(members), first=members[0], last=members[-1])


def _lines(plan: Plan, device: int) -> dict[str, dict[str, int]]:
    """Counts the lines of a program by module and kind."""
    program = plan.programs[device]
    counted = Counter(zip(program.module.tolist(), program.kind.tolist(), strict=True))
    counts: dict[str, dict[str, int]] = {name: {} for name in plan.names}
    for (module, kind), times in sorted(counted.items()):
        counts[plan.names[module]][OpKind(kind).word] = times
    return counts


def count_encoder_phases_in_tp_slots(plan: Plan, device: int) -> tuple[int, int]:
    """Counts the compute phases of encoders, and those between a launch of the LLM and its wait."""
    program, in_flight, phases, inside = plan.programs[device], 0, 0, 0
    for module, op, chunk, _, place in program.rows[program.kind <= OpKind.WEIGHT_GRAD].tolist():
        name = plan.names[module]
        template = plan.template_of(name, OpKind(op), plan.ranks.stage_of(name, device), chunk)
        kind = template[place].kind
        if name == LLM:
            in_flight += (kind == OpKind.LAUNCH) - (kind == OpKind.WAIT)
        elif kind not in COLLECTIVE_PHASES:
            phases, inside = phases + 1, inside + (in_flight > 0)
    return phases, inside


def _travels(plan: Plan, device: int, messages: BatchMessageSpecs) -> Iterator[MessageCount]:
    """Yields messages by module and kind, with the shape of the largest."""
    program = plan.programs[device]
    for number, (module, times) in enumerate(_lines(plan, device).items()):
        for kind in (*SENDS, *RECVS):
            if kind.word not in times:
                continue
            sent = program.microbatch[(program.module == number) & (program.kind == kind)].tolist()
            microbatch = sent[0] if module == LLM else max(sent, key=partial(_count_tokens, messages, module))
            specs = (
                messages.encoder_rows(module, microbatch)
                if kind in SEAMS
                else messages.stage_input(module, 0, microbatch)
            )
            for spec in specs:
                yield MessageCount(
                    module=module,
                    verb=kind.word,
                    times=times[kind.word],
                    shape=spec.shape,
                    dtype=str(spec.dtype).removeprefix("torch."),
                    bytes=torch.Size(spec.shape).numel() * spec.dtype.itemsize,
                )


def _count_tokens(messages: BatchMessageSpecs, module: str, microbatch: int) -> int:
    assert messages.batch is not None, "the step has run"
    return messages.batch.count_tokens(module, microbatch)


def _count_parameters(trainer: RankTrainer, module: str) -> ParameterCount:
    named = trainer.model.parameters.items()
    parameters = [parameter for name, parameter in named if name.startswith(f"{module}.")]
    return ParameterCount(
        count=sum(parameter.numel() for parameter in parameters),
        trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        bytes=sum(parameter.nbytes for parameter in parameters),
    )
