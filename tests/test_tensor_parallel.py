"""Tensor-parallel plans compute what one process does, with encoder work in their slots or without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_bugs import BUGS
from engine_cases import TP, TP_SHARDED, Case
from hypothesis import given
from hypothesis import strategies as st
from sharding_bugs import SHARDING_BUGS
from tensor_parallel_bugs import TP_BUGS
from test_equality import caught, check, check_cases
from worker_lines import run_worker

from optimus.engine.build_rank import choose_recompute_mode, find_layer_ranges
from optimus.engine.rank_batch import RoutedEncoderRows, route_encoder_rows
from optimus.errors import UserError
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan
from optimus.ir.ranks import LLM
from optimus.models import phase_order
from optimus.models.build import build_layers, insert_tp_collectives
from optimus.models.chunk import SegmentedChunk
from optimus.models.collectives import ParamSplit, TpGroup
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
            tp_group = TpGroup(rank=plan.ranks.place(name, rank).tp, size=plan.modules[name].layout.tp)
            for number, (first, end) in enumerate(find_layer_ranges(plan, module, rank)):
                layers = build_layers(
                    module, dtype=torch.bfloat16, device="meta", first=first, end=end, tp_group=tp_group
                )
                chunk = SegmentedChunk(
                    [insert_tp_collectives(layer) if tp_group.size > 1 else layer for layer in layers],
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
    lines = [line[4:] for line in (phase_order.__doc__ or "").splitlines() if "|- " in line]
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
        for phase in SegmentedChunk([insert_tp_collectives(layer)]).phases(kind, 0)
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


@st.composite
def routed(draw: st.DrawFn) -> tuple[list[RoutedEncoderRows], int, int]:
    """Pieces on some ranks of a group, whose rows go to different places of a sequence, or nowhere."""
    size = draw(st.sampled_from([1, 2, 4]))
    length = size * draw(st.integers(1, 6))
    places = list(draw(st.permutations(range(length))))
    pieces = []
    for _ in range(draw(st.integers(0, 3))):
        tp = draw(st.sampled_from([tp for tp in (1, 2, 4) if size % tp == 0]))
        block = draw(st.integers(0, size // tp - 1))
        rows = tp * draw(st.integers(0, 3))
        wanted: list[bool] = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
        targets = [places.pop() if places and want else length for want in wanted]
        holders = range(block * tp, (block + 1) * tp)
        pieces.append(RoutedEncoderRows(holders=holders, targets=torch.tensor(targets, dtype=torch.int64)))
    return pieces, size, length


@given(routed())
def test_every_row_reaches_its_place_and_no_other(given: tuple[list[RoutedEncoderRows], int, int]) -> None:
    pieces, size, length = given
    routes = [route_encoder_rows(pieces, TpGroup(rank=rank, size=size), length) for rank in range(size)]
    numbers, count = [], 0  # every row of every piece has one
    for piece in pieces:
        numbers.append(torch.arange(count, count + len(piece.targets)))
        count += len(piece.targets)
    held = []
    for rank in range(size):
        parts = [torch.empty(0, dtype=torch.int64)]
        for piece, own in zip(pieces, numbers, strict=True):
            if rank in piece.holders:
                parts.append(own.chunk(len(piece.holders))[rank - piece.holders[0]] if len(own) else own)
        held.append(torch.cat(parts))
        assert sum(routes[rank].pieces) == len(held[rank])
    found = {}
    for rank, mine in enumerate(routes):
        came = [held[other][theirs.leaving].split(theirs.sent)[rank] for other, theirs in enumerate(routes)]
        assert tuple(map(len, came)) == mine.received
        for number, target in zip(torch.cat(came).tolist(), mine.targets.tolist(), strict=True):
            found[number] = rank * (length // size) + target
    expected = {
        number: target
        for piece, own in zip(pieces, numbers, strict=True)
        for number, target in zip(own.tolist(), piece.targets.tolist(), strict=True)
        if target < length
    }
    assert found == expected
