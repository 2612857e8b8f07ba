"""Runs a script of the tests in a process of its own, which forks ranks and prints a JSON line per case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run_worker(script: str, *arguments: str, timeout_s: float, **variables: str) -> list[dict[str, Any]]:
    """Returns the lines that a script printed; `variables` are added to its environment."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **variables},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def run_cases(script: str, names: Sequence[str], *, timeout_s: float) -> list[dict[str, Any]]:
    """Returns the lines of some cases, all of which the script must have run without an error."""
    lines = run_worker(script, *names, timeout_s=timeout_s)
    assert [line["name"] for line in lines] == list(names)
    for line in lines:
        assert "error" not in line, f"{line['name']}: {line['error']}"
    return lines
