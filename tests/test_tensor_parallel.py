"""Tensor-parallel plans compute what one process does, with encoder work in their slots or without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from engine_bugs import BUGS
from engine_cases import TP, TP_SHARDED, Case
from hypothesis import given
from hypothesis import strategies as st
from sharding_bugs import SHARDING_BUGS
from tensor_parallel_bugs import TP_BUGS
from test_equality import caught, check, check_cases
from torch import Tensor
from worker_lines import run_worker

from optimus.engine.build_rank import choose_recompute_mode, find_layer_ranges
from optimus.engine.process_groups import build_cp_group, build_tp_group
from optimus.engine.rank_batch import BinRows, RowPlaces, route_encoder_rows
from optimus.errors import UserError
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.models import phase_order
from optimus.models.build import build_layers, insert_collectives
from optimus.models.chunk import SegmentedChunk
from optimus.models.collectives import NO_TP, ParamSplit, TpGroup
from optimus.models.microbatch_inputs import SeamRoute
from optimus.models.phase_order import SKIPPED_IN_RECOMPUTE, place_phases
from optimus.verify.validator import check_plan

QUICK = ("tp: four", "sharded tp: eight: pp 2 x tp 2 x dp 2, two encoders")


@pytest.mark.ci("tensor parallelism")
@pytest.mark.timeout(240)
def test_a_few_tensor_parallel_plans_compute_what_one_process_does() -> None:
    assert set(check_cases(2, *QUICK, timeout_s=200)) == set(QUICK)


@pytest.mark.ci("tensor parallelism")
@pytest.mark.timeout(240)
def test_slots_change_no_bit() -> None:
    lines = run_worker("engine_worker.py", "2", "tp: two stages", "tp: two stages, no slots", timeout_s=200)
    for line in lines:
        check(line)
    assert lines[0]["digests"] == lines[1]["digests"]


@pytest.mark.heavy
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("group", "cases"), [("tp", TP), ("tp-sharded", TP_SHARDED)])
def test_all_tensor_parallel_plans_compute_what_one_process_does(group: str, cases: list[Case]) -> None:
    assert len(check_cases(20, group, timeout_s=2300)) == len(cases) >= 16


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_every_planted_bug_is_noticed() -> None:
    lines = run_worker("engine_worker.py", "tp-bugs", timeout_s=850)
    missed = [line["name"] for line in lines if not caught(line)]
    assert len(lines) == len(TP_BUGS) >= 15
    assert not missed


def test_every_planted_bug_replaces_something_that_exists() -> None:
    """Renames reach these bugs only as strings, and the tests that run them are heavy."""
    for _, plant in (*BUGS.values(), *TP_BUGS.values(), *SHARDING_BUGS.values()):
        with plant():
            pass


# ---------------------------------------------------------------------------- plans and phases


def in_slots(plan: Plan) -> int:
    """Phases of encoders between a launch of the LLM and its wait."""
    found = 0
    for device, program in enumerate(plan.programs):
        in_flight = 0
        for module, kind, chunk, _, place in program.rows[program.kind <= OpKind.WEIGHT_GRAD].tolist():
            name = plan.names[module]
            stage = plan.ranks.stage_of(name, device)
            phase = plan.template_of(name, OpKind(kind), stage, chunk)[place]
            if name == LLM:
                in_flight += (phase.kind == OpKind.LAUNCH) - (phase.kind == OpKind.WAIT)
            else:
                found += in_flight > 0
    return found


@pytest.mark.parametrize("case", [case for case in TP if case.ranks <= 8], ids=lambda case: case.name)
def test_plans_fill_slots_unless_told_not_to_and_pass_the_proof(case: Case) -> None:
    assert (in_slots(case.plan) > 0) == case.slots
    assert check_plan(case.plan).ok
    check_launches(case)


def check_launches(case: Case) -> None:
    """Every collective is launched and waited for at its own lines, and the one that is spared at none."""
    for module in case.job.model.modules:
        plan, name = case.plan, module.name
        for rank in range(case.ranks):
            stage = plan.ranks.stage_of(name, plan.ranks.class_of(rank))
            tp_group, cp_group = build_tp_group(plan, name, rank), build_cp_group(plan, name, rank)
            ranks: dict[str, Any] = {"tp_group": tp_group, "cp_group": cp_group}
            for number, (first, end) in enumerate(find_layer_ranges(plan, module, rank)):
                layers = build_layers(
                    module, dtype=torch.bfloat16, device="meta", first=first, end=end, **ranks
                )
                cut = [insert_collectives(layer) for layer in layers]
                if name == LLM and first == 0 and plan.dealing_replicas > 1:
                    replicas = TpGroup(rank=0, size=plan.dealing_replicas)
                    cut[0] = [layers[0][0].make_exchange(replicas, "deal"), *cut[0]]
                chunk = SegmentedChunk(
                    cut,
                    recompute=choose_recompute_mode(plan, name),
                    regather=plan.modules[name].regather,
                )
                for kind in (OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD):
                    template = plan.template_of(name, kind, stage, number)
                    if not template:
                        continue
                    placed = place_phases("op", template, chunk.phases(kind, 0))
                    for line, (planned, phases) in enumerate(zip(template, placed, strict=True)):
                        if planned.kind not in (OpKind.LAUNCH, OpKind.WAIT):
                            continue
                        spared = planned.name == SKIPPED_IN_RECOMPUTE and kind != OpKind.FORWARD
                        here = [phase.kernels for phase in phases if phase.kind == planned.kind]
                        assert here == ([] if spared else [(planned.name,)]), (line, planned, here)


def drawn(kind: OpKind) -> list[str]:
    """Phases of an op as the docstring of `phase_order` draws them: three columns, the third with I and W."""
    columns = [(0, 30), (30, 60), (60, 90)]
    column = {OpKind.FORWARD: 0, OpKind.BACKWARD: 1, OpKind.INPUT_GRAD: 2, OpKind.WEIGHT_GRAD: 2}[kind]
    drawing, _, _ = (phase_order.__doc__ or "").partition("With context parallelism")
    lines = [line[4:] for line in drawing.splitlines() if "|- " in line]
    begin, end = columns[column]
    cells = [line[begin:end].strip() for line in lines]
    if kind in (OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD):
        half = cells.index("weight gradient (W)")
        cells = cells[:half] if kind == OpKind.INPUT_GRAD else cells[half + 1 :]
    return [cell.removeprefix("|- ") for cell in cells if cell.startswith("|- ")]


@pytest.mark.parametrize("kind", [OpKind.FORWARD, OpKind.BACKWARD, OpKind.INPUT_GRAD, OpKind.WEIGHT_GRAD])
def test_the_phases_of_a_layer_are_those_of_the_drawing(kind: OpKind) -> None:
    llm = TP[0].job.model.llm
    (layer,) = build_layers(
        llm, dtype=torch.bfloat16, device="meta", first=1, end=2, tp_group=TpGroup(size=2)
    )
    marks = {OpKind.LAUNCH: "< ", OpKind.WAIT: "> "}
    phases = [
        marks.get(phase.kind, "") + phase.kernels[0]
        for phase in SegmentedChunk([insert_collectives(layer)]).phases(kind, 0)
    ]
    assert phases == drawn(kind)


# ---------------------------------------------------------------------------- parts of parameters


blocks = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 3)), min_size=1, max_size=3)


@given(blocks=blocks, size=st.integers(1, 5), dim=st.integers(0, 1))
def test_parts_make_up_the_whole(blocks: list[tuple[int, int]], size: int, dim: int) -> None:
    split = ParamSplit(dim=dim, blocks=tuple(blocks))
    shape = [2, 2]
    shape[dim] = split.shard_length(1)
    whole = torch.arange(1, 1 + shape[0] * shape[1]).reshape(shape)
    parts = [split.shard(whole, rank, size) for rank in range(size)]
    assert {part.shape[dim] for part in parts} == {split.shard_length(size)}
    assert torch.equal(split.unshard(parts), whole)
    assert sum(int((part != 0).sum()) for part in parts) == whole.numel()


def test_heads_that_do_not_go_round_are_refused() -> None:
    case = replace(TP[0], tp=4)
    llm = case.job.model.llm
    attention = replace(llm.stack.attention, heads=4, kv_heads=2)
    odd = replace(llm, stack=replace(llm.stack, attention=attention))
    with pytest.raises(UserError, match="does not divide 4 heads that share 2") as error:
        build_layers(odd, dtype=torch.float32, device="meta", tp_group=TpGroup(size=4))
    assert "use 1 or 2" in str(error.value)


# ---------------------------------------------------------------------------- the seam


@dataclass(frozen=True)
class DealtRows:
    """Bins of some replicas that feed one microbatch of each: of every row, its replica and its place."""

    replicas: int
    size: int  # of the tensor-parallel group
    length: int
    bins: list[tuple[int, range, list[tuple[int, int]]]]

    def seen_by(self, replica: int) -> list[BinRows]:
        """Returns the bins as a rank of one replica knows them: not the places of others' rows."""
        return [
            BinRows(
                replica=encodes,
                holders=holders,
                owners=torch.tensor([owner for owner, _ in rows], dtype=torch.int64),
                targets=torch.tensor(
                    [place if owner == replica else self.length for owner, place in rows], dtype=torch.int64
                ),
            )
            for encodes, holders, rows in self.bins
        ]


@st.composite
def dealt_rows(draw: st.DrawFn) -> DealtRows:
    replicas, size = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    length = size * draw(st.integers(1, 4))
    places = list(draw(st.permutations([(r, at) for r in range(replicas) for at in range(length)])))
    bins = []
    for replica in range(replicas):
        for _ in range(draw(st.integers(0, 3))):
            tp = draw(st.sampled_from([tp for tp in (1, 2, 4) if size % tp == 0]))
            block = draw(st.integers(0, size // tp - 1))
            count = tp * draw(st.integers(0, 3))
            wanted: list[bool] = draw(st.lists(st.booleans(), min_size=count, max_size=count))
            own = [place for place in places if replicas > 1 or place[0] == replica]
            rows = [own.pop() if own and want else (replicas, length) for want in wanted]
            places = [place for place in places if place not in rows]
            bins.append((replica, range(block * tp, (block + 1) * tp), rows))
    return DealtRows(replicas, size, length, bins)


def exchange(held: list[Tensor], routes: list[SeamRoute]) -> list[Tensor]:
    """Returns what every rank of a group receives."""
    for mine, route in zip(held, routes, strict=True):
        assert sum(route.pieces) == len(mine)
    sent = [mine[route.leaving].split(route.sent) for mine, route in zip(held, routes, strict=True)]
    received = [[of_rank[to] for of_rank in sent] for to in range(len(routes))]
    assert [tuple(map(len, each)) for each in received] == [route.received for route in routes]
    return [torch.cat(each) for each in received]


@given(dealt_rows())
def test_every_row_reaches_its_replica_and_place_and_no_other(given: DealtRows) -> None:
    size, replicas = given.size, given.replicas
    routes = {
        (replica, rank): route_encoder_rows(
            given.seen_by(replica),
            RowPlaces.contiguous(given.length, size),
            TpGroup(rank=rank, size=size),
            NO_TP,
            replica,
            replicas,
        )
        for replica in range(replicas)
        for rank in range(size)
    }
    places = [place for _, _, rows in given.bins for place in rows]
    held: dict[tuple[int, int], Tensor] = {}  # numbers of rows, by replica and rank
    for replica, rank in routes:
        parts, count = [torch.empty(0, dtype=torch.int64)], 0
        for encodes, holders, rows in given.bins:
            numbers = torch.arange(count, count + len(rows))
            count += len(rows)
            if encodes == replica and rank in holders:
                parts.append(numbers[BinRows.part(_holding(holders, len(rows)), rank)])
        held[replica, rank] = torch.cat(parts)
    if replicas > 1:
        for rank in range(size):
            group = [(replica, rank) for replica in range(replicas)]
            deals = [routes[at][0]["deal"] for at in group]
            held |= zip(group, exchange([held[at] for at in group], deals), strict=True)
    if size > 1:
        for replica in range(replicas):
            group = [(replica, rank) for rank in range(size)]
            seams = [routes[at][0]["tp"] for at in group]
            held |= zip(group, exchange([held[at] for at in group], seams), strict=True)
    found = {}
    for (replica, rank), rows in held.items():
        targets = torch.cat([*routes[replica, rank][1], torch.empty(0, dtype=torch.int64)])
        for number, target in zip(rows.tolist(), targets.tolist(), strict=True):
            if target < given.length:
                found[number] = replica, rank * (given.length // size) + target
    assert found == {n: place for n, place in enumerate(places) if place[1] < given.length}


def _holding(holders: range, rows: int) -> BinRows:
    nothing = torch.empty(rows, dtype=torch.int64)
    return BinRows(replica=0, holders=holders, owners=nothing, targets=nothing)
