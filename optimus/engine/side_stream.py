"""Launches a collective on a side stream (GPU) or thread (CPU) once the message it reads has arrived.

An op may begin with a collective over what another stage sends. The plan lets compute of other ops continue
until that message arrives, so the program must not wait for it either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context

import torch

Run = Callable[[], None]


class SideStream:
    """Launches in flight alongside the program, by the op that they belong to."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: ThreadPoolExecutor | None = None
        self._launches: dict[object, Future[None]] = {}
        self._inline = False

    def launch(self, op: object, run: Run) -> None:
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
