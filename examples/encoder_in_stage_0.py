"""Before: torch pipelining with the vision encoder inside stage 0."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from toy_vlm import FirstStage, LastStage, encoder_blocks, loss_fn, make_batch

MICROBATCHES, STEPS = 8, 5


class WithEncoder(nn.Module):
    """Stage 0 does the encoder's work too, while stage 1 waits."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.stage = nn.Sequential(*encoder_blocks()), FirstStage()

    def forward(self, tokens: Tensor, images: Tensor) -> Tensor:
        return self.stage(tokens, self.encoder(images))


def main() -> None:
    """`torchrun --nproc-per-node 2 encoder_in_stage_0.py`."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    first, last = WithEncoder(), LastStage()  # both are made on every rank, so that all draw the same weights
    module = last if rank else first
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for step in range(STEPS):
        tokens, images, labels = make_batch(step)
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank:
            schedule.step(target=labels, losses=losses)
            print(f"step {step}  loss {torch.stack(losses).mean():.6f}", flush=True)
        else:
            schedule.step(tokens, images)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
