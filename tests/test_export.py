"""The command `export`: files, what a target cannot run and its price, and mistakes told."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from export_cases import export_unproven, fsdp_plan, parsed, planned, uneven_plan, with_llm

from optimus.cli import run
from optimus.cli.flags import NO, OK, USER_ERROR
from optimus.errors import DoesNotFit, UserError
from optimus.ir.binding import hash_fields
from optimus.ir.plan import Plan
from optimus.ir.planfile import save_plan
from optimus.ir.ranks import LLM
from optimus.job.layout import Layout
from optimus.job.read import find_job
from optimus.planner import planning
from optimus.planner.systems.colocated_plan import Sharding

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def uneven() -> Plan:
    return uneven_plan()


# ---------------------------------------------------------------------------- what a target cannot run


def whats(plan: Plan, target: str) -> list[str]:
    return [each.what for each in export_unproven(plan, target).not_supported]


def test_what_the_targets_cannot_run_is_said(uneven: Plan) -> None:
    for target in ("megatron", "bridge", "torchtitan"):
        found = whats(uneven, target)
        assert found[0] == "encoder work in the LLM's idle time"
        assert "vision in a layout of its own (dp8 pp1 tp1)" in found
    assert whats(replace(uneven, order="greedy"), "megatron")[-1] == "the LLM's order greedy"
    assert "the LLM's order zero-bubble" in whats(replace(uneven, order="zero-bubble"), "megatron")
    assert "the LLM's order zero-bubble" not in whats(replace(uneven, order="zero-bubble"), "torchtitan")
    assert "recomputing only norms and non-linearities" in whats(
        with_llm(uneven, recompute="selective"), "megatron"
    )
    staged = replace(
        uneven,
        modules={
            "vision": replace(
                uneven.modules["vision"], layout=Layout(dp=2, pp=4, tp=1), microbatches_per_llm_microbatch=2
            ),
            LLM: uneven.modules[LLM],
        },
    )
    for target in ("megatron", "bridge"):
        assert {
            "vision over 4 pipeline stages",
            "vision in 2 pieces per microbatch of the LLM",
        } <= set(whats(staged, target))
    in_first = replace(staged, strategy="stage0")
    assert "vision over 4 pipeline stages" not in whats(in_first, "megatron")


def test_a_plan_of_fsdp_is_written_as_it_is() -> None:
    for sharding, strategy, reshards in (
        (Sharding.PARAMETERS, "optim_grads_params", "always"),
        (Sharding.GRADIENTS, "optim_grads", "never"),
    ):
        plan = fsdp_plan(sharding)
        megatron = export_unproven(plan, "megatron")
        flags = parsed(megatron.files["megatron.args"])
        assert flags["use-megatron-fsdp"] == []
        assert flags["data-parallel-sharding-strategy"] == [strategy]
        assert f'"fsdp_reshard_after_forward": "{reshards}"' in "".join(
            export_unproven(plan, "torchtitan").files.values()
        )
        for target in ("megatron", "bridge", "torchtitan"):
            assert "encoder work in the LLM's idle time" not in whats(plan, target)
            written = export_unproven(plan, target).as_written
            assert written is not None and (written.system, written.over_plan) == ("fsdp", 1.0)
    assert "use-megatron-fsdp" not in parsed(
        export_unproven(uneven_plan(), "megatron").files["megatron.args"]
    )


def test_embedding_and_head_stay_at_the_ends(uneven: Plan) -> None:
    chunks = list(uneven.modules[LLM].chunks)
    moved = [replace(chunks[0], layers=0), replace(chunks[1], layers=chunks[0].layers + chunks[1].layers)]
    plan = with_llm(uneven, chunks=(*moved, *chunks[2:]))
    text = export_unproven(plan, "megatron").files["megatron.args"]
    assert parsed(text)["pipeline-model-parallel-layout"][0].startswith("E|ttttt|ttt|")
    assert "a first or last virtual stage without layers" in whats(plan, "torchtitan")


@pytest.mark.parametrize("target", ["megatron", "bridge", "torchtitan"])
def test_the_best_of_what_the_target_can_run(uneven: Plan, target: str) -> None:
    def best(**notes: object) -> Any:
        return export_unproven(replace(uneven, notes={**uneven.notes, **notes}), target).best_there

    step = uneven.claims.step_s
    systems = {
        "llm-only": 0.5 * step,
        "three-phase": step,
        "balanced": step,
        "stage0": 2 * step,
        "fsdp": 3 * step,
    }
    assert (best(systems_s=systems).system, best(systems_s=systems).over_plan) == ("stage0", pytest.approx(2))
    assert best(systems_s=systems, systems_unfit=["stage0"]).system == "fsdp"
    assert best(systems_s={**systems, "fsdp": step}).system == "fsdp"
    assert best(systems_s={"balanced": step}) is None
    assert best(systems_s="broken") is None


@pytest.mark.ci
def test_a_plan_notes_the_systems_that_do_not_fit() -> None:
    made = planning.make_plan(find_job("paper/small-a100", None, ["llm=pp1,tp4"]), systems=["stage0"])
    assert "systems_unfit" not in made.plan.notes
    systems = {**made.systems, "stage0": replace(made.systems["stage0"], fits=False)}
    comparison = replace(made.comparison, systems=systems)
    plan = planning.build_plan(comparison, "optimus").plan
    assert plan.notes["systems_unfit"] == ["stage0"]
    assert export_unproven(plan, "megatron").best_there is None


# ---------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "small.plan.json"
    plan = planned("cpu/tiny-vl", "llm=pp2,tp1")
    notes = {**plan.notes, "systems_s": {"stage0": 2 * plan.claims.step_s}}
    save_plan(replace(plan, notes=notes), path)
    return path


@pytest.mark.parametrize("target", ["megatron", "bridge", "torchtitan"])
def test_the_json_has_the_contracts_keys(
    plan_file: Path, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    for _ in range(2):  # a second time over the first
        assert run(["export", str(plan_file), "--to", target, "-o", str(folder), "--json"]) == OK
    found = json.loads(capsys.readouterr().out.partition("}\n{")[0] + "}")
    assert found["schema"] == "optimus.export/1" and found["target"] == target
    assert {*map(str, folder.iterdir())} == set(found["files"])
    assert all(set(each) == {"what", "why"} for each in found["not_supported"])
    assert found["best_there"]["system"] == "stage0" and found["as_written"] == found["best_there"]
    assert found["best_there"]["over_plan"] == pytest.approx(2)
    assert json.loads((folder / "ranks.json").read_text())["world"] == 2


def test_files_are_named_after_the_plan(
    plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["export", str(plan_file), "--to", "megatron"]) == OK
    text = capsys.readouterr().out
    assert "small-megatron/megatron.args" in text and "100.0% more than the plan's" in text
    head = (tmp_path / "small-megatron" / "megatron.args").read_text()
    assert "cannot run" in head and "100.0% more" in head
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["export", str(plan_file), "--to", "megatron"]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "megatro"], "did you mean megatron?"),
        (["--to", "megatron", "-o", "a/b/c"], "cannot be a folder"),
        (["--to", "megatron", "-o", "small.plan.json"], "cannot be a folder"),
    ],
)
def test_mistakes_are_told(
    plan_file: Path,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(plan_file.parent)
    assert run(["export", plan_file.name, *arguments]) == USER_ERROR
    shown = capsys.readouterr().err
    assert said in shown and "hint:" in shown and "Traceback" not in shown


def test_a_plan_without_sizes_is_refused_by_the_field(uneven: Plan) -> None:
    with pytest.raises(UserError, match="is not in the plan"):
        export_unproven(replace(uneven, bound_to={}), "megatron")


def test_numbers_that_are_none_are_refused(uneven: Plan) -> None:
    broken = {**uneven.bound_to, "model": {**uneven.bound_to["model"], "llm.stack.hidden": "wide"}}
    with pytest.raises(UserError, match="not a positive whole number"):
        export_unproven(replace(uneven, bound_to=broken), "megatron")
    chunks = uneven.modules[LLM].chunks
    fewer = with_llm(uneven, chunks=(replace(chunks[0], layers=chunks[0].layers - 1), *chunks[1:]))
    with pytest.raises(UserError, match="hold 81 layers"):
        export_unproven(fewer, "megatron")


def test_broken_microbatches_are_an_answer_no(
    uneven: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = {**uneven.bound_to["workload"], "sequences_per_step": 17}
    hashes = {**uneven.hashes, "workload": hash_fields(workload)}
    plan = replace(uneven, bound_to={**uneven.bound_to, "workload": workload}, hashes=hashes)
    with pytest.raises(DoesNotFit, match="not whole"):
        export_unproven(plan, "torchtitan")
    save_plan(plan, tmp_path / "odd.plan.json")
    assert run(["export", str(tmp_path / "odd.plan.json"), "--to", "megatron"]) == NO
    assert "multiple of 8" in capsys.readouterr().err


def test_export_leaves_torch_alone(plan_file: Path, tmp_path: Path) -> None:
    arguments = ["export", str(plan_file), "--to", "torchtitan", "-o", str(tmp_path / "o")]
    script = (
        "import sys; from optimus.cli import run\n"
        f"assert run({arguments!r}) == 0\n"
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    ast.parse((tmp_path / "o" / "torchtitan_plan.py").read_text())
