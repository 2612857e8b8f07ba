"""Compares streamed weights with transformers' loader, and saved folders with the original byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from torch import nn

from optimus.hf.load import load_model
from optimus.hf.split import SplitModel, split_model
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


def parts_of(split: SplitModel) -> list[nn.Module]:
    return [*split.stages, *(block for blocks in split.encoders.values() for block in blocks)]


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
