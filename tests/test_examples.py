"""The example that turns a torch-pipelining script into a filled one: short, and with the same losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
MOST_LINES = 80


def run_example(name: str) -> list[str]:
    """Lines that it printed on two ranks."""
    path = os.pathsep.join([str(EXAMPLES.parent), str(EXAMPLES)])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", name],
        cwd=EXAMPLES,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_examples_are_short() -> None:
    for name in ("encoder_in_stage_0.py", "filled.py"):
        assert len((EXAMPLES / name).read_text().splitlines()) <= MOST_LINES


@pytest.mark.ci("engine")
@pytest.mark.timeout(180)
def test_the_filled_script_has_the_losses_of_the_one_it_replaces() -> None:
    before, after = run_example("encoder_in_stage_0.py"), run_example("filled.py")
    assert len(before) == 5 and before[0].startswith("step 0  loss ")
    assert after == before
