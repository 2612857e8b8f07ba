"""Computes the loss of a microbatch as transformers does, as its share of the whole batch's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from optimus.hf.inputs import IGNORED


@dataclass(frozen=True, kw_only=True)
class CausalLmLoss:
    """The sum over a microbatch's labels, divided by the batch's count, and its share of the router loss.

    Losses of all microbatches add up to the batch's. `router_coef` weighs the load-balancing loss, which
    is the mean over microbatches of what transformers computes for each.
    """

    num_labels: int
    num_microbatches: int = 1
    router_coef: float = 0.0

    def __call__(self, logits: Tensor, *more: Tensor) -> Tensor:
        """Returns the loss of `logits`, router statistics if any, and the target last."""
        *stats, target = more
        shifted = target[:, 1:].to(logits.device)
        scores = logits[:, :-1]
        if scores.dtype not in (torch.float32, torch.float64):
            scores = scores.float()
        loss = functional.cross_entropy(
            scores.flatten(0, 1), shifted.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss = loss / self.num_labels
        for sums in stats:
            loss = loss + self.router_coef * balance_experts(sums) / self.num_microbatches
        return loss


def balance_experts(sums: Tensor) -> Tensor:
    """Returns the load-balancing loss from sums of tokens per expert, probabilities per expert, and rows."""
    experts = len(sums) // 2
    tokens, probabilities = sums[:experts] / sums[-1], sums[experts : 2 * experts] / sums[-1]
    return (tokens.detach() * probabilities).sum() * experts
