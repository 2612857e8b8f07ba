"""Trains models on ranks of this host whose images are dealt, and compares gradients with one process.

Prints one JSON line a case. Rank r has the microbatches r, r + ranks, ... of `hf_models`: unequal images,
text only, a video, a packed and a padded pair; in "no images" all have text only.
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


@dataclass(frozen=True, kw_only=True)
class DealtCase:
    name: str
    model: str
    wrap: str = "ddp"  # "ddp", "fsdp" or "hsdp"
    ranks: int = 4
    batches: tuple[int, ...] = (0, 1, 2, 3, 4, 1, 0, 1)  # microbatches of the whole step
    plan: None = None  # read by `play`


CASES = [
    DealtCase(name="qwen2_5_vl ddp", model="qwen2_5_vl"),
    DealtCase(name="qwen2_5_vl fsdp", model="qwen2_5_vl", wrap="fsdp"),
    DealtCase(name="qwen3_vl ddp", model="qwen3_vl"),
    DealtCase(name="qwen3_vl fsdp", model="qwen3_vl", wrap="fsdp"),
    DealtCase(name="qwen3_vl hsdp", model="qwen3_vl", wrap="hsdp"),
    DealtCase(name="qwen3_vl 8 ranks", model="qwen3_vl", wrap="fsdp", ranks=8),
    DealtCase(name="siglip ddp", model="llava_siglip_qwen2"),
    DealtCase(name="siglip fsdp", model="llava_siglip_qwen2", wrap="fsdp"),
    DealtCase(name="whisper ddp", model="qwen2_audio"),
    DealtCase(name="whisper fsdp", model="qwen2_audio", wrap="fsdp"),
    DealtCase(name="one rank has images", model="qwen3_vl", wrap="fsdp", batches=(1, 1, 3, 1)),
    DealtCase(name="no images", model="qwen3_vl", wrap="fsdp", batches=(1, 1, 1, 1)),
]


def deal(model: Any, case: str) -> DealtEncoder:
    inner = model.model
    if case.startswith(("qwen2_5", "qwen3")):
        fields = ("pooler_output", "deepstack_features")
        return DealtEncoder(inner.visual, inner.language_model, outputs=fields)
    if case == "qwen2_audio":
        tower = inner.audio_tower
        return DealtEncoder(
            tower,
            inner.language_model,
            projector=inner.multi_modal_projector,
            outputs=("last_hidden_state",),
        )
    layer = inner.config.vision_feature_layer
    return DealtEncoder(
        inner.vision_tower,
        inner.language_model,
        projector=inner.multi_modal_projector,
        outputs=("hidden_states",),
        hidden_states=(layer,),
    )


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
    count = count_labels(case.batches, batches)
    dealt = deal(model, case.model)  # before or after sharding
    wrapped = model
    if case.wrap == "ddp":
        has_unused = case.model.startswith("llava")  # layers behind the one that it reads
        wrapped = DistributedDataParallel(model, find_unused_parameters=has_unused)
    else:
        shard(model, case)
    numbers = list(case.batches[rank :: case.ranks])
    total = run(wrapped, batches, numbers, count / case.ranks)  # DDP and FSDP2 take means over ranks
    grads = {name: whole(cast(Tensor, p.grad)) for name, p in model.named_parameters() if p.grad is not None}
    results = everybody((total, {} if rank else grads))
    if rank:
        return {}
    reference = hf_models.build(case.model)
    expected_loss = run(reference, batches, list(case.batches), count)
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    scale = max(float(grad.abs().max()) for grad in expected.values())
    differences = {
        name: float((grads.get(name, torch.zeros(())) - expected.get(name, torch.zeros(()))).abs().max())
        / scale
        for name in {**grads, **expected}
    }
    worst = max(differences, key=lambda name: differences[name])
    return {
        "loss": abs(sum(total for total, _ in results) / case.ranks - expected_loss),
        "gradients": differences[worst],
        "worst": worst,
        "missing": sorted(set(expected) - set(grads)),
        "fullest": max(dealt.loads) * len(dealt.loads) / sum(dealt.loads) if dealt.loads else 1.0,
    }


def main(names: list[str]) -> None:
    for case in CASES:
        if not names or case.name in names:
            print(json.dumps({"name": case.name, **play(cast(Any, case), cast(Any, compare))}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
