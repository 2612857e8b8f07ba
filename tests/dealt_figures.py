"""Measures steps of FSDP2 around a tiny Qwen2.5-VL with heavy-tailed images, as they come and dealt.

`python tests/dealt_figures.py 2` runs two ranks, each on a core of its own. More ranks share cores, and one
that waits leaves its core to another: there is less to gain. A round runs the same steps in both ways, every
other round in reversed order; a second argument is the number of rounds.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from engine_worker import play
from test_dealing import TAIL, draw
from torch import Tensor
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from optimus.data.dealt_encoder import DealtEncoder, count_tower_flops

ROUNDS, STEPS = 14, 6
SHRINK = 16  # of tokens
DATA = {**TAIL, "image": 512}  # shrunk: images of 32 tokens of the LLM (10 x 12 patches), about five a rank
IMAGE, TEXT_TOKENS = 150, 8
VISION = {"depth": 6, "hidden_size": 256, "intermediate_size": 768, "num_heads": 4, "out_hidden_size": 64}
LLM: dict[str, Any] = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LLM |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
LLM |= {"rope_parameters": {"mrope_section": [2, 3, 3]}}
Grid = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class TimingCase:
    ranks: int
    rounds: int
    plan: None = None  # read by `play`


def draw_grids(ranks: int) -> list[list[list[Grid]]]:
    """Returns the images of every step and rank; one without has a dummy, without which FSDP2 would fail."""
    shape = {name: value / (1 if name == "text_only" else SHRINK) for name, value in DATA.items()}
    sequences = draw(np.random.default_rng(0), STEPS * ranks, **shape)
    grids = [[_grid(int(tokens)) for tokens in each] or [(1, 2, 2)] for each in sequences]
    return [grids[at : at + ranks] for at in range(0, len(grids), ranks)]


def _grid(tokens: int) -> Grid:
    height = math.isqrt(tokens)
    return (1, 2 * height, 2 * (tokens // height))


def make_batch(config: Any, grids: list[Grid]) -> dict[str, Tensor]:
    """Returns a sample as the processor would: images, and a text before each."""
    patches = [math.prod(grid) for grid in grids]
    pixels = torch.randn(sum(patches), 6 * config.vision_config.patch_size**2)
    texts = [torch.randint(3, 100, (TEXT_TOKENS,)) for _ in grids]
    images = [torch.full((count // 4,), IMAGE) for count in patches]
    ids = torch.cat([part for pair in zip(texts, images, strict=True) for part in pair])[None]
    inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids), "input_ids": ids}
    return inputs | {"labels": ids.masked_fill(ids == IMAGE, -100), "mm_token_type_ids": (ids == IMAGE).int()}


def build(is_dealt: bool) -> tuple[Any, DealtEncoder | None]:
    config = Qwen2_5_VLConfig(text_config=LLM, vision_config=VISION, image_token_id=IMAGE)
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    tower, llm = model.model.visual, model.model.language_model
    dealt = DealtEncoder(tower, llm, outputs=["pooler_output"]) if is_dealt else None
    for part in (*llm.layers, *tower.blocks, model):
        fully_shard(part)
    return model, dealt


def time_step(model: Any, batch: dict[str, Tensor]) -> float:
    """Returns the seconds until all ranks have their gradients."""
    dist.barrier()
    begin = time.perf_counter()
    model(**batch).loss.backward()
    dist.barrier()
    seconds = time.perf_counter() - begin
    model.zero_grad()
    return seconds


def measure(case: TimingCase, rank: int) -> dict[str, Any]:
    models = {"drawn": build(is_dealt=False)[0]}
    models["dealt"], dealt = build(is_dealt=True)
    assert dealt is not None
    tower = dealt.tower
    steps = draw_grids(case.ranks)
    batches = [make_batch(models["drawn"].config, step[rank]) for step in steps]
    fullest = {"drawn": 0.0, "dealt": 0.0}
    for step, batch in zip(steps, batches, strict=True):  # also warms up
        own = [sum(count_tower_flops(tower, math.prod(grid)) for grid in grids) for grids in step]
        for model in models.values():
            time_step(model, batch)
        for way, loads in (("drawn", own), ("dealt", dealt.loads)):
            fullest[way] += max(loads) * case.ranks / sum(loads) / len(steps)
    rounds: dict[str, list[float]] = {way: [] for way in models}
    for number in range(case.rounds):
        for way in list(models)[:: -1 if number % 2 else 1]:
            rounds[way].append(sum(time_step(models[way], batch) for batch in batches) / STEPS)
        if rank == 0:
            _say(f"round {number + 1} of {case.rounds}")
    return {"fullest": fullest, "rounds": rounds}


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def describe(result: dict[str, Any]) -> list[str]:
    drawn, dealt = (np.array(result["rounds"][way]) for way in ("drawn", "dealt"))

    def spread(values: Any) -> str:
        return f"{np.median(values):.3f} ({np.min(values):.3f} to {np.max(values):.3f})"

    fullest = " and ".join(f"{way} {value:.3f}" for way, value in result["fullest"].items())
    return [
        f"fullest rank over the mean, encoder: {fullest}",
        f"seconds of a step, median of {len(drawn)} rounds: drawn {spread(drawn)}, dealt {spread(dealt)}",
        f"drawn over dealt, median of the rounds' ratios: {spread(drawn / dealt)}",
    ]


def main(ranks: int, rounds: int) -> None:
    result = play(cast(Any, TimingCase(ranks=ranks, rounds=rounds)), cast(Any, measure))
    if "error" in result:
        sys.exit(result["error"])
    print(f"{ranks} ranks, {STEPS} steps a round", *describe(result), sep="\n")  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS)
