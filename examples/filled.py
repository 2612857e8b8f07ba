"""After: the same training with the encoder on both ranks, in the pipeline's idle time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist
from toy_vlm import FirstStage, LastStage, encoder_blocks, loss_fn, make_batch

from optimus import EncoderBlocks, FillSchedule, plan_modules, profile_stages

MICROBATCHES, STEPS = 8, 5


def main() -> None:
    """`torchrun --nproc-per-node 2 filled.py`."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    blocks, first, last = encoder_blocks(), FirstStage(), LastStage()
    stage = last if rank else first

    # How long does each stage and block take? Measured once; then the plan is the same on every rank.
    tokens, images, _ = make_batch(0, samples=2)  # one microbatch
    profiles = profile_stages([stage], {"images": blocks}, tokens, {"images": [images]}, pp=2, repeats=5)
    plan = plan_modules(
        stages=profiles.stage_seconds,
        encoders={"images": EncoderBlocks(blocks=profiles.block_seconds("images"))},
        microbatches=MICROBATCHES,
        ranks=2,
        pp=2,
    )

    schedule = FillSchedule([stage], {"images": blocks}, plan, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(schedule.parameters(), lr=1e-3)
    for step in range(STEPS):
        tokens, images, labels = make_batch(step)
        optimizer.zero_grad()
        losses: list[Tensor] = []
        schedule.step(tokens, images=images, target=labels, losses=losses)
        if rank:
            print(f"step {step}  loss {torch.stack(losses).mean():.6f}", flush=True)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
