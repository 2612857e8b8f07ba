"""Compares streamed weights with transformers' loader, and saved folders with the original byte for byte."""

from __future__ import annotations

import copy
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from hf_chain import parts_of
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from optimus.errors import UserError
from optimus.hf.checkpoint import INDEX, SINGLE, Checkpoint
from optimus.hf.load import load_model
from optimus.hf.safetensors_file import TensorFileWriter, read_header, read_rows
from optimus.hf.split import split_model
from optimus.hf.weights import load_weights, own_tensors, save_weights


def save_folder(case: str, folder: Path, *, shard_size: str = "60KB", dtype: Any = torch.bfloat16) -> None:
    model = hf_models.build(case, dtype=dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=shard_size)
    (folder / "preprocessor_config.json").write_text("{}")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made: dict[str, Path] = {}
    for case in hf_models.CASES:
        made[case] = tmp_path_factory.mktemp(case) / "model"
        save_folder(case, made[case])
    return made


@pytest.mark.ci("hf")
@pytest.mark.parametrize("case", hf_models.CASES)
def test_streamed_weights_and_buffers_are_those_of_from_pretrained(
    case: str, folders: dict[str, Path]
) -> None:
    expected = type(hf_models.build(case)).from_pretrained(folders[case], dtype="auto")
    model = load_model(folders[case])
    split = split_model(model, stages=[1, 2, 1])
    report = load_weights(model, parts_of(split), folders[case])
    assert report.read_bytes <= 1.1 * report.own_bytes
    state = own_tensors(parts_of(split))
    assert set(state) == set(expected.state_dict())
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state[name], tensor), name
    buffers = {n.removeprefix("hf."): b for part in parts_of(split) for n, b in part.named_buffers()}
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.ci("hf")
@pytest.mark.parametrize("case", hf_models.CASES)
def test_round_trip_over_two_splits_gives_the_same_files(
    case: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    before = folders[case]
    for number, stages in enumerate(([1, 2, 1], [3, 1])):
        model = load_model(before)
        parts = parts_of(split_model(model, stages=stages))
        load_weights(model, parts, before)
        save_weights(model, parts, before, tmp_path / str(number))
        before = tmp_path / str(number)
    for path in folders[case].iterdir():
        assert (before / path.name).read_bytes() == path.read_bytes(), path.name


def load_parts(folder: Path, stages: list[int], own: int | None = None, **options: Any) -> Any:
    """Returns a model, its parts on this rank and the report of loading them: one stage, or all parts."""
    model = load_model(folder, dtype=options.get("dtype"))
    split = split_model(model, stages=stages)
    parts = parts_of(split) if own is None else [split.stages[own]]
    return model, parts, load_weights(model, parts, folder, cast="dtype" in options)


@pytest.mark.ci("hf")
@pytest.mark.parametrize("case", ["qwen2_5_vl", "qwen3_vl_moe", "gemma3"])
def test_a_rank_reads_and_holds_its_own_tensors_only(case: str, folders: dict[str, Path]) -> None:
    files = sum(path.stat().st_size for path in folders[case].glob("*.safetensors"))
    for own in range(2):
        _, (part,), report = load_parts(folders[case], [3, 1], own)
        assert report.own_bytes == sum(p.nbytes for p in part.parameters())
        assert report.read_bytes == report.own_bytes < 0.8 * files
        assert all(p.is_meta is False for p in part.parameters())


@pytest.mark.ci("hf")
def test_a_load_holds_at_most_one_tensor_beside_its_own(folders: dict[str, Path]) -> None:
    """Counts the bytes of tensors alive under a dispatch mode, merged and transposed experts included."""
    folder = folders["qwen3_vl_moe"]
    model = load_model(folder)
    parts = parts_of(split_model(model, stages=[2, 2]))
    largest = max(p.nbytes for p in model.parameters())
    with AliveBytes() as alive:
        report = load_weights(model, parts, folder)
    buffers = sum(b.nbytes for part in parts for b in part.buffers())
    assert alive.peak <= report.own_bytes + largest + 2 * buffers


class AliveBytes(TorchDispatchMode):  # type: ignore[misc]
    """Sums the bytes of storages made under it that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in self.seen:
                    self.seen.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        return result

    def free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


@pytest.mark.ci("hf")
def test_another_dtype_is_asked_for_and_saved_as_it_was(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["qwen2_5_vl"]
    model, parts, _ = load_parts(folder, [4], dtype=torch.float32)
    assert {p.dtype for part in parts for p in part.parameters()} == {torch.float32}
    save_weights(model, parts, folder, tmp_path)
    for path in folder.glob("*.safetensors"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    model = load_model(folder, dtype=torch.float32)
    problem = refusal(lambda: load_weights(model, parts_of(split_model(model, stages=[4])), folder))
    assert "is not float32" in str(problem) and ".safetensors" in str(problem)


@pytest.mark.ci("hf")
def test_models_of_one_file_round_trip_and_load_in_transformers(tmp_path: Path) -> None:
    save_folder("qwen3_vl_tied", tmp_path / "a", shard_size="1GB")
    assert not (tmp_path / "a" / INDEX).exists()
    model, parts, _ = load_parts(tmp_path / "a", [2, 2])
    assert len(split_model(model, stages=[2, 2]).tied(parts)) == 1
    save_weights(model, parts, tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / SINGLE).read_bytes() == (tmp_path / "a" / SINGLE).read_bytes()
    assert (tmp_path / "b" / "preprocessor_config.json").exists()
    again = type(hf_models.build("qwen3_vl_tied")).from_pretrained(tmp_path / "b", dtype="auto")
    for name, tensor in own_tensors(parts).items():
        assert torch.equal(again.state_dict()[name], tensor), name


PER_EXPERT = [
    WeightConverter(
        source_patterns=["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
        target_patterns="mlp.experts.gate_up_proj",
        operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
    ),
    WeightConverter(
        source_patterns="mlp.experts.*.down_proj.weight",
        target_patterns="mlp.experts.down_proj",
        operations=[MergeModulelist(dim=0)],
    ),
]


@pytest.fixture
def per_expert(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a tensor for each expert, as releases of other families have them."""
    mapping = {"qwen3_vl_moe": PER_EXPERT}
    original = conversion_mapping.get_checkpoint_conversion_mapping
    monkeypatch.setattr(
        conversion_mapping,
        "get_checkpoint_conversion_mapping",
        lambda kind: copy.deepcopy(mapping[kind]) if kind in mapping else original(kind),
    )
    save_folder("qwen3_vl_moe", tmp_path / "experts")
    return tmp_path / "experts"


@pytest.mark.ci("hf")
def test_merged_experts_are_filled_expert_by_expert(per_expert: Path, tmp_path: Path) -> None:
    expected = type(hf_models.build("qwen3_vl_moe")).from_pretrained(per_expert, dtype="auto")
    model, parts, report = load_parts(per_expert, [2, 2])
    assert report.read_bytes == report.own_bytes
    assert any("experts.3.up_proj" in name for name in Checkpoint(per_expert).weight_map)
    for name, tensor in own_tensors(parts).items():
        assert torch.equal(expected.state_dict()[name], tensor), name
    save_weights(model, parts, per_expert, tmp_path / "again")
    for path in per_expert.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.ci("hf")
def test_a_missing_expert_is_named(per_expert: Path) -> None:
    drop(per_expert, "model.language_model.layers.1.mlp.experts.2.up_proj.weight")
    assert "layers.1.mlp.experts.gate_up_proj" in str(refusal(lambda: load_parts(per_expert, [4])))


def test_transposed_experts_are_those_of_transformers(folders: dict[str, Path], tmp_path: Path) -> None:
    """Released files have experts as (experts, in, out), the modules as (experts, out, in)."""
    shutil.copytree(folders["qwen3_vl_moe"], tmp_path / "released")
    for path in (tmp_path / "released").glob("*.safetensors"):
        tensors = load_file(path)
        turned = {n: t.transpose(1, 2).contiguous() if ".experts." in n else t for n, t in tensors.items()}
        save_file(turned, path, metadata={"format": "pt"})
    expected = type(hf_models.build("qwen3_vl_moe")).from_pretrained(tmp_path / "released", dtype="auto")
    model, parts, _ = load_parts(tmp_path / "released", [2, 2])
    for name, tensor in own_tensors(parts).items():
        assert torch.equal(expected.state_dict()[name], tensor), name
    save_weights(model, parts, tmp_path / "released", tmp_path / "again")
    for path in (tmp_path / "released").glob("*.safetensors"):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def refusal(function: Any) -> UserError:
    with pytest.raises(UserError) as raised:
        function()
    return raised.value


def change(folder: Path, name: str, replace: Any) -> str:
    """Rewrites the file of a tensor with what `replace` makes of its tensors; returns the file's name."""
    file: str = json.loads((folder / INDEX).read_text())["weight_map"][name]
    tensors = load_file(folder / file)
    save_file(replace(tensors), folder / file, metadata={"format": "pt"})
    return file


def drop(folder: Path, name: str) -> None:
    """Removes a tensor from its file and from the index."""
    change(folder, name, lambda tensors: {n: t for n, t in tensors.items() if n != name})
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.ci("hf")
@pytest.mark.parametrize(
    "damage", ["missing", "renamed", "misshapen", "dtype", "truncated", "extra", "no file"]
)
def test_damaged_folders_are_refused_by_tensor_and_file(
    damage: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["qwen2_5_vl"], folder)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    name = next(n for n in weight_map if "layers.1.self_attn.k_proj.weight" in n)
    file, said = weight_map[name], name
    if damage == "missing":
        drop(folder, name)
        file, said = INDEX, "language_model.layers.1.self_attn.k_proj.weight"
    elif damage == "renamed":
        change(folder, name, lambda tensors: {f"{n}s" if n == name else n: t for n, t in tensors.items()})
    elif damage == "misshapen":
        change(folder, name, lambda tensors: {n: t[:-1] if n == name else t for n, t in tensors.items()})
    elif damage == "dtype":
        change(folder, name, lambda tensors: {n: t.half() if n == name else t for n, t in tensors.items()})
    elif damage == "truncated":
        last = list(read_header(folder / file).tensors)[-1]
        (folder / file).write_bytes((folder / file).read_bytes()[:-1])
        said = last
    elif damage == "extra":
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] = {"model.surprise.weight": file, **index["weight_map"]}
        (folder / INDEX).write_text(json.dumps(index))
        said = "model.surprise.weight"
    else:
        (folder / file).unlink()
        said = "cannot be read"
    text = str(refusal(lambda: load_parts(folder, [2, 2])))
    assert said in text and file in text


def test_folders_that_run_code_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model"):
        load_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="runs code"):
        load_model(tmp_path)


def test_our_reader_agrees_with_safetensors(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(6, dtype=torch.int64).reshape(3, 2),
        "a": torch.randn(4, 3).to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = read_header(tmp_path / "x.safetensors")
    writer = TensorFileWriter(tmp_path / "y.safetensors", file)
    for name, entry in file.tensors.items():
        into = torch.empty(entry.shape, dtype=entry.dtype)
        assert read_rows(file, name, into) == tensors[name].nbytes
        assert torch.equal(into, tensors[name])
        writer.write(name, into)
    writer.close()
    assert (tmp_path / "y.safetensors").read_bytes() == (tmp_path / "x.safetensors").read_bytes()
    rows = torch.empty(2, 3, dtype=torch.bfloat16)
    assert read_rows(file, "a", rows, 1) == 12
    assert torch.equal(rows, tensors["a"][1:3])
