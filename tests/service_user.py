"""A process without privileges, home or writable site-packages: where compiled code must work too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import optimus

PACKAGE = Path(optimus.__file__).parent
NOBODY = 65534


def run(script: str, where: Path, variables: Mapping[str, str], *before: str) -> list[str]:
    """The lines that `script` prints, run from a file in `where`, with no other variables than these."""
    path = where / "script.py"
    path.write_text(script)
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(PACKAGE.parent), **variables}
    command = [*before, sys.executable, "-B", str(path)]
    done = subprocess.run(
        command, env=variables, cwd="/", capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.fixture(scope="session")
def as_nobody() -> list[str]:
    """A command prefix that runs this very interpreter without privileges.

    Root's Python may lie where no one else can read. Then the process keeps the right to read everything;
    what it may write is what nobody may write.
    """
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]
    read = ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    shell = ["sh", "-c", 'exec "$0" "$@"']  # setpriv itself would still start what only root can read
    for prefix in ([*drop, *shell], [*drop, *read, *shell]):
        probe = [*prefix, sys.executable, "-c", "import numba, sys; print(sys.version)"]
        bare = {"PATH": os.environ["PATH"]}
        done = subprocess.run(probe, env=bare, capture_output=True, text=True, check=False)
        if done.stdout.strip() == sys.version:
            return prefix
    pytest.skip("an unprivileged process cannot run this interpreter here")


@pytest.fixture
def installed() -> Iterator[Path]:
    """A directory anyone can read and no one can write: `site-packages` with Optimus, and a script."""
    where = Path(tempfile.mkdtemp(prefix="optimus-test-"))
    shutil.copytree(
        PACKAGE, where / "site-packages" / "optimus", ignore=shutil.ignore_patterns("__pycache__")
    )
    (where / "tmp").mkdir()
    subprocess.run(["chmod", "-R", "a+rX,a-w", where], check=True)
    (where / "tmp").chmod(0o1777)
    yield where
    shutil.rmtree(where)
