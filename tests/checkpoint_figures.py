"""Measures what a checkpoint costs: `python tests/checkpoint_figures.py`, on a quiet machine; prints JSON.

Steps of a run that saves after every fifth are compared with the others: the copy that training waits for,
and the step behind it, which shares its cores with the threads that write. Bytes and seconds stand beside
those of a plain `dcp.save` of the same tensors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from faults import ROOT
from torch import distributed as dist
from torch.distributed import checkpoint as dcp

from optimus.engine.checkpoint import CheckpointWriter
from optimus.engine.checkpoint_folder import CheckpointConfig
from optimus.engine.checkpoint_state import describe_tensor

JOB, STEPS, EVERY, ROUNDS = "cpu/bench-vl", 80, 5, 14
TENSORS, ROWS = 24, 1024  # 100 MB of float32


def measure_run(folder: Path) -> dict[str, float]:
    words = ["train", JOB, "--steps", str(STEPS), "--checkpoint-every", str(EVERY), "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "optimus", *words, "--run-dir", str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()][EVERY:]
    saving = [line["checkpoint_s"] for line in lines if (line["step"] + 1) % EVERY == 0]
    behind = [line["step_s"] for line in lines if line["step"] % EVERY == 0]
    others = [line["step_s"] for line in lines if line["step"] % EVERY not in (0, EVERY - 1)]
    usual = median(others)
    return {
        "step_s": usual,
        "copy_share": median(saving) / usual,
        "copy_share_longest": max(saving) / usual,
        "step_behind": median(behind) / usual,
        "steps": len(lines),
        "checkpoints": len(saving),
    }


def measure_save(folder: Path) -> dict[str, float]:
    """Alternates our checkpoints with plain ones, in one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    tensors = {f"model.{n}": torch.randn(ROWS, ROWS) for n in range(TENSORS)}
    state = {name: describe_tensor(tensor) for name, tensor in tensors.items()}
    writer = CheckpointWriter(folder, CheckpointConfig(keep_last=1), dist.new_group())
    ours, copy, plain = [], [], []
    for number in range(ROUNDS):
        for way in ("ours", "plain") if number % 2 else ("plain", "ours"):
            begin = time.perf_counter()
            if way == "plain":
                dcp.save(dict(tensors), checkpoint_id=folder / f"plain{number}")
                plain.append(time.perf_counter() - begin)
            else:
                writer.save(number, {}, state)
                copy.append(time.perf_counter() - begin)
                assert writer.wait()
                ours.append(time.perf_counter() - begin)
    dist.destroy_process_group()
    size = sum(path.stat().st_size for path in (folder / f"step-{ROUNDS - 1:08d}").iterdir())
    plain_size = sum(path.stat().st_size for path in (folder / "plain0").iterdir())
    return {
        "bytes_over_plain": size / plain_size,
        "megabytes": size / 1e6,
        "seconds": median(ours),
        "plain_seconds": median(plain),
        "seconds_over_plain": median(a / b for a, b in zip(ours, plain, strict=True)),
        "copy_seconds": median(copy),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measure_save(Path(name))))  # noqa: T201
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measure_run(Path(name))))  # noqa: T201
