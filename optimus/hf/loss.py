"""Computes the loss of a microbatch as transformers does, as a sum that the batch's labels divide."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from optimus.errors import UserError
from optimus.hf.inputs import IGNORED


def causal_lm_loss(logits: Tensor, *more: Tensor, router_weight: float | None = None) -> Tensor:
    """Returns the loss of `logits` as a sum over labels; behind them are router statistics and the target.

    The whole batch's number of labels divides it (`num_items` of `FillSchedule.step`). `router_weight` is the
    weight of the microbatch's load-balancing loss in this sum, see `SplitModel.router_weight`.
    """
    *stats, target = more
    scores = logits[:, :-1]
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()
    labels = target[:, 1:].to(logits.device).flatten()
    loss = functional.cross_entropy(scores.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    for sums in stats:
        if router_weight is None:
            raise UserError(
                field="router_weight",
                problem="is missing for a model with a router loss",
                hint="give loss_kwargs of step the split model's router_weight",
            )
        loss = loss + balance_experts(sums).to(loss.dtype) * router_weight
    return loss


def balance_experts(sums: Tensor) -> Tensor:
    """Returns the load-balancing loss from sums of tokens per expert, probabilities per expert, and rows."""
    experts = len(sums) // 2
    tokens, probabilities = sums[:experts] / sums[-1], sums[experts : 2 * experts] / sums[-1]
    return (tokens.detach() * probabilities).sum() * experts
