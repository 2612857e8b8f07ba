"""Collectives whose numbers are still to come: launched beside the program as soon as a message is there.

An op may open with a collective on what another stage sends. A plan lets other compute go on until then; so
must a rank. On a GPU a stream of its own waits for the message and launches; on a CPU a thread does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context

import torch

Run = Callable[[], None]


class SideStream:
    """What was begun beside the program, by any name, until somebody needs it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: ThreadPoolExecutor | None = None
        self._begun: dict[object, Future[None]] = {}
        self._waits = False

    def begin(self, name: object, run: Run) -> None:
        """Runs what waits for a message first."""
        if self._waits:
            run()
        elif self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()
        else:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="side")
            self._begun[name] = self._thread.submit(copy_context().run, run)

    def end(self, name: object) -> None:
        """Until it is launched; errors of it are raised here."""
        begun = self._begun.pop(name, None)
        if begun is not None:
            begun.result()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Nothing runs beside the program, for those who look at all that is made."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
