"""Saves a run under one plan and goes on under another; prints one JSON line for every pair of plans."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine_cases import Case
from engine_worker import RankRun, everybody, play
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as dcp_load

from optimus.engine.checkpoint import CheckpointWriter, find_newest, load_state
from optimus.engine.checkpoint_folder import CheckpointConfig
from optimus.engine.checkpoint_state import collect_rank_state

BEFORE, AFTER = 3, 20  # steps
CONFIG = CheckpointConfig(every=1, keep_last=1)

PIPELINE = Case(name="", ranks=2, pp=2, microbatches=8, sharded=True, clip=1.0)
REPLICAS = replace(PIPELINE, pp=1, microbatches=4)
PP2_DP2 = replace(PIPELINE, ranks=4, microbatches=4, encoders=((2, 1),))
DP4 = replace(PIPELINE, ranks=4, pp=1, microbatches=2)
PP2_TP2 = replace(PIPELINE, ranks=4, tp=2, encoders=((1, 1, 2),))
ZERO_BUBBLE = replace(PP2_DP2, order="zero-bubble", chunks=2, layers=6, encoders=((1, 1),))
PP4 = replace(PIPELINE, ranks=4, pp=4, encoders=((2, 1),))
EIGHT = replace(PIPELINE, ranks=8, tp=2, microbatches=4, encoders=((2, 1, 2),))
CP2_DP2 = replace(PIPELINE, ranks=4, pp=1, cp=2, microbatches=4)
CP2_TP2 = replace(PIPELINE, ranks=4, pp=1, cp=2, tp=2, encoders=((1, 2),))
PP4_DP2 = replace(PIPELINE, ranks=8, pp=4, microbatches=4, encoders=((4, 1),))


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two plans of one model and workload."""

    name: str
    first: Case
    second: Case
    model: dict[str, Any]

    @property
    def cases(self) -> tuple[Case, Case]:
        return replace(self.first, **self.model), replace(self.second, **self.model)


PAIRS = [
    Pair(name="same plan", first=PP2_DP2, second=PP2_DP2, model={"dropout": True}),
    Pair(name="pp to dp", first=PP2_DP2, second=DP4, model={"plain": True, "dropout": True}),
    Pair(name="encoder pp to tp", first=PP2_DP2, second=PP2_TP2, model={}),
    Pair(name="tp to zero-bubble", first=PP2_TP2, second=ZERO_BUBBLE, model={"layers": 6}),
    Pair(name="zero-bubble to two ranks", first=ZERO_BUBBLE, second=PIPELINE, model={"layers": 6}),
    Pair(name="two ranks to eight", first=REPLICAS, second=EIGHT, model={"plain": True}),
    Pair(name="eight ranks to four", first=EIGHT, second=DP4, model={}),
    Pair(name="context ranks to pp", first=CP2_DP2, second=PP2_DP2, model={"tied": True}),
    Pair(name="pp to context and tensor ranks", first=PP2_DP2, second=CP2_TP2, model={"varied": True}),
    Pair(name="tied ends apart to one", first=PP2_DP2, second=REPLICAS, model={"tied": True}),
    Pair(name="tied in one stage to ends apart", first=DP4, second=PP4, model={"tied": True}),
    Pair(name="frozen trunk", first=PP4_DP2, second=PP2_TP2, model={"frozen_trunk": ("vision",)}),
    Pair(name="frozen llm", first=PP2_DP2, second=REPLICAS, model={"frozen_llm": True}),
    Pair(name="padded heads", first=PP2_TP2, second=DP4, model={"odd": True}),
    Pair(name="padded heads from replicas", first=REPLICAS, second=PP2_TP2, model={"odd": True}),
]


def make_run(case: Case, rank: int) -> RankRun:
    run = RankRun(case, rank)
    run.trains = True
    return run


def step(run: RankRun, number: int) -> tuple[float, float]:
    loss = run.play(number)
    assert run.built.optimizer is not None and run.built.optimizer.grad_norm is not None
    return loss, float(run.built.optimizer.grad_norm)


def save_and_go_on(case: Case, rank: int, *, folder: Path) -> dict[str, Any]:
    """Trains on while the checkpoint is written: what is written must not change."""
    run = make_run(case, rank)
    for number in range(BEFORE):
        step(run, number)
    writer = CheckpointWriter(folder, CONFIG, dist.new_group())
    writer.save(BEFORE, {}, collect_rank_state(run.built, saving=True))
    after = [step(run, number) for number in range(BEFORE, BEFORE + AFTER)]
    assert writer.wait()
    return {"after": after, "all": everybody(0)}


def load_and_go_on(case: Case, rank: int, *, folder: Path, again: Path) -> dict[str, Any]:
    """Saves the state again at once, so that it can be compared bit by bit."""
    run = make_run(case, rank)
    newest = find_newest(folder, None)
    assert newest is not None and newest[1].step == BEFORE
    load_state(newest[0], collect_rank_state(run.built, saving=False), None)
    writer = CheckpointWriter(again, CONFIG, dist.new_group())
    writer.save(BEFORE, {}, collect_rank_state(run.built, saving=True))
    assert writer.wait()
    after = [step(run, number) for number in range(BEFORE, BEFORE + AFTER)]
    return {"after": after, "all": everybody(0)}


def read_whole(folder: Path) -> dict[str, Tensor]:
    """Reads a checkpoint with torch's own reader."""
    (path,) = folder.glob("step-*")
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    state = {name: torch.full(t.size, float("nan"), dtype=t.properties.dtype) for name, t in metadata.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_load(state, checkpoint_id=path, no_dist=True)
    return state


def compare_pair(pair: Pair) -> dict[str, Any]:
    first, second = pair.cases
    with tempfile.TemporaryDirectory() as name:
        folders = Path(name, "first"), Path(name, "second")
        for folder in folders:
            folder.mkdir()
        saved = play(first, partial(save_and_go_on, folder=folders[0]))
        if "error" in saved:
            return saved
        loaded = play(second, partial(load_and_go_on, folder=folders[0], again=folders[1]))
        if "error" in loaded:
            return loaded
        one, other = map(read_whole, folders)
    worst = max(
        abs(ours / theirs - 1)
        for after in zip(loaded["after"], saved["after"], strict=True)
        for ours, theirs in zip(*after, strict=True)
    )
    different = [key for key in one.keys() | other.keys() if not _is_same(one.get(key), other.get(key))]
    return {"tensors": len(one), "different": different, "worst": worst, "values": _count(one)}


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _count(state: dict[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in state.values())


if __name__ == "__main__":
    for pair in PAIRS:
        if pair.name in sys.argv[1:] or not sys.argv[1:]:
            print(json.dumps({"name": pair.name, **compare_pair(pair)}), flush=True)  # noqa: T201
