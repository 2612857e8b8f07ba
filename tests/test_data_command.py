"""`optimus data index` writes lengths that jobs read, and ends with an answer whatever data and model are."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_data import chat, write_data_set, write_folder

from optimus import cli
from optimus.data import index_lengths, media_headers
from optimus.data.jsonl_file import scan_jsonl
from optimus.data.token_counts import TokenCounter
from optimus.errors import UserError
from optimus.job.read import load_job

pytestmark = pytest.mark.ci("data")


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert cli.run([*arguments, "--json"]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


JOB = """
format: optimus.job/1
model: {hf: model/config.json}
cluster: {use: h100, gpus: 8}
workload: {sequence_tokens: 512, sequences_per_step: 8, lengths: train.lengths.jsonl}
"""


def test_the_command_writes_lengths_that_a_job_reads_whatever_the_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_lengths, "CHUNKS_PER_WORKER", 1)
    data = write_data_set(tmp_path, 600)
    model = write_folder(tmp_path / "model", "qwen2_5_vl")
    command = ["data", "index", str(data), "--model", str(model)]
    one = run_json(capsys, *command, "--workers", "1")
    written = (tmp_path / "train.lengths.jsonl").read_bytes()
    two = run_json(capsys, *command, "--workers", "2")
    assert one == two and (tmp_path / "train.lengths.jsonl").read_bytes() == written
    rows = [json.loads(line) for line in written.splitlines()]
    assert one["samples"] == len(rows) == 599 and one["skipped"] == 1
    assert one["tokens"] == sum(row["text"] + sum(row["vision"]) for row in rows)
    (example,) = one["reasons"]["file missing"]["examples"]
    assert example == {"line": 501, "detail": "missing.png"}

    packed = run_json(capsys, *command, "--workers", "1", "--sequence-tokens", "512")
    assert 0.9 < packed["fill"] <= 1 and packed["tokens"] == one["tokens"]
    rows = [json.loads(line) for line in (tmp_path / "train.lengths.jsonl").read_text().splitlines()]
    assert len(rows) == packed["sequences"]
    (tmp_path / "job.yaml").write_text(JOB)
    sequences = load_job(tmp_path / "job.yaml").workload.sequences
    assert [(row["text"], *row["vision"]) for row in rows] == [
        (sequence.text, *sequence.lengths("vision")) for sequence in sequences
    ]
    assert sum(sequence.tokens for sequence in sequences) == one["tokens"]
    short = run_json(capsys, *command, "--workers", "1", "--sequence-tokens", "100")
    assert short["reasons"]["longer than a sequence"]["count"] == short["skipped"] - 1 > 0
    assert cli.run([*command, "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert "599 samples" in printed and "█" in printed and "line 501: missing.png" in printed


@pytest.mark.heavy
def test_a_killed_worker_ends_the_command_with_an_error(tmp_path: Path) -> None:
    def kill_one(name: str, done: int, total: int) -> None:
        os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)

    file = scan_jsonl(write_data_set(tmp_path, 40 * index_lengths.CHUNK))
    model, folder = write_folder(tmp_path / "model", "qwen2_5_vl"), media_headers.MediaFolder(root=tmp_path)
    with pytest.raises(UserError, match="worker process"):
        index_lengths.index_lengths(file, model=model, folder=folder, workers=2, progress=kill_one)


def test_a_data_set_without_a_sample_that_can_be_used_is_a_no(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_folder(tmp_path / "model", "llava")
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"b": 2}\n\n')
    command = ["data", "index", str(tmp_path / "bad.jsonl"), "--model", str(model)]
    result = run_json(capsys, *command, code=1)
    assert (result["samples"], result["skipped"], result["lengths"]) == (0, 2, None)
    assert not (tmp_path / "bad.lengths.jsonl").exists()


def test_control_codes_and_surrogates_of_a_data_set_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_folder(tmp_path / "model", "llava")
    rows = [
        chat("<image>", images=["\ud800\x1b[2J.png"]),
        {"messages": [{"role": "\x1b]0;x", "content": ""}]},
    ]
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.run(["data", "index", str(tmp_path / "bad.jsonl"), "--model", str(model)]) == 1
    printed = capsys.readouterr().out
    assert "\\ud800\\x1b[2J.png" in printed and "role \\x1b]0;x" in printed
    assert all(line.isprintable() for line in printed.splitlines())


def test_a_processor_that_counts_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "model", "qwen2_audio")
    run = TokenCounter._run

    def one_more(counter: TokenCounter, kind: str, **inputs: Any) -> tuple[str, int]:
        text, count = run(counter, kind, **inputs)
        return text, count + 1

    with monkeypatch.context() as patch:
        patch.setattr(TokenCounter, "_run", one_more)
        with pytest.raises(UserError, match="of items where"):
            TokenCounter(folder)
    for template, problem in (
        ("{{ message.content | length }}", "cannot be told from its prompts"),
        ("{% generation %}{{ message.role }}{% endgeneration %}", "0 placeholders for 2 files"),
    ):
        (folder / "chat_template.jinja").write_text(
            f"{{% for message in messages %}}{template}{{% endfor %}}"
        )
        with pytest.raises(UserError, match=problem):
            TokenCounter(folder)


def test_model_folders_without_a_processor_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "llava")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="chat template"):
        TokenCounter(folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match="no processor"):
        TokenCounter(folder)
    (folder / "processor_config.json").write_text('{"processor_class": "Qwen2_5OmniProcessor"}')
    with pytest.raises(UserError, match="torchvision"):
        TokenCounter(folder)
    (folder / "processor_config.json").write_text('{"processor_class": "Popen"}')
    with pytest.raises(UserError, match="names no processor"):
        TokenCounter(folder)


def test_without_the_extra_the_command_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sample_index", "index_lengths", "token_counts", "media_headers"):
        monkeypatch.delitem(sys.modules, f"optimus.data.{name}")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert cli.run(["data", "index", str(tmp_path / "a.jsonl"), "--model", "folder"]) == 2
    assert "soundfile is not installed\nhint: pip install 'optimus-mllm[data]'" in capsys.readouterr().err
