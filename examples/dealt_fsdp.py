"""Trains a tiny Qwen2.5-VL with FSDP2, its images dealt over the ranks by one line.

torchrun --nproc-per-node 2 dealt_fsdp.py dealt      # or: undealt
"""

import sys
import time

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from optimus import DealtEncoder

STEPS, SIDE, IMAGE = 6, 24, 150  # an image has SIDE x SIDE patches
VISION = {"depth": 4, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 64}
LLM = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LLM |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}


def make_batch(config: Qwen2_5_VLConfig, step: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Returns a sample as the processor would: one rank has seven images, others have one."""
    images = 7 if step % ranks == rank else 1
    generator = torch.Generator().manual_seed(step * ranks + rank)
    pixels = torch.randn(images * SIDE**2, 6 * config.vision_config.patch_size**2, generator=generator)
    text = torch.randint(3, 100, (images, 8), generator=generator)
    ids = torch.cat([text, torch.full((images, SIDE**2 // 4), IMAGE)], 1).view(1, -1)
    inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * images)}
    labels, kinds = ids.masked_fill(ids == IMAGE, -100), (ids == IMAGE).int()
    return {**inputs, "input_ids": ids, "labels": labels, "mm_token_type_ids": kinds}


def main(way: str) -> None:
    """Trains a few steps; rank 0 prints its loss and the seconds of each."""
    dist.init_process_group("gloo")  # nccl on GPUs
    torch.manual_seed(0)
    rope = {"rope_parameters": {"mrope_section": [2, 3, 3]}}
    config = Qwen2_5_VLConfig(text_config=LLM | rope, vision_config=VISION, image_token_id=IMAGE)
    model = Qwen2_5_VLForConditionalGeneration(config)
    tower, llm = model.model.visual, model.model.language_model
    if way == "dealt":
        DealtEncoder(tower, llm, outputs=["pooler_output"])
    for part in (*llm.layers, *tower.blocks, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        begin = time.perf_counter()
        loss = model(**make_batch(config, step, dist.get_rank(), dist.get_world_size())).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.4f}  {time.perf_counter() - begin:.2f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
