"""Text of others reaches the terminal escaped and shortened: keys, values, names, paths, exceptions."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_plans import tiny_plan

from benchmarks.docs.supported_models import DATA
from optimus.cli import run, run_and_report_errors
from optimus.cli.console import print_lines, print_result
from optimus.cli.flags import USER_ERROR
from optimus.cli.text import align_columns, wrap_text
from optimus.errors import MAX_LINE, DoesNotFit, UserError, show_line
from optimus.ir.planfile import format_plan

ROOT = Path(__file__).parents[1]
RED, TITLE, CLEAR = "\x1b[31m", "\x1b]0;owned\x07", "\x1b[2J\x1b[H"
REVERSED, C1, LINES = "\u202egnp.exe", "\x9b31m", "a\r\nerror: forged\u2028b\x85c\x00"
CODES = (RED, TITLE, CLEAR, REVERSED, C1, LINES, "\x7f", "\ud800", "\u200b", "\u2066")
HOSTILE = st.lists(st.sampled_from([*CODES, "x", " ", "llm", "[red]", "\t"]) | st.text(), max_size=6).map(
    "".join
)
LONG = "k" * 900_000
MOST_PRINTED = 20_000  # characters of an answer to a text of 900,000


def assert_harmless(text: str) -> None:
    """A terminal only prints it: no codes, no characters without a glyph."""
    codes = {character for character in text if not character.isprintable()}
    assert codes <= {"\n"}, codes
    assert len(text) < MOST_PRINTED


# ---------------------------------------------------------------------------- the writers


@given(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
def test_errors_are_harmless(field: str, problem: str, hint: str, value: str, file: str) -> None:
    error = str(UserError(field=field, problem=problem, hint=hint, value=value, file=file, line=3))
    assert_harmless(error)
    assert error.startswith("error: ") and error.count("\n") == 1 and "\nhint: " in error
    refusal = str(DoesNotFit(problem, hint))
    assert_harmless(refusal)
    assert refusal.count("\n") == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(HOSTILE, HOSTILE)
def test_what_is_printed_is_harmless(capsys: pytest.CaptureFixture[str], text: str, label: str) -> None:
    lines = [text, *wrap_text(label, text), *align_columns([label, "b"], [[text, label], [label, text]])]
    print_result({}, lines, as_json=False)
    print_result({text: [label]}, [], as_json=True)
    printed = capsys.readouterr().out
    assert_harmless(printed)
    assert json.JSONDecoder().raw_decode(printed[printed.index("\n{\n") :].strip())[0] == {text: [label]}
    print_lines([text], to_stderr=True)
    shown = capsys.readouterr().err
    assert_harmless(shown)
    assert shown.count("\n") == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(HOSTILE)
def test_exceptions_of_ours_are_harmless(capsys: pytest.CaptureFixture[str], text: str) -> None:
    def fail() -> int:
        raise RuntimeError(text)

    run_and_report_errors(fail, as_json=False)
    assert_harmless(capsys.readouterr().err)


@given(st.text())
def test_text_that_a_terminal_prints_is_left_alone(text: str) -> None:
    if text.isprintable():
        assert show_line(text) == text
    assert show_line(show_line(text)) == show_line(text)


@pytest.mark.parametrize("words", [LONG, "k " * 450_000, "\x1b" * 900_000])
def test_long_text_is_shortened(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = UserError(field=words, problem="is wrong", hint=words, value=words, file=words)
    assert len(str(error)) < 5 * MAX_LINE and "is wrong" in str(error)
    print_result({}, wrap_text("name", words) + align_columns(["a", "b"], [[words, "end"]]), as_json=False)
    shown = capsys.readouterr().out
    assert_harmless(shown)
    assert "end" in shown


def test_only_the_console_prints() -> None:
    """Every other module of the commands hands its lines to `print_lines`."""
    found = [
        path.relative_to(ROOT)
        for path in (ROOT / "optimus").rglob("*.py")
        if path.name != "console.py" and re.search(r"^\s*print\(", path.read_text(), re.MULTILINE)
    ]
    assert not found


# ---------------------------------------------------------------------------- the commands

CONFIG = json.loads((DATA / "released_forms.json").read_text())
JOB = """\
format: optimus.job/1
name: demo
model: {use: qwen2.5-vl-72b}
cluster: {use: h100, gpus: 64}
workload: {sequence_tokens: 8192, sequences_per_step: 64}
today: {framework: megatron, layout: {llm: {dp: 16, pp: 4}, vision: stage0}, measured: {step_s: 17.9}}
run: {steps: 20}
"""


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every container of a document with every key or index in it."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, dict | list):
            yield from places(value)


def with_text(document: Any, rng: random.Random, text: str) -> Any:
    """Puts a text into a document: as a value, as a key, or at the end of a text that is there."""
    changed = copy.deepcopy(document)
    block, key = rng.choice(list(places(changed)))
    way = rng.randrange(3)
    if way == 0 and isinstance(block, dict):
        block[text] = block.pop(key)
    elif way == 1 and isinstance(block[key], str):
        block[key] += text
    else:
        block[key] = text
    return changed


def hostile_calls(rng: random.Random) -> list[tuple[str, str, list[str]]]:
    """Lists files with a hostile text in them, and the command that reads each."""
    text = rng.choice([*CODES, LONG, "".join(rng.sample(CODES, 4))])
    config = with_text(CONFIG[rng.choice(sorted(CONFIG))], rng, text)
    plan = json.loads(format_plan(tiny_plan(random.Random(rng.randrange(5)))))
    named = with_text({key: plan[key] for key in ("name", "tool", "strategy", "order", "notes")}, rng, text)
    anywhere = with_text(plan, rng, text)
    return [
        (
            "job.yaml",
            json.dumps(with_text(yaml.safe_load(JOB), rng, text)),
            ["why", "good.plan.json", "llm=pp2", "--job", "job.yaml"],
        ),
        ("l.jsonl", json.dumps(with_text({"text": 7, "vision": [3]}, rng, text)), ["deal", "l.jsonl"]),
        (
            "config.json",
            json.dumps(config),
            ["init", "--hf", "config.json", "--on", "h100:64", "-o", "j.yaml"],
        ),
        ("x.plan.json", json.dumps({**plan, **named}), ["check", "x.plan.json"]),
        ("x.plan.json", json.dumps(anywhere), ["check", "x.plan.json", "--grid"]),
        ("x.plan.json", json.dumps({**plan, **named}), ["diff", "x.plan.json", "good.plan.json"]),
        ("p.yaml", json.dumps({text: text}), ["simulate", "cpu/tiny-vl", "--profile", "p.yaml"]),
        ("q.yaml", json.dumps({"format": text}), ["simulate", "cpu/tiny-vl", "--profile", "q.yaml"]),
    ]


def run_hostile_calls(count: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """Runs commands on hostile files, and returns how many of them printed a part of the text."""
    (folder / "good.plan.json").write_text(format_plan(tiny_plan(random.Random(0))))
    rng, quoted = random.Random(17), 0
    for _ in range(count):
        for name, text, arguments in hostile_calls(rng):
            (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
            run(arguments)
            printed = capsys.readouterr()
            assert_harmless(printed.out + printed.err)
            assert "This is a bug in Optimus" not in printed.err, (arguments, text[:500], printed.err)
            quoted += re.search(r"\\[xu][0-9a-f]{2}|kkkk", printed.out + printed.err) is not None
    return quoted


def test_commands_print_no_codes_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_hostile_calls(3, tmp_path, capsys) > 3


@pytest.mark.ci
def test_many_commands_print_no_codes_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_hostile_calls(40, tmp_path, capsys) > 40


@pytest.mark.ci
def test_a_hostile_config_leaves_the_terminal_alone(tmp_path: Path) -> None:
    """As a process, with standard output that knows ASCII only."""
    config = copy.deepcopy(next(iter(CONFIG.values())))
    config["model_type"] += TITLE + RED + REVERSED
    (tmp_path / f"config{RED}.json").write_text(json.dumps({**config, LONG: 1, CLEAR: {RED: [TITLE]}}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    for arguments in (
        ["init", "--hf", f"config{RED}.json", "--on", "h100:64"],
        ["simulate", f"config{RED}.json", "--on", f"h100{TITLE}:64"],
        [f"{RED}check", LONG[:50_000]],
        ["train", f"config{RED}.json", f"--{CLEAR}"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "optimus", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            check=False,
        )
        assert done.returncode == USER_ERROR, done.stderr
        assert_harmless((done.stdout + done.stderr).decode("ascii"))
        assert b"Traceback" not in done.stderr
