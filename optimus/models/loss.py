"""Cross entropy where every rank of a tensor-parallel group holds some columns of the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimus.models.sample import IGNORED
from optimus.models.tensor_parallel import TpGroup


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """One small collective: of every row, each rank's part of the normaliser and of the label's logit."""

    @staticmethod
    def forward(
        context: Any, logits: Tensor, labels: Tensor, tp_group: TpGroup, first: int, count: int
    ) -> Tensor:
        asked, mine = labels != IGNORED, labels - first
        here = asked & (mine >= 0) & (mine < count)
        column = mine.clamp(0, max(0, logits.shape[1] - 1))[:, None]
        own = torch.logsumexp(logits[:, :count], 1)
        found = torch.where(here, logits.gather(1, column)[:, 0], 0.0)
        parts: Tensor = tp_group.all_gather(torch.stack((own, found))[None]).wait()
        normaliser = torch.logsumexp(parts[:, 0], 0)
        context.save_for_backward(logits, normaliser, asked, here, column)
        context.count = count
        return torch.where(asked, normaliser - parts[:, 1].sum(0), 0.0).sum()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, normaliser, asked, here, column = context.saved_tensors
        found = logits.sub_(normaliser[:, None]).exp_()  # in place: logits are large
        found[:, context.count :].zero_()
        found.scatter_add_(1, column, -here[:, None].to(found.dtype))
        return found.mul_((asked * gradient)[:, None]), None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, tp_group: TpGroup, *, first: int, count: int
) -> Tensor:
    """Summed over all rows, the same on all ranks; this one has `count` columns, from `first` on.

    Columns behind them stand for nothing, and are taken for minus infinity.
    """
    found: Tensor = _VocabParallelCrossEntropy.apply(logits, labels, tp_group, first, count)
    return found
