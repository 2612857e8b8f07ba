"""Trains a vision-language model of transformers in a filled pipeline: its folder in, a folder out.

    torchrun --nproc-per-node 2 hf_vlm.py MODEL_FOLDER OUT_FOLDER

If MODEL_FOLDER does not exist, a tiny Qwen3-VL with random weights is made there. Batches are synthetic; in
`load_batches` put your own: the outputs of the model's processor, with labels, one per microbatch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from optimus.hf import FilledModel

MICROBATCHES, STEPS, SEED = 4, 5, 0
IGNORED = -100  # labels without a loss


def make_tiny_model(folder: Path) -> None:
    """Writes a Qwen3-VL of 0.2 million parameters, as transformers would."""
    torch.manual_seed(SEED)
    text = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 5e5}
    rope = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [2, 4, 2], "mrope_interleaved": True}
    vision = {"depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64}
    vision |= {"patch_size": 4, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}
    tokens = {"image_token_id": 150, "video_token_id": 151, "vision_start_token_id": 152}
    config = Qwen3VLConfig(
        text_config={**text, "rope_parameters": rope}, vision_config=vision, **tokens, vision_end_token_id=153
    )
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)


def load_batches(config: Any, replica: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yields steps of microbatches as the processor of Qwen-VL returns them; those of a replica differ."""
    generator = torch.Generator().manual_seed(SEED + replica)
    vision, image = config.vision_config, config.image_token_id
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    for _ in range(STEPS):
        batches = []
        for number in range(MICROBATCHES):
            grid = torch.tensor([[1, 4 + 2 * number, 6]])  # microbatches have images of several sizes
            patches = int(grid.prod())
            start = torch.randint(0, 100, (1, 1), generator=generator)
            text = (start + torch.arange(24)) % 100
            rows = torch.full((1, patches // vision.spatial_merge_size**2), image)
            ids = torch.cat([text[:, :4], rows, text[:, 4:]], 1)
            batches.append(
                {
                    "input_ids": ids,
                    "labels": ids.masked_fill(ids == image, IGNORED),
                    "mm_token_type_ids": (ids == image).int(),
                    "pixel_values": torch.randn(patches, pixels, generator=generator),
                    "image_grid_thw": grid,
                }
            )
        yield batches


def main(folder: Path, out: Path) -> None:
    """Loads this rank's part of the model, trains it with an optimizer of torch, and saves it."""
    dist.init_process_group("gloo")  # nccl on GPUs, and FilledModel(..., device="cuda")
    rank, pp = dist.get_rank(), 2
    if rank == 0 and not folder.exists():
        make_tiny_model(folder)
    dist.barrier()

    model = FilledModel(folder, pp=pp, microbatches=MICROBATCHES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batches in enumerate(load_batches(model.config, replica=model.replica)):
        loss = model.step(batches)
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}  loss {loss:.4f}  norm {norm:.3f}", flush=True)
    model.save(out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
