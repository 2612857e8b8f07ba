"""Plans whose sequences are split over ranks compute what one process does, images and documents included."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from context_parallel_bugs import CP_BUGS
from engine_cases import CP, CP_SHARDED, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from test_equality import caught, check_cases
from test_tensor_parallel import check_launches, exchange
from torch import Tensor
from worker_lines import run_worker

from optimus.engine.build_rank import build_rank_model, reject_unsupported_plan
from optimus.engine.process_groups import ProcessGroups
from optimus.engine.rank_batch import BinRows, Routes, RowPlaces, route_encoder_rows
from optimus.errors import UserError
from optimus.ir.op import KernelName, OpKind
from optimus.ir.plan import Span
from optimus.models import phase_order
from optimus.models.attention import attend_by_blocks, attend_by_spans
from optimus.models.build import build_layers, insert_collectives
from optimus.models.chunk import SegmentedChunk
from optimus.models.collectives import TpGroup
from optimus.models.context_parallel import split_sequences
from optimus.verify.validator import check_plan

QUICK = (
    "cp: cp 2 x dp 2, dealt",
    "cp: cp 2 x pp 2 zero-bubble, documents",
    "cp: cp 4",
    "sharded cp: eight: cp 2 x tp 2 x pp 2",
)


@pytest.mark.ci("context parallelism")
@pytest.mark.timeout(240)
def test_a_few_context_parallel_plans_compute_what_one_process_does() -> None:
    assert set(check_cases(2, *QUICK, timeout_s=200)) == set(QUICK)


@pytest.mark.heavy
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("group", "cases"), [("cp", CP), ("cp-sharded", CP_SHARDED)])
def test_all_context_parallel_plans_compute_what_one_process_does(group: str, cases: list[Case]) -> None:
    assert len(check_cases(20, group, timeout_s=2300)) == len(cases) >= 16


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_every_planted_bug_is_noticed() -> None:
    lines = run_worker("engine_worker.py", "cp-bugs", timeout_s=850)
    missed = [line["name"] for line in lines if not caught(line)]
    assert len(lines) == len(CP_BUGS) >= 15
    assert not missed


@pytest.mark.ci("context parallelism")
@pytest.mark.timeout(120)
def test_a_planted_bug_is_noticed() -> None:
    names = ["rotary positions begin anew on every rank", "gradients of keys are not summed"]
    lines = run_worker("engine_worker.py", "cp-bugs", *names, timeout_s=100)
    assert [line["name"] for line in lines] == names and all(map(caught, lines))


def test_every_planted_bug_replaces_something_that_exists() -> None:
    for _, plant in CP_BUGS.values():
        with plant():
            pass


# ---------------------------------------------------------------------------- plans and phases


@pytest.mark.parametrize("case", CP, ids=lambda case: case.name)
def test_plans_pass_the_proof_and_launch_every_collective_at_its_line(case: Case) -> None:
    assert check_plan(case.plan).ok
    check_launches(case)


def drawn(column: slice) -> list[str]:
    """Phases of a context-parallel layer around its attention, as the docstring of `phase_order` draws."""
    _, _, drawing = (phase_order.__doc__ or "").partition("With context parallelism")
    cells = [line[column].strip() for line in drawing.splitlines() if "|- " in line]
    return [cell.removeprefix("|- ") for cell in cells if cell]


@pytest.mark.parametrize(
    ("kind", "column"), [(OpKind.FORWARD, slice(4, 34)), (OpKind.BACKWARD, slice(34, None))]
)
def test_the_phases_around_attention_are_those_of_the_drawing(kind: OpKind, column: slice) -> None:
    two, llm = TpGroup(size=2), CP[0].job.model.llm
    (layer,) = build_layers(
        llm, dtype=torch.bfloat16, device="meta", first=1, end=2, tp_group=two, cp_group=two
    )
    marks = {OpKind.LAUNCH: "< ", OpKind.WAIT: "> "}
    phases = [
        marks.get(phase.kind, "") + phase.kernels[0]
        for phase in SegmentedChunk([insert_collectives(layer)]).phases(kind, 0)
    ]
    expected = drawn(column)
    first = phases.index(expected[0])
    assert len(expected) > 3 and phases[first : first + len(expected)] == expected


# ---------------------------------------------------------------------------- shares of sequences


@st.composite
def packed(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    """Returns cp, lengths of sequences, and lengths of the documents in them."""
    cp = draw(st.sampled_from([1, 2, 3, 4]))
    lengths, spans = [], []
    for _ in range(draw(st.integers(1, 3))):
        length = 2 * cp * draw(st.integers(1, 4))
        cuts = draw(st.sets(st.integers(1, length - 1), max_size=3))
        ends = [0, *sorted(cuts), length]
        spans += [end - begin for begin, end in pairwise(ends)]
        lengths.append(length)
    return cp, lengths, spans


@given(packed())
def test_ranks_share_all_rows_and_see_what_one_process_sees(given: tuple[int, list[int], list[int]]) -> None:
    cp, lengths, spans = given
    total = sum(lengths)
    shares = [split_sequences(lengths, spans, rank, cp) for rank in range(cp)]
    document = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(spans))
    rows = torch.arange(total)
    expected = (document[:, None] == document) & (rows[:, None] >= rows)
    for share in shares:
        assert torch.equal(torch.cat([other.rows for other in shares]), share.by_rank)
        assert torch.equal(share.by_rank[share.in_order], rows)
        assert len(share.rows) == total // cp == sum(block.queries for block in share.blocks)
        seen = torch.zeros(len(share.rows), total, dtype=torch.bool)
        at = 0
        for block in share.blocks:
            for query in range(block.queries):
                last = block.first_key + block.keys - block.queries + query + 1
                seen[at, block.first_key : last] = True
                at += 1
        assert torch.equal(seen, expected[share.rows])


def test_ranks_have_equal_work_in_a_sequence_of_one_document() -> None:
    shares = [split_sequences([48], [48], rank, 4) for rank in range(4)]
    pairs = [
        sum(b.queries * b.keys - b.queries * (b.queries - 1) // 2 for b in share.blocks) for share in shares
    ]
    assert len(set(pairs)) == 1 and sum(pairs) == 48 * 49 // 2


@settings(max_examples=30)
@given(packed(), st.sampled_from([1, 2]))
def test_blocks_attend_as_spans_do(given: tuple[int, list[int], list[int]], kv_heads: int) -> None:
    cp, lengths, spans = given
    total = sum(lengths)
    generator = torch.Generator().manual_seed(total)
    queries = torch.randn(total, 2, 4, dtype=torch.float64, generator=generator)
    keys, values = torch.randn(2, total, kv_heads, 4, dtype=torch.float64, generator=generator)
    whole = attend_by_spans(queries, keys, values, spans, True)
    for rank in range(cp):
        share = split_sequences(lengths, spans, rank, cp)
        found = attend_by_blocks(queries[share.rows], keys, values, share.blocks)
        torch.testing.assert_close(found, whole[share.rows], rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------- encoder rows


Place = tuple[int, int, int]  # replica, context rank, tensor-parallel rank


@given(st.data())
def test_every_encoder_row_reaches_the_rank_of_its_position(data: st.DataObject) -> None:
    replicas, cp, tp = (data.draw(st.sampled_from([1, 2])) for _ in range(3))
    length = 2 * cp * tp * data.draw(st.integers(1, 2))
    shares = [split_sequences([length], [length], rank, cp) for rank in range(cp)]
    positions = [(replica, row) for replica in range(replicas) for row in range(length)]
    wanted = data.draw(st.permutations(positions))
    bins: list[tuple[int, int, range, list[tuple[int, int]]]] = []  # replica, context, holders, rows
    for replica in range(replicas):
        for context in range(cp):
            own = [place for place in wanted if replicas > 1 or place[0] == replica]
            count = tp * data.draw(st.integers(0, 3))
            taken = own[: data.draw(st.integers(0, count))]
            wanted = [place for place in wanted if place not in taken]
            padding = [(replicas, length)] * (count - len(taken))
            bins.append((replica, context, range(tp), taken + padding))
    ranks: list[Place] = [(r, c, t) for r in range(replicas) for c in range(cp) for t in range(tp)]
    routes: dict[Place, tuple[Routes, tuple[Tensor, ...]]] = {}
    held: dict[Place, Tensor] = {}  # numbers of rows
    for replica, context, t in ranks:
        seen = [
            BinRows(
                replica=encodes,
                holders=holders,
                context=at,
                owners=torch.tensor([owner for owner, _ in rows], dtype=torch.int64),
                targets=torch.tensor(
                    [row if owner == replica else length for owner, row in rows], dtype=torch.int64
                ),
            )
            for encodes, at, holders, rows in bins
        ]
        place = replica, context, t
        places = RowPlaces.split(shares[context], tp, cp)
        groups = TpGroup(rank=t, size=tp), TpGroup(rank=context, size=cp)
        routes[place] = route_encoder_rows(seen, places, *groups, replica, replicas)
        starts = list(accumulate((len(rows) for _, _, _, rows in bins), initial=0))
        numbers = [
            torch.arange(start, start + len(each.owners))[each.part(t, context)]
            for start, each in zip(starts, seen, strict=False)
            if each.replica == replica
        ]
        held[place] = torch.cat(numbers)
    for axis, fixed in (("deal", (1, 2)), ("tp", (0, 1)), ("cp", (0, 2))):
        for key in {tuple(rank[at] for at in fixed) for rank in ranks}:
            group = [rank for rank in ranks if tuple(rank[at] for at in fixed) == key]
            if len(group) > 1:
                taken_routes = [routes[rank][0][axis] for rank in group]
                held |= zip(group, exchange([held[rank] for rank in group], taken_routes), strict=True)
    found = {}
    for (replica, context, t), rows in held.items():
        targets = torch.cat([*routes[replica, context, t][1], torch.empty(0, dtype=torch.int64)])
        for number, target in zip(rows.tolist(), targets.tolist(), strict=True):
            if target < length // cp // tp:
                row = shares[context].rows[t * (length // cp // tp) + target]
                found[number] = replica, int(row)
    rows_of_bins = [row for _, _, _, rows in bins for row in rows]
    assert found == {number: row for number, row in enumerate(rows_of_bins) if row[1] < length}


# ---------------------------------------------------------------------------- refusals


def test_what_context_parallelism_does_not_do_is_refused() -> None:
    case = CP[0]
    module = replace(case.plan.modules["llm"], recomputed=(KernelName.ATTENTION,), recompute="selective")
    again = replace(case.plan, modules={**case.plan.modules, "llm": module})
    groups = ProcessGroups(rank=0, members={}, groups={})
    with pytest.raises(UserError, match=r"plan.modules.llm.recomputed = attention"):
        build_rank_model(case.job.model, again, groups, llm_tokens=24, dtype=torch.float32)
    buckets = tuple(
        tuple(replace(bucket, gathered_per=Span.MICROBATCH) for bucket in of_stage)
        for of_stage in case.plan.modules["llm"].buckets
    )
    module = replace(case.plan.modules["llm"], buckets=buckets)
    sharded = replace(case.plan, modules={**case.plan.modules, "llm": module})
    with pytest.raises(UserError, match=r"plan.modules.llm.buckets"):
        build_rank_model(case.job.model, sharded, groups, llm_tokens=24, dtype=torch.float32)
    stack = case.job.model.llm.stack
    both_ways = replace(stack, attention=replace(stack.attention, causal=False))
    model = replace(case.job.model, llm=replace(case.job.model.llm, stack=both_ways))
    with pytest.raises(UserError, match=r"model.llm.stack.attention.causal"):
        build_rank_model(model, case.plan, groups, llm_tokens=24, dtype=torch.float32)
    with pytest.raises(UserError, match=r"does not divide 22 tokens of a sequence into 4 equal chunks"):
        split_sequences([22], [22], 0, 2)
    with pytest.raises(UserError, match=r"plan.modules.llm.layout.cp = 2 .* with modules of one's own"):
        reject_unsupported_plan(case.plan)
