"""Tensors on their way: from one op to the next on this rank, or to and from another rank."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

Key = tuple[str, str, int, int]  # what it is, module, virtual stage that gets it, microbatch


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Shape and type of a tensor that travels: fixed, so that no size travels with it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Pending:
    """A receive that was posted."""

    __slots__ = ("tensors", "works")

    def __init__(self, tensors: tuple[Tensor, ...], works: list[dist.Work]) -> None:
        self.tensors, self.works = tensors, works


class Mail:
    """What ops of this rank hand to each other. Sends are kept alive until they have ended."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._there: dict[Key, tuple[Tensor, ...] | Pending] = {}
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        # On a GPU a receive starts after what its stream holds when it is posted: on one of its own, nothing.
        self._receiving = torch.cuda.Stream(device) if device.type == "cuda" else None

    def put(self, key: Key, tensors: tuple[Tensor, ...]) -> None:
        self._there[key] = tensors

    def take(self, key: Key) -> tuple[Tensor, ...]:
        """The tensors under a key, once; waits for a receive."""
        found = self._there.pop(key)
        if isinstance(found, Pending):
            for work in found.works:
                work.wait()
            if self._receiving is not None:
                for tensor in found.tensors:
                    tensor.record_stream(torch.cuda.current_stream(self.device))
            return found.tensors
        return found

    def send(self, key: Key, other: int, group: dist.ProcessGroup) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        for tensor in self.take(key):
            whole = tensor.contiguous()
            self._sent.append((dist.isend(whole, other, group), whole))

    def receive(self, key: Key, specs: tuple[TensorSpec, ...], other: int, group: dist.ProcessGroup) -> None:
        """Posts a receive; whoever takes it waits."""
        with nullcontext() if self._receiving is None else torch.cuda.stream(self._receiving):
            tensors = tuple([spec.empty(self.device) for spec in specs])
            self._there[key] = Pending(tensors, [dist.irecv(tensor, other, group) for tensor in tensors])

    def finish(self) -> None:
        """Waits for all sends. What nobody took is an error of the program."""
        while self._sent:
            self._sent.popleft()[0].wait()
        assert not self._there, f"left behind: {sorted(self._there)}"
