"""Masters saved by four replicas and read by two, by one and by four again; prints one JSON line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from engine_worker import everybody, play
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint

from optimus.engine.distributed_optimizer import DistributedOptimizer, ShardedBucket
from optimus.engine.optimizer_config import OptimizerConfig, ParamGroup

SHAPES = ((3, 5), (7,), (2, 2))  # 26 numbers: no multiple of 4
RANKS = 4


@dataclass(frozen=True, kw_only=True)
class Replicas:
    name: str = "views"
    ranks: int = RANKS
    plan: None = None  # nothing is played


def parameters(seed: int) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, dtype=torch.bfloat16)) for shape in SHAPES]


def state_of(bucket: ShardedBucket, optimizer: DistributedOptimizer) -> dict[str, Tensor]:
    assert optimizer.adamw is not None
    (tensor,) = optimizer.tensors()
    kept = optimizer.adamw.state[tensor.parameter]
    return {
        name: bucket.to_dtensor(part) for name, part in {"master": bucket.master, **moments(kept)}.items()
    }


def moments(kept: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: part for name, part in kept.items() if part.dim()}


def trained(seed: int, group: dist.ProcessGroup | None) -> tuple[ShardedBucket, DistributedOptimizer]:
    """After one step on gradients that depend on the seed."""
    bucket = ShardedBucket(parameters(seed), group)
    optimizer = DistributedOptimizer(
        [bucket],
        [bucket.reduced_grad],
        config=OptimizerConfig(clip=0.0),
        group_of=lambda parameter: ParamGroup(weight_decay=0.1, lr=0.1),
        device=torch.device("cpu"),
    )
    bucket.begin_step()
    for parameter in bucket.parameters:
        assert parameter.grad is not None
        parameter.grad.copy_(torch.arange(parameter.numel()).view_as(parameter) + seed)
    bucket.reduce()
    bucket.wait_reduced()
    optimizer.step()
    return bucket, optimizer


def whole(state: dict[str, Tensor]) -> dict[str, list[float]]:
    return {
        name: (part.full_tensor() if hasattr(part, "full_tensor") else part).tolist()
        for name, part in state.items()
    }


def save_and_read(case: Any, rank: int, *, folder: Path) -> dict[str, Any]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    state = state_of(*trained(1, dist.group.WORLD))
    saved = whole(state)
    checkpoint.save(state, checkpoint_id=folder)
    found = []
    for group in (dist.group.WORLD, pairs[rank // 2], None):
        bucket, optimizer = trained(2, group)
        other = state_of(bucket, optimizer)
        before = whole(other)
        checkpoint.load(other, checkpoint_id=folder)
        bucket.gather()
        bucket.wait_gathered()
        flat = torch.cat([parameter.detach().flatten() for parameter in bucket.parameters])
        computes = torch.equal(flat, torch.tensor(saved["master"]).to(torch.bfloat16))
        found.append((before != saved, whole(state_of(bucket, optimizer)) == saved, computes))
    return {"all": everybody(found)}


if __name__ == "__main__":
    look = partial(save_and_read, folder=Path(sys.argv[1]))
    print(json.dumps(play(cast(Any, Replicas()), cast(Any, look))))  # noqa: T201
