"""Trains models on ranks of this host whose images are dealt, and compares gradients with one process.

Prints one JSON line a case. Rank r has the microbatches r, r + ranks, ... of a step's in `hf_models`: unequal
images, text only, a video, a packed and a padded pair. Further steps have images on one rank, and on none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import hf_models
import torch
from engine_worker import everybody, play
from fill_vlm_worker import whole
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from optimus.data.dealt_encoder import DealtEncoder
from optimus.hf.inputs import IGNORED

UNEQUAL, ON_ONE_RANK, ON_NONE = (0, 1, 2, 3, 4, 1, 0, 1), (1, 1, 3, 1, 1, 1, 1, 1), (1,) * 8
TOWERS = {
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "siglip": "llava_siglip_qwen2",
    "whisper": "qwen2_audio",
}


@dataclass(frozen=True, kw_only=True)
class DealtCase:
    name: str
    model: str
    wrap: str = "ddp"  # "ddp", "fsdp" or "hsdp"
    ranks: int = 4
    steps: tuple[tuple[int, ...], ...] = (UNEQUAL, ON_ONE_RANK)  # microbatches of all ranks
    plan: None = None  # read by `play`


ALL_STEPS = (UNEQUAL, ON_ONE_RANK, ON_NONE)
CASES = [
    *(
        DealtCase(name=f"{tower} fsdp {ranks}", model=model, wrap="fsdp", ranks=ranks, steps=ALL_STEPS)
        for tower, model in TOWERS.items()
        for ranks in (4, 8)
    ),
    *(
        DealtCase(name=f"{tower} ddp {ranks}", model=model, ranks=ranks)
        for tower, model in TOWERS.items()
        for ranks in (4, 8)
    ),
    *(
        DealtCase(name=f"{tower} ddp {ranks} no images", model=model, ranks=ranks, steps=(ON_NONE,))
        for tower, model in TOWERS.items()
        for ranks in (4, 8)
    ),
    DealtCase(name="qwen3_vl hsdp 4", model="qwen3_vl", wrap="hsdp", steps=ALL_STEPS),
]


def deal(model: Any, case: str) -> None:
    inner = model.model
    llm, projector = inner.language_model, getattr(inner, "multi_modal_projector", None)
    if case == "qwen2_audio":
        DealtEncoder(inner.audio_tower, llm, projector=projector, outputs=["last_hidden_state"])
    elif projector is None:
        DealtEncoder(inner.visual, llm, outputs=["pooler_output", "deepstack_features"])
    else:
        layers = [inner.config.vision_feature_layer]
        tower, outputs = inner.vision_tower, ["hidden_states"]
        DealtEncoder(tower, llm, projector=projector, outputs=outputs, hidden_states=layers)


def tower_of(model: Any) -> Any:
    names = ("visual", "vision_tower", "audio_tower")
    return next(getattr(model.model, name) for name in names if hasattr(model.model, name))


def shard(model: Any, case: DealtCase) -> None:
    """Shards layers, tower and the rest, as trainers do."""
    shape, names = ((case.ranks,), ("dp",)) if case.wrap == "fsdp" else ((2, case.ranks // 2), ("dp", "fsdp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.model.language_model.layers:
        fully_shard(layer, mesh=mesh)
    tower = tower_of(model)
    if case.model.startswith("llava"):  # transformers finds no hidden states of a tower that is sharded whole
        for layer in tower.encoder.layers:
            fully_shard(layer, mesh=mesh)
    else:
        fully_shard(tower, mesh=mesh)
    fully_shard(model, mesh=mesh)


def inputs_of(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "labels"}


def count_labels(numbers: Sequence[int], batches: list[dict[str, Any]]) -> int:
    return sum(int((batches[number]["labels"][:, 1:] != IGNORED).sum()) for number in numbers)


def run(model: Any, batches: list[dict[str, Any]], numbers: list[int], count: float) -> float:
    """Adds gradients of some microbatches; returns their loss."""
    total = 0.0
    for number in numbers:
        out = model(**inputs_of(batches[number]), use_cache=False)
        loss = hf_models.sum_of_labels(out.logits, batches[number]["labels"]) / count
        loss.backward()
        total += float(loss.detach())
    return total


def compare(case: DealtCase, rank: int) -> dict[str, Any]:
    batches = hf_models.microbatches(case.model)
    model = hf_models.build(case.model)
    deal(model, case.model)  # before or after sharding
    wrapped = model
    if case.wrap == "ddp":
        # layers behind the one that LLaVA reads, and a tower that no rank runs
        has_unused = case.model.startswith("llava") or ON_NONE in case.steps
        wrapped = DistributedDataParallel(model, find_unused_parameters=has_unused)
    else:
        shard(model, case)
    results = []
    for step in case.steps:
        count = count_labels(step, batches) / case.ranks  # DDP and FSDP2 take means over ranks
        model.zero_grad()
        loss = run(wrapped, batches, list(step[rank :: case.ranks]), count) / case.ranks
        named = model.named_parameters()
        grads = {name: whole(cast(Tensor, p.grad)) for name, p in named if p.grad is not None}
        results.append((everybody(loss), grads))
    return {} if rank else compare_with_one_process(case, batches, results)


def compare_with_one_process(
    case: DealtCase, batches: list[dict[str, Any]], results: Sequence[tuple[list[float], dict[str, Tensor]]]
) -> dict[str, Any]:
    """Returns the largest differences of all steps, of gradients over the largest of their step."""
    model, zero = hf_models.build(case.model), torch.zeros(())
    loss, missing, differences = 0.0, set[str](), dict[str, float]()
    for step, (losses, grads) in zip(case.steps, results, strict=True):
        model.zero_grad()
        loss = max(loss, abs(sum(losses) - run(model, batches, list(step), count_labels(step, batches))))
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        scale = max(float(grad.abs().max()) for grad in expected.values())
        for name in {**grads, **expected}:
            difference = float((grads.get(name, zero) - expected.get(name, zero)).abs().max()) / scale
            differences[name] = max(difference, differences.get(name, 0.0))
        missing |= set(expected) - set(grads)
    worst = max(differences, key=lambda name: differences[name])
    return {"loss": loss, "gradients": differences[worst], "worst": worst, "missing": sorted(missing)}


def main(names: list[str]) -> None:
    for case in CASES:
        if not names or case.name in names:
            print(json.dumps({"name": case.name, **play(cast(Any, case), cast(Any, compare))}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
