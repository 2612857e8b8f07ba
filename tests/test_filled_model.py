"""`FilledModel` gives the same losses, norms and saved weights however a model is laid out over ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import hf_models
import pytest
import torch
from filled_model_worker import WAYS
from safetensors.torch import load_file

CLOSE = 1e-12
TOWER = "model.visual.blocks.*"


def train(folder: Path, way: str, accumulate: int = 1, frozen: str = "") -> tuple[list[list[float]], Path]:
    """Returns losses and norms, and the folder that was saved."""
    here = Path(__file__).parent
    ranks = str(WAYS[way]["ranks"])
    worker = [str(here / "filled_model_worker.py"), str(folder), way, str(accumulate), frozen]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, *worker],
        cwd=here,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), folder.parent / f"saved {way} {accumulate} {bool(frozen)}"


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "model"
    model = hf_models.build("qwen3_vl_tied")
    model.config.dtype = hf_models.DTYPE
    model.save_pretrained(path, max_shard_size="100KB")
    return path


@pytest.mark.ci("hf")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("way", "accumulate", "frozen"),
    [
        ("two stages", 2, TOWER),
        ("sharded", 1, ""),
        pytest.param("chunks", 1, "", marks=pytest.mark.heavy),
        pytest.param("sharded", 2, TOWER, marks=pytest.mark.heavy),
    ],
)
def test_layouts_change_nothing(folder: Path, way: str, accumulate: int, frozen: str) -> None:
    expected, right = train(folder, "no pipeline", 1, frozen)
    printed, saved = train(folder, way, accumulate, frozen)
    assert torch.tensor(printed).allclose(torch.tensor(expected), rtol=CLOSE, atol=0)
    before, after, other = load_folder(folder), load_folder(saved), load_folder(right)
    assert set(before) == set(after) == set(other)
    for name, tensor in other.items():
        assert float((after[name] - tensor).abs().max()) < CLOSE, name
        assert torch.equal(after[name], before[name]) == (bool(frozen) and ".visual.blocks." in name), name
