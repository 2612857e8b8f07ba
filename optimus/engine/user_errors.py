"""Prints a mistake of the user once, instead of a traceback of every rank."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from torch import distributed as dist

from optimus.engine.torch_private import default_store
from optimus.errors import OptimusError

KEY = "optimus/reported_errors"
GRACE_S = 1.0  # for the rank that prints, before a launcher ends all ranks because another one has ended


def report_errors_once() -> None:
    """Makes an uncaught `OptimusError` end this process with one message of all ranks, and exit code 1.

    Other exceptions keep their traceback.
    """
    if getattr(sys.excepthook, "__module__", "") == __name__:
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, OptimusError):
            previous(kind, error, trace)
        elif _is_first_to_report():
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
        else:
            time.sleep(GRACE_S)

    hook.__module__ = __name__
    sys.excepthook = hook


def _is_first_to_report() -> bool:
    try:
        return not dist.is_initialized() or default_store().add(KEY, 1) == 1
    except (RuntimeError, OSError):  # the rank that holds the store has ended
        return True


def say(text: str) -> None:
    """Prints a line of progress to stderr, on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        sys.stderr.write(f"optimus: {text}\n")
        sys.stderr.flush()
