"""Passes tensors from op to op: on this rank through a mailbox, between ranks by point-to-point messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol
from weakref import finalize

import torch
from torch import Tensor
from torch import distributed as dist

from optimus.models.collectives import has_streams

# Payload (forward, backward or rows), module, receiving virtual stage, microbatch.
Key = tuple[str, str, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Shape and dtype of a message. Both are known to its receiver, so no message carries its size."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def with_rows(self, rows: int) -> TensorSpec:
        """Returns the spec of a message with another number of rows: the first dimension."""
        return TensorSpec(shape=(rows, *self.shape[1:]), dtype=self.dtype)


class MessageSpecs(Protocol):
    """Specs of messages. The number of tensors in a message and their dtypes never change; shapes may.

    The executor sets `batch` to that of the step that runs.
    """

    batch: Any

    def stage_input(self, module: str, virtual: int, microbatch: int) -> tuple[TensorSpec, ...]:
        """Returns the specs of what a virtual stage of a module receives from the one before it."""

    def encoder_rows(self, module: str, microbatch: int) -> tuple[TensorSpec, ...]:
        """Returns the specs of what an encoder microbatch sends over the seam."""


class CountsTokens(Protocol):
    """A batch that knows how many tokens its encoder microbatches run."""

    def count_tokens(self, name: str, microbatch: int) -> int: ...


@dataclass(kw_only=True)
class BatchMessageSpecs:
    """Message specs of layers built from a job: the batch says how many tokens an encoder microbatch has."""

    inputs: Mapping[str, Sequence[tuple[TensorSpec, ...]]]  # the first virtual stage's are not read
    rows: Mapping[str, tuple[TensorSpec, ...]]
    tokens_per_row: Mapping[str, tuple[int, int]]  # of an encoder: in its inputs, and in its output rows
    batch: CountsTokens | None = None

    def stage_input(self, module: str, virtual: int, microbatch: int) -> tuple[TensorSpec, ...]:
        specs = self.inputs[module][virtual]
        if module not in self.tokens_per_row:
            return specs
        return self._sized(specs, module, microbatch, self.tokens_per_row[module][0])

    def encoder_rows(self, module: str, microbatch: int) -> tuple[TensorSpec, ...]:
        return self._sized(self.rows[module], module, microbatch, self.tokens_per_row[module][1])

    def _sized(
        self, specs: tuple[TensorSpec, ...], module: str, microbatch: int, tokens_per_row: int
    ) -> tuple[TensorSpec, ...]:
        if self.batch is None:
            return specs  # before the first step, of one row each
        rows = self.batch.count_tokens(module, microbatch) // tokens_per_row
        return tuple([spec.with_rows(rows) for spec in specs])


class _PendingSends:
    """Tensors of sends that have not completed, kept alive until they have.

    A send over gloo completes only when something waits for it, so a thread waits.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[dist.Work | Future[bool], Tensor]] = deque()
        self._to_wait_for: SimpleQueue[tuple[dist.Work, Future[bool]] | None] | None = None

    def add(self, work: dist.Work, tensor: Tensor, group: dist.ProcessGroup) -> None:
        backend = dist.get_backend(group)
        if backend == "fake":
            return  # a dry run: nothing reads it
        if backend != "gloo":
            self._pending.append((work, tensor))
            return
        done: Future[bool] = Future()
        if self._to_wait_for is None:
            self._to_wait_for = SimpleQueue()
            Thread(target=_wait_in_order, args=(self._to_wait_for,), daemon=True).start()
            finalize(self, self._to_wait_for.put, None)
        self._to_wait_for.put((work, done))
        self._pending.append((done, tensor))

    def release_completed(self) -> None:
        """Drops tensors whose sends have completed; raises the error of one that failed."""
        while self._pending:
            work, _ = self._pending[0]
            if not (work.done() if isinstance(work, Future) else work.is_completed()):
                break
            self._pending.popleft()
            if isinstance(work, Future):
                work.result()

    def wait(self) -> None:
        """Waits for all sends."""
        while self._pending:
            work, _ = self._pending.popleft()
            work.result() if isinstance(work, Future) else work.wait()


def _wait_in_order(works: SimpleQueue[tuple[dist.Work, Future[bool]] | None]) -> None:
    while (entry := works.get()) is not None:
        work, done = entry
        failure: Exception | None = None
        try:
            work.wait()
        except Exception as error:  # raised where the result is read
            failure = error
        del entry, work  # before the result is set: a work that outlives its group crashes the process
        done.set_result(True) if failure is None else done.set_exception(failure)
        del done


class P2PMailbox:
    """Tensors that one op leaves for another, by key; sends and receives go through it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tensors: dict[Key, tuple[Tensor, ...]] = {}
        self._receives: dict[Key, list[dist.Work]] = {}  # posted, not yet waited for
        self._sends = _PendingSends()
        # NCCL starts a receive after what its stream holds when it is posted: an own stream holds nothing.
        self._recv_stream = torch.cuda.Stream(device) if has_streams(device) else None
        self._compute_stream = None if self._recv_stream is None else torch.cuda.current_stream(device)

    def put(self, key: Key, tensors: tuple[Tensor, ...]) -> None:
        self._tensors[key] = tensors

    def take(self, key: Key) -> tuple[Tensor, ...]:
        """Removes and returns the tensors under a key; waits for their receive, if there is one."""
        tensors = self._tensors.pop(key)
        works = self._receives.pop(key, None)
        if works is not None:
            for work in works:
                work.wait()
            if self._compute_stream is not None:
                # A side stream may take a message and pass it on unchanged, then compute reads it.
                for tensor in tensors:
                    tensor.record_stream(torch.cuda.current_stream(self.device))
                    tensor.record_stream(self._compute_stream)
        return tensors

    def send(self, key: Key, peer: int, group: dist.ProcessGroup) -> None:
        """Sends the tensors under a key to another rank; those without elements are not sent."""
        self._sends.release_completed()
        for tensor in self.take(key):
            message = tensor.contiguous()
            if message.numel():
                self._sends.add(dist.isend(message, peer, group), message, group)

    def receive(self, key: Key, specs: tuple[TensorSpec, ...], peer: int, group: dist.ProcessGroup) -> None:
        """Posts a receive; `take` waits for it."""
        self._sends.release_completed()
        with nullcontext() if self._recv_stream is None else torch.cuda.stream(self._recv_stream):
            tensors = tuple([spec.empty(self.device) for spec in specs])
            self._receives[key] = [dist.irecv(tensor, peer, group) for tensor in tensors if tensor.numel()]
        self._tensors[key] = tensors

    def finish(self) -> None:
        """Waits for all sends and checks that every tensor was taken."""
        self._sends.wait()
        assert not self._tensors, f"left behind: {sorted(self._tensors)}"


class SideStream:
    """Launches collectives on a side stream (GPU) or thread (CPU) once the message they read has arrived.

    An op may begin with a collective over what another stage sends. The plan lets compute of other ops
    continue until that message arrives, so the program must not wait for it either.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if has_streams(device) else None
        self._thread: ThreadPoolExecutor | None = None
        self._launches: dict[object, Future[None]] = {}
        self._inline = False

    def launch(self, op: object, run: Callable[[], None]) -> None:
        """Runs `run`, which waits for a message first, without blocking the program."""
        if self._inline:
            run()
        elif self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()
        else:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="side")
            self._launches[op] = self._thread.submit(copy_context().run, run)

    def wait(self, op: object) -> None:
        """Waits until `run` has returned and raises its error, if any; on a GPU streams order the work."""
        launch = self._launches.pop(op, None)
        if launch is not None:
            launch.result()

    @contextmanager
    def inline(self) -> Iterator[None]:
        """Runs launches within the program, so that a dispatch mode sees every tensor they allocate."""
        self._inline = True
        try:
            yield
        finally:
            self._inline = False
