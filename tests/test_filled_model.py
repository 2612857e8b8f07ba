"""`FilledModel` gives the same losses, norms and saved weights however a model is laid out over ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from checkpoint_worker import read_whole
from filled_model_worker import WAYS
from peft import LoraConfig
from safetensors.torch import load_file
from torch import distributed as dist

from optimus.engine.stage_profile import StageInputs
from optimus.engine.user_errors import report_errors_once
from optimus.errors import UserError
from optimus.hf import FilledModel, freeze
from optimus.hf.dealt_inputs import describe_rows, merge_rows
from optimus.hf.lora import add_lora

CLOSE = 1e-12
TOWER = "model.visual.blocks.*"
EMBEDDING = "model.language_model.embed_tokens.weight"


def run_worker(
    ranks: int, folder: Path, way: str, accumulate: int = 1, frozen: str = "", *case: str
) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    worker = [str(here / "filled_model_worker.py"), str(folder), way, str(accumulate), frozen, *case]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *worker],
        cwd=here,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def launch(*args: Any) -> list[Any]:
    """Returns the lines that the worker prints."""
    done = run_worker(*args)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def train(folder: Path, way: str, accumulate: int = 1, frozen: str = "") -> tuple[list[list[float]], Path]:
    """Returns losses and norms, and the folder that was saved."""
    (printed,) = launch(WAYS[way]["ranks"], folder, way, accumulate, frozen)
    return printed, folder.parent / f"saved {way} {accumulate} {bool(frozen)}"


def largest_difference(printed: list[list[float]], expected: list[list[float]]) -> float:
    """Returns the largest relative difference of losses and norms."""
    pairs = zip(chain.from_iterable(printed), chain.from_iterable(expected), strict=True)
    return max(abs(value / right - 1) for value, right in pairs)


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
        ("two stages", 1, EMBEDDING),  # tied: the head on the other rank is frozen with it
        ("dealt", 1, ""),
        pytest.param("dealt", 1, TOWER, marks=pytest.mark.heavy),
        pytest.param("dealt over four", 1, "", marks=pytest.mark.heavy),
        pytest.param("dealt in pairs, sharded", 1, "", marks=pytest.mark.heavy),
        pytest.param("chunks", 1, "", marks=pytest.mark.heavy),
        pytest.param("sharded", 2, TOWER, marks=pytest.mark.heavy),
    ],
)
def test_layouts_change_nothing(folder: Path, way: str, accumulate: int, frozen: str) -> None:
    expected, right = train(folder, "no pipeline", 1, frozen)
    printed, saved = train(folder, way, accumulate, frozen)
    assert largest_difference(printed, expected) < CLOSE
    before, after, other = load_folder(folder), load_folder(saved), load_folder(right)
    assert set(before) == set(after) == set(other)
    for name, tensor in other.items():
        assert float((after[name] - tensor).abs().max()) < CLOSE, name
        assert torch.equal(after[name], before[name]) == fnmatchcase(name, frozen), name


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [case for case in hf_models.CASES if case != "qwen3_vl_tied"])
def test_images_dealt_over_replicas_change_nothing(case: str, tmp_path: Path) -> None:
    """Every family that is compared, with text-only microbatches on one replica or the other."""
    folder = save(case, tmp_path / "model")
    (expected,) = launch(1, folder, "no pipeline", 1, "", case)
    (printed,) = launch(4, folder, "dealt", 1, "", case)
    right, saved = (load_folder(tmp_path / f"saved {way} 1 False") for way in ("no pipeline", "dealt"))
    assert set(saved) == set(right)
    losses = largest_difference(printed, expected)
    weights = max(float((saved[name] - tensor).abs().max()) for name, tensor in right.items())
    sys.stdout.write(f"{case}: losses and norms differ by {losses:.1e}, weights by {weights:.1e}\n")
    assert max(losses, weights) < CLOSE


@pytest.mark.ci("hf")
@pytest.mark.timeout(150)
def test_ranks_of_a_replica_with_different_batches_are_refused(folder: Path) -> None:
    told = launch(2, folder, "different")
    assert told == [["batches differ between the ranks of replica 0"] * 2] * 2  # another token, other pixels


# ---------------------------------------------------------------------------- checkpoints


def launch_checkpoints(folder: Path, way: str, saved: Path, again: Path) -> list[list[float]]:
    here = Path(__file__).parent
    worker = [str(here / "filled_checkpoint_worker.py"), str(folder), way, str(saved), str(again)]
    ranks = str(WAYS[way]["ranks"])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, *worker],
        cwd=here,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return printed


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param("two stages", "sharded", marks=pytest.mark.ci("hf")),
        pytest.param("sharded", "no pipeline", marks=pytest.mark.heavy),
        pytest.param("chunks", "dealt in pairs, sharded", marks=pytest.mark.heavy),
        pytest.param("dealt over four", "two stages", marks=pytest.mark.heavy),
        pytest.param("sharded", "sharded", marks=pytest.mark.heavy),
    ],
)
def test_checkpoints_load_under_another_layout(folder: Path, tmp_path: Path, first: str, second: str) -> None:
    saved, again = tmp_path / "saved", tmp_path / "again"
    expected = launch_checkpoints(folder, first, saved, again)
    printed = launch_checkpoints(folder, second, saved, again)
    difference = largest_difference(printed, expected)
    one, other = read_whole(saved), read_whole(again)
    different = [name for name in one.keys() | other.keys() if not torch.equal(one[name], other[name])]
    sys.stdout.write(f"{first} to {second}: {len(one)} tensors, steps differ by {difference:.1e}\n")
    assert not different and difference <= (0.0 if first == second else CLOSE)


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


def test_what_comes_at_the_wrong_time_is_refused(
    model: FilledModel, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="call step first"):
        model.clip_grad_norm_(1.0)
    model.prepare(two_batches())
    measured, planned = capsys.readouterr().err.splitlines()[-2:]
    assert measured == "optimus: measures 1 stages and 1 blocks of vision on microbatch 0"
    assert planned.startswith(
        "optimus: plans 1f1b, vision dp 1 pp 1 chunks 1, llm dp 1 pp 1 chunks 1, 2 micro"
    )
    text = two_batches()[1]
    assert model.step([text, text]) > 0  # no images at all, once there is a plan
    freeze(model.model, TOWER)
    with pytest.raises(UserError, match="after the plan was made"):
        model.step(two_batches())
    add_lora(model.model, model.parts, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(UserError, match="save_lora"):
        model.save("anywhere")


@pytest.mark.ci("hf")
def test_a_mistake_is_printed_once_for_all_ranks(folder: Path) -> None:
    done = run_worker(2, folder.parent / "nowhere", "two stages")
    assert done.returncode != 0
    assert done.stderr.count("does not exist\nhint: give the folder of a model") == 1
    assert "filled_model.py" not in done.stderr  # no traceback through our code


def test_bugs_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    report_errors_once()
    report_errors_once()
    bug = ValueError("bug")
    sys.excepthook(ValueError, bug, None)
    sys.excepthook(UserError, UserError(field="pp", problem="is odd", hint="use 2"), None)
    assert seen == [bug] and capsys.readouterr().err == "error: pp is odd\nhint: use 2\n"


def test_a_plan_of_another_layout_or_of_frozen_parameters_is_refused(model: FilledModel) -> None:
    freeze(model.model, "model.visual.*")
    model.prepare(two_batches())
    with pytest.raises(UserError, match=r"plan is for .* chunks 1, and this model has .* chunks 2"):
        FilledModel(model.folder, pp=1, microbatches=2, encoder_blocks=1, chunks=2, plan=model.plan)
    with pytest.raises(UserError, match="dealing_replicas = 2 is 1 in the plan that was given"):
        FilledModel(model.folder, pp=1, microbatches=2, encoder_blocks=1, dealing_replicas=2, plan=model.plan)
    trained = FilledModel(model.folder, pp=1, microbatches=2, encoder_blocks=1, plan=model.plan)
    with pytest.raises(UserError, match="was planned as frozen, and has parameters that train"):
        trained.step(two_batches())


def test_items_of_different_sizes_are_not_dealt() -> None:
    short, long = (
        describe_rows(StageInputs(args=(torch.ones(2, 8, n),), kwargs={"mask": torch.ones(2, n)}))
        for n in (40, 60)
    )
    assert merge_rows("audio", []) is None and merge_rows("audio", [short, short]) == short
    with pytest.raises(UserError, match=r"inputs of audio .* sizes \[\(\(8, 40\).* and \[\(\(8, 60\)"):
        merge_rows("audio", [short, long])


def save(case: str, folder: Path, dtype: torch.dtype = hf_models.DTYPE) -> Path:
    model = hf_models.build(case, dtype=dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder)
    return folder


def test_autocast_that_begins_after_the_plan_is_refused(model: FilledModel, tmp_path: Path) -> None:
    path = save("qwen3_vl_tied", tmp_path / "float32", torch.float32)
    model = FilledModel(path, pp=1, microbatches=2, encoder_blocks=1)
    batches = [{n: v.float() if v.is_floating_point() else v for n, v in b.items()} for b in two_batches()]
    model.step(batches)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UserError, match=r"expect \[torch.float32"):
        model.step(batches)


@pytest.mark.ci("hf")
def test_accumulated_router_losses_are_those_of_one_step(model: FilledModel, tmp_path: Path) -> None:
    data, grads, losses = hf_models.microbatches("qwen3_vl_moe")[:2], [], []
    path = save("qwen3_vl_moe", tmp_path / "moe")
    for accumulate in (1, 2):
        moe = FilledModel(path, pp=1, microbatches=2 // accumulate, encoder_blocks=1)
        moe.model.set_experts_implementation("eager")
        moe.prepare(data[: 2 // accumulate])
        count, parts = moe.count_labels(data), [data[at::accumulate] for at in range(accumulate)]
        losses.append(sum(moe.step(part, num_items=count, accumulate=accumulate) for part in parts))
        grads.append(torch.cat([p.grad.flatten() for p in moe.parameters()]))
    assert losses[1] == pytest.approx(losses[0], rel=CLOSE)
    assert float((grads[1] - grads[0]).abs().max()) < CLOSE * float(grads[0].abs().max())
    with pytest.raises(UserError, match="accumulate = 1"):
        moe.step(data[:1], num_items=count)


@pytest.mark.ci("hf")
def test_labels_on_padding_count_as_in_the_loss_of_the_model(model: FilledModel, tmp_path: Path) -> None:
    path = save("qwen2_audio", tmp_path / "audio", torch.float32)
    batch = hf_models.microbatches("qwen2_audio")[4]
    batch = {name: v.float() if v.is_floating_point() else v for name, v in batch.items()}
    batch["labels"][batch["attention_mask"] == 0] = 7
    audio = FilledModel(path, pp=1, microbatches=1, encoder_blocks=1)
    expected = float(hf_models.build("qwen2_audio", dtype=torch.float32)(**batch).loss.detach())
    assert audio.step([batch]) == pytest.approx(expected, rel=1e-6)


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
