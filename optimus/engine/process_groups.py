"""Process groups from a plan: who talks to whom on integers alone, then one group per axis, in one order.

An *axis* divides ranks into groups that do not overlap: the replicas of a module, or the pairs along every
second edge of its pipelines. Edges are coloured (even, odd, wrap-around), so that no rank is in two pairs of
one axis, and every direction and class of traffic has axes of its own. How many there are depends on the
plan, never on the number of ranks; where a backend can split, one split makes all groups of an axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from optimus.ir.op import Communicator, OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM, RankGrid
from optimus.models.collectives import TpGroup

Members = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One division of ranks into groups; `members` of a rank without a group are none."""

    name: str
    members: Callable[[int], Members]


def group_axes(plan: Plan) -> list[Axis]:
    """Every axis of a plan, in the order in which all ranks make their groups."""
    ranks, found = plan.ranks, []
    for name, module in plan.modules.items():
        found.append(Axis(name=f"{name}.dp", members=_replicas(ranks, name)))
        if module.layout.tp > 1:
            found.append(Axis(name=f"{name}.tp", members=_sharers(ranks, name)))
        for direction in ("forward", "backward")[: 1 + _learns(plan, name)]:
            for colour in _colours(module.layout.pp, module.layout.chunks):
                axis = f"{name}.{direction}.{colour}"
                found.append(Axis(name=axis, members=_pairs(ranks, name, colour)))
        if name != LLM:
            for pipeline in _remote_pipelines(ranks, name):
                for direction in ("seam", "seam-back")[: 1 + _learns(plan, name)]:
                    axis = f"{name}.{direction}.{pipeline}"
                    found.append(Axis(name=axis, members=_seam(ranks, name, pipeline)))
    if ranks.llm.pp > 1:
        found.append(Axis(name="ends", members=_ends(ranks)))
    return found


def replica_ranks(plan: Plan, module: str, rank: int) -> Members:
    """The ranks that hold what a rank holds of a module, itself among them."""
    return _replicas(plan.ranks, module)(rank) or (rank,)


def tp_group_of(plan: Plan, module: str, rank: int) -> TpGroup:
    """A rank's place among those that divide the layers of a module between them."""
    return TpGroup(rank=plan.ranks.place(module, rank).tp, size=plan.modules[module].layout.tp)


def replica_mesh(plan: Plan, module: str) -> DeviceMesh:
    """This rank's replicas of a module, for FSDP2 or DDP; all ranks make theirs at the same point."""
    members = list(replica_ranks(plan, module, dist.get_rank()))
    group = dist.new_group(members, use_local_synchronization=True)
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    return DeviceMesh.from_group(group, device, mesh_dim_names=("replicas",))


def stage_edge(plan: Plan, rank: int, module: str, kind: OpKind) -> tuple[str, int]:
    """The axis that carries a transfer of this rank, and the rank at its other end.

    For the seam seen from stage 0 the axis depends on the microbatch: see `seam_edge`.
    """
    ranks, pp = plan.ranks, plan.modules[module].layout.pp
    device = ranks.class_of(rank)
    stage = ranks.stage_of(module, device)
    ahead = kind in (OpKind.SEND_F, OpKind.RECV_B)  # the edge to the next stage, or from the previous one
    source = stage if ahead else (stage - 1) % pp
    other = ranks.next_stage(module, device, 1 if ahead else -1)
    direction = "forward" if kind in (OpKind.SEND_F, OpKind.RECV_F) else "backward"
    return f"{module}.{direction}.{_colour(source, pp)}", ranks.member(other, rank)


def seam_edge(plan: Plan, rank: int, module: str, kind: OpKind, microbatch: int) -> tuple[str, int]:
    """The axis that carries an encoder microbatch's rows, or their gradient, and the other end."""
    ranks = plan.ranks
    pipeline = plan.modules[module].pipelines[microbatch]
    direction = "seam" if kind in (OpKind.SEND_SEAM, OpKind.RECV_SEAM) else "seam-back"
    ends = _seam_ends(ranks, module, pipeline, rank)
    assert rank in ends, f"rank {rank} is no end of pipeline {pipeline} of {module}"
    entry, last = ends
    other = entry if kind in (OpKind.SEND_SEAM, OpKind.RECV_SEAM_B) else last
    return f"{module}.{direction}.{pipeline}", other


# ---------------------------------------------------------------------------- axes, on integers


def _learns(plan: Plan, name: str) -> bool:
    """Whether gradients flow between the stages of a module, or back over its seam."""
    return any(
        kind in chunk.templates
        for chunk in plan.modules[name].chunks
        for kind in (OpKind.BACKWARD, OpKind.INPUT_GRAD)
    )


def _replicas(ranks: RankGrid, module: str) -> Callable[[int], Members]:
    return lambda rank: ranks.group_of(module, Communicator.DP, rank)


def _sharers(ranks: RankGrid, module: str) -> Callable[[int], Members]:
    return lambda rank: ranks.group_of(module, Communicator.TP, rank)


def _colour(source: int, pp: int) -> str:
    """Of the edge from stage `source` to the next."""
    return "wrap" if source == pp - 1 else "odd" if source % 2 else "even"


def _colours(pp: int, chunks: int) -> list[str]:
    if pp == 1:
        return []
    return ["even"] + ["odd"] * (pp > 2) + ["wrap"] * (chunks > 1)


def _pairs(ranks: RankGrid, module: str, colour: str) -> Callable[[int], Members]:
    """Both ends of the edge of this colour at a rank's stage, if it has one."""
    pp = ranks.layouts[module].pp

    def members(rank: int) -> Members:
        device = ranks.class_of(rank)
        stage = ranks.stage_of(module, device)
        for source, step in ((stage, 1), ((stage - 1) % pp, -1)):
            if _colour(source, pp) == colour:
                return tuple(sorted((rank, ranks.member(ranks.next_stage(module, device, step), rank))))
        return ()

    return members


def _remote_pipelines(ranks: RankGrid, module: str) -> list[int]:
    """Pipelines of an encoder whose last stage is not on LLM stage 0."""
    return [
        pipeline for pipeline in range(ranks.num_pipelines(module)) if _last_stage(ranks, module, pipeline)
    ]


def _last_stage(ranks: RankGrid, module: str, pipeline: int) -> int:
    """The LLM's stage on which an encoder pipeline ends."""
    layout, llm = ranks.layouts[module], ranks.llm
    return pipeline // (llm.tp // layout.tp) // llm.cp * layout.pp + layout.pp - 1


def _seam_ends(ranks: RankGrid, module: str, pipeline: int, like: int) -> Members:
    """The ranks on LLM stage 0 and at the last stage of an encoder pipeline, where `like` stands in both.

    None if the pipeline does not reach that place of the tensor-parallel group.
    """
    layout, llm, place = ranks.layouts[module], ranks.llm, ranks.place(LLM, like)
    across = llm.tp // layout.tp
    if place.tp // layout.tp != pipeline % across:
        return ()
    context, last = pipeline // across % llm.cp, _last_stage(ranks, module, pipeline)
    return ranks.rank_of(0, place.dp, context, place.tp), ranks.rank_of(last, place.dp, context, place.tp)


def _seam(ranks: RankGrid, module: str, pipeline: int) -> Callable[[int], Members]:
    def members(rank: int) -> Members:
        ends = _seam_ends(ranks, module, pipeline, rank)
        return tuple(sorted(ends)) if rank in ends else ()

    return members


def _ends(ranks: RankGrid) -> Callable[[int], Members]:
    """First and last stage of an LLM pipeline: they share tied embeddings."""

    def members(rank: int) -> Members:
        stages = ranks.group_of(LLM, Communicator.PP, rank)
        return (stages[0], stages[-1]) if rank in (stages[0], stages[-1]) else ()

    return members


# ---------------------------------------------------------------------------- process groups


@dataclass(frozen=True, kw_only=True)
class ProcessGroups:
    """A rank's process groups by axis; none where it would be alone.

    `control` holds all ranks of an LLM pipeline, for what hosts tell each other: never a device's data.
    """

    rank: int
    members: Mapping[str, Members]
    groups: Mapping[str, dist.ProcessGroup]
    control: dist.ProcessGroup | None = None

    def get(self, axis: str) -> dist.ProcessGroup | None:
        return self.groups.get(axis)

    def tp_group(self, plan: Plan, module: str) -> TpGroup:
        """This rank's place in the module's tensor-parallel group, with the group."""
        return replace(tp_group_of(plan, module, self.rank), group=self.get(f"{module}.tp"))

    def mesh(self, module: str, device_type: str) -> DeviceMesh | None:
        """The replicas of a module as a mesh, for those who place tensors by it."""
        group = self.get(f"{module}.dp")
        return None if group is None else DeviceMesh.from_group(group, device_type, mesh_dim_names=("dp",))


def make_groups(
    plan: Plan,
    rank: int,
    *,
    timeout_s: float,
    backend: str | None = None,
    options_of: Callable[[str], Any] = lambda axis: None,
) -> ProcessGroups:
    """All groups of this rank. Every rank must call it, at the same time, with the same plan.

    Where a backend cannot split, members name a group after its ranks and the number of groups they already
    have. So every rank makes one for every axis, be it of itself alone: the numbers stay the same everywhere.
    `options_of` gives a backend options for the groups of an axis, by its name.
    """
    splits = dist.get_backend() == "nccl" and backend is None
    timeout = timedelta(seconds=timeout_s)
    control = _control(plan, rank, timeout)  # first: split groups are unequal in number on ranks
    members, groups = {}, {}
    for axis in group_axes(plan):
        mine = members[axis.name] = axis.members(rank)
        if splits:
            every = _all_groups(plan, axis)
            if not every:
                continue
            group = dist.split_group(split_ranks=every, timeout=timeout, group_desc=axis.name)
        else:
            group = dist.new_group(
                list(mine or (rank,)),
                timeout=timeout,
                backend=backend,
                pg_options=options_of(axis.name),
                use_local_synchronization=True,
                group_desc=axis.name,
            )
        if group is not None and len(mine) > 1:
            groups[axis.name] = group
    return ProcessGroups(rank=rank, members=members, groups=groups, control=control)


def _control(plan: Plan, rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """On CPUs whatever the devices are."""
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


def _all_groups(plan: Plan, axis: Axis) -> list[list[int]]:
    """Every group of an axis, in order of its first rank; each is asked for once."""
    seen, found = bytearray(plan.ranks.world), []
    for rank in range(plan.ranks.world):
        members = () if seen[rank] else axis.members(rank)
        for member in members:
            seen[member] = 1
        if len(members) > 1:
            found.append(list(members))
    return found
