"""Runs scripts of this folder that print one JSON line a case."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run_cases(script: str, names: Sequence[str], *, timeout_s: int) -> list[dict[str, Any]]:
    """Returns what a script prints of some cases, all of which it must have run without an error."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *names],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["name"] for line in lines] == list(names)
    for line in lines:
        assert "error" not in line, f"{line['name']}: {line['error']}"
    return lines
