"""Tensors on their way: from one op to the next on this rank, or to and from another rank."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from weakref import finalize

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


class _PendingSends:
    """Tensors that are being sent: kept until they have arrived.

    gloo tells that a send is over only to who waits for it, so a thread does.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[dist.Work | Future[bool], Tensor]] = deque()
        self._awaited: SimpleQueue[tuple[dist.Work, Future[bool]] | None] | None = None

    def add(self, work: dist.Work, tensor: Tensor, group: dist.ProcessGroup) -> None:
        backend = dist.get_backend(group)
        if backend == "fake":
            return  # a dry run: nobody takes it
        if backend != "gloo":
            self._kept.append((work, tensor))
            return
        over: Future[bool] = Future()
        if self._awaited is None:
            self._awaited = SimpleQueue()
            Thread(target=_await_all, args=(self._awaited,), daemon=True).start()
            finalize(self, self._awaited.put, None)
        self._awaited.put((work, over))
        self._kept.append((over, tensor))

    def forget_arrived(self) -> None:
        while self._kept:
            work, _ = self._kept[0]
            if not (work.done() if isinstance(work, Future) else work.is_completed()):
                break
            self._kept.popleft()
            if isinstance(work, Future):
                work.result()  # raises if it failed

    def finish(self) -> None:
        while self._kept:
            work, _ = self._kept.popleft()
            work.result() if isinstance(work, Future) else work.wait()


def _await_all(awaited: SimpleQueue[tuple[dist.Work, Future[bool]] | None]) -> None:
    while (given := awaited.get()) is not None:
        work, over = given
        failed: Exception | None = None
        try:
            work.wait()
        except Exception as error:  # for whoever asks how it ended
            failed = error
        del given, work  # first: a work that outlives its group ends the process badly
        over.set_result(True) if failed is None else over.set_exception(failed)
        del over


class P2PMailbox:
    """What ops of this rank hand to each other. Sends are kept alive until they have ended."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._there: dict[Key, tuple[Tensor, ...] | Pending] = {}
        self._sent = _PendingSends()
        # On a GPU a receive starts after what its stream holds when it is posted: on one of its own, nothing.
        self._receiving = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._computing = None if self._receiving is None else torch.cuda.current_stream(device)

    def put(self, key: Key, tensors: tuple[Tensor, ...]) -> None:
        self._there[key] = tensors

    def take(self, key: Key) -> tuple[Tensor, ...]:
        """The tensors under a key, once; waits for a receive."""
        found = self._there.pop(key)
        if isinstance(found, Pending):
            for work in found.works:
                work.wait()
            if self._computing is not None:
                # Also where it is taken beside the program: what is handed on as it came is read by compute.
                for tensor in found.tensors:
                    tensor.record_stream(torch.cuda.current_stream(self.device))
                    tensor.record_stream(self._computing)
            return found.tensors
        return found

    def send(self, key: Key, other: int, group: dist.ProcessGroup) -> None:
        self._sent.forget_arrived()
        for tensor in self.take(key):
            whole = tensor.contiguous()
            self._sent.add(dist.isend(whole, other, group), whole, group)

    def receive(self, key: Key, specs: tuple[TensorSpec, ...], other: int, group: dist.ProcessGroup) -> None:
        """Posts a receive; whoever takes it waits."""
        self._sent.forget_arrived()
        with nullcontext() if self._receiving is None else torch.cuda.stream(self._receiving):
            tensors = tuple([spec.empty(self.device) for spec in specs])
            self._there[key] = Pending(tensors, [dist.irecv(tensor, other, group) for tensor in tensors])

    def finish(self) -> None:
        """Waits for all sends. What nobody took is an error of the program."""
        self._sent.finish()
        assert not self._there, f"left behind: {sorted(self._there)}"
