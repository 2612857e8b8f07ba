"""Runs the Trainer of transformers with dealt images on ranks of this host; compares it with one process.

Prints one JSON line a case: the largest differences of losses and gradients in three steps of SGD from a loop
in one process. Ranks have unequal images; in the second step one rank has images, in the third none.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import hf_models
import torch
from accelerate.state import DistributedType, PartialState
from dealt_worker import ALL_STEPS, TOWERS, count_labels, deal, run
from engine_worker import everybody, play
from fill_vlm_worker import whole
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

RATE = 1e-3
# transformers 5.22 names SiglipTextEmbeddings among the modules to wrap, which LLaVA does not have.
LLAVA_FSDP = {"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer", "SiglipEncoderLayer"]}


@dataclass(frozen=True, kw_only=True)
class TrainerCase:
    name: str
    model: str
    fsdp: bool = False
    is_dealt: bool = True
    ranks: int = 4
    plan: None = None  # read by `play`


CASES = [
    *(
        TrainerCase(name=f"{tower} {wrap} {ranks}", model=model, fsdp=wrap == "fsdp", ranks=ranks)
        for tower, model in TOWERS.items()
        for wrap in ("ddp", "fsdp")
        for ranks in (4, 8)
    ),
    TrainerCase(name="qwen2_5_vl ddp 4 undealt", model="qwen2_5_vl", is_dealt=False),
    TrainerCase(name="qwen2_5_vl fsdp 2", model="qwen2_5_vl", fsdp=True, ranks=2),
]


class Gradients(TrainerCallback):  # type: ignore[misc]
    """Keeps the gradients of every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        self.steps.append({name.removeprefix("module."): whole(grad) for name, grad in grads.items()})


class ListTrainer(Trainer):  # type: ignore[misc]
    """Trains on microbatches in a given order."""

    def __init__(self, *args: Any, microbatches: list[dict[str, Any]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.microbatches, self.losses = microbatches, list[float]()

    def get_train_dataloader(self) -> DataLoader:
        # with a cache transformers 5.22 does not find the documents of a packed sequence
        batches = [{**batch, "use_cache": False} for batch in self.microbatches]
        return DataLoader(batches, batch_size=1, collate_fn=lambda rows: rows[0])

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(float(loss))
        return loss


def sum_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """Returns the loss of transformers in the model's dtype, where transformers computes in float32."""
    return hf_models.sum_of_labels(outputs.logits, labels) / num_items_in_batch


def train(numbers: list[int], case: TrainerCase) -> tuple[list[float], list[dict[str, Tensor]], bool]:
    """Returns losses of microbatches, gradients of steps, and whether all parameters are sharded."""
    options = TrainingArguments(
        tempfile.gettempdir(),
        use_cpu=not case.fsdp,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=len(numbers) // len(ALL_STEPS),
        max_steps=len(ALL_STEPS),
        optim="sgd",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        fsdp=case.fsdp,
        fsdp_config=LLAVA_FSDP if case.fsdp and case.model.startswith("llava") else None,
    )
    model, batches = hf_models.build(case.model), hf_models.microbatches(case.model)
    if case.is_dealt:
        deal(model, case.model)
    gradients = Gradients()
    trainer = ListTrainer(
        model,
        options,
        microbatches=[batches[number] for number in numbers],
        callbacks=[gradients],
        compute_loss_func=sum_loss,
        train_dataset=[0],
    )
    trainer.remove_callback(PrinterCallback)  # it writes to standard output
    trainer.train()
    sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return trainer.losses, gradients.steps, sharded


def as_gpus() -> AbstractContextManager[Any]:
    """Makes accelerate treat ranks on CPUs as ranks on devices: it shards no model on CPUs."""
    backend = "gloo", DistributedType.MULTI_GPU
    return mock.patch.object(PartialState, "_prepare_backend", return_value=backend)


def train_alone(case: str) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Returns losses and gradients of steps of a loop without Trainer and ranks."""
    model, batches = hf_models.build(case), hf_models.microbatches(case)
    losses, steps = [], []
    for numbers in ALL_STEPS:
        model.zero_grad()
        losses.append(run(model, batches, list(numbers), count_labels(numbers, batches)))
        steps.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
    return losses, steps


def compare(case: TrainerCase, rank: int) -> dict[str, Any]:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1", "ACCELERATE_TORCH_DEVICE": "cpu"}
    around: Callable[[], AbstractContextManager[Any]] = as_gpus if case.fsdp else nullcontext
    with around():
        losses, steps, is_sharded = train([n for step in ALL_STEPS for n in step[rank :: case.ranks]], case)
    of_ranks = everybody(losses)
    if rank:
        return {}
    expected_losses, expected = train_alone(case.model)
    by_step = (
        torch.tensor(of_ranks, dtype=torch.float64).view(case.ranks, len(ALL_STEPS), -1).sum((0, 2))
        / case.ranks
    )
    differences = [compare_grads(*pair) for pair in zip(steps, expected, strict=True)]
    return {
        "loss": float((by_step - torch.tensor(expected_losses, dtype=torch.float64)).abs().max()),
        "gradients": max(differences),
        "is_sharded": is_sharded,
        "missing": [sorted(set(b) - set(a)) for a, b in zip(steps, expected, strict=True)],
    }


def compare_grads(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the largest difference over the largest gradient; none may be missing but zeros."""
    scale = max(float(grad.abs().max()) for grad in expected.values())
    zero = torch.zeros(())
    names = {**grads, **expected}
    return max(float((grads.get(n, zero) - expected.get(n, zero)).abs().max()) for n in names) / scale


def main(names: list[str]) -> None:
    for case in CASES:
        if not names or case.name in names:
            print(json.dumps({"name": case.name, **play(cast(Any, case), cast(Any, compare))}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
