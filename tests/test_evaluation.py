"""The loss of held-out batches, and the forward lines of programs that compute it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from eval_worker import STEPS
from faults import ROOT
from tiny_plans import tiny_plan
from worker_lines import run_cases

import optimus
from optimus.engine.compile import FORWARD_KINDS
from optimus.engine.packed_data import PackedDataset
from optimus.engine.run_section import read_training_config
from optimus.errors import UserError
from optimus.ir.op import OpKind
from optimus.ir.plan import Plan, Program
from optimus.verify.expected_program import ExpectedProgram, PlanLines, check_line_coverage
from optimus.verify.rules import check_collective_order, check_transfer_order
from optimus.verify.validator import check_plan
from optimus.verify.wait_graph import find_host_deadlock, find_stream_deadlock
from optimus.verify.waits import LineWaits, WaitDerivation

CASES = [
    "sharded: two by two interleaved",
    "sharded tp: two stages, encoder too",
    "sharded: zero-bubble, tied, dropout, two encoders",
    "dealt: tp 2 x dp 2, encoder too",
    "sharded cp: cp 2 x tp 2",
]

# ---------------------------------------------------------------------------- the loss


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES[:2], id="some", marks=pytest.mark.ci("survival")),
        pytest.param(CASES[2:], id="others", marks=pytest.mark.heavy),
    ],
)
def test_evaluation_is_that_of_one_process_and_changes_no_bit_of_training(cases: list[str]) -> None:
    for line in run_cases("eval_worker.py", cases, timeout_s=230):
        assert len(set(line["losses"])) == STEPS - 1
        assert line["difference"] <= 1e-12
        assert line["same"] == [True] * 4
        assert line["left"] == [[0] * (STEPS - 1)] * 4  # bytes that an evaluation leaves behind


@pytest.mark.ci("survival")
@pytest.mark.timeout(180)
def test_a_run_evaluates_every_few_steps(tmp_path: Path) -> None:
    text = (ROOT / "optimus" / "catalog" / "jobs" / "cpu" / "tiny-vl.yaml").read_text()
    (tmp_path / "plain.yaml").write_text(text)
    (tmp_path / "eval.yaml").write_text(text + "\nrun: {eval: {every: 2, batches: 2}}\n")
    lines = {}
    for name in ("plain", "eval"):
        summary = optimus.train(optimus.load_job(tmp_path / f"{name}.yaml"), steps=5, run_dir=tmp_path)
        metrics = (tmp_path / "metrics.jsonl").read_text().splitlines()
        lines[name] = [json.loads(line) for line in metrics]
    assert [line["eval_loss"] is None for line in lines["eval"]] == [True, False, True, False, True]
    assert all(line["eval_loss"] is None for line in lines["plain"])
    assert summary.eval_loss == lines["eval"][3]["eval_loss"]
    assert [line["loss"] for line in lines["eval"]] == [line["loss"] for line in lines["plain"]]


# ---------------------------------------------------------------------------- programs


def forward_waits(plan: Plan) -> LineWaits:
    """Returns the waits of the forward lines of a plan; they wait for no other line."""
    lines, expected = PlanLines(plan), ExpectedProgram(plan)
    assert not list(check_line_coverage(lines, expected))
    derivation = WaitDerivation(lines, expected)
    waits = derivation.derive()
    kept = np.isin(lines.kind, FORWARD_KINDS)
    number = np.where(kept, np.cumsum(kept) - 1, -1)
    posted = {(int(a), int(b)) for a, b in zip(*derivation._posted(), strict=True)}
    leaves_out = kept[waits.after] & ~kept[waits.before]
    data = zip(waits.before[leaves_out].tolist(), waits.after[leaves_out].tolist(), strict=True)
    assert set(data) <= posted  # an order of issue, not of data
    assert (kept[waits.send] == kept[waits.recv]).all()
    meets = waits.meeting >= 0
    for meeting in range(len(waits.meeting_size)):
        assert len(set(kept[meets & (waits.meeting == meeting)].tolist())) <= 1
    both, sent = kept[waits.before] & kept[waits.after], kept[waits.send]
    programs = tuple(
        Program.of(program.rows[np.isin(program.kind, FORWARD_KINDS)]) for program in plan.programs
    )
    return replace(
        waits,
        lines=PlanLines(replace(plan, programs=programs)),
        before=number[waits.before[both]],
        after=number[waits.after[both]],
        send=number[waits.send[sent]],
        recv=number[waits.recv[sent]],
        duration_s=waits.duration_s[kept],
        lane=waits.lane[kept],
        phase_kind=waits.phase_kind[kept],
        issue_s=waits.issue_s[kept],
        group=waits.group[kept],
        meeting=waits.meeting[kept],
    )


def check_forward(plan: Plan) -> None:
    waits = forward_waits(plan)
    kinds = set(waits.lines.kind.tolist())
    assert OpKind.FORWARD in kinds and not kinds & {OpKind.BACKWARD, OpKind.OPTIMIZER, OpKind.REDUCE_GRAD}
    assert find_host_deadlock(waits) is None
    assert find_stream_deadlock(waits, one_queue=False) is None
    assert not list(check_transfer_order(waits)) and not list(check_collective_order(waits))


def check_forwards(seeds: range) -> int:
    """Returns how many plans with transfers were valid; the forward lines of each keep the rules."""
    count = 0
    for seed in seeds:
        plan = tiny_plan(Random(seed), few=False)
        if check_plan(plan).ok:
            check_forward(plan)
            count += any((program.kind == OpKind.SEND_F).any() for program in plan.programs)
    return count


@pytest.mark.parametrize(
    "seeds",
    [
        range(60),
        pytest.param(range(1000, 1400), marks=pytest.mark.ci("plan file")),
        pytest.param(range(2000, 4000), marks=pytest.mark.heavy),
    ],
)
def test_forward_lines_of_a_valid_plan_keep_the_rules_against_deadlock(seeds: range) -> None:
    assert check_forwards(seeds) > len(seeds) // 4


# ---------------------------------------------------------------------------- data and settings


def test_sequences_that_are_held_out_are_in_no_epoch() -> None:
    sequences = [(2 * number, 2 * number + 1) for number in range(20)]
    dataset: Any = object()
    packed = PackedDataset(dataset=dataset, sequences=sequences, length=8, seed=3, held_out=6)
    held_out = {packed.members(-1 - at) for at in range(6)}
    assert len(held_out) == 6
    for epoch in range(3):
        trained = {packed.members(epoch * 14 + at) for at in range(14)}
        assert len(trained) == 14 and not trained & held_out
    other = replace(packed, seed=4)
    assert {other.members(-1 - at) for at in range(6)} == held_out
    assert [other.members(at) for at in range(14)] != [packed.members(at) for at in range(14)]


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"every": 5}, "run.eval.batches has to be at least 1"),
        ({"batches": 5}, "run.eval.every has to be at least 1"),
        ({"every": 5, "batch": 5}, "run.eval.batch is unknown"),
        (5, "run.eval = 5 is not a mapping"),
    ],
)
def test_settings_of_evaluation_are_checked(section: object, problem: str) -> None:
    with pytest.raises(UserError) as refused:
        read_training_config({"eval": section}, steps=None)
    assert problem in str(refused.value)
