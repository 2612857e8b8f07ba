"""Trains folders by `FilledModel` in several ways; prints losses, norms and a digest of what it saved."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import hf_models
import torch
from torch import Tensor
from torch import distributed as dist
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from optimus.errors import UserError
from optimus.hf import FilledModel, freeze

WAYS: dict[str, dict[str, Any]] = {  # number of ranks, and options
    "two stages": {"ranks": 2, "pp": 2},
    "no pipeline": {"ranks": 1, "pp": 1, "encoder_blocks": 1},
    "chunks": {"ranks": 2, "pp": 2, "chunks": 2, "encoder_pp": 2},
    "sharded": {"ranks": 4, "pp": 2, "encoder_pp": 2, "shard": True},
    "dealt": {"ranks": 4, "pp": 2, "encoder_pp": 2, "dealing_replicas": 2},
    "dealt over four": {"ranks": 4, "pp": 1, "encoder_blocks": 2, "dealing_replicas": 4},
    "dealt in pairs, sharded": {"ranks": 8, "pp": 2, "dealing_replicas": 2, "shard": True},
}
STEPS, MICROBATCHES = 2, 2


def refuse_different_batches(folder: Path) -> None:
    """Rank 1 of one replica has another token, then other pixels; prints what each rank is told."""
    model = FilledModel(folder, pp=2, microbatches=2)
    for name in ("input_ids", "pixel_values"):
        batches = [dict(batch) for batch in hf_models.microbatches("qwen3_vl_tied")[:2]]
        if dist.get_rank() == 1:
            batches[0][name] = batches[0][name].clone()
            batches[0][name][0, 0] += 1
        told: list[str] = [""] * 2
        try:
            model.step(batches)
        except UserError as error:
            dist.all_gather_object(told, f"{error.field} {error.problem}")
        if dist.get_rank() == 0:
            print(json.dumps(told))  # noqa: T201


def widen_norm(self: Any, x: Tensor) -> Tensor:
    """Computes as Gemma's norm does, in the dtype of its input.

    Its own sums the weight's gradient over rows in float32, and dealing changes the rows that are summed.
    """
    normed: Tensor = self._norm(x) * (1.0 + self.weight)
    return normed


def main(folder: Path, way: str, accumulate: int, frozen: str, case: str = "qwen3_vl_tied") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Gemma3RMSNorm.forward = widen_norm
    if way == "different":
        refuse_different_batches(folder)
        dist.destroy_process_group()
        return
    options = dict(WAYS[way])
    replicas = options.pop("ranks") // options["pp"]
    # All replicas together have the same batches, however many there are.
    model = FilledModel(folder, microbatches=4 // accumulate // replicas, **options)
    if "moe" in case:
        model.model.set_experts_implementation("eager")  # torch's grouped_mm refuses float64
    if frozen:
        freeze(model.model, frozen)
    # Weights differ as gradients do; AdamW would make steps of 1e-12 of a gradient that is rounding alone.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False)
    data, printed = hf_models.microbatches(case)[:4], []
    share = len(data) // replicas
    mine = data[model.replica * share : (model.replica + 1) * share]
    parts = [mine[at::accumulate] for at in range(accumulate)]
    for _ in range(STEPS):
        count = model.count_labels(mine)
        loss = sum(model.step(part, num_items=count, accumulate=accumulate) for part in parts)
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        printed.append((loss, float(norm)))
    model.save(folder.parent / f"saved {way} {accumulate} {bool(frozen)}")
    if dist.get_rank() == 0:
        print(json.dumps(printed))  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
