"""Derives process groups from a plan: peers on integers alone, then one group per axis, in one order.

An *axis* divides ranks into groups that do not overlap: the replicas of a module, or the pairs along every
second edge of its pipelines. Edges are coloured (even, odd, wrap-around), so that no rank is in two pairs of
one axis, and every direction and class of traffic has axes of its own. Their number depends on the plan,
never on the number of ranks; where a backend can split, one split makes all groups of an axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from optimus.ir.op import Communicator, OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM, RankGrid
from optimus.models.collectives import TpGroup

Members = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GroupAxis:
    """One division of ranks into groups; a rank without a group has no `members`."""

    name: str
    members: Callable[[int], Members]
    shared_with: str = ""  # an earlier axis with the same groups
    sends: Callable[[int], bool] | None = None  # of pairs: whether a rank sends, or receives
    all_to_all: bool = False  # its groups run that, too


def list_group_axes(plan: Plan) -> list[GroupAxis]:
    """Returns every axis of a plan, in the order in which all ranks make their groups."""
    ranks, axes = plan.ranks, list[GroupAxis]()
    like_llm = [name for name, layout in ranks.layouts.items() if layout == ranks.llm]
    for name, module in plan.modules.items():
        # Members run one program, so that they use a group of several modules in one order. Not so for tp:
        # a side stream launches collectives of one module, in an order that others do not know.
        shared_with = f"{like_llm[0]}.dp" if name in like_llm[1:] else ""
        axes.append(
            GroupAxis(
                name=f"{name}.dp", members=_members(ranks, name, Communicator.DP), shared_with=shared_with
            )
        )
        if module.layout.tp > 1:
            members = _members(ranks, name, Communicator.TP)
            axes.append(GroupAxis(name=f"{name}.tp", members=members, all_to_all=name == LLM))  # of rows
        if module.layout.cp > 1:
            members = _members(ranks, name, Communicator.CP)
            axes.append(GroupAxis(name=f"{name}.cp", members=members, all_to_all=name == LLM))
        for direction in ("forward", "backward")[: 1 + needs_backward(plan, name)]:
            for colour in _colours(module.layout.pp, module.layout.chunks):
                axes.append(
                    GroupAxis(
                        name=f"{name}.{direction}.{colour}",
                        members=_pairs(ranks, name, colour),
                        sends=_sends_over_edge(ranks, name, colour, ahead=direction == "forward"),
                    )
                )
        if name != LLM:
            for pipeline in _remote_pipelines(ranks, name):
                for direction in ("seam", "seam-back")[: 1 + needs_backward(plan, name)]:
                    axes.append(
                        GroupAxis(
                            name=f"{name}.{direction}.{pipeline}",
                            members=_seam(ranks, name, pipeline),
                            sends=_sends_over_seam(ranks, to_llm=direction == "seam"),
                        )
                    )
    if plan.dealing_replicas > 1:
        members = _dealing_members(ranks, plan.dealing_replicas)
        axes.append(GroupAxis(name=f"{LLM}.deal", members=members, all_to_all=True))
    if ranks.entry_stage < ranks.llm.pp - 1:
        axes.append(GroupAxis(name="ends", members=_ends(ranks)))
    return axes


def find_replica_ranks(plan: Plan, module: str, rank: int) -> Members:
    """Returns the ranks that hold the same part of a module as a rank, itself included."""
    return plan.ranks.group_of(module, Communicator.DP, rank) or (rank,)


def build_tp_group(plan: Plan, module: str, rank: int) -> TpGroup:
    """Returns a rank's position in the tensor-parallel group of a module, without a process group."""
    return TpGroup(rank=plan.ranks.place(module, rank).tp, size=plan.modules[module].layout.tp)


def build_cp_group(plan: Plan, module: str, rank: int) -> TpGroup:
    """Returns a rank's position in the context-parallel group of a module, without a process group."""
    return TpGroup(rank=plan.ranks.place(module, rank).cp, size=plan.modules[module].layout.cp)


def replica_mesh(plan: Plan, module: str) -> DeviceMesh:
    """Returns this rank's replicas of a module, for FSDP2 or DDP; all ranks call it at the same point."""
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    return make_replica_mesh(find_replica_ranks(plan, module, dist.get_rank()), device)


def make_replica_mesh(replicas: Members, device: str) -> DeviceMesh:
    """Returns a mesh of ranks that are replicas of each other, with a connected group."""
    group = dist.new_group(list(replicas), use_local_synchronization=True)
    return DeviceMesh.from_group(connect_group(group, device), device, mesh_dim_names=("replicas",))


def find_stage_peer(plan: Plan, rank: int, module: str, kind: OpKind) -> tuple[str, int]:
    """Returns the axis that carries a transfer of this rank, and the rank at its other end.

    For the seam seen from the LLM the axis depends on the microbatch: see `find_seam_peer`.
    """
    ranks, pp = plan.ranks, plan.modules[module].layout.pp
    device = ranks.class_of(rank)
    stage = ranks.stage_of(module, device)
    ahead = kind in (OpKind.SEND_F, OpKind.RECV_B)  # the edge to the next stage, or from the previous one
    source = stage if ahead else (stage - 1) % pp
    neighbour = ranks.next_stage(module, device, 1 if ahead else -1)
    direction = "forward" if kind in (OpKind.SEND_F, OpKind.RECV_F) else "backward"
    return f"{module}.{direction}.{_colour(source, pp)}", ranks.member(neighbour, rank)


def find_seam_peer(plan: Plan, rank: int, module: str, kind: OpKind, microbatch: int) -> tuple[str, int]:
    """Returns the axis that carries an encoder microbatch's rows, or their gradient, and the other end."""
    ranks = plan.ranks
    pipeline = plan.modules[module].pipelines[microbatch]
    direction = "seam" if kind in (OpKind.SEND_SEAM, OpKind.RECV_SEAM) else "seam-back"
    ends = _seam_ends(ranks, module, pipeline, rank)
    assert rank in ends, f"rank {rank} is no end of pipeline {pipeline} of {module}"
    entry, last = ends
    peer = entry if kind in (OpKind.SEND_SEAM, OpKind.RECV_SEAM_B) else last
    return f"{module}.{direction}.{pipeline}", peer


def find_receiving_tp_ranks(plan: Plan, module: str, microbatch: int) -> range:
    """Returns the LLM's tensor-parallel ranks at which rows of an encoder microbatch arrive."""
    tp = plan.modules[module].layout.tp
    block = plan.modules[module].pipelines[microbatch] % (plan.ranks.llm.tp // tp)
    return range(block * tp, (block + 1) * tp)


def find_receiving_cp_rank(plan: Plan, module: str, microbatch: int) -> int:
    """Returns the LLM's context-parallel rank at which rows of an encoder microbatch arrive."""
    across = plan.ranks.llm.tp // plan.modules[module].layout.tp
    return plan.modules[module].pipelines[microbatch] // across % plan.ranks.llm.cp


def receives_encoder_rows(plan: Plan, rank: int, module: str, microbatch: int) -> bool:
    """Returns whether rows of an encoder microbatch arrive at a rank of the LLM's entry stage."""
    place = plan.ranks.place(LLM, rank)
    in_context = place.cp == find_receiving_cp_rank(plan, module, microbatch)
    return in_context and place.tp in find_receiving_tp_ranks(plan, module, microbatch)


# ---------------------------------------------------------------------------- axes, on integers


def needs_backward(plan: Plan, name: str) -> bool:
    """Tells whether gradients flow between the stages of a module, or back over its seam."""
    return any(
        kind in chunk.templates
        for chunk in plan.modules[name].chunks
        for kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD)
    )


def _members(ranks: RankGrid, module: str, communicator: Communicator) -> Callable[[int], Members]:
    return lambda rank: ranks.group_of(module, communicator, rank)


def _dealing_members(ranks: RankGrid, replicas: int) -> Callable[[int], Members]:
    """Returns the ranks of the entry stage that exchange rows of dealt images with a rank of it."""

    def members(rank: int) -> Members:
        place = ranks.place(LLM, rank)
        first = place.dp - place.dp % replicas
        group = (ranks.rank_of(place.pp, first + other, place.cp, place.tp) for other in range(replicas))
        return tuple(group) if place.pp == ranks.entry_stage else ()

    return members


def _colour(source: int, pp: int) -> str:
    """Returns the colour of the edge from stage `source` to the next."""
    return "wrap" if source == pp - 1 else "odd" if source % 2 else "even"


def _colours(pp: int, chunks: int) -> list[str]:
    if pp == 1:
        return []
    return ["even"] + ["odd"] * (pp > 2) + ["wrap"] * (chunks > 1)


def _pairs(ranks: RankGrid, module: str, colour: str) -> Callable[[int], Members]:
    """Returns both ends of the edge of this colour at a rank's stage, if it has one."""
    pp = ranks.layouts[module].pp

    def members(rank: int) -> Members:
        device = ranks.class_of(rank)
        stage = ranks.stage_of(module, device)
        for source, step in ((stage, 1), ((stage - 1) % pp, -1)):
            if _colour(source, pp) == colour:
                return tuple(sorted((rank, ranks.member(ranks.next_stage(module, device, step), rank))))
        return ()

    return members


def _sends_over_edge(ranks: RankGrid, module: str, colour: str, *, ahead: bool) -> Callable[[int], bool]:
    """Returns whether a rank is the end of its edge of this colour that sends, ahead or back."""
    pp = ranks.layouts[module].pp

    def sends(rank: int) -> bool:
        return (_colour(ranks.stage_of(module, ranks.class_of(rank)), pp) == colour) == ahead

    return sends


def _sends_over_seam(ranks: RankGrid, *, to_llm: bool) -> Callable[[int], bool]:
    """Returns whether a rank is the end of a seam that sends: rows come to the LLM's entry stage."""
    return lambda rank: (ranks.place(LLM, rank).pp != ranks.entry_stage) == to_llm


def _remote_pipelines(ranks: RankGrid, module: str) -> list[int]:
    """Returns the pipelines of an encoder that do not end on the LLM's entry stage."""
    pipelines = range(ranks.num_pipelines(module))
    return [p for p in pipelines if _exit_stage(ranks, module, p) != ranks.entry_stage]


def _exit_stage(ranks: RankGrid, module: str, pipeline: int) -> int:
    """Returns the LLM stage on which an encoder pipeline ends."""
    layout, llm = ranks.layouts[module], ranks.llm
    return pipeline // (llm.tp // layout.tp) // llm.cp * layout.pp + ranks.exit_stage(module)


def _seam_ends(ranks: RankGrid, module: str, pipeline: int, like: int) -> Members:
    """Returns the ranks on the LLM's entry stage and at the end of an encoder pipeline, placed as `like`.

    Empty if the pipeline does not run on that position of the tensor-parallel group.
    """
    layout, llm, place = ranks.layouts[module], ranks.llm, ranks.place(LLM, like)
    across = llm.tp // layout.tp
    if place.tp // layout.tp != pipeline % across:
        return ()
    context, stages = pipeline // across % llm.cp, (ranks.entry_stage, _exit_stage(ranks, module, pipeline))
    return tuple(ranks.rank_of(stage, place.dp, context, place.tp) for stage in stages)


def _seam(ranks: RankGrid, module: str, pipeline: int) -> Callable[[int], Members]:
    def members(rank: int) -> Members:
        ends = _seam_ends(ranks, module, pipeline, rank)
        return tuple(sorted(ends)) if rank in ends else ()

    return members


def _ends(ranks: RankGrid) -> Callable[[int], Members]:
    """Returns entry and last stage of an LLM pipeline, which share tied embeddings."""

    def members(rank: int) -> Members:
        stages = ranks.group_of(LLM, Communicator.PP, rank)
        ends = stages[ranks.entry_stage], stages[-1]
        return ends if rank in ends else ()

    return members


# ---------------------------------------------------------------------------- process groups


@dataclass(frozen=True, kw_only=True)
class ProcessGroups:
    """Process groups of one rank by axis; none where it would be alone.

    `control` holds all ranks of an LLM pipeline, for messages between hosts, never a device's data.
    """

    rank: int
    members: Mapping[str, Members]
    groups: Mapping[str, dist.ProcessGroup]
    control: dist.ProcessGroup | None = None

    def get(self, axis: str) -> dist.ProcessGroup | None:
        return self.groups.get(axis)

    def tp_group(self, plan: Plan, module: str) -> TpGroup:
        """Returns this rank's position in the module's tensor-parallel group, with the process group."""
        return replace(build_tp_group(plan, module, self.rank), group=self.get(f"{module}.tp"))

    def cp_group(self, plan: Plan, module: str) -> TpGroup:
        """Returns this rank's position in the module's context-parallel group, with the process group."""
        return replace(build_cp_group(plan, module, self.rank), group=self.get(f"{module}.cp"))

    def deal_group(self, plan: Plan) -> TpGroup:
        """Returns this replica's position among those that deal images to each other."""
        rank, size = plan.ranks.place(LLM, self.rank).dp % plan.dealing_replicas, plan.dealing_replicas
        return TpGroup(rank=rank, size=size, group=self.get(f"{LLM}.deal"))

    def mesh(self, module: str, device_type: str) -> DeviceMesh | None:
        """Returns the replicas of a module as a mesh, to place tensors by."""
        group = self.get(f"{module}.dp")
        return None if group is None else DeviceMesh.from_group(group, device_type, mesh_dim_names=("dp",))


def make_process_groups(
    plan: Plan,
    rank: int,
    *,
    timeout_s: float,
    backend: str | None = None,
    options_of: Callable[[str], Any] = lambda axis: None,
) -> ProcessGroups:
    """Makes all groups of this rank. Every rank must call it, at the same time, with the same plan.

    Where a backend cannot split, members name a group after its ranks and the number of groups they already
    have. So every rank makes one for every axis, even of itself alone: the numbers stay the same everywhere.
    `options_of` returns backend options for the groups of an axis, by its name.
    """
    splits = dist.get_backend() == "nccl" and backend is None
    timeout = timedelta(seconds=timeout_s)
    control = _control(plan, rank, timeout)  # first: ranks have unequally many split groups
    members, groups = dict[str, Members](), dict[str, dist.ProcessGroup]()
    for axis in list_group_axes(plan):
        group_ranks = members[axis.name] = axis.members(rank)
        if axis.shared_with:
            if axis.shared_with in groups:
                groups[axis.name] = groups[axis.shared_with]
            continue
        if splits:
            all_groups = _all_groups(plan, axis)
            if not all_groups:
                continue
            group = dist.split_group(split_ranks=all_groups, timeout=timeout, group_desc=axis.name)
        else:
            group = dist.new_group(
                list(group_ranks or (rank,)),
                timeout=timeout,
                backend=backend,
                pg_options=options_of(axis.name),
                use_local_synchronization=True,
                group_desc=axis.name,
            )
        if group is not None and len(group_ranks) > 1:
            groups[axis.name] = group
    return ProcessGroups(rank=rank, members=members, groups=groups, control=control)


def connect_groups(plan: Plan, groups: ProcessGroups, device: torch.device) -> None:
    """Runs one small operation of every kind in every group, axis by axis: on all ranks in one order.

    NCCL connects a communicator in its first operation, two peers in their first message, and blocks the host
    there until all members have come. Programs first use their groups in an order that differs from rank to
    rank: one would wait for another that waits for it.
    """
    for axis in list_group_axes(plan):
        group = groups.get(axis.name)
        if group is None or axis.shared_with or dist.get_backend(group) == "fake":
            continue
        if axis.sends is None:
            connect_group(group, device, all_to_all=axis.all_to_all)
        elif axis.sends(groups.rank):
            dist.send(torch.ones(1, device=device), group=group, group_dst=1 - dist.get_rank(group))
        else:
            dist.recv(torch.empty(1, device=device), group=group, group_src=1 - dist.get_rank(group))


def connect_group(
    group: dist.ProcessGroup, device: torch.device | str, *, all_to_all: bool = False
) -> dist.ProcessGroup:
    """Connects the members of a group that runs collectives; returns the group."""
    ones = torch.ones(dist.get_world_size(group), device=device)
    members = TpGroup(rank=dist.get_rank(group), size=len(ones), group=group)
    if members.size > 1:
        dist.all_reduce(ones, group=group)
        members.all_gather(ones[:1]).wait()
        members.reduce_scatter(ones).wait()
        if all_to_all:
            members.all_to_all(ones, [1] * len(ones), [1] * len(ones)).wait()
    return group


def _control(plan: Plan, rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """Makes the control group, on CPUs whatever the devices are."""
    pipeline = plan.ranks.group_of(LLM, Communicator.PP, rank)
    if len(pipeline) == 1:
        return None
    backend = "gloo" if dist.get_backend() == "nccl" else None
    return dist.new_group(
        list(pipeline),
        timeout=timeout,
        backend=backend,
        use_local_synchronization=True,
        group_desc="control",
    )


def _all_groups(plan: Plan, axis: GroupAxis) -> list[list[int]]:
    """Returns every group of an axis, in order of its first rank."""
    seen, groups = bytearray(plan.ranks.world), list[list[int]]()
    for rank in range(plan.ranks.world):
        members = () if seen[rank] else axis.members(rank)
        for member in members:
            seen[member] = 1
        if len(members) > 1:
            groups.append(list(members))
    return groups
