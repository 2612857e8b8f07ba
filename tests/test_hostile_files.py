"""Hostile files run no code: every reader answers or raises a typed error, soon and in little memory."""

from __future__ import annotations

import json
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hostile_files import MAKERS, Evil, make_pickle
from machine import allowed_s
from made_profiles import made_profile
from tiny_plans import tiny_plan
from torch.distributed import checkpoint as dcp

from optimus.cost.profile_file import format_profile, load_profile
from optimus.data.processor import load_processor
from optimus.data.sample_index import IndexKey, SampleIndex
from optimus.data.tar_shards import scan_shards
from optimus.engine.checkpoint import load_state
from optimus.engine.checkpoint_folder import MANIFEST, METADATA, Manifest, describe_file, verify_files
from optimus.engine.checkpoint_state import Box, TensorShards
from optimus.engine.checkpoint_storage import ShardedSavePlanner, StateWriter
from optimus.engine.input_digest import digest_index
from optimus.errors import OptimusError
from optimus.hf.checkpoint import INDEX, Checkpoint
from optimus.hf.load import load_model
from optimus.hf.safetensors_file import read_header
from optimus.ir.planfile import format_plan, load_plan
from optimus.job.data_source import DataSource
from optimus.job.read import find_job, load_job
from optimus.job.workload import read_sequence_lengths

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MOST_S, MOST_MB = 2.0, 500
JOB = "format: optimus.job/1\nmodel: {use: qwen2.5-vl-72b}\ncluster: {use: h100, gpus: 64}\n"
KEY = IndexKey(
    data="d", processor="p", media_dir=".", sequence_tokens=8, decode=False, max_pixels=1, max_audio_s=1
)


class Reader:
    """A file that Optimus reads, in a folder made by `prepare`, and how it reads it."""

    def __init__(self, file: str, good: Callable[[], bytes], read: Callable[[Path], object]) -> None:
        self.file, self.good, self.read = file, good, read


def state() -> dict[str, TensorShards]:
    values = torch.arange(12, dtype=torch.float32).view(3, 4)
    return {"weight": TensorShards(shape=(3, 4), boxes=(Box(offsets=(0, 0), values=values),))}


def checkpoint_in(folder: Path) -> Path:
    """Writes a checkpoint in DCP's files, once."""
    checkpoint = folder / "step-00000003"
    if not checkpoint.exists():
        dcp.save(
            {}, storage_writer=StateWriter(checkpoint), planner=ShardedSavePlanner(state()), no_dist=True
        )
    return checkpoint


def load_checkpoint(path: Path) -> None:
    """Loads a checkpoint whose attacker also wrote a manifest that fits."""
    folder = path.parent
    if path.name != MANIFEST:
        files = {entry.name: describe_file(entry) for entry in folder.iterdir() if entry.name != MANIFEST}
        (folder / MANIFEST).write_text(Manifest(step=3, facts={}, files=files).dumps())
    verify_files(folder, Manifest.load(folder))
    load_state(folder, state(), None)


def read_index(path: Path) -> None:
    """Reads an index of samples in the three places that do."""
    source = DataSource(
        path=path.with_name("data.jsonl"), media_dir=path.parent, index=path, model_dir=path.parent,
        sequence_tokens=8, max_pixels=1, max_audio_s=1, workers=0,
    )  # fmt: skip
    source.read_packed_tokens()
    digest_index(path)
    index = SampleIndex.load(path, KEY)
    if index is not None:
        list(index.sequences)
        index.packed_lengths().rows()


def good_index() -> bytes:
    import io

    buffer = io.BytesIO()
    header = {"format": "x", "key": vars(KEY)}
    np.savez(buffer, header=np.frombuffer(json.dumps(header).encode(), np.uint8), numbers=np.arange(3))
    return buffer.getvalue()


def read_shards(path: Path) -> None:
    (path.parents[1] / "a.tar").write_bytes(b"\0" * 1024)
    (path.parent / "dataset.yaml").write_text("sample_type: {__class__: CrudeWebdataset}\n")
    scan_shards(path.parents[1])


READERS = {
    "plan": Reader("a.plan.json", lambda: format_plan(tiny_plan(random.Random(1))).encode(), load_plan),
    "job": Reader("job.yaml", JOB.encode, load_job),
    "profile": Reader(
        "p.yaml", lambda: format_profile(made_profile(find_job("cpu/tiny-vl"))).encode(), load_profile
    ),
    "lengths": Reader("l.jsonl", lambda: b'{"text": 5, "vision": [3]}\n' * 50, read_sequence_lengths),
    "config": Reader(
        "config.json", lambda: b'{"model_type": "qwen3_vl"}', lambda p: find_job(p, on="h100:8")
    ),
    "weights": Reader("model.safetensors", lambda: b"\2" + b"\0" * 7 + b"{}", read_header),
    "weights in a folder": Reader(
        "model.safetensors", lambda: b"\2" + b"\0" * 7 + b"{}", lambda path: Checkpoint(path.parent)
    ),
    "weight index": Reader(INDEX, lambda: b'{"weight_map": {"a": "b"}}', lambda p: Checkpoint(p.parent)),
    "sample index": Reader("data.index.npz", good_index, read_index),
    "shards": Reader(".nv-meta/split.yaml", lambda: b"split_parts: {train: ['a.tar']}\n", read_shards),
    **{
        f"checkpoint's {name}": Reader(f"step-00000003/{name}", lambda: b"", load_checkpoint)
        for name in (MANIFEST, METADATA, ".metadata", "__0_0.distcp")
    },
}


def most_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def attack(name: str, maker: str, rng: random.Random, folder: Path) -> str:
    """Lets one reader read one hostile file; returns what came of it."""
    reader, canary = READERS[name], folder / "canary"
    inside = folder / name.replace("'", "").replace(" ", "-")
    path = inside / reader.file
    if name.startswith("checkpoint"):
        checkpoint_in(inside)
    path.parent.mkdir(parents=True, exist_ok=True)
    before, good = path.read_bytes() if path.exists() else b"", reader.good()
    path.write_bytes(MAKERS[maker](rng, canary, good or before or b"{}"))
    started, held = time.process_time(), most_megabytes()
    try:
        reader.read(path)
        found = "read"
    except OptimusError as error:
        found = "refused" if "\nhint: " in str(error) and len(str(error)) < 20_000 else str(error)
    finally:
        spent = time.process_time() - started
        hostile = path.read_bytes()
        if before:
            path.write_bytes(before)
    case = name, maker, hostile[:200]
    assert not canary.exists(), case
    assert spent < MOST_S or spent < allowed_s(MOST_S), case
    assert most_megabytes() - held < MOST_MB, case
    return found


def attack_all(count: int, seed: int, folder: Path) -> Counter[str]:
    """Deals hostile files over readers: every reader meets every maker."""
    rng, found = random.Random(seed), Counter[str]()
    pairs = [(name, maker) for maker in MAKERS for name in READERS]
    rng.shuffle(pairs)
    for number in range(count):
        found[attack(*pairs[number % len(pairs)], rng, folder)] += 1
    return found


def test_the_canary_sings(tmp_path: Path) -> None:
    """The pickles do run code where they are unpickled, so a reader that did would be seen."""
    import pickle

    canary = tmp_path / "canary"
    for how in range(4):
        pickle.loads(pickle.dumps(Evil(f"touch {canary}", how)))
        canary.unlink()
    yaml.load(f"!!python/object/apply:os.system ['touch {canary}']", Loader=yaml.UnsafeLoader)
    assert canary.exists() and make_pickle(random.Random(1), canary, b"")


def test_hostile_files_run_no_code(tmp_path: Path) -> None:
    assert attack_all(28, 1, tmp_path)["refused"] > 14


@pytest.mark.parametrize("model_type", ["qwen3_vl", "evil"])
def test_code_in_a_model_folder_is_not_run(model_type: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "evil.py").write_text(f"import os\nos.system('touch {canary}')\nclass Evil: pass\n")
    named = dict.fromkeys(("AutoConfig", "AutoModel", "AutoProcessor", "AutoTokenizer"), "evil.Evil")
    document = {"model_type": model_type, "auto_map": named, "processor_class": "Evil"}
    for file in ("config.json", "processor_config.json", "tokenizer_config.json", "preprocessor_config.json"):
        (tmp_path / file).write_text(json.dumps(document))
    (tmp_path / "model.safetensors").write_bytes(b"\2" + b"\0" * 7 + b"{}")
    for load in (load_processor, load_model):
        with suppress(OptimusError):
            load(tmp_path)
    assert not canary.exists()


@pytest.mark.ci("plan file")
def test_500_hostile_files_run_no_code(tmp_path: Path) -> None:
    found = attack_all(500, 2, tmp_path)
    assert found["refused"] > 250 and set(found) <= {"refused", "read"}, found


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_5000_hostile_files_run_no_code(tmp_path: Path) -> None:
    attack_all(5000, 3, tmp_path)
