"""Runs the Trainer of transformers with a `BalancedBatchSampler`, on ranks of this host.

Prints one JSON line a case with the samples of every rank, as the model saw them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import Accelerator
from engine_worker import everybody, play
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainingArguments

from optimus.data import BalancedBatchSampler
from optimus.errors import UserError

SAMPLES, MICROBATCHES, BATCH_SIZE, EPOCHS = 32, 2, 2, 3
LOADS = [float((n * 37) % 41) for n in range(SAMPLES)]


@dataclass(frozen=True, kw_only=True)
class TrainerCase:
    name: str
    resume_at: int = 0  # steps; 0 runs without a stop
    ranks: int = 2
    plan: None = None  # read by `play`


# An epoch has four steps: one case stops inside an epoch, one at its end.
CASES = [
    TrainerCase(name="whole"),
    TrainerCase(name="inside", resume_at=6),
    TrainerCase(name="boundary", resume_at=8),
]


class Recorder(nn.Module):  # type: ignore[misc]
    """Notes the samples of each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[list[int]] = []

    def forward(self, number: Tensor, **_: Any) -> dict[str, Tensor]:
        self.seen.append(number.tolist())
        return {"loss": (self.weight * number.double()).mean()}


class BalancedTrainer(Trainer):  # type: ignore[misc]
    def get_train_dataloader(self) -> DataLoader:
        sampler = BalancedBatchSampler(LOADS, BATCH_SIZE, microbatches=MICROBATCHES)
        return DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)


def train(folder: str, *, steps: int, resume: bool = False) -> list[list[int]]:
    options = TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=MICROBATCHES,
        num_train_epochs=EPOCHS,
        max_steps=steps,
        save_strategy="steps",
        save_steps=steps,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        log_level="error",
    )
    model = Recorder()
    trainer = BalancedTrainer(
        model,
        options,
        train_dataset=[{"number": n} for n in range(SAMPLES)],
        data_collator=lambda rows: {"number": torch.tensor([row["number"] for row in rows])},
    )
    trainer.remove_callback(PrinterCallback)  # it writes to standard output
    trainer.train(resume_from_checkpoint=resume)
    return model.seen


def run(case: TrainerCase, rank: int) -> dict[str, Any]:
    """Returns the microbatches of every rank, and what `prepare` says about the loader."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    steps = SAMPLES // (case.ranks * MICROBATCHES * BATCH_SIZE) * EPOCHS
    seen = train(folder[0], steps=case.resume_at) if case.resume_at else []
    seen += train(folder[0], steps=steps, resume=bool(case.resume_at))
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    loader = DataLoader(range(SAMPLES), batch_sampler=BalancedBatchSampler(LOADS, BATCH_SIZE))
    try:
        Accelerator(cpu=True).prepare(loader)
        refused = ""
    except UserError as error:
        refused = str(error)
    return {"ranks": everybody(seen), "refused": refused}


def main(names: list[str]) -> None:
    for case in CASES:
        if not names or case.name in names:
            print(json.dumps({"name": case.name, **play(cast(Any, case), cast(Any, run))}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
