"""`optimus train` with `data:`: losses of transformers on the same files, under any plan, from any step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_data import chat, write_folder, write_image, write_weights
from torch.nn import functional
from transformers import AutoModelForImageTextToText

import optimus
from optimus import cli
from optimus.cli.train_inputs import build_data_json, format_data
from optimus.data.sample_index import open_data
from optimus.engine.packed_data import PackedDataset
from optimus.errors import UserError
from optimus.hf.chat_dataset import ChatDataset
from optimus.job.read import load_data_source, load_job
from optimus.models.sample import IGNORE_INDEX, Sample

JOB = """
format: optimus.job/1
model: {hf: model}
cluster: {use: h100, gpus: 2, gpus_per_node: 2}
workload: {sequence_tokens: 256, sequences_per_step: 4}
data: {path: photos/train.jsonl, workers: 1}
layout: {limits: {microbatch_sequences: [1]}}
run: {dtype: float64, seed: 3}
"""


def write_job(folder: Path, kind: str = "qwen2_5_vl") -> Path:
    photos = folder / "photos"
    photos.mkdir()
    with (photos / "train.jsonl").open("w") as file:
        for number in range(30):
            images = [] if number % 5 == 4 else [f"{number % 7}.png"] * (1 + number % 2)
            asked = "<image>" * len(images) + "what is in " * (number % 4 + 1)
            file.write(json.dumps(chat(asked, "the cat " * (number % 3 + 1), images=images)) + "\n")
    for place in range(7):
        write_image(photos / f"{place}.png", (60 + 20 * place, 70))
    write_weights(folder / "model", kind, torch.float32)
    (folder / "job.yaml").write_text(JOB)
    return folder / "job.yaml"


def run_json(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert cli.run([*map(str, words), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def their_loss(model_dir: Path, dataset: ChatDataset, sequences: list[tuple[int, ...]]) -> float:
    """Runs samples one by one through transformers; samples without labels count in the mean."""
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float64).eval()
    total, labels = 0.0, 0
    for number in (number for sequence in sequences for number in sequence):
        sample = dataset.sample(number)
        labels += dataset.labels(number)
        if not sample.skipped:
            total += alone_loss(model, sample)
    return total / labels


def alone_loss(model: Any, sample: Sample) -> float:
    inputs: dict[str, Any] = {"input_ids": sample.tokens[None]}
    inputs["mm_token_type_ids"] = (sample.tokens == model.config.image_token_id).int()[None]
    if items := sample.items["vision"]:
        inputs["image_grid_thw"] = torch.tensor([[1, *item.grid] for item in items])
        groups = [
            item.inputs.reshape(item.grid[0] // 2, 2, item.grid[1] // 2, 2, -1).transpose(1, 2).flatten(0, 3)
            for item in items
        ]
        inputs["pixel_values"] = torch.cat(groups).double()
    with torch.no_grad():
        logits = model(**inputs).logits[0]
    loss = functional.cross_entropy(logits, sample.labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return float(loss)


@pytest.mark.ci("data")
@pytest.mark.timeout(600)  # a minute of CPU in ten processes
def test_losses_are_those_of_transformers_on_the_same_files_under_two_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run goes on from the first one's weights and step, and a file is broken after indexing.

    The first one evaluates the weights that it saves.
    """
    job = write_job(tmp_path)
    job.write_text(JOB.replace("seed: 3", "seed: 3, eval: {every: 2, batches: 1}"))
    source = load_data_source(job)
    assert source is not None
    index = open_data(source, progress=lambda *_: None).index
    (tmp_path / "photos" / "3.png").write_bytes((tmp_path / "photos" / "3.png").read_bytes()[:-400])
    saved, runs = tmp_path / "saved", [tmp_path / "a", tmp_path / "b"]
    first = run_json(
        capsys, "train", job, "--steps", 2, "--layout", "llm=pp2,tp1", "--save", saved, "--run-dir", runs[0]
    )
    second = run_json(
        capsys, "train", job, "--steps", 1, "--first-step", 2, "--model", saved, "--run-dir", runs[1],
        "--layout", "llm=pp1,tp1",
    )  # fmt: skip

    data = open_data(source)
    dataset = ChatDataset.open(data.file, data.index, folder=data.folder, model_dir=source.model_dir)
    packed = PackedDataset(dataset=dataset, sequences=index.sequences, length=256, seed=3, held_out=4)
    steps = [[packed.members(number) for number in range(4 * step, 4 * step + 4)] for step in range(3)]
    lines = [json.loads(line) for run in runs for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for step, folder in ((0, tmp_path / "model"), (2, saved)):
        expected = their_loss(folder, dataset, steps[step])
        assert abs(lines[step]["loss"] - expected) < 1e-6 * expected, step

    expected = their_loss(saved, dataset, [packed.members(-1 - at) for at in range(4)])
    assert lines[1]["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert lines[0]["eval_loss"] is None

    broken = {n for n in range(len(dataset)) if dataset.sample(n).skipped}
    counts = [sum(number in broken for members in step for number in members) for step in steps]
    assert [line["skipped_samples"] for line in lines] == counts and sum(counts) > 0
    assert first["skipped_samples"] == sum(counts[:2]) and second["skipped_samples"] == counts[2]
    assert all("unreadable file: 3.png" in reason for reason in first["skipped"] + second["skipped"])


def test_a_job_with_data_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "photos" / "train.jsonl").write_text("{}\n")
    write_weights(tmp_path / "model", "qwen3_vl", torch.float32)
    job = tmp_path / "job.yaml"

    def error(text: str) -> str:
        job.write_text(text)
        with pytest.raises(UserError) as raised:
            load_job(job)
        return str(raised.value)

    command = f"run optimus data index {tmp_path}/photos/train.jsonl --model {tmp_path}/model"
    assert f"{command} --sequence-tokens 256" in error(JOB)
    limited = JOB.replace("workers: 1", "max_pixels: 99, index: other.npz, media_dir: model")
    assert f"--media-dir {tmp_path}/model --max-pixels 99 --output {tmp_path}/other.lengths.jsonl" in error(
        limited
    )
    assert "data needs a model folder" in error(JOB.replace("{hf: model}", "{use: qwen2.5-vl-72b}"))
    assert "data needs workload.sequence_tokens" in error(JOB.replace("workload:", "source: a #"))
    assert "data.index = a.bin is not a .npz file" in error(JOB.replace("workers: 1", "index: a.bin"))
    assert "data.workers = 0" in error(JOB.replace("workers: 1", "workers: 0"))
    assert "data.paths" in error(JOB.replace("path:", "paths:"))
    wrong = error(JOB.replace("{hf: model}", "{hf: modell}"))
    assert "model.hf = modell is neither a model folder nor a config.json" in wrong
    job.write_text(JOB.replace("train.jsonl", "trane.jsonl"))
    with pytest.raises(UserError, match=r"data.path = photos/trane.jsonl does not exist"):
        load_data_source(job)


@pytest.mark.ci("data")
def test_a_workload_that_states_other_lengths_than_its_data_is_refused(tmp_path: Path) -> None:
    job, photos = write_job(tmp_path), tmp_path / "photos"
    source = load_data_source(job)
    assert source is not None
    open_data(source, progress=lambda *_: None)
    read = load_job(job)

    def error(old: str, new: str) -> str:
        job.write_text(JOB.replace(old, new))
        with pytest.raises(UserError) as raised:
            load_job(job)
        return str(raised.value)

    step = "sequences_per_step: 4"
    percentiles = f"{step}, vision_tokens: {{p50: 20, p95: 40, max: 60}}"
    assert "workload.vision_tokens is given together with data" in error(step, percentiles)
    (photos / "other.jsonl").write_text((photos / "train.lengths.jsonl").read_text())
    stated = error(step, f"{step}, lengths: photos/other.jsonl")
    assert "workload.lengths = photos/other.jsonl is not" in stated and "leave it out" in stated
    longer = error("sequence_tokens: 256", "sequence_tokens: 300")
    assert "workload.sequence_tokens = 300 is another length" in longer and "to 256 tokens" in longer
    assert "--sequence-tokens 300" in longer
    job.write_text(JOB.replace(step, f"{step}, lengths: photos/../photos/train.lengths.jsonl"))
    assert load_job(job).workload == read.workload

    unpacked = ["data", "index", str(photos / "train.jsonl"), "--model", str(tmp_path / "model")]
    assert cli.run(unpacked) == 0
    assert "packs samples to no length" in error("seed: 3", "seed: 4")

    lines = (photos / "train.jsonl").read_text().splitlines(keepends=True)
    (photos / "train.jsonl").write_text("".join(lines[:-3]))
    with pytest.raises(UserError, match=r"workload.lengths = .* has other lengths than the data"):
        optimus.train(read, steps=1)


@pytest.mark.ci("data")
def test_videos_and_sounds_are_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    job, photos = write_job(tmp_path), tmp_path / "photos"
    source = load_data_source(job)
    assert source is not None
    usable = (photos / "train.jsonl").read_text()
    others = [chat("<video>what", videos=["a.mp4"]), chat("<audio>what", audios=["a.wav"])]
    (photos / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in others) + usable)
    open_data(source, progress=lambda *_: None)
    index = open_data(source).index
    described = build_data_json(index)
    assert described["samples"] == 30
    assert described["skipped"]["not supported"] == {
        "count": 2,
        "examples": [
            {"line": 1, "detail": "a video; give some of its frames as images"},
            {"line": 2, "detail": "audio, for which the model has no encoder"},
        ],
    }
    lines = format_data(load_job(job), index)
    assert all(len(line) <= 80 or "/" in line for line in lines)
    words = " ".join(" ".join(lines).split())
    assert "skipped 2 not supported (line 1: a video; give some of its frames as images; line 2:" in words

    for row, detail in zip(others, ("a video; give some", "audio, for which the model"), strict=True):
        (photos / "train.jsonl").write_text(json.dumps(row) + "\n")
        assert cli.run(["train", str(job)]) == 2
        printed = " ".join(capsys.readouterr().err.split())
        assert f"has no sample that can be used: 1 not supported (line 1: {detail}" in printed


@pytest.mark.ci("data")
def test_a_model_of_sounds_is_refused_before_its_data_are_indexed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "model", "qwen2_audio")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "train.jsonl").write_text(json.dumps(chat("<audio>what", audios=["a.wav"])))
    (tmp_path / "job.yaml").write_text(JOB)
    assert cli.run(["train", str(tmp_path / "job.yaml")]) == 2
    printed = capsys.readouterr().err
    assert "model.family = qwen2_audio" in printed and "hint: " in printed
    assert not list((tmp_path / "photos").glob("*.npz"))


@pytest.mark.ci("data")
def test_data_without_a_sample_that_can_be_used_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, "llava_siglip")
    (tmp_path / "photos" / "train.jsonl").write_text('{"a": 1}\n')
    assert cli.run(["train", str(job)]) == 2
    assert "has no sample that can be used: 1 unknown form (line 1: keys a)" in capsys.readouterr().err
    assert not list((tmp_path / "photos").glob("*.npz"))
