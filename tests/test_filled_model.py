"""`FilledModel` gives the same losses, norms and saved weights however a model is laid out over ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from filled_model_worker import WAYS
from peft import LoraConfig
from safetensors.torch import load_file
from torch import distributed as dist

from optimus.errors import UserError
from optimus.hf import FilledModel, freeze
from optimus.hf.lora import add_lora

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


# ---------------------------------------------------------------------------- refusals


@pytest.fixture
def model(folder: Path, tmp_path: Path) -> Iterator[FilledModel]:
    """The model on one rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield FilledModel(folder, pp=1, microbatches=2, encoder_blocks=1)
    dist.destroy_process_group()


def two_batches() -> list[dict[str, Any]]:
    return [dict(batch) for batch in hf_models.microbatches("qwen3_vl_tied")[:2]]  # the second has no image


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda batches: batches.pop(), r"batches = 1 were given for 2 microbatches"),
        (lambda batches: batches[1].pop("labels"), r"batches\[1\]: labels is missing"),
        (
            lambda batches: batches[1].update(labels=batches[1]["labels"][:, 1:]),
            r"batches\[1\]: labels has shape .*, not that of input_ids",
        ),
        (lambda batches: [batch["labels"].fill_(-100) for batch in batches], r"labels are all -100"),
        (lambda batches: batches[0].pop("image_grid_thw"), r"batches\[0\]: image_grid_thw is missing"),
        (
            lambda batches: batches[0].update(pixel_values=batches[0]["pixel_values"][4:]),
            r"batches\[0\]: pixel_values has 72 rows, and image_grid_thw has 76 patches",
        ),
        (
            lambda batches: batches[1]["input_ids"].fill_(160),
            r"input_ids = 160 is outside the vocabulary of 160",
        ),
        (
            lambda batches: batches.pop(0) and batches.append(batches[0]),
            r"no microbatch with inputs .*\n.*prepare",
        ),
    ],
)
def test_batches_that_cannot_be_trained_on_are_refused_by_name(
    model: FilledModel, change: Callable[[Any], Any], problem: str
) -> None:
    batches = [{name: value.clone() for name, value in batch.items()} for batch in two_batches()]
    change(batches)
    with pytest.raises(UserError, match=problem):
        model.step(batches)


def test_what_comes_at_the_wrong_time_is_refused(model: FilledModel) -> None:
    with pytest.raises(UserError, match="call step first"):
        model.clip_grad_norm_(1.0)
    model.prepare(two_batches())
    text = two_batches()[1]
    assert model.step([text, text]) > 0  # no images at all, once there is a plan
    freeze(model.model, TOWER)
    with pytest.raises(UserError, match="after the plan was made"):
        model.step(two_batches())
    add_lora(model.model, model.parts, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(UserError, match="save_lora"):
        model.save("anywhere")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"pp": 0}, "pp = 0"),
        ({"pp": 2}, "pp = 2 does not divide 1 ranks"),
        ({"encoder_pp": 2}, "encoder_pp = 2 does not divide pp = 1"),
        ({"chunks": 9}, r"pp \* chunks = 9 stages are more than the LLM's 4 layers"),
        ({"microbatches": "4"}, "microbatches = 4 is not a positive number"),
        ({"order": "gpipe"}, "order = gpipe is not known"),
    ],
)
def test_layouts_that_cannot_be_are_refused_by_name(
    model: FilledModel, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        FilledModel(model.folder, **{"pp": 1, "microbatches": 2, **options})
    with pytest.raises(UserError, match="does not exist"):
        FilledModel("nowhere", pp=1, microbatches=2)
