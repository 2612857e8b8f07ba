"""Trains transformers models in `FillSchedule` and compares with one process; prints one JSON line a case.

Ranks load their own parts from a folder of safetensors; everything else stays on `meta`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import hf_models
import torch
from engine_worker import everybody, play
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from optimus.engine.fill_schedule import FillSchedule
from optimus.engine.process_groups import replica_mesh
from optimus.hf.inputs import IGNORED, count_labels, step_arguments
from optimus.hf.load import load_model
from optimus.hf.lora import ADAPTER, add_lora
from optimus.hf.loss import causal_lm_loss
from optimus.hf.split import SplitModel, split_model
from optimus.hf.training import checkpoint_activations, freeze, train_only
from optimus.hf.weights import load_weights
from optimus.ir.plan import EncoderBlocks, Plan, Seconds
from optimus.ir.ranks import LLM
from optimus.planner.user_modules import plan_modules

MICROBATCHES = 4
TRAINED = Seconds(forward_s=1.0, backward_s=2.0, weight_s=1.0)
FROZEN = Seconds(forward_s=1.0, backward_s=0.0)
TOWERS, PROJECTORS = (
    ("*visual*", "*vision_tower*", "*audio_tower*"),
    ("*.merger.*", "*multi_modal_projector*"),
)
LORA = ["q_proj", "v_proj", "qkv", "linear_fc1"]


@dataclass(frozen=True, kw_only=True)
class HfCase:
    """`blocks` are layers per block of the encoders that are cut, `encoder_pp` stages of every encoder."""

    name: str
    model: str
    ranks: int = 2
    pp: int = 2
    chunks: int = 1
    order: str = ""
    blocks: tuple[tuple[str, tuple[int, ...]], ...] = ()
    encoder_pp: int = 1
    accumulate: int = 1
    option: str = ""  # frozen, projector, lora, checkpointing or fsdp
    folder: Path = field(default=Path(), compare=False)

    @property
    def replicas(self) -> int:
        return self.ranks // self.pp

    @cached_property
    def plan(self) -> Plan:
        with torch.device("meta"):
            split = self.split(hf_models.MODELS[self.model]())
        self.choose(split, meta=True)
        encoders = {}
        for name, blocks in split.encoders.items():
            trains, seconds = False, []
            for block in blocks:
                trains = trains or any(p.requires_grad for p in block.parameters())
                seconds.append(TRAINED if trains else FROZEN)
            encoders[name] = EncoderBlocks(blocks=seconds, pp=min(self.encoder_pp, len(blocks)))
        return plan_modules(
            stages=[TRAINED] * len(split.stages),
            encoders=encoders,
            microbatches=MICROBATCHES,
            ranks=self.ranks,
            pp=self.pp,
            order=self.order,
        )

    def split(self, model: Any) -> SplitModel:
        count = self.pp * self.chunks
        layers = [1, 2, 1] if count == 3 else [4 // count] * count
        return split_model(model, stages=layers, blocks={name: list(each) for name, each in self.blocks})

    def choose(self, split: SplitModel, *, meta: bool = False) -> None:
        """Freezes what the option says; adapters come to loaded parts."""
        choose(split.model, self.option)
        if self.option == "lora" and meta:
            for name, parameter in split.model.named_parameters():
                parameter.requires_grad_(any(f".{target}." in name for target in LORA))


def choose(model: Any, option: str) -> None:
    names = [name for name, _ in model.named_parameters()]
    if option == "frozen":
        freeze(model, *(pattern for pattern in TOWERS if any(pattern[1:-1] in name for name in names)))
    if option == "projector":
        train_only(model, *(p for p in PROJECTORS if any(p.strip("*.") in name for name in names)))


CASES = [
    HfCase(name="qwen2_5_vl", model="qwen2_5_vl", blocks=(("vision", (1, 2, 1)),), accumulate=4),
    HfCase(name="qwen2_5_vl dp", model="qwen2_5_vl", ranks=4, blocks=(("vision", (2, 2)),), encoder_pp=2),
    HfCase(
        name="qwen3_vl", model="qwen3_vl", ranks=4, pp=4, blocks=(("vision", (1, 1, 1, 1)),), encoder_pp=2
    ),
    HfCase(name="qwen3_vl tied", model="qwen3_vl_tied", blocks=(("vision", (2, 2)),), accumulate=4),
    HfCase(name="qwen3_vl tied dp", model="qwen3_vl_tied", ranks=4, accumulate=2),
    HfCase(name="qwen3_vl tied FSDP2", model="qwen3_vl_tied", ranks=4, accumulate=2, option="fsdp"),
    HfCase(name="qwen3_vl zero-bubble", model="qwen3_vl", chunks=2, order="zero-bubble"),
    HfCase(name="qwen3_vl_moe", model="qwen3_vl_moe", blocks=(("vision", (3, 1)),)),
    HfCase(name="qwen3_vl_moe dp", model="qwen3_vl_moe", ranks=4),
    HfCase(name="llava_siglip_qwen2", model="llava_siglip_qwen2", blocks=(("vision", (1, 3)),), encoder_pp=2),
    HfCase(name="llava_clip_llama", model="llava_clip_llama", ranks=4, pp=4, blocks=(("vision", (1, 3)),)),
    HfCase(name="internvl", model="internvl", blocks=(("vision", (2, 2)),)),
    HfCase(name="gemma3", model="gemma3", chunks=2, blocks=(("vision", (2, 2)),)),
    HfCase(name="qwen2_audio", model="qwen2_audio", blocks=(("audio", (2, 2)),), encoder_pp=2),
    HfCase(name="qwen2_5_omni", model="qwen2_5_omni", ranks=4, blocks=(("vision", (2, 2)),)),
    HfCase(name="frozen tower", model="qwen2_5_vl", option="frozen", blocks=(("vision", (2, 2)),)),
    HfCase(name="projector only", model="qwen3_vl", option="projector", blocks=(("vision", (2, 2)),)),
    HfCase(name="LoRA", model="qwen2_5_vl", option="lora", blocks=(("vision", (2, 2)),), encoder_pp=2),
    HfCase(name="checkpointing", model="qwen3_vl", option="checkpointing", blocks=(("vision", (2, 2)),)),
    HfCase(name="FSDP2", model="llava_siglip_qwen2", ranks=4, option="fsdp", blocks=(("vision", (2, 2)),)),
    HfCase(name="FSDP2 zero-bubble", model="gemma3", ranks=4, option="fsdp", order="zero-bubble"),
]


# ---------------------------------------------------------------------------- data


def numbers(case: HfCase, step: int, replica: int) -> list[int]:
    """The microbatches of a step: replicas and steps have other data, or another order."""
    count = len(hf_models.BATCH)
    first = step * case.replicas + replica
    return [(first + at) % count for at in range(MICROBATCHES)]


def all_numbers(case: HfCase) -> Iterator[int]:
    for step in range(case.accumulate):
        for replica in range(case.replicas):
            yield from numbers(case, step, replica)


# ---------------------------------------------------------------------------- one process


def set_adapters(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Values that depend on the name alone."""
    for name, parameter in named:
        if ".lora_" in name:
            generator = torch.Generator().manual_seed(sum(name.encode()))
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=hf_models.DTYPE)


def one_process(case: HfCase) -> tuple[float, dict[str, Tensor]]:
    model = type(hf_models.build(case.model)).from_pretrained(case.folder, dtype=hf_models.DTYPE).eval()
    if "moe" in case.model:
        model.set_experts_implementation("eager")
    if case.model == "qwen2_audio":  # its class freezes these positions, and `from_pretrained` forgets it
        model.model.audio_tower.embed_positions.requires_grad_(False)
    choose(model, case.option)
    if case.option == "lora":
        model.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=2, target_modules=LORA), model, adapter_name=ADAPTER)
        set_adapters(model.named_parameters())
    batches = hf_models.documents(case.model)
    if case.model in hf_models.PACKED:
        batches = [[batch] for batch in hf_models.microbatches(case.model)]
    used = list(all_numbers(case))
    count = sum(
        int((document["labels"][:, 1:] != IGNORED).sum()) for number in used for document in batches[number]
    )
    total = 0.0
    for document in (document for number in used for document in batches[number]):
        inputs = {name: value for name, value in document.items() if name != "labels"}
        out = model(**inputs, use_cache=False)
        loss = hf_models.sum_of_labels(out.logits, document["labels"]) / count
        if "moe" in case.model:
            loss = loss + model.config.text_config.router_aux_loss_coef * out.aux_loss.double() / len(used)
        if loss.requires_grad:
            loss.backward()
        total += float(loss.detach())
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if model.config.tie_word_embeddings:
        grads["lm_head.weight"] = grads["model.language_model.embed_tokens.weight"]
    return total, grads


# ---------------------------------------------------------------------------- ranks


def load(case: HfCase, rank: int) -> tuple[Any, list[nn.Module], list[nn.Module], float]:
    """Returns the split model, this rank's stages and all its parts, and bytes read over bytes owned."""
    plan = case.plan
    model = load_model(case.folder)
    if "moe" in case.model:
        model.set_experts_implementation("eager")
    model.eval()
    split = case.split(model)
    device = plan.ranks.class_of(rank)
    stages = split.stages[plan.ranks.stage_of(LLM, device) :: case.pp]
    blocks: list[nn.Module] = []
    for name, of_encoder in split.encoders.items():
        place, counts = plan.ranks.stage_of(name, device), [c.layers for c in plan.modules[name].chunks]
        mine = of_encoder[sum(counts[:place]) : sum(counts[: place + 1])]
        blocks += mine
        if case.option == "fsdp":
            mesh = replica_mesh(plan, name)
            for block in mine:
                fully_shard(block, mesh=mesh)
    if case.option == "fsdp":
        mesh = replica_mesh(plan, LLM)
        for part in stages:
            fully_shard(part, mesh=mesh)
    parts = [*stages, *blocks]
    report = load_weights(model, parts, case.folder)
    case.choose(split)
    if case.option == "lora":
        add_lora(model, parts, LoraConfig(r=2, target_modules=LORA))
        set_adapters((name, p) for part in parts for name, p in part.hf.named_parameters())
    if case.option == "checkpointing":
        checkpoint_activations(parts)
    return split, stages, parts, report.read_bytes / report.own_bytes


def compare(case: HfCase, rank: int) -> dict[str, Any]:
    split, stages, parts, read = load(case, rank)
    replica = case.plan.ranks.place(LLM, rank).dp
    batches = [split.inputs(batch) for batch in hf_models.microbatches(case.model)]
    used = list(all_numbers(case))
    count = count_labels([batches[number] for number in used])
    weight = split.router_weight(count, len(used))
    loss_kwargs = {} if weight is None else {"router_weight": weight}
    schedule = FillSchedule(
        stages,
        split.encoders,
        case.plan,
        loss_fn=causal_lm_loss,
        tied=split.tied(stages),
        shapes=split.shapes,
    )
    total = 0.0
    for step in range(case.accumulate):
        chosen = [batches[number] for number in numbers(case, step, replica)]
        losses: list[Tensor] = []
        args, kwargs = step_arguments(chosen)
        schedule.step(
            *args, **kwargs, losses=losses, num_items=count, loss_kwargs=loss_kwargs, return_outputs=False
        )
        total += sum(map(float, losses)) / count
    grads = {
        name.removeprefix("hf."): whole(parameter.grad)
        for part in parts
        for name, parameter in part.named_parameters()
        if parameter.grad is not None
    }
    results = everybody((total, grads, read))
    return {} if rank else compare_with_one_process(case, results)


def compare_with_one_process(case: HfCase, results: list[Any]) -> dict[str, Any]:
    loss, expected = one_process(case)
    scale = max(float(grad.abs().max()) for grad in expected.values())
    differences = {
        name: float((grad - expected.get(name, torch.zeros(()))).abs().max()) / scale
        for _, of_rank, _ in results
        for name, grad in of_rank.items()
    }
    worst = max(differences, key=lambda name: differences[name])
    return {
        "loss": abs(sum(total for total, _, _ in results) - loss),
        "gradients": differences[worst],
        "worst": worst,
        "missing": sorted(set(expected) - set(differences)),
        "read": max(read for _, _, read in results),
    }


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


def main(names: list[str]) -> None:
    for case in CASES:
        if not names or case.name in names:
            with tempfile.TemporaryDirectory() as folder:
                model = hf_models.build(case.model)
                model.config.dtype = hf_models.DTYPE
                model.save_pretrained(folder, max_shard_size="60KB")
                object.__setattr__(case, "folder", Path(folder))
                result = play(cast(Any, case), cast(Any, compare))
            print(json.dumps({"name": case.name, **result}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
