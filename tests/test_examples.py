"""The example trains as one process of transformers would, and what it saves is loaded by transformers."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import Qwen3VLForConditionalGeneration

EXAMPLES = Path(__file__).parents[1] / "examples"
MOST_LINES = 100
PRINTED = 1e-4  # losses have four digits


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("hf_vlm", EXAMPLES / "hf_vlm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(ranks: int, *args: str) -> list[tuple[float, float]]:
    """Losses and norms that it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "hf_vlm.py", *args],
        cwd=EXAMPLES,
        env={
            **os.environ,
            "PYTHONPATH": str(EXAMPLES.parent),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = re.findall(r"step \d+  loss ([\d.]+)  norm ([\d.]+)", done.stdout)
    return [(float(loss), float(norm)) for loss, norm in lines]


def train_in_one_process(example: Any, folder: Path, replicas: int) -> tuple[Any, list[tuple[float, float]]]:
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    printed = []
    data = [example.load_batches(model.config, replica) for replica in range(replicas)]
    for of_replicas in zip(*data, strict=True):
        batches = [batch for of_replica in of_replicas for batch in of_replica]
        count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            labels = batch.pop("labels")
            logits = model(**batch, use_cache=False).logits
            loss = functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum") / count
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        printed.append((total, float(norm)))
    return model, printed


def test_the_example_is_short() -> None:
    assert len((EXAMPLES / "hf_vlm.py").read_text().splitlines()) <= MOST_LINES


@pytest.mark.ci("hf")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.heavy)])
def test_the_example_trains_as_one_process_and_its_folder_loads(ranks: int, tmp_path: Path) -> None:
    example, folder, out = load_example(), tmp_path / "model", tmp_path / "out"
    printed = run_example(ranks, str(folder), str(out))
    expected, in_one_process = train_in_one_process(example, folder, ranks // 2)
    assert len(printed) == example.STEPS
    for (loss, norm), (right_loss, right_norm) in zip(printed, in_one_process, strict=True):
        assert abs(loss - right_loss) < PRINTED and abs(norm - right_norm) < 10 * PRINTED
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(out)
    for name, parameter in expected.named_parameters():
        difference = float((loaded.get_parameter(name) - parameter).detach().abs().max())
        assert difference < 1e-4, (name, difference)
