"""Reads the environment variables that Optimus listens to, so that nothing else has to."""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import Mapping
from pathlib import Path


def cache_candidates(variables: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Places for files that only save time when kept, best first; none is promised to be usable.

    `OPTIMUS_CACHE_DIR`, then `XDG_CACHE_HOME/optimus`, then `~/.cache/optimus`, then a directory of this
    user's own among the temporary files. What is not known is left out: there may be no home (a container
    with a bare user id) and no temporary directory (a read-only root).
    """
    candidates = []
    if chosen := variables.get("OPTIMUS_CACHE_DIR"):
        candidates.append(Path(chosen).absolute())
    if (xdg := Path(variables.get("XDG_CACHE_HOME", ""))).is_absolute():  # the XDG rule: ignore others
        candidates.append(xdg / "optimus")
    if (home := Path(_home(variables))).is_absolute():
        candidates.append(home / ".cache" / "optimus")
    try:
        candidates.append(Path(tempfile.gettempdir(), f"optimus-{os.geteuid()}"))
    except FileNotFoundError:
        pass
    return tuple(candidates)


def _home(variables: Mapping[str, str]) -> str:
    if home := variables.get("HOME"):
        return home
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return ""
