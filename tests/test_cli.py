"""The command contract: exit codes, JSON, errors without tracebacks, and nothing that imports torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from optimus import __version__
from optimus.cli import run
from optimus.cli.flags import NO, OK, OUR_BUG, USER_ERROR

ROOT = Path(__file__).parents[1]
SYSTEM_KEYS = {"step_s", "step_over_floor", "peak_memory_bytes", "mfu", "bubbles_s"}
CAUSES = {"dp_all_gather", "dp_reduce_scatter", "pp_warmup", "pp_cooldown", "pp_other", "tp"}
SMALL = "paper/small-a100"
AT = "--layout", "llm=pp1,tp4"  # the search over layouts has tests of its own


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = OK) -> str:
    assert run(list(arguments)) == code
    return capsys.readouterr().out


def test_simulate_json_has_the_contract_s_keys(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output_of(capsys, "simulate", SMALL, *AT, "--json"))
    assert found["schema"] == "optimus.simulate/1"
    assert {"llm-only", "stage0", "balanced", "balanced-best"} <= set(found["systems"])
    for system in found["systems"].values():
        assert set(system) >= SYSTEM_KEYS
        assert set(system["bubbles_s"]) == CAUSES
        assert system["step_s"] > sum(system["bubbles_s"].values())
    assert found["not_modelled"]


def test_simulate_prints_a_table_that_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = output_of(capsys, "simulate", SMALL, *AT, "--system", "stage0", "fsdp")
    assert "stage0" in text and "fsdp" in text and "balanced-best" not in text
    assert "\x1b" not in text  # plain when piped
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.ci
def test_a_bare_config_and_a_catalog_model_need_no_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    config = next((ROOT / "tests/data/configs").glob("*VL-2B*"))
    for model in (str(config), "siglip-so400m-8b"):
        text = output_of(capsys, "simulate", model, "--on", "h100:8", "--layout", "llm=pp1,tp8")
        assert "assumed" in text  # the default workload is printed


@pytest.mark.ci
def test_layouts_can_be_stated_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("simulate", SMALL, "--layout", "llm=pp2,tp4,chunks2", "--system", "stage0", "--json")
    found = json.loads(output_of(capsys, *arguments))
    assert found["layout"]["llm"] == {"dp": 1, "pp": 2, "cp": 1, "ep": 1, "tp": 4, "chunks": 2}


@pytest.mark.ci
def test_init_writes_a_job_that_simulates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = next((ROOT / "tests/data/configs").glob("*VL-2B*"))
    job = tmp_path / "job.yaml"
    found = json.loads(
        output_of(capsys, "init", "--hf", str(config), "--on", "h100:8", "-o", str(job), "--json")
    )
    assert found["job"] == job.read_text()
    assert "step s" in output_of(capsys, "simulate", str(job), "--system", "stage0")
    assert run(["init", "--hf", str(config), "--on", "h100:8", "-o", str(job)]) == USER_ERROR
    assert "exists" in capsys.readouterr().err  # never over a user's file


@pytest.mark.ci
def test_today_stands_beside_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "format: optimus.job/1\n"
        "model: {use: siglip-so400m-8b}\n"
        "cluster: {use: h100, gpus: 16}\n"
        "workload: {sequence_tokens: 4096, sequences_per_step: 64,"
        " vision_tokens: {p50: 1000, p95: 2000, max: 4000}}\n"
        "today:\n"
        "  framework: torchtitan\n"
        "  layout: {llm: {dp: 4, pp: 2, tp: 2}, vision: stage0}\n"
        "  measured: {step_s: 1.5, peak_memory_gb: 70}\n"
    )
    found = json.loads(
        output_of(capsys, "simulate", str(job), "--layout", "llm=pp2,tp2", "--system", "today", "--json")
    )
    today = found["systems"]["today"]
    assert today["measured_step_s"] == 1.5 and today["measured_memory_bytes"] == 70e9
    assert "torchtitan" in today["how"] and "dp4 pp2 tp2" in today["how"]
    words = "simulate", str(job), "--layout", "llm=pp2,tp2", "--system", "today"
    assert "measured" in output_of(capsys, *words)


def test_catalog_lists_what_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output_of(capsys, "catalog", "--json"))
    assert {"models", "clusters", "jobs"} <= set(found)
    text = output_of(capsys, "catalog")
    for name in (*found["models"], *found["clusters"], *found["jobs"]):
        assert name in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "paper/strong-3071"], "did you mean paper/strong-3072?"),
        (["simulate", "qwen2.5-vl-72b"], "--on"),
        (["simulate", SMALL, "--preset", "papper"], "did you mean paper"),
        (["simulate", SMALL, "--system", "stage1"], "did you mean stage0?"),
        (["simulate", SMALL, "--layout", "llm=pp3"], "layout.llm.pp = 3"),
        (["simulate", "nowhere.yaml"], "nowhere.yaml"),
        (["simulate", SMALL, "--system", "today"], "today"),
        (["simulat", SMALL], "did you mean simulate?"),
        (["simulate", SMALL, "--system", "fsdp", "--system", "stage0"], "is given twice"),
        (["simulate", SMALL, "--layout", "pp8"], "write MODULE=AXIS"),
        (["simulate", SMALL, "--picture", "no/such/folder.svg"], "cannot be written"),
    ],
)
def test_mistakes_are_named_with_a_hint(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == USER_ERROR
    shown = capsys.readouterr()
    assert message in shown.err and "hint: " in shown.err and "Traceback" not in shown.err
    assert shown.out == ""


def test_what_cannot_fit_is_a_no(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "kimi-k2.5", "--on", "h100:8"]) == NO
    shown = capsys.readouterr()
    assert "no: " in shown.err and "hint: " in shown.err


def test_our_own_bugs_say_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("optimus.job.read.find_job", broken)
    assert run(["simulate", SMALL]) == OUR_BUG
    assert f"bug in Optimus {__version__}" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of(capsys, "--version").strip() == __version__
    assert "simulate" in output_of(capsys, "--help")
    for command in (["catalog"], ["init"], ["simulate"]):
        with pytest.raises(SystemExit) as end:
            run([*command, "--help"])
        assert end.value.code == 0
    assert "usage: optimus simulate" in capsys.readouterr().out


@pytest.mark.ci
def test_planner_commands_leave_torch_alone() -> None:
    script = (
        "import sys; from optimus.cli import run\n"
        f"assert run(['simulate', '{SMALL}', *{AT}, '--json']) == 0\n"
        "assert run(['catalog']) == 0\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "assert 'transformers' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr


def test_public_verbs_are_not_submodules() -> None:
    import optimus

    rooms = {path.stem for path in (ROOT / "optimus").iterdir()}
    assert not rooms & set(optimus.__all__)
    for verb in optimus.__all__:
        assert callable(getattr(optimus, verb))
    with pytest.raises(AttributeError):
        _ = optimus.nothing
