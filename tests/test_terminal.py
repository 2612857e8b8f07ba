"""Output on a terminal: no line is wider than 80 columns when piped, and progress is plain lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from optimus.cli import COMMANDS, console, run
from optimus.cli.text import align_columns, format_next_commands, wrap_text
from optimus.engine import launcher

ROOT = Path(__file__).parent.parent
LENGTHS = str(Path(__file__).parents[1] / "examples" / "lengths.jsonl")
TINY, AT = "cpu/tiny-vl", ("--layout", "llm=pp2,tp1")
LONG_NAME = "a-vision-language-model-whose-name-is-longer-than-any-that-was-released"


def piped(folder: Path, *arguments: str, code: int = 0) -> tuple[str, str]:
    """Runs a command as a shell does with both outputs piped and COLUMNS unset."""
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-m", "optimus", *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def assert_fits(text: str, *, width: int = 80) -> None:
    """Every line fits, or holds nothing but its margin and one word that cannot be broken."""
    for line in text.splitlines():
        assert len(line) <= width or re.fullmatch(r"(\S+:?)?\s+\S+|\S+", line), line
        assert line == line.rstrip(), f"trailing spaces: {line!r}"


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_fits_80_columns(
    command: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    if command is None:
        assert run(["--help"]) == 0
    else:
        with pytest.raises(SystemExit):
            run([command, "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: optimus")
    assert_fits(shown)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two plans of a job, and what was printed about them in `out`."""
    folder = tmp_path_factory.mktemp("plans")
    for name, strategy in (("a", "optimus"), ("b", "paper")):
        flags = (*AT, "--system", "stage0", "--strategy", strategy, "--no-sure", "-o", f"{name}.plan.json")
        out, err = piped(folder, "plan", TINY, *flags)
        (folder / f"{name}.out").write_text(out + err)
    return folder


@pytest.mark.ci
def test_a_plan_fits_80_columns_when_piped(plans: Path) -> None:
    for name in ("a.out", "b.out"):
        assert_fits((plans / name).read_text())


@pytest.mark.ci
def test_how_sure_a_plan_is_fits_80_columns_when_piped(tmp_path: Path) -> None:
    out, err = piped(tmp_path, "plan", TINY, *AT, "--system", "fsdp", "--noise")
    assert "perturbed cost models" in out and "noise" in out
    assert_fits(out + err)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("catalog",), 0),
        (("init", "--hf", "internvl3-78b", "--on", "h200:128"), 0),
        (("simulate", TINY, *AT, "--system", "stage0", "fsdp", "three-phase"), 0),
        (("simulate", "a.plan.json"), 0),
        (("check", "a.plan.json"), 0),
        (("why", "a.plan.json", "llm=pp1"), 0),
        (("export", "a.plan.json", "--to", "megatron"), 0),
        (("export", "a.plan.json", "--to", "torchtitan"), 0),
        (("report", "a.plan.json"), 0),
        (("sweep", TINY, *AT, "--gpus", "2,3", "--system", "stage0"), 0),
        (("train", TINY, "--plan", "a.plan.json", "--steps", "2", "--memory"), 0),
        (("train", TINY, "--plan", "a.plan.json", "--dry-run"), 0),
        (("profile", TINY), 0),
        (("diff", "a.plan.json", "b.plan.json"), 1),
        (("deal", LENGTHS), 0),
        (("simulate", "kimi-k2.5", "--on", "h100:8"), 1),
        (("plan", TINY, "--layout", "llm=pp3"), 2),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else None,
)
def test_every_command_fits_80_columns_when_piped(arguments: tuple[str, ...], code: int, plans: Path) -> None:
    out, err = piped(plans, *arguments, code=code)
    assert out or code
    assert_fits(out)
    assert_fits(err)


@pytest.mark.ci
def test_a_long_model_name_fits_too(tmp_path: Path) -> None:
    job = (ROOT / "optimus/catalog/jobs/cpu/tiny-vl.yaml").read_text()
    (tmp_path / "long.yaml").write_text(job.replace("name: tiny-vl", f"name: {LONG_NAME}"))
    for command in (
        ("simulate", "long.yaml", *AT, "--system", "stage0", "fsdp"),
        ("plan", "long.yaml", *AT, "--system", "stage0", "fsdp", "--no-sure", "-o", "a.plan.json"),
        ("check", "a.plan.json"),
    ):
        out, _ = piped(tmp_path, *command)
        assert LONG_NAME in out or command[0] == "check"
        assert_fits(out)


def test_a_wide_table_is_split_at_the_given_column(monkeypatch: pytest.MonkeyPatch) -> None:
    header, rows = ["name", "a", "b", "c"], [["x", "1", "2", "3"], ["y", "4", "5", ""]]
    monkeypatch.setenv("COLUMNS", "80")
    assert align_columns(header, rows) == ["  name  a  b  c", "  x     1  2  3", "  y     4  5"]
    wide = [["x", *("1" * 30, "2" * 30, "3" * 30)], ["y", "4" * 30, "5" * 30, ""]]
    split = align_columns(header, wide, breaks=[2])
    heads = [[cell[:1] for cell in line.split()] for line in split if line]
    assert heads == [["n", "a"], ["x", "1"], ["y", "4"], ["n", "b", "c"], ["x", "2", "3"], ["y", "5"]]
    monkeypatch.setenv("COLUMNS", "120")
    assert len(align_columns(header, wide, breaks=[2])) == 3


def test_lines_use_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "word " * 40
    for width in (80, 132):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = wrap_text("label", text)
        assert lines[0].startswith("label          word")
        assert max(map(len, lines)) <= width < max(map(len, lines)) + len(" word")


def test_a_number_keeps_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    for width in range(40, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        assert not any(
            line.strip().startswith(("s ", "s,", "GB")) for line in wrap_text("", "a 1.25 s, 80 GB " * 9)
        )


def test_a_long_command_is_continued_as_a_shell_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    command = f"optimus plan job.yaml --on {'x' * 30} --profile y.yaml"
    lines = format_next_commands("optimus check a", command)
    assert lines[0] == "next  optimus check a" and lines[1].endswith(" \\")
    assert " ".join(line.strip().removesuffix(" \\") for line in lines[1:]) == command


def test_piped_progress_is_a_line_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    with console.progress_bar("planning") as progress:
        for tick in range(120):  # a tenth of a second each
            now_s = 100.0 + tick / 10
            progress("layouts", tick, 120)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        f"planning: layouts, {tick} of 120, {tick // 10} s" for tick in (10, 60, 110)
    ]


def test_work_below_a_second_prints_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress_bar("planning") as progress, console.training_progress(3) as step:
        progress("layouts", 1, 2)
        step({"step": 0, "loss": 1.0, "step_s": 0.1, "tokens_per_s": 100.0})
    assert capsys.readouterr() == ("", "")


def test_a_message_of_a_rank_takes_the_line_of_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    monkeypatch.setattr("os.write", lambda file, data: written.append(data))
    for is_terminal in (True, False):
        monkeypatch.setattr("os.isatty", lambda file, answer=is_terminal: answer)
        words = [sys.executable, "-c", "import sys; sys.stderr.write('a\\nb\\n')"]
        process = subprocess.Popen(words, stderr=subprocess.PIPE)
        launcher._RankProcess(rank=3, process=process).forward_stderr()
        process.wait()
    assert written == [b"\r\x1b[2K[3] a\n", b"\r\x1b[2K[3] b\n", b"[3] a\n", b"[3] b\n"]


def test_the_command_line_starts_without_what_commands_load() -> None:
    script = "import sys, optimus.cli; print({'numpy', 'numba', 'torch'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
