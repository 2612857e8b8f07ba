"""A plan that `optimus check` refuses is shown by no other command, and named with the rule it breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import plan_mutants
import pytest

import optimus
from optimus.cli import run
from optimus.cli.flags import NO, USER_ERROR
from optimus.errors import UserError
from optimus.ir.plan import Plan
from optimus.ir.planfile import save_plan
from optimus.job.read import find_job
from optimus.planner.planning import make_plan

SHOWN_BY = {
    "simulate": ["simulate", "bad.plan.json"],
    "simulate --trace": ["simulate", "bad.plan.json", "--trace", "bad.json.gz"],
    "report": ["report", "bad.plan.json", "--trace", "bad.json.gz"],
    "diff": ["diff", "good.plan.json", "bad.plan.json"],
    "diff of the other": ["diff", "bad.plan.json", "good.plan.json"],
    "why": ["why", "bad.plan.json", "llm=pp1,tp2"],
    "export megatron": ["export", "bad.plan.json", "--to", "megatron"],
    "export torchtitan": ["export", "bad.plan.json", "--to", "torchtitan"],
    "train": ["train", "cpu/tiny-vl", "--plan", "bad.plan.json", "--steps", "1"],
    "launch": ["launch", "cpu/tiny-vl", "--slurm", "--plan", "bad.plan.json", "--dry-run"],
}


def claim_less(plan: Plan) -> Plan:
    """Returns the plan with a claim of a twelfth of its step."""
    less_s = plan.claims.step_s / 12.4
    return replace(plan, claims=replace(plan.claims, step_s=less_s, lagged_s=less_s))


def lose_an_op(plan: Plan) -> Plan:
    return plan_mutants.drop(plan, Random(3))


def free_memory(plan: Plan) -> Plan:
    """Returns the plan with a device class that claims less than it uses."""
    return replace(plan, memory=(replace(plan.memory[0], llm_activations=0), *plan.memory[1:]))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(find_job("cpu/tiny-vl", None, ["llm=pp1,tp1"]), strategy="optimus", systems=[]).plan


@pytest.mark.parametrize(
    ("change", "rule"), [(claim_less, "claim"), (lose_an_op, "coverage"), (free_memory, "memory")]
)
def test_no_command_shows_a_plan_that_check_refuses(
    plan: Plan,
    change: Callable[[Plan], Plan],
    rule: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    save_plan(plan, Path("good.plan.json"))
    save_plan(change(plan), Path("bad.plan.json"))
    assert run(["check", "bad.plan.json"]) == NO
    capsys.readouterr()
    for name, arguments in SHOWN_BY.items():
        for flags in ([], ["--json"]):
            assert run([*arguments, *flags]) == USER_ERROR, name
            printed = capsys.readouterr()
            assert printed.out == "", name
            assert f"breaks the rule `{rule}`" in printed.err and "bad.plan.json" in printed.err, name
            assert "optimus check bad.plan.json" in printed.err, name
    assert {path.name for path in tmp_path.rglob("*.*")} == {"good.plan.json", "bad.plan.json"}


def test_commands_that_read_plan_files_are_listed() -> None:
    """A command that loads a plan file is run above, or is `check`."""
    commands = Path(optimus.__file__).parent / "cli"
    loading = {path.stem for path in commands.glob("*.py") if "load_plan(" in path.read_text()}
    assert loading <= {arguments[0] for arguments in SHOWN_BY.values()} | {"check"}


def test_the_library_refuses_it_as_the_commands_do(plan: Plan, tmp_path: Path) -> None:
    bad = claim_less(plan)
    for show in (
        lambda: optimus.report(bad, tmp_path / "bad.html"),
        lambda: optimus.why(bad, "llm=pp1,tp2"),
        lambda: optimus.export(bad, "megatron"),
    ):
        with pytest.raises(UserError, match="step_s"):
            show()
    assert not list(tmp_path.iterdir())
