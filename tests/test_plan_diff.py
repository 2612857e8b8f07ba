"""The difference of two plans: figures, lines that came, went or moved, and how a text diff shows it."""

from __future__ import annotations

import difflib
import json
from dataclasses import replace

from plan_by_hand import plan_by_hand

from optimus.cli.diff import build_diff_json, format_diff
from optimus.ir.plan import Plan, Program
from optimus.ir.plan_diff import FirstDifferingLine, SettingChange, compare_plans
from optimus.ir.planfile import format_plan
from optimus.job.layout import Layout


def small_plan() -> Plan:
    return plan_by_hand(Layout(dp=1, pp=4, tp=2), Layout(dp=2, pp=2, tp=2))


def moved_line(plan: Plan, device: int, line: int, to: int) -> Plan:
    rows = plan.programs[device].rows.tolist()
    rows.insert(to, rows.pop(line))
    return with_rows(plan, device, rows)


def with_rows(plan: Plan, device: int, rows: list[list[int]]) -> Plan:
    programs = [*plan.programs]
    programs[device] = Program.of(rows)
    return replace(plan, programs=tuple(programs))


def test_a_plan_is_the_same_as_itself() -> None:
    found = compare_plans(small_plan(), replace(small_plan(), notes={}))
    assert found.same and found.fields == ("notes",) and found.ratio == 1
    assert format_diff(found) == ["The plans are the same."]


def test_moving_a_line_is_a_small_difference() -> None:
    a = small_plan()
    for line, to in ((3, 9), (9, 3), (2, 30), (0, 1)):
        b = moved_line(a, 2, line, to)
        found = compare_plans(a, b)
        assert (found.moved, found.only_a, found.only_b) == (1, 0, 0)
        assert found.first is not None and (found.first.device, found.first.line) == (2, min(line, to) + 1)
        assert found.fields == () and not found.same
        texts = format_plan(a).splitlines(), format_plan(b).splitlines()
        changed = [
            line for line in difflib.unified_diff(*texts, n=0) if line[0] in "+-" and line[1] not in "+-"
        ]
        assert 2 <= len(changed) <= 3


def test_lines_that_came_and_went() -> None:
    a = small_plan()
    rows = a.programs[1].rows.tolist()
    b = with_rows(a, 1, [*rows[:4], *rows[6:]])
    found = compare_plans(a, b)
    assert (found.moved, found.only_a, found.only_b) == (0, 2, 0)
    assert found.lines[0] - found.lines[1] == 2
    found = compare_plans(b, a)
    assert (found.moved, found.only_a, found.only_b) == (0, 0, 2)
    twice = compare_plans(a, with_rows(a, 1, [*rows[:4], rows[3], *rows[4:]]))
    assert (twice.moved, twice.only_a, twice.only_b) == (0, 0, 1)
    ended = compare_plans(a, with_rows(a, 3, a.programs[3].rows.tolist()[:-1]))
    assert ended.first == FirstDifferingLine(device=3, line=len(a.programs[3]), a="all.finish 0 0 0", b=None)


def test_swapping_two_distant_lines_moves_two() -> None:
    a = small_plan()
    rows = a.programs[0].rows.tolist()
    rows[3], rows[12] = rows[12], rows[3]
    assert compare_plans(a, with_rows(a, 0, rows)).moved == 2


def test_other_layouts_and_figures() -> None:
    a = small_plan()
    b = plan_by_hand(Layout(dp=2, pp=2, tp=2, chunks=2), Layout(dp=4, pp=1, tp=2), microbatches=2)
    claims = replace(b.claims, step_s=10.0)
    memory = (replace(b.memory[0], seam=10**9), *b.memory[1:])
    modules = {**b.modules, "llm": replace(b.modules["llm"], recompute="full")}
    b = replace(b, claims=claims, memory=memory, modules=modules, order="1f1b")
    found = compare_plans(a, b)
    assert found.step_s == (12.5, 10.0) and found.ratio == 0.8
    assert found.peak_bytes == (a.memory[0].peak, memory[0].peak)
    assert found.layouts == (
        SettingChange(field="enc0", a="dp2 pp2 tp2", b="dp4 pp1 tp2"),
        SettingChange(field="llm", a="dp1 pp4 tp2", b="dp2 pp2 tp2 chunks2"),
    )
    assert {change.field: (change.a, change.b) for change in found.settings} == {
        "order": ("gpipe", "1f1b"),
        "microbatches": ("4", "2"),
        "llm.recompute": ("none", "full"),
    }
    assert "modules" in found.fields and "claims" in found.fields
    text = "\n".join(format_diff(found))
    assert "0.800x" in text and "dp2 pp2 tp2 chunks2" in text and "The first that differs is line" in text
    written = build_diff_json(found)
    assert written["schema"] == "optimus.diff/1" and json.loads(json.dumps(written)) == written


def test_a_module_that_only_one_has() -> None:
    found = compare_plans(small_plan(), plan_by_hand(Layout(dp=1, pp=4, tp=2)))
    assert SettingChange(field="enc0", a="dp2 pp2 tp2", b=None) in found.layouts
    assert found.only_a > 0 == found.only_b
