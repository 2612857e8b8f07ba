"""Plain data parallelism: gradients of a bucket in one flat buffer, summed over the module's own replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.errors import UserError


class FlatGradients:
    """The gradients of some parameters as views of one buffer."""

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        self.parameters, self.group = list(parameters), group
        types = sorted({str(parameter.dtype) for parameter in self.parameters})
        if len(types) > 1:
            raise UserError(
                field="parameters",
                problem=f"of one stage or block have the types {' and '.join(types)}",
                hint="give all that one stage or block trains one type",
            )
        size = sum(parameter.numel() for parameter in self.parameters)
        like = self.parameters[0]
        self.flat = torch.zeros(size, dtype=like.dtype, device=like.device)
        self._views = []
        at = 0
        for parameter in self.parameters:
            self._views.append(self.flat[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()
        self._work: dist.Work | None = None

    def reset(self) -> None:
        """Zero, and where weight gradients are added again even if an optimizer took them away."""
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def launch(self) -> None:
        if self.group is not None:
            self._work = dist.all_reduce(self.flat, dist.ReduceOp.SUM, self.group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
