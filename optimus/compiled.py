"""Compiles the hot loops with numba and keeps the machine code in a directory that is surely ours.

By default numba keeps it next to the source or below the home directory, and raises at import where it can
write neither: read-only site-packages, no HOME, a service user. Here such a place only costs time. numba
takes 0.4 s to import, so the first use imports it, not this module.

Numba notices by its own file alone that a cached function is stale: compiled functions that call each other
belong in one file.
"""

from __future__ import annotations

import functools
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from optimus.environment import cache_candidates

F = TypeVar("F", bound=Callable[..., object])

MIN_FREE_BYTES = 1 << 20  # a disk that cannot take this would fail later, in the middle of a call


def njit_cached(function: F) -> F:
    """Compiles on first call, outside the interpreter lock and without fastmath: same inputs, same bits."""
    import numba

    directory = _cache_directory()
    if directory is not None:
        try:
            with _numba_caching_in(directory):
                return cast(F, numba.njit(nogil=True, cache=True)(function))
        except RuntimeError:  # numba found no way to cache, e.g. the function was imported from a zip
            pass
    return cast(F, numba.njit(nogil=True)(function))


@contextmanager
def announce_first_compilation(announce: Callable[[Path | None], None]) -> Iterator[None]:
    """Calls `announce` once, right before the first compilation in this block, if there is one.

    Machine code loaded from the cache is no compilation. `announce` gets the directory where the result
    will be kept, or None if it cannot be kept and the next run will compile again.
    """
    from numba.core import event

    class Announcer(event.Listener):  # type: ignore[misc]
        announced = False

        def on_start(self, event: Any) -> None:
            if not self.announced:
                self.announced = True
                path = event.data["dispatcher"].stats.cache_path
                announce(None if path is None else Path(path))

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Announcer()):
        yield


@functools.cache
def _cache_directory() -> Path | None:
    """Returns the directory where this process keeps machine code; None if there is none."""
    return find_private_directory(cache_candidates())


def find_private_directory(candidates: Iterable[Path]) -> Path | None:
    """Returns the first directory that only this user can enter and that has room; creates it if needed.

    Cached code is unpickled and run. Among the temporary files anyone could have come before us with a
    directory or a link of that name, and numba makes directories that a group may write, as the umask says:
    nobody else gets as far as these.
    """
    for directory in candidates:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_only_ours(directory):
                with tempfile.TemporaryFile(dir=directory) as probe:
                    probe.write(bytes(MIN_FREE_BYTES))
                return directory
        except OSError:
            continue
    return None


def _is_only_ours(directory: Path) -> bool:
    """Tells if nobody else can enter a directory, or put another in its place."""
    link, target = directory.lstat(), directory.stat()
    others_enter = target.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if link.st_uid != os.geteuid() or target.st_uid != os.geteuid() or others_enter:
        return False
    above = {*directory.absolute().parents, *directory.resolve().parents}
    return not any(map(_is_writable_by_others, above))


def _is_writable_by_others(directory: Path) -> bool:
    """Tells if others can rename what is in a directory; in a sticky one only owners can."""
    found = directory.stat()
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    return bool(others_write) or found.st_uid not in (0, os.geteuid())


@contextmanager
def _numba_caching_in(directory: Path) -> Iterator[None]:
    """Points numba at `directory` for functions decorated in this block only: other packages use numba too.

    Numba settles a function's cache path when it is decorated, so nothing has to hold afterwards.
    """
    from numba import config

    saved = config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES
    config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = str(directory), "UserProvidedCacheLocator"
    try:
        yield
    finally:
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = saved
