"""Who talks to whom: axes divide ranks, both ends of a transfer agree, and all worlds cost the same."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from random import Random
from typing import Any

import pytest
from engine_cases import CASES
from tiny_plans import tiny_plan
from torch import distributed as dist

from optimus.engine import process_groups as engine_groups
from optimus.engine.process_groups import (
    find_seam_peer,
    find_stage_peer,
    list_group_axes,
    make_process_groups,
)
from optimus.engine.torch_private import fake_process_group
from optimus.ir.op import RECVS, SENDS, OpKind
from optimus.ir.plan import EncoderBlocks, Plan, Seconds
from optimus.planner.user_modules import plan_modules

FULL, FROZEN = Seconds(forward_s=1.0, backward_s=2.0, weight_s=1.0), Seconds(forward_s=1.0, backward_s=0.0)
SEAM_KINDS = (OpKind.SEND_SEAM, OpKind.RECV_SEAM, OpKind.SEND_SEAM_B, OpKind.RECV_SEAM_B)
WORLDS = (64, 3072, 100_000)
LISTED_WORLDS = (64, 3072)  # in which every group of every axis is listed


def modules_plan(
    *, ranks: int, pp: int, chunks: int = 1, order: str = "", encoders: tuple[tuple[int, int, Seconds], ...]
) -> Plan:
    """Encoders are pp, pieces, and the seconds of each of their eight blocks."""
    return plan_modules(
        stages=[FULL] * (pp * chunks),
        encoders={
            f"encoder{number}": EncoderBlocks(blocks=[seconds] * 8, pp=own, pieces=pieces)
            for number, (own, pieces, seconds) in enumerate(encoders)
        },
        microbatches=2 * pp,
        ranks=ranks,
        pp=pp,
        order=order,
    )


def with_replicas(plan: Plan, times: int) -> Plan:
    """The plan with `times` as many data-parallel replicas of every module: programs stay the same."""
    modules = {
        name: replace(module, layout=module.layout.with_(dp=times * module.layout.dp))
        for name, module in plan.modules.items()
    }
    return replace(plan, modules=modules)


def random_plans(count: int) -> Iterator[Plan]:
    """Random plans with TP, CP and EP 1."""
    drawn = (tiny_plan(Random(seed)) for seed in range(1000))
    return islice((p for p in drawn if p.ranks.llm.tp == p.ranks.llm.cp == p.ranks.llm.ep == 1), count)


def many_plans() -> Iterator[Plan]:
    for pp in (1, 2, 3, 4, 6, 8):
        fits = [own for own in range(1, pp + 1) if pp % own == 0]
        for chunks in (1, 2):
            own, other = fits[chunks % len(fits)], fits[-1 - chunks % len(fits)]
            encoders = ((own, 1, FULL), (other, 2, FROZEN if chunks == 2 else FULL))[: (pp + chunks) % 3]
            plan = modules_plan(ranks=2 * pp, pp=pp, chunks=chunks, encoders=encoders)
            yield from (with_replicas(plan, times) for times in (1, 2, 3))
        yield modules_plan(ranks=pp, pp=pp, order="zero-bubble", encoders=((fits[0], 1, FULL),))
    yield from random_plans(15)
    yield from (case.plan for case in CASES if case.ranks > 2)


@pytest.fixture(scope="module", params=["few", pytest.param("many", marks=pytest.mark.ci("engine"))])
def many(request: pytest.FixtureRequest) -> list[Plan]:
    """Plans of many layouts that the engine runs."""
    if request.param == "few":
        plan = modules_plan(ranks=8, pp=4, chunks=2, encoders=((2, 1, FULL), (4, 2, FROZEN)))
        return [*random_plans(5), plan, with_replicas(plan, 3)]
    plans = list(many_plans())
    assert len(plans) >= 60
    return plans


def test_every_axis_divides_ranks_without_overlap_and_all_members_agree(many: list[Plan]) -> None:
    for plan in many:
        everybody = range(plan.ranks.world)
        for axis in list_group_axes(plan):
            for rank in everybody:
                members = axis.members(rank)
                assert not members or rank in members, (axis.name, rank)
                assert list(members) == sorted(set(members)) and set(members) <= set(everybody)
                assert all(axis.members(other) == members for other in members), (axis.name, rank)


def test_axes_have_names_of_their_own_and_do_not_depend_on_the_number_of_replicas(many: list[Plan]) -> None:
    for plan in many:
        names = [axis.name for axis in list_group_axes(plan)]
        assert len(names) == len(set(names))
        assert [axis.name for axis in list_group_axes(with_replicas(plan, 3))] == names


Line = tuple[str, int, int]  # module, virtual stage at the receiving end of the edge, microbatch


def transfers(plan: Plan, rank: int) -> Iterator[tuple[OpKind, str, int, Line]]:
    """Kind, axis, other end and what travels, in the order of a rank's program."""
    ranks = plan.ranks
    device = ranks.class_of(rank)
    for number, kind_number, chunk, microbatch, _ in plan.programs[device].rows.tolist():
        name, kind = plan.names[number], OpKind(kind_number)
        if kind in SEAM_KINDS:
            yield kind, *find_seam_peer(plan, rank, name, kind, microbatch), (name, 0, microbatch)
        elif kind in SENDS or kind in RECVS:
            virtual = chunk * plan.modules[name].layout.pp + ranks.stage_of(name, device)
            later = virtual + (kind in (OpKind.SEND_F, OpKind.RECV_B))  # the later end of the edge
            yield kind, *find_stage_peer(plan, rank, name, kind), (name, later, microbatch)


def test_both_ends_of_every_transfer_name_the_same_axis_and_each_other(many: list[Plan]) -> None:
    for plan in many:
        members = {axis.name: axis.members for axis in list_group_axes(plan)}
        sent: dict[tuple[str, int, int], list[Line]] = defaultdict(list)
        received: dict[tuple[str, int, int], list[Line]] = defaultdict(list)
        for rank in range(plan.ranks.world):
            for kind, axis, other, line in transfers(plan, rank):
                assert other != rank
                assert members[axis](rank) == tuple(sorted((rank, other))), (kind, axis, rank, other)
                if kind in SENDS:
                    sent[axis, rank, other].append(line)
                else:
                    received[axis, other, rank].append(line)
        assert sent == received  # the k-th send with the k-th receive, of the same rows


def test_a_pair_has_only_one_direction_on_an_axis(many: list[Plan]) -> None:
    """So nothing waits behind traffic of the other direction."""
    for plan in many:
        directions: dict[str, set[OpKind]] = defaultdict(set)
        for rank in range(plan.ranks.world):
            for kind, axis, _, _ in transfers(plan, rank):
                directions[axis].add(kind)
        assert all(
            len(found & set(SENDS)) == 1 and len(found & set(RECVS)) == 1 for found in directions.values()
        )


def test_a_wrong_peer_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = modules_plan(ranks=8, pp=4, encoders=((2, 1, FULL),))
    test_both_ends_of_every_transfer_name_the_same_axis_and_each_other([plan])
    right = engine_groups._colour
    monkeypatch.setattr(engine_groups, "_colour", lambda source, pp: right(max(source, 1), pp))
    with pytest.raises((AssertionError, KeyError)):
        test_both_ends_of_every_transfer_name_the_same_axis_and_each_other([plan])


# ---------------------------------------------------------------------------- process groups


@cache
def eight_ranks() -> Plan:
    encoders = ((2, 1, FULL), (1, 2, FULL), (4, 1, FROZEN))
    return modules_plan(ranks=8, pp=4, chunks=2, encoders=encoders)


def world_plan(world: int) -> Plan:
    return with_replicas(eight_ranks(), world // 8)


def counted(monkeypatch: pytest.MonkeyPatch, name: str, answer: Callable[..., Any]) -> list[Any]:
    """Calls of a function of torch.distributed, in order."""
    calls: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return answer(*args, **kwargs)

    monkeypatch.setattr(dist, name, call)
    return calls


def test_ranks_make_as_many_groups_in_a_world_of_any_size(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    calls = counted(monkeypatch, "new_group", dist.new_group)
    found = {}
    for world in WORLDS:
        plan = world_plan(world)
        names = [axis.name for axis in list_group_axes(plan)]
        for rank in (0, world // 2, world - 1):
            calls.clear()
            with fake_process_group(rank, world):
                began_s = time.perf_counter()
                made = make_process_groups(plan, rank, timeout_s=5)
                seconds = time.perf_counter() - began_s
                assert {len(made.members[name]) > 1 for name in made.groups} == {True}
                mesh = made.mesh("llm", "cpu")
                assert mesh is not None and mesh.size() == world // 4 and mesh.mesh_dim_names == ("dp",)
                assert made.get("llm.dp") is not None and made.get("llm.dp").size() == world // 4  # type: ignore[union-attr]
            # One order on all ranks; the first is for what hosts tell each other.
            assert [kwargs["group_desc"] for _, kwargs in calls] == ["control", *names]
            assert all(rank in ranks for (ranks,), _ in calls)
            found[world, rank] = len(calls)
            request.node.user_properties.append((f"seconds of rank {rank} of {world}", round(seconds, 3)))
            assert seconds < 10
    assert len(set(found.values())) == 1, found


@pytest.fixture
def splitting(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of `split_group`, as a backend that can split gets them; else only hosts get a group, on CPUs."""

    def new_group(*_: Any, backend: str, group_desc: str, **__: Any) -> None:
        assert (backend, group_desc) == ("gloo", "control")

    monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
    monkeypatch.setattr(dist, "new_group", new_group)
    return counted(monkeypatch, "split_group", lambda **_: None)


@pytest.mark.parametrize("world", LISTED_WORLDS)
def test_a_split_divides_the_ranks_of_its_axis(splitting: list[Any], world: int) -> None:
    """One call per axis, with every group of it; so all ranks give the same lists."""
    plan = world_plan(world)
    make_process_groups(plan, 0, timeout_s=5)
    for (_, kwargs), axis in zip(splitting, list_group_axes(plan), strict=True):
        lists = kwargs["split_ranks"]
        named = [member for members in lists for member in members]
        assert len(named) == len(set(named)) and set(named) <= set(range(world))
        for rank in {0, 1, world // 2, world - 1}:
            mine = [members for members in lists if rank in members]
            assert mine == ([list(axis.members(rank))] if len(axis.members(rank)) > 1 else [])


def test_ranks_split_as_often_in_a_world_of_any_size(
    splitting: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_groups, "_all_groups", lambda *_: [[0, 1]])  # see the test before this one
    found = set()
    for world in WORLDS:
        plan = world_plan(world)
        for rank in (0, world // 2, world - 1):
            splitting.clear()
            make_process_groups(plan, rank, timeout_s=5)
            assert [kwargs["group_desc"] for _, kwargs in splitting] == [
                axis.name for axis in list_group_axes(plan)
            ]
            found.add(len(splitting))
    assert len(found) == 1
