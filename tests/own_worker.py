"""Trains tiny models of transformers in our own layers on four ranks; prints one JSON line for each.

Arguments are a dtype, steps of AdamW and names of `hf_models`, with `@` and a name of LAYOUTS for a layout
that is not tp2 x pp2; rank 0 compares with one process of unpatched transformers. `@reversed` compares two
such processes with each other: the second sums the gradients of documents in reverse order.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hf_models
import torch
from engine_worker import LR, RankRun, everybody, play, worst
from own_families import OwnCase, as_ours, save_folder
from torch import Tensor

from optimus.engine.optimizer_config import OptimizerConfig
from optimus.hf.own_layers import list_layer_tensors, load_layers, save_layers

WEIGHT_DECAY = 0.01


class OwnRun(RankRun):
    """One rank of a case, with the weights of its folder."""

    learning = OptimizerConfig(lr=LR, weight_decay=WEIGHT_DECAY)

    def __init__(self, case: OwnCase, rank: int) -> None:
        def load(model: Any) -> None:
            tensors = list_layer_tensors(model, case.plan, rank)
            self.report = load_layers(case.job.model, tensors, case.folder)

        super().__init__(case, rank, load=load, dataset=case.documents)


def train_reference(
    name: str, dtype: torch.dtype, steps: int, *, reverse: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """Returns losses and trained parameters of one process of transformers."""
    model = hf_models.build(name, dtype=dtype)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=LR,
        foreach=False,
    )
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(hf_models.reference(name, model, reverse=reverse)[0])
        optimizer.step()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def compare_orders(name: str, dtype: torch.dtype, steps: int) -> dict[str, float]:
    """Returns how far transformers differs from itself after steps that sum in another order."""
    losses, parameters = train_reference(name, dtype, steps)
    other_losses, others = train_reference(name, dtype, steps, reverse=True)
    return {
        "losses": max(abs(a - b) / abs(b) for a, b in zip(other_losses, losses, strict=True)),
        "parameters": worst([others], parameters),
    }


def compare(case: OwnCase, rank: int, *, steps: int) -> dict[str, Any]:
    """Loss and gradients of one step, losses and parameters of more, bytes read and written."""
    run = OwnRun(case, rank)
    loss = run.play(0)
    gradients = everybody(run.gradients())
    read = everybody((run.report.read_bytes, run.report.own_bytes))
    run.trains = True
    losses = [run.play(step) for step in range(steps)]
    learned = everybody(run.learned())
    empty_slots = replace(case, slots=False)
    again = OwnRun(empty_slots, rank)
    same = loss == again.play(0)
    empty = everybody(again.gradients())
    into = case.folder.parent / "saved"
    save_layers(case.job.model, list_layer_tensors(again.model, case.plan, rank), case.folder, into)
    if rank:
        return {}
    names = sorted({name.removesuffix(" (head)") for of_rank in gradients for name in of_rank})
    model = case.job.model
    expected_loss, theirs = hf_models.reference(case.model, hf_models.build(case.model, dtype=run.dtype))
    expected_losses, trained = train_reference(case.model, run.dtype, steps)
    return {
        "loss": abs(loss - expected_loss) / abs(expected_loss),
        "gradients": worst(gradients, as_ours(model, theirs, names), run),
        "losses": max(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True)),
        "fallen": losses[-1] / losses[0],
        "parameters": worst(learned, as_ours(model, trained, names), run),
        "slots": same
        and case.plan.programs != empty_slots.plan.programs
        and all(_equal(a, b) for a, b in zip(gradients, empty, strict=True)),
        "read": max(of_rank / own for of_rank, own in read),
        "saved": sorted(path.name for path in case.folder.iterdir() if not _same(path, into / path.name)),
    }


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _same(a: Path, b: Path) -> bool:
    return b.exists() and a.read_bytes() == b.read_bytes()


LAYOUTS: dict[str, dict[str, Any]] = {
    "": {"pp": 2, "tp": 2, "encoders": ((1, 1, 2),)},
    "stages": {"pp": 4, "encoders": ((4, 1),), "order": "zero-bubble"},
    "context": {"pp": 2, "cp": 2, "encoders": ((2, 1),)},
    "context-tp": {"pp": 1, "cp": 2, "tp": 2, "encoders": ((1, 2),), "order": "zero-bubble"},
    "recompute": {"pp": 2, "tp": 2, "encoders": ((2, 1, 2),), "recompute": "full"},
}


def main(dtype: str, steps: str, names: list[str]) -> None:
    for name in names:
        model, _, layout = name.partition("@")
        if layout == "reversed":
            result = compare_orders(model, getattr(torch, dtype), int(steps))
            print(json.dumps({"name": name, **result}), flush=True)  # noqa: T201
            continue
        with tempfile.TemporaryDirectory() as folder:
            save_folder(model, Path(folder, "model"), getattr(torch, dtype))
            case = OwnCase(
                name=name,
                model=model,
                folder=Path(folder, "model"),
                dtype=dtype,
                ranks=4,
                microbatches=5,
                **LAYOUTS[layout],
            )
            print(json.dumps({"name": name, **play(case, partial(compare, steps=int(steps)))}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
