"""Trains a `FilledModel`, saves it, and goes on; or goes on from what another layout has saved.

Arguments: the model folder, the layout, the folder of checkpoints, and one to save the loaded state in.
Prints losses and norms of the steps behind the checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hf_models
import torch
from filled_model_worker import WAYS
from torch import distributed as dist

from optimus.hf import FilledCheckpoints, FilledModel

BEFORE, AFTER = 2, 20  # steps
CASE = "qwen3_vl_tied"


def main(folder: Path, way: str, saved: Path, again: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    options = dict(WAYS[way])
    replicas = options.pop("ranks") // options["pp"]
    model = FilledModel(folder, microbatches=4 // replicas, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01, foreach=False)
    checkpoints = FilledCheckpoints(model, optimizer, saved)
    data = hf_models.microbatches(CASE)[:4]
    share = len(data) // replicas
    batches = data[model.replica * share : (model.replica + 1) * share]

    def step() -> tuple[float, float]:
        loss, norm = model.step(batches), model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss, float(norm)

    begin = checkpoints.load()
    if begin:
        assert begin == BEFORE and checkpoints.extra == {"epoch": 1}
        copy = FilledCheckpoints(model, optimizer, again)
        copy.save(begin)
        assert copy.wait()
    else:
        for _ in range(BEFORE):
            step()
        checkpoints.save(BEFORE, {"epoch": 1})
    printed = [step() for _ in range(AFTER)]  # while the checkpoint is written
    assert checkpoints.wait()
    if dist.get_rank() == 0:
        print(json.dumps(printed))  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
