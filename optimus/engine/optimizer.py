"""What ends a step: one norm over the gradients of all modules, clipping, AdamW on this rank's masters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.engine.distributed_optimizer import ShardedBucket

SMALL = 1e-6  # added to a norm that divides, as torch.nn.utils.clip_grad_norm_ does


class DistributedOptimizer:
    """Every rank must hold one, be it for no bucket: the norm is summed over all ranks.

    `counted` are the gradients that enter the norm on this rank: each of the model's on one rank only. `clip`
    is the largest norm that gradients keep; 0 leaves them as they are. Nothing is read back from a device.
    """

    def __init__(
        self,
        buckets: Sequence[ShardedBucket],
        counted: Sequence[Tensor],
        *,
        learning_rate: float,
        weight_decay: float,
        clip: float = 0.0,
        device: torch.device,
    ) -> None:
        self.buckets, self._counted, self.clip, self._device = buckets, counted, clip, device
        masters = [bucket.master for bucket in self.buckets]
        self.adamw = (
            torch.optim.AdamW(masters, lr=learning_rate, weight_decay=weight_decay, fused=True)
            if masters
            else None
        )
        self.norm: Tensor | None = None  # of the last step, before clipping

    def step(self) -> None:
        """Gradients are summed; masters are updated, and gathered when the next step begins."""
        self.norm = self._norm()
        if self.clip:
            kept = torch.clamp(self.clip / (self.norm + SMALL), max=1.0)
            for bucket in self.buckets:
                bucket.summed.mul_(kept)
        if self.adamw is not None:
            self.adamw.step()

    def _norm(self) -> Tensor:
        """Parts of every parameter lie on its replicas: each number is counted once."""
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in self._counted]
        squares = [norm.square() for norm in norms]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        total = total.to(self._device)
        dist.all_reduce(total)
        return total.sqrt()
