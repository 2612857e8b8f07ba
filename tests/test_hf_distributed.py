"""Loads and saves parts spread over gloo processes: pipeline stages, replicas, and rows sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from hf_chain import parts_of
from torch import distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForMultimodalLM

from optimus.hf import load_model, load_weights, save_weights_distributed, split_model
from optimus.hf.parts import Elsewhere
from optimus.hf.weights import own_tensors

RANKS = 2


def run_ranks(work: Callable[..., None], *args: Any) -> None:
    """Runs a function on every rank of a gloo group; an exception of any fails the test."""
    mp.start_processes(run_rank, (work, *args), nprocs=RANKS, start_method="fork")


def run_rank(rank: int, work: Callable[..., None], folder: Path, *args: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder.parent / f"store-{work.__name__}"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    try:
        work(rank, folder, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def save_folder(case: str, folder: Path) -> None:
    model = hf_models.build(case, dtype=torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder, max_shard_size="60KB")


def check_same_files(folder: Path, again: Path) -> None:
    for path in folder.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name
    assert not list(again.glob("*.partial"))


def save_stages(rank: int, folder: Path, into: Path) -> None:
    """Has a stage on each rank and replicas of the tower on both."""
    model = load_model(folder)
    split = split_model(model, stages=[3, 1])
    parts: list[nn.Module] = [split.stages[rank], *split.encoders["vision"]]
    report = load_weights(model, parts, folder)
    assert report.read_bytes <= 1.1 * report.own_bytes
    assert all(p.is_meta for p in split.stages[1 - rank].parameters())
    save_weights_distributed(model, parts, folder, into)


@pytest.mark.ci("hf")
@pytest.mark.parametrize("case", ["qwen3_vl_tied", "qwen3_vl_moe"])
def test_stages_and_replicas_of_two_ranks_are_saved_as_they_were(case: str, tmp_path: Path) -> None:
    save_folder(case, tmp_path / "model")
    run_ranks(save_stages, tmp_path / "model", tmp_path / "again")
    check_same_files(tmp_path / "model", tmp_path / "again")


def save_shards(rank: int, folder: Path, into: Path) -> None:
    """Has all parts on both ranks, sharded by FSDP2 before they have memory."""
    model = load_model(folder)
    split = split_model(model, stages=[2, 2], blocks={"vision": [2, 2]})
    mesh = init_device_mesh("cpu", (RANKS,))
    for part in parts_of(split):
        for layer in getattr(part, "text", nn.Module())._modules.get("layers", ()):
            if not isinstance(layer, Elsewhere):
                fully_shard(layer, mesh=mesh)
        fully_shard(part, mesh=mesh)
    report = load_weights(model, parts_of(split), folder)
    whole = sum(p.nbytes for p in model.parameters())
    assert report.read_bytes <= 1.1 * report.own_bytes < 0.6 * whole
    expected = AutoModelForMultimodalLM.from_pretrained(folder, dtype="auto").state_dict()
    for name, tensor in own_tensors(parts_of(split)).items():
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.full_tensor(), expected[name]), name
    save_weights_distributed(model, parts_of(split), folder, into)


@pytest.mark.ci("hf")
@pytest.mark.parametrize("case", ["qwen2_5_vl", "qwen3_vl_tied", "qwen3_vl_moe"])
def test_sharded_parts_read_their_rows_and_are_saved_whole(case: str, tmp_path: Path) -> None:
    save_folder(case, tmp_path / "model")
    run_ranks(save_shards, tmp_path / "model", tmp_path / "again")
    check_same_files(tmp_path / "model", tmp_path / "again")
