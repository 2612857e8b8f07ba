"""Runs a script of the tests in a process of its own, which forks ranks and prints a JSON line per case."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run_worker(script: str, *arguments: str, timeout_s: float) -> list[dict[str, Any]]:
    """The lines that it printed."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
