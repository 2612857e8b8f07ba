"""Plain data parallelism: every replica holds all parameters, and gets all their gradients summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.engine.buckets import check_types, views_of


class ReplicatedBucket:
    """The gradients of some parameters as views of one buffer, summed on all replicas.

    Whoever brings an optimizer of his own finds them in `grad`, as after any backward.
    """

    offset = 0
    gathers = False

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        check_types(parameters)
        self.parameters, self.group = list(parameters), group
        like = self.parameters[0]
        size = sum(parameter.numel() for parameter in self.parameters)
        self.summed = torch.zeros(size, dtype=like.dtype, device=like.device)
        self._views = views_of(self.summed, self.parameters)
        self._work: dist.Work | None = None

    def reset(self) -> None:
        """Zero, and where weight gradients are added again even if an optimizer took them away."""
        self.summed.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def gather(self) -> None:
        """Parameters are whole on every rank."""

    def wait_gathered(self) -> None:
        """Parameters are whole on every rank."""

    def reduce(self) -> None:
        if self.group is not None:
            self._work = dist.all_reduce(self.summed, dist.ReduceOp.SUM, self.group, async_op=True)

    def wait_reduced(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
