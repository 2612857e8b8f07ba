"""Computes a part of an answer in a forked process, so that planning uses two cores."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import IO, Any, Generic, TypeVar

from optimus.environment import end_with_parent

T = TypeVar("T")
K = TypeVar("K")


def compute_by_key(
    function: Callable[[K], T],
    work: Mapping[K, float],
    *,
    cores: int,
    report: Callable[[K], None] = lambda key: None,
    shared: Iterable[object] = (),
) -> dict[K, T]:
    """Returns the function's result for every key; of two cores each gets about half of the `work`.

    Keys that are computed here are reported. `shared` objects are the same in all results.
    """
    ours: list[K] = []
    for key in sorted(work, key=work.__getitem__, reverse=True):
        ours += [key] if sum(work[each] for each in ours) * 2 + work[key] <= sum(work.values()) else []
    others = [key for key in work if key not in ours] if cores > 1 else []
    cores = cores if others else 1
    with Forked(lambda: [function(key) for key in others], cores=cores, shared=shared) as other:
        results = {}
        for key in work:
            if key not in others:
                report(key)
                results[key] = function(key)
        results |= zip(others, other.result(), strict=True)
    return {key: results[key] for key in work}


class Forked(Generic[T]):
    """The result of a function, computed in a forked process beside this one, or here when it is asked for.

    The process finds all that is in memory as it is; nothing is passed to it. `shared` objects are the same
    in its result, all others are copies. With one core, or where the process fails, the function runs here.
    """

    def __init__(self, function: Callable[[], T], *, cores: int, shared: Iterable[object] = ()) -> None:
        self._function = function
        self._shared = {id(each): each for each in shared}  # ids are kept by a fork
        self._process = 0
        if cores > 1 and sys.platform == "linux":
            self._begin()

    def _begin(self) -> None:
        reading, writing = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():  # other threads only print, and the process prints nothing
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process = os.fork()
        if self._process == 0:
            status = 1
            try:
                end_with_parent(parent)
                os.close(reading)
                with os.fdopen(writing, "wb") as file:
                    _Pickler(file, self._shared).dump(self._function())
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        self._file = os.fdopen(reading, "rb")  # closed by __exit__

    def result(self) -> T:
        """Waits for the result."""
        if not self._process:
            return self._function()
        try:
            result: T = _Unpickler(self._file, self._shared).load()
        except (EOFError, pickle.UnpicklingError):  # errors are raised here, as they would be with one core
            return self._function()
        return result

    def __enter__(self) -> Forked[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the process, if its result was not asked for."""
        if self._process:
            self._file.close()
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)


class _Pickler(pickle.Pickler):
    def __init__(self, file: IO[bytes], shared: dict[int, object]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._shared = shared

    def persistent_id(self, item: object) -> int | None:
        return id(item) if id(item) in self._shared else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], shared: dict[int, object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: Any) -> object:
        return self._shared[number]
