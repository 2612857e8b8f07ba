"""Clips gradients and updates masters that are sharded over replicas, as Megatron's distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from optimus.engine.buckets import GroupOf
from optimus.engine.optimizer_config import OptimizerConfig, ParamGroup
from optimus.engine.sharded_bucket import ShardedBucket

SPIKE_WINDOW = 64  # steps whose median is the usual norm
SPIKE_MIN_STEPS = 8  # before which nothing is a spike
CLIP_EPS = 1e-6  # added to the norm that divides, as torch.nn.utils.clip_grad_norm_ does


class OptimizerTensor(NamedTuple):
    """A part of a bucket's masters that AdamW updates as one tensor.

    `begin` and `end` are its place in the flat buffer of the bucket, `parameter` is a view of its `master`.
    """

    bucket: ShardedBucket
    begin: int
    end: int
    parameter: nn.Parameter


class DistributedOptimizer:
    """Clips by one norm over the gradients of all modules, then steps AdamW on this rank's masters.

    Every rank must have one, even without buckets: the norm is summed over all ranks. `norm_grads` are the
    gradients that enter the norm on this rank; each gradient of the model enters it on one rank. `group_of`
    gives rate and decay of a parameter of a bucket. The host reads nothing from the device.

    A step whose loss or norm is not finite, or whose norm exceeds the median of the last ones `spike_factor`
    times (0: never), changes neither masters nor moments, on any rank.
    """

    def __init__(
        self,
        buckets: Sequence[ShardedBucket],
        norm_grads: Sequence[Tensor],
        *,
        config: OptimizerConfig,
        group_of: GroupOf,
        device: torch.device,
        spike_factor: float = 0.0,
    ) -> None:
        self.buckets, self.config, self._norm_grads, self._device = buckets, config, norm_grads, device
        self.clip = config.clip
        self._tensors: dict[ParamGroup, list[OptimizerTensor]] = {}
        for bucket in buckets:
            for group, tensor in _split_masters(bucket, group_of):
                self._tensors.setdefault(group, []).append(tensor)
        groups: list[dict[str, Any]] = [
            {"params": [tensor.parameter for tensor in tensors], "initial_lr": group.lr, **group._asdict()}
            for group, tensors in self._tensors.items()
        ]
        self.adamw = (
            torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, fused=True) if groups else None
        )
        self._spike_factor = spike_factor
        self.grad_norm: Tensor | None = None  # of the last step, before clipping
        self.left_out = torch.zeros((), device=device)  # 1 if the last step was
        # Norms of the last steps that were not left out, equal on all ranks; 0 before there were as many.
        self.recent_norms = torch.zeros(SPIKE_WINDOW, dtype=torch.float64, device=device)

    def tensors(self) -> Iterator[OptimizerTensor]:
        """Yields what `adamw` has one state each for; a group without masters on this rank has none."""
        return chain.from_iterable(self._tensors.values())

    def state_of(self, tensor: OptimizerTensor) -> dict[str, Tensor]:
        """Returns the state of AdamW for a tensor: zeros before the first step."""
        assert self.adamw is not None
        state: dict[str, Tensor] = self.adamw.state[tensor.parameter]
        if not state:
            master = tensor.parameter.detach()
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
        return state

    def set_learning_rate(self, step: int) -> float:
        """Sets the rates of a step; returns that of modules without one of their own."""
        factor = self.config.lr_factor(step)
        for group in [] if self.adamw is None else self.adamw.param_groups:
            group["lr"] = group["initial_lr"] * factor
        return self.config.lr * factor

    def step(self, loss: Tensor | None = None) -> None:
        """Updates masters from reduced gradients; they are gathered when the next step begins.

        `loss` is this rank's part of it, if any.
        """
        self.grad_norm = norm = self._total_norm(loss)
        self.left_out = (~norm.isfinite() | self._is_spike(norm)).float()
        moved = torch.cat([self.recent_norms[1:], norm.view(1)])
        self.recent_norms.copy_(torch.where(self.left_out.bool(), self.recent_norms, moved))
        if self.clip:
            scale = torch.clamp(self.clip / (self.grad_norm + CLIP_EPS), max=1.0)
            for bucket in self.buckets:
                bucket.reduced_grad.mul_(scale)
        if self.adamw is not None:
            self.adamw.found_inf = self.left_out  # as torch.amp.GradScaler does
            self.adamw.step()

    def read_outcome(self) -> tuple[float, bool]:
        """Returns the norm of the last step, and whether it was left out. The host waits for the device."""
        assert self.grad_norm is not None
        norm, left_out = torch.stack([self.grad_norm, self.left_out.double()]).tolist()
        return norm, bool(left_out)

    def _is_spike(self, norm: Tensor) -> Tensor:
        if not self._spike_factor:
            return torch.zeros_like(norm, dtype=torch.bool)
        known = (self.recent_norms > 0).sum()
        middle = SPIKE_WINDOW - known + (known - 1) // 2  # zeros are first
        median = self.recent_norms.sort().values.gather(0, middle.view(1))[0]
        return (known >= SPIKE_MIN_STEPS) & (norm > self._spike_factor * median)

    def _total_norm(self, loss: Tensor | None = None) -> Tensor:
        """Returns the norm of all gradients, NaN if the loss of a rank is not finite."""
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in self._norm_grads]
        squares = [norm.square() for norm in norms]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        total = total.to(self._device)
        if loss is not None:
            total = total + 0.0 * loss
        dist.all_reduce(total)
        return total.sqrt()


def _split_masters(bucket: ShardedBucket, group_of: GroupOf) -> Iterator[tuple[ParamGroup, OptimizerTensor]]:
    """Splits a rank's masters where the group of parameters changes; padding belongs to none."""
    offset, end_offset, end = bucket.shard_offset, bucket.shard_offset + len(bucket.master), 0
    for group, members in groupby(bucket.parameters, group_of):
        begin, end = end, end + sum(parameter.numel() for parameter in members)
        first, last = max(begin, offset), min(end, end_offset)
        if first < last:
            part = slice(first - offset, last - offset)
            parameter = nn.Parameter(bucket.master[part])
            parameter.grad = bucket.reduced_grad[part]
            yield group, OptimizerTensor(bucket, first, last, parameter)
