"""Plans keep NCCL's rules, which a strict network over gloo enforces and names where they are broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from engine_cases import SIXTEEN, Case
from strict_network import run_strict_ranks
from test_equality import GRADIENT, check
from torch import Tensor
from torch import distributed as dist
from worker_lines import run_worker

import optimus
from optimus.engine.process_groups import GroupAxis, connect_group, find_stage_peer, list_group_axes
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan

MANY = 400  # ranks of which only some members are compared
SOON_S = 2.0  # in which a rank that waits gives up

# ---------------------------------------------------------------------------- rules


def group(ranks: list[int], name: str = "") -> dist.ProcessGroup:
    return dist.new_group(ranks, backend="strict", use_local_synchronization=True, group_desc=name)


def numbers(count: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(count, dtype=dtype)


def run_all_kinds(rank: int) -> list[Any]:
    """Every kind of operation between three ranks, and messages between two."""
    every, results = group([0, 1, 2], "all"), list[Any]()
    total = numbers() + rank
    dist.all_reduce(total, group=every)
    parts = [torch.zeros(4) for _ in range(3)]
    dist.all_gather(parts, numbers() * rank, group=every)
    shared = numbers() * (rank + 1)
    dist.broadcast(shared, 1, group=every)
    connect_group(every, "cpu", all_to_all=True)
    results += [total.tolist(), torch.stack(parts).sum(0).tolist(), shared.tolist()]
    if rank < 2:
        pair, received = group([0, 1], "pair"), torch.zeros(4)
        if rank:
            dist.send(numbers(), 0, group=pair)
        else:
            dist.recv(received, 1, group=pair)
            results.append(received.tolist())
    return results


def swap_collectives(rank: int) -> None:
    every = group([0, 1], "all")
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(numbers(), group=every),
        lambda: dist.broadcast(numbers(), 0, group=every),
    ]
    for call in calls:  # connects both
        call()
    for call in calls[:: -1 if rank else 1]:
        call()


def reduce_other_sizes(rank: int) -> None:
    dist.all_reduce(numbers(4 + rank), group=group([0, 1], "all"))


def reduce_other_dtypes(rank: int) -> None:
    dist.all_reduce(numbers(dtype=torch.float64 if rank else torch.float32), group=group([0, 1], "all"))


def receive_other_size(rank: int) -> None:
    pair = group([0, 1], "pair")
    dist.recv(numbers(8), 0, group=pair) if rank else dist.send(numbers(4), 1, group=pair)


def send_what_nobody_receives(rank: int) -> None:
    pair = group([0, 1], "pair")
    dist.recv(numbers(), 0, group=pair) if rank else dist.send(numbers(), 1, group=pair)
    if not rank:
        dist.send(numbers(), 1, group=pair)


def both_send_first(rank: int) -> None:
    """Fine over gloo, which takes a small message before it is received."""
    pair, other = group([0, 1], "pair"), 1 - rank
    for source in (0, 1):  # connects both directions
        dist.send(numbers(), other, group=pair) if rank == source else dist.recv(numbers(), other, group=pair)
    dist.send(numbers(), other, group=pair)
    dist.recv(numbers(), other, group=pair)


def first_use_in_two_orders(rank: int) -> None:
    groups = [group([0, 1], name) for name in ("one", "other")]
    for each in groups[:: -1 if rank else 1]:
        dist.all_reduce(numbers(), group=each)


def post_three(rank: int) -> list[float]:
    """Each rank posts three receives, then three sends: both directions need queues of their own."""
    there, back = (group([0, 1], name) for name in ("there", "back"))
    here, away = (back, there) if rank == 0 else (there, back)
    other = 1 - rank
    for source, pair in ((0, there), (1, back)):
        dist.send(numbers(), other, group=pair) if rank == source else dist.recv(numbers(), other, group=pair)
    received = [torch.zeros(4) for _ in range(3)]
    posted = [dist.irecv(tensor, other, group=here) for tensor in received]
    sent = [dist.isend(numbers(), other, group=away) for _ in received]
    for work in (*posted, *sent):
        assert work is not None
        work.wait()
    return [float(tensor.sum()) for tensor in received]


def test_an_operation_of_every_kind_does_what_it_does_over_gloo() -> None:
    ranks = run_strict_ranks(run_all_kinds, 3)
    assert ranks[0] == [[3, 6, 9, 12], [0, 3, 6, 9], [0, 2, 4, 6], [0, 1, 2, 3]]
    assert ranks[1] == ranks[2] == ranks[0][:3]


@pytest.mark.ci("engine")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("function", "rules", "named"),
    [
        (
            swap_collectives,
            {},
            "operation 2: all-reduce of 4 elements of float32 meets operation 2: broadcast",
        ),
        (reduce_other_sizes, {}, "all-reduce of 4 elements of float32 meets operation 0: all-reduce of 5"),
        (reduce_other_dtypes, {}, "meets operation 0: all-reduce of 4 elements of float64 of rank 1"),
        (receive_other_size, {}, "send of 4 elements of float32 meets operation 0: receive of 8"),
        (send_what_nobody_receives, {}, "operation 1: send of 4 elements of float32 waits for members"),
        (both_send_first, {}, "operation 2: send of 4 elements of float32 meets operation 2: send of 4"),
        (first_use_in_two_orders, {}, "blocks the host in its first all-reduce: rank 1 does not come"),
        (reduce_other_sizes, {"sealed": True}, "connects in a step: all-reduce"),
        (post_three, {"queues": 1}, "waits for members that do not come to it"),
        (post_three, {"pending": 2}, "is posted behind 2 others"),
    ],
)
def test_a_broken_rule_is_named(function: Any, rules: dict[str, Any], named: str) -> None:
    told = run_strict_ranks(function, 2, timeout_s=SOON_S, **rules)
    assert any(named in line for line in told), told


@pytest.mark.ci("engine")
@pytest.mark.parametrize("rules", [{"queues": 2}, {"pending": 6}, {}])
def test_the_same_with_room_is_allowed(rules: dict[str, Any]) -> None:
    assert run_strict_ranks(post_three, 2, **rules) == [[6.0] * 3] * 2


# ---------------------------------------------------------------------------- plans

QUICK = ("two by two interleaved", "tp: two stages", "fsdp: four ranks, frozen trunk")
GROUPS = ("", "tp", "cp", "dealt", "systems", "sharded", "tp-sharded", "cp-sharded", "sixteen")


def check_strict(*names: str, timeout_s: float) -> int:
    lines = run_worker("engine_worker.py", "2", *names, timeout_s=timeout_s, NETWORK="strict")
    for line in lines:
        check(line)
    return len(lines)


@pytest.mark.ci("engine")
@pytest.mark.timeout(240)
def test_a_few_plans_keep_the_rules() -> None:
    assert check_strict(*QUICK, timeout_s=230) == len(QUICK)


@pytest.mark.ci("engine")
@pytest.mark.timeout(240)
def test_a_strict_network_changes_no_bit() -> None:
    (loose,), (strict,) = (
        run_worker("engine_worker.py", "2", QUICK[0], timeout_s=110, NETWORK=network)
        for network in ("gloo", "strict")
    )
    assert strict["digests"] == loose["digests"]


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ["hf_fill_worker.py", "fill_worker.py", "fill_vlm_worker.py"])
def test_all_modules_keep_the_rules(script: str) -> None:
    lines = run_worker(script, timeout_s=850, NETWORK="strict")
    assert len(lines) >= 8
    for line in lines:
        assert "error" not in line, line["error"]
        assert line["gradients"] <= GRADIENT, line


@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", GROUPS)
def test_all_plans_keep_the_rules(name: str) -> None:
    assert check_strict(*filter(None, [name]), timeout_s=1700) >= 9


@pytest.mark.ci("engine")
@pytest.mark.timeout(120)
def test_groups_that_connect_at_their_first_use_block_each_other() -> None:
    (line,) = run_worker("engine_worker.py", "0", "two by two", timeout_s=110, NETWORK="unconnected")
    assert "blocks the host in its first" in line["error"] and "does not come" in line["error"]


# ---------------------------------------------------------------------------- connections, on integers


def check_axis(axis: GroupAxis, ranks: list[int]) -> int:
    """Checks that an axis divides ranks: every member of a group names the same ones; how many have one."""
    found = 0
    for rank in ranks:
        members = axis.members(rank)
        if len(members) < 2:
            continue
        found += 1
        assert rank in members and len(set(members)) == len(members)
        for other in members if len(ranks) < MANY else {members[0], members[-1], members[len(members) // 2]}:
            assert axis.members(other) == members, (axis.name, rank, other)
        if axis.sends is not None:
            assert len(members) == 2 and sum(map(axis.sends, members)) == 1, (axis.name, members)
    return found


def check_connections(plan: Plan, ranks: list[int]) -> None:
    """Checks what makes connecting safe: one order of axes, each of which divides the ranks."""
    axes = {axis.name: axis for axis in list_group_axes(plan)}
    assert sum(check_axis(axis, ranks) for axis in axes.values())
    for rank, module, kind in product(ranks, plan.modules, (OpKind.SEND_F, OpKind.SEND_B)):
        name, peer = find_stage_peer(plan, rank, module, kind)
        if plan.modules[module].layout.pp > 1 and name in axes:
            sends = axes[name].sends
            assert sends is not None and sends(rank) and not sends(peer), (name, rank, peer)


@pytest.mark.ci("engine")
@pytest.mark.parametrize("name", ["gpu/bench-vl", "paper/small-a100", "paper/A"])
def test_all_ranks_connect_their_groups_in_one_order(name: str) -> None:
    plan = optimus.plan(optimus.find_job(name), strategy="optimus", systems=(), draws=0).plan
    check_connections(plan, list(range(plan.ranks.world)))


@pytest.mark.ci("engine")
def test_thousands_of_ranks_connect_their_groups_in_one_order() -> None:
    job = optimus.find_job("paper/strong-3072")
    plan = optimus.plan(job, strategy="optimus", systems=(), draws=0).plan
    assert plan.ranks.world == 3072
    check_connections(plan, list(range(3072)))
    more = {
        name: replace(module, layout=module.layout.with_(dp=33 * module.layout.dp))
        for name, module in plan.modules.items()
    }
    larger = replace(plan, modules=more)
    assert larger.ranks.world == 101_376
    check_connections(larger, Random(0).sample(range(101_376), 400))


@pytest.mark.parametrize("case", SIXTEEN, ids=lambda case: case.name)
def test_plans_of_all_systems_connect_their_groups_in_one_order(case: Case) -> None:
    check_connections(case.plan, list(range(case.ranks)))


def test_a_rank_that_names_other_members_is_noticed() -> None:
    axis = GroupAxis(name="broken", members=lambda rank: (0, 1) if rank == 0 else (1, 2))
    with pytest.raises(AssertionError, match="broken"):
        check_axis(axis, [0, 1, 2])
    both = GroupAxis(name="pairs", members=lambda rank: (0, 1), sends=lambda rank: True)
    with pytest.raises(AssertionError, match="pairs"):
        check_axis(both, [0, 1])
