"""Trains a toy VLM with all that `FillSchedule` takes, and compares with one process; one JSON line a case.

Microbatches differ in length, images and labels, and some have no images; blocks and stages read keyword
inputs; the first and last stage share a weight; an auxiliary loss travels along the stages; gradients add up
over several steps; blocks and stages of other ranks stay on `meta`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from engine_worker import everybody, play, worst
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from optimus.engine.fill_schedule import FillSchedule
from optimus.engine.process_groups import replica_mesh
from optimus.engine.stage_profile import StageInputs, profile_stages
from optimus.ir.plan import EncoderBlocks, Plan, Seconds
from optimus.ir.ranks import LLM
from optimus.planner.user_modules import plan_modules

WIDTH, PIXELS, VOCABULARY, IMAGE, IGNORED = 6, 5, 11, 10, -100
BLOCKS, MICROBATCHES, UPDATES, RATE, CLIP = 4, 4, 2, 0.2, 0.5
TIMES = Seconds(forward_s=1.0, backward_s=2.0, weight_s=1.0, gather_s=0.1, reduce_s=0.1)
# Rows of the images of each microbatch, by step: two of them become one row of the LLM.
IMAGES = (((4, 2), (), (6,), (2, 2, 4)), ((2,), (), (4,), ()), ((2, 6), (4, 4), (), (2,)))


@dataclass(frozen=True, kw_only=True)
class VlmCase:
    name: str
    ranks: int
    pp: int
    chunks: int = 1
    order: str = ""
    encoder_pp: int = 1
    pieces: int = 1
    accumulate: int = 1  # steps before the optimizer's
    sharded: bool = False  # by FSDP2
    tied: bool = True
    profiled: bool = False  # by `profile_stages`, before

    @property
    def replicas(self) -> int:
        return self.ranks // self.pp

    @cached_property
    def plan(self) -> Plan:
        return plan_modules(
            stages=[TIMES] * (self.pp * self.chunks),
            encoders={
                "images": EncoderBlocks(blocks=[TIMES] * BLOCKS, pp=self.encoder_pp, pieces=self.pieces)
            },
            microbatches=MICROBATCHES,
            ranks=self.ranks,
            pp=self.pp,
            order=self.order,
        )


CASES = [
    VlmCase(name="tied, accumulated", ranks=2, pp=2, accumulate=3),
    VlmCase(name="replicas", ranks=4, pp=2, encoder_pp=2, accumulate=2),
    VlmCase(name="pieces, zero-bubble", ranks=2, pp=2, pieces=2, order="zero-bubble", profiled=True),
    VlmCase(name="interleaved", ranks=2, pp=2, chunks=2, encoder_pp=2, tied=False),
    VlmCase(name="four stages", ranks=4, pp=4, encoder_pp=2, profiled=True),
    VlmCase(name="FSDP2", ranks=4, pp=2, encoder_pp=2, accumulate=2, sharded=True),
    VlmCase(name="FSDP2, no pipeline", ranks=2, pp=1, accumulate=2, sharded=True),
    VlmCase(name="one rank holds both ends", ranks=2, pp=1, chunks=2),
]


# ---------------------------------------------------------------------------- modules


class Block(nn.Module):  # type: ignore[misc]
    """Adds the mean of an image's rows to each; the first embeds pixels, the last merges pairs of rows."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(WIDTH if number else PIXELS, WIDTH)

    def forward(self, x: Tensor, *, sizes: list[int]) -> Tensor | tuple[Tensor, ...]:
        x = self.linear(x).tanh()
        x = torch.cat([image + image.mean(0) for image in x.split(sizes)])
        if self.number < BLOCKS - 1:
            return x
        pairs = x.unflatten(0, (-1, 2))
        return pairs.mean(1), pairs[:, 0] * pairs[:, 1]


class VlmStage(nn.Module):  # type: ignore[misc]
    """State: hidden (1, n, width), and the auxiliary loss so far."""

    def __init__(self, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.is_first, self.is_last = is_first, is_last
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if is_first else None
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if is_last else None

    def forward(self, *inputs: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, ...]:
        if self.embedding is not None:
            ids, *rows = inputs
            x = self.embedding(ids)
            merged = torch.cat(rows[::2]) + 0.3 * torch.cat(rows[1::2])
            x = x.masked_scatter((ids == IMAGE)[..., None].expand_as(x), merged)
            auxiliary = x.new_zeros(())
        else:
            x, auxiliary = inputs
        x = (self.linear(x) + (positions * scale).sin()[..., None]).tanh()
        x = x + x.cumsum(1) / 10
        auxiliary = auxiliary + x.square().mean()
        return (x if self.head is None else self.head(x)), auxiliary


def loss_fn(logits: Tensor, auxiliary: Tensor, labels: Tensor, *, weight: float) -> Tensor:
    """Sum over labels, and an auxiliary loss that counts as many labels."""
    loss = functional.cross_entropy(logits[0], labels[0], ignore_index=IGNORED, reduction="sum")
    return loss + weight * auxiliary * (labels != IGNORED).sum()


def build(case: VlmCase) -> tuple[list[VlmStage], list[Block]]:
    torch.manual_seed(1)
    count = case.pp * case.chunks
    stages = [VlmStage(is_first=at == 0, is_last=at == count - 1).double() for at in range(count)]
    blocks = [Block(number).double() for number in range(BLOCKS)]
    if case.tied:
        stages[-1].head.weight = stages[0].embedding.weight
    return stages, blocks


# ---------------------------------------------------------------------------- data


def image_shapes(number: int, inputs: StageInputs) -> list[tuple[int, int]]:
    rows = sum(inputs.kwargs["sizes"])
    return [(rows, WIDTH)] if number < BLOCKS - 1 else [(rows // 2, WIDTH)] * 2


def llm_shapes(number: int, inputs: StageInputs) -> list[tuple[int, ...]]:
    return [(1, inputs.kwargs["positions"].shape[1], WIDTH), ()]


def make_batch(case: VlmCase, step: int, replica: int) -> dict[str, Any]:
    """The arguments of one `FillSchedule.step`, and its targets."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    images: list[Any] = []
    ids, positions, labels = [], [], []
    for number in range(MICROBATCHES):
        sizes = IMAGES[(step + replica) % len(IMAGES)][(number + replica) % MICROBATCHES]
        tokens = torch.randint(VOCABULARY - 1, (1, 9 + number % 3 + step % 2), generator=generator)
        parts = [sizes[at :: case.pieces] for at in range(case.pieces)]
        rows = sum(map(sum, parts)) // 2
        tokens = torch.cat([tokens[:, :2], torch.full((1, rows), IMAGE), tokens[:, 2:]], 1)
        for part in parts:
            pixels = torch.randn(sum(part), PIXELS, generator=generator, dtype=torch.float64)
            images.append(StageInputs(args=(pixels,), kwargs={"sizes": list(part)}) if part else None)
        target = tokens.roll(-1, 1)
        target[tokens == IMAGE] = IGNORED
        target[:, : number + 1] = IGNORED
        ids.append(tokens)
        positions.append(torch.arange(tokens.shape[1], dtype=torch.float64)[None])
        labels.append(target)
    return {"ids": ids, "images": images, "positions": positions, "labels": labels}


def count_items(case: VlmCase, update: int) -> int:
    return sum(
        int((labels != IGNORED).sum())
        for step in range(update * case.accumulate, (update + 1) * case.accumulate)
        for replica in range(case.replicas)
        for labels in make_batch(case, step, replica)["labels"]
    )


# ---------------------------------------------------------------------------- both ways


def learn(parameters: Iterator[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in {id(p): p for p in parameters}.values():
            parameter.sub_(RATE * cast(Tensor, parameter.grad))
            parameter.grad = None


def named(stages: dict[int, nn.Module], blocks: dict[int, nn.Module]) -> dict[str, nn.Parameter]:
    modules = {f"stage{at}": stage for at, stage in stages.items()}
    modules |= {f"block{at}": block for at, block in blocks.items()}
    return {f"{name}.{own}": p for name, module in modules.items() for own, p in module.named_parameters()}


def one_process(case: VlmCase) -> list[tuple[dict[str, Tensor], float, float]]:
    """Of every update: clipped gradients, their norm before, and the loss."""
    stages, blocks = build(case)
    results = []
    for update in range(UPDATES):
        items, total = count_items(case, update), 0.0
        for step in range(update * case.accumulate, (update + 1) * case.accumulate):
            for replica in range(case.replicas):
                total += one_step(case, stages, blocks, make_batch(case, step, replica), items)
        parameters = named(dict(enumerate(stages)), dict(enumerate(blocks)))
        unique = {id(p): p for p in parameters.values()}.values()
        norm = float(nn.utils.clip_grad_norm_(unique, CLIP))
        grads = {name: cast(Tensor, p.grad).clone() for name, p in parameters.items()}
        if case.tied and len(stages) > 1:  # the shared weight is listed under its first name only
            grads[f"stage{len(stages) - 1}.head.weight"] = grads["stage0.embedding.weight"]
        results.append((grads, norm, total))
        learn(iter(unique))
    return results


def one_step(
    case: VlmCase, stages: list[VlmStage], blocks: list[Block], batch: dict[str, Any], items: int
) -> float:
    total = 0.0
    for number in range(MICROBATCHES):
        rows: list[Tensor] = []
        for inputs in batch["images"][number * case.pieces : (number + 1) * case.pieces]:
            if inputs is not None:
                state: Any = inputs.args
                for block in blocks:
                    state = block(*(state if isinstance(state, tuple) else (state,)), **inputs.kwargs)
                rows += state
        rows = rows or [torch.zeros(0, WIDTH, dtype=torch.float64)] * 2
        state = batch["ids"][number], *rows
        for stage in stages:
            state = stage(*state, positions=batch["positions"][number], scale=0.7)
        logits, auxiliary = state
        loss = loss_fn(logits, auxiliary, batch["labels"][number], weight=0.5) / items
        loss.backward()
        total += float(loss.detach())
    return total


def prepare(case: VlmCase, rank: int) -> tuple[dict[int, nn.Module], list[nn.Module], dict[int, nn.Module]]:
    """This rank's stages by number, all blocks, and those of this rank; the others have no values."""
    plan = case.plan
    stages, blocks = build(case)
    device = plan.ranks.class_of(rank)
    stage = plan.ranks.stage_of(LLM, device)
    first = plan.ranks.stage_of("images", device) * BLOCKS // case.encoder_pp
    mine = range(first, first + BLOCKS // case.encoder_pp)
    local = {at: stages[at] for at in range(stage, len(stages), case.pp)}
    if case.tied and len(stages) > 1:  # two parameters, on most plans of two ranks
        head = cast(Any, stages[-1].head)
        head.weight = nn.Parameter(head.weight.detach().clone())
    blocks = [block if at in mine else block.to("meta") for at, block in enumerate(blocks)]
    return dict(local), list(blocks), {at: blocks[at] for at in mine}


def make_schedule(
    case: VlmCase, stages: dict[int, Any], blocks: list[nn.Module], mine: dict[int, nn.Module], replica: int
) -> FillSchedule:
    plan, last = case.plan, case.pp * case.chunks - 1
    profiles = None
    if case.profiled:
        batch = make_batch(case, 0, replica)
        microbatch = StageInputs(
            args=(batch["ids"][0],), kwargs={"positions": batch["positions"][0], "scale": 0.7}
        )
        images = {"images": batch["images"][: case.pieces]}
        profiles = profile_stages(
            list(stages.values()), {"images": blocks}, microbatch, images, pp=case.pp, repeats=1
        )
        assert len(profiles.block_seconds("images")) == BLOCKS
        assert all(seconds.forward_s > 0 < seconds.backward_s for seconds in profiles.stage_seconds)
    if case.sharded:
        meshes = {name: replica_mesh(plan, name) for name in plan.modules}
        for block in mine.values():
            fully_shard(block, mesh=meshes["images"])
        for stage in stages.values():
            fully_shard(stage, mesh=meshes[LLM])
    ends = [stage.embedding for at, stage in stages.items() if at == 0]
    ends += [stage.head for at, stage in stages.items() if at == last > 0]
    return FillSchedule(
        list(stages.values()),
        {"images": blocks},
        plan,
        loss_fn=loss_fn,
        tied=[end.weight for end in ends] if case.tied else None,
        shapes={"images": image_shapes, LLM: llm_shapes},
        profiles=profiles,
    )


def compare(case: VlmCase, rank: int) -> dict[str, Any]:
    stages, blocks, mine = prepare(case, rank)
    replica = case.plan.ranks.place(LLM, rank).dp
    schedule = make_schedule(case, stages, blocks, mine, replica)
    seen = []
    for update in range(UPDATES):
        first, total = update * case.accumulate, 0.0
        batches = [make_batch(case, step, replica) for step in range(first, first + case.accumulate)]
        items = schedule.count_labels(*(labels for batch in batches for labels in batch["labels"]))
        assert items == count_items(case, update)
        for batch in batches:
            losses: list[Tensor] = []
            schedule.step(
                batch["ids"],
                images=batch["images"],
                positions=batch["positions"],
                scale=0.7,
                target=batch["labels"],
                losses=losses,
                num_items=items,
                return_outputs=False,
                loss_kwargs={"weight": 0.5},
            )
            total += sum(map(float, losses)) / items
        norm = schedule.clip_grad_norm_(CLIP)
        parameters = named(stages, mine)
        grads = {name: whole(cast(Tensor, p.grad)) for name, p in parameters.items()}
        seen.append({"gradients": grads, "norm": float(norm), "loss": total})
        learn(schedule.parameters())
    of_ranks = [everybody(one) for one in seen]
    if rank:
        return {}
    differences = {"gradients": 0.0, "norm": 0.0, "loss": 0.0}
    for of_update, (grads, norm, total) in zip(of_ranks, one_process(case), strict=True):
        differences["gradients"] = max(
            differences["gradients"], worst([one["gradients"] for one in of_update], grads)
        )
        differences["norm"] = max(differences["norm"], *(abs(one["norm"] - norm) for one in of_update))
        difference = abs(sum(one["loss"] for one in of_update) - total)
        differences["loss"] = max(differences["loss"], difference)
    return differences


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


def main(names: list[str]) -> None:
    for case in CASES:
        if not names or case.name in names:
            result = play(cast(Any, case), cast(Any, compare))
            print(json.dumps({"name": case.name, **result}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
