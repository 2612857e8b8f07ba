"""Ops print and parse in short form, and a grid holds each of them once, below all it waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from plan_by_hand import llm_alone, two_pipelines
from slow_plan_replay import PHASES, Id, SlowPlan
from tiny_plans import tiny_plan

from optimus.cli.check import format_op_grid
from optimus.ir.op import OpKind, ShortOpName
from optimus.ir.plan import Plan, Program
from optimus.ir.ranks import LLM
from optimus.verify.wait_graph import build_op_grid


def test_short_forms_are_read_as_they_are_written() -> None:
    assert str(ShortOpName(OpKind.FORWARD, 2, 0)) == "2F0"
    assert str(ShortOpName(OpKind.WEIGHT_GRAD, 0, 13, "vision")) == "vision:0W13"
    for kind in OpKind:
        for module in ("", "vision"):
            op = ShortOpName(kind, 3, 17, module)
            assert ShortOpName.parse(str(op)) == op


@pytest.mark.parametrize("text", ["", "F", "2F", "F0", "2X0", "02F0", "2F 0", ":2F0", "2f0", "2F0 "])
def test_other_text_is_no_op(text: str) -> None:
    with pytest.raises(ValueError, match="short form"):
        ShortOpName.parse(text)


def steps(plan: Plan) -> dict[tuple[int, ShortOpName], int]:
    """Rows of all ops of a grid, by class and op."""
    found: dict[tuple[int, ShortOpName], int] = {}
    for step, row in enumerate(build_op_grid(plan)):
        for device, op in enumerate(row):
            if op is not None:
                assert (device, op) not in found
                found[device, op] = step
    return found


@pytest.mark.parametrize("seed", range(12))
def test_a_grid_has_every_op_once_below_all_it_waits_for(seed: int) -> None:
    plan = tiny_plan(Random(seed))
    slow, placed = SlowPlan(plan), steps(plan)

    def cell(line: Id) -> tuple[int, ShortOpName]:
        device, module, kind, chunk, microbatch, _ = line
        return device, ShortOpName(kind, chunk, microbatch, "" if module == LLM else module)

    opening = [line for line in slow.at if line.kind in PHASES and line.place == 0]
    assert set(placed) == {cell(line) for line in opening}
    for program in slow.programs:
        order = [placed[cell(line)] for line in program if line.kind in PHASES and line.place == 0]
        assert order == sorted(set(order))
    for line in opening:
        for need in slow.needs[line]:
            sources = slow.needs[slow.send_of(need)] if need.kind.name.startswith("RECV") else [need]
            for source in sources:
                if source.kind in PHASES and cell(source) != cell(line):
                    assert placed[cell(source)] < placed[cell(line)], (source, line)


def test_a_broken_plan_has_a_grid_in_program_order() -> None:
    plan = two_pipelines()
    without = tuple(Program.of(program.rows[1:]) for program in plan.programs)
    broken = replace(plan, programs=without)
    for device, program in enumerate(broken.programs):
        firsts = int(((program.kind <= OpKind.WEIGHT_GRAD) & (program.place == 0)).sum())
        column = [row[device] for row in build_op_grid(broken, aligned=False)]
        assert all(op is not None for op in column[:firsts]) and not any(column[firsts:])


@pytest.mark.parametrize("make", [llm_alone, two_pipelines])
def test_a_grid_is_as_wide_as_the_terminal(make: Callable[[], Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    grid = build_op_grid(make())
    monkeypatch.setenv("COLUMNS", "1000")
    wide = format_op_grid(grid)
    assert len(wide) == len(grid) + 1 and wide[0].split()[:3] == ["step", "class", "0"]
    monkeypatch.setenv("COLUMNS", "40")
    narrow = format_op_grid(grid)
    assert max(map(len, narrow)) <= 40
    assert sum(line.count("class") for line in narrow) == len(grid[0])
