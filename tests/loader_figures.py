"""Measures decoding in worker processes: samples per second and worker, and steps that waited for data.

`python tests/loader_figures.py 400` decodes as many images of 448 x 448 and 896 x 672 pixels in this process
and in one and two workers; `python tests/loader_figures.py train 20` trains as many steps on small images.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from chat_data import chat, write_image, write_weights
from faults import ROOT

from optimus.data.jsonl_file import scan_jsonl
from optimus.data.media_headers import MediaFolder
from optimus.data.sample_index import IndexKey, build_index
from optimus.engine.prefetched_data import PrefetchedDataset
from optimus.hf.chat_dataset import ChatDataset

JOB = """format: optimus.job/1
model: {hf: tiny-qwen}
cluster: {use: h100, gpus: 2, gpus_per_node: 2}
workload: {sequence_tokens: 512, sequences_per_step: 8}
data: {path: photos/train.jsonl, workers: 1}
layout: {llm: {pp: 2, tp: 1}, limits: {microbatch_sequences: [1]}}
"""


def write_photos(folder: Path, samples: int) -> ChatDataset:
    """Writes JPEG files of two sizes, with a limit of 1,280 tokens per image."""
    model = write_weights(folder / "model", "qwen2_5_vl", torch.float32)
    path = model / "preprocessor_config.json"
    settings = json.loads(path.read_text()) | {
        "size": {"shortest_edge": 3136, "longest_edge": 28 * 28 * 1280}
    }
    path.write_text(json.dumps(settings))
    for place in range(20):
        write_image(folder / f"{place}.jpg", (448, 448) if place % 2 else (896, 672))
    lines = [chat("<image>what is it", images=[f"{number % 20}.jpg"]) for number in range(samples)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file, media = scan_jsonl(folder / "data.jsonl"), MediaFolder(root=folder)
    key = IndexKey.make(file, model=model, folder=media, sequence_tokens=None)
    index = build_index(file, key, model=model, folder=media, workers=1, progress=lambda *_: None)
    return ChatDataset.open(file, index, folder=media, model_dir=model)


def measure_workers(samples: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        data = write_photos(Path(name), samples)
        data.sample(0)
        begin_s = time.monotonic()
        for number in range(samples):
            data.sample(number)
        sys.stdout.write(f"in this process: {samples / (time.monotonic() - begin_s):.1f} samples/s\n")
        for workers in (1, 2):
            loader = PrefetchedDataset(data, workers=workers, preload=[ChatDataset.__module__])
            loader.start((number, None) for number in range(2 * workers))  # until they have started
            loader.wait()
            begin_s = time.monotonic()
            loader.start((number, None) for number in range(samples))
            for number in range(samples):
                loader.sample(number)
            rate = samples / (time.monotonic() - begin_s) / workers
            sys.stdout.write(f"{workers} workers: {rate:.1f} samples/s and worker\n")
            loader.close()


def measure_training(steps: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        made = [sys.executable, str(ROOT / "examples" / "make_captions.py"), "photos", "tiny-qwen"]
        subprocess.run(made, cwd=name, check=True, capture_output=True)
        (Path(name) / "job.yaml").write_text(JOB)
        command = [sys.executable, "-m", "optimus", "train", "job.yaml", "--steps", str(steps), "--json"]
        ran = subprocess.run(command, cwd=name, check=True, stdout=subprocess.PIPE, text=True)
        lines = (Path(name) / "optimus-run" / "metrics.jsonl").read_text().splitlines()
    summary, waited = json.loads(ran.stdout), [json.loads(line)["data_wait_s"] for line in lines]
    sys.stdout.write(
        f"{summary['waiting_steps']} of {steps} steps waited for data, {sum(waited):.2f} s in all; "
        f"median step {summary['step_s_median']:.2f} s\n"
    )


if __name__ == "__main__":
    (measure_training if sys.argv[1] == "train" else measure_workers)(int(sys.argv[-1]))
