"""Commands remove what they make outside their files, however they end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.shaped_net import NAMESPACES, PREFIX, shaped_links
from optimus.errors import UserError

ROOT = Path(__file__).parents[1]
GONE_S = 30.0  # a rank that is still importing torch ends when it has
STARTED_S = 60.0


def links_and_namespaces(process: int) -> set[str]:
    """Lists the bridge, links and namespaces whose names say that a process made them."""
    places = [path for path in (Path("/sys/class/net"), NAMESPACES) if path.is_dir()]
    names = [path.name for place in places for path in place.iterdir()]
    return {name for name in names if re.fullmatch(rf"{PREFIX}{process}([nv]\d+)?", name)}


def children(process: int) -> set[int]:
    """Lists the processes that a process started, and theirs."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == process:
            found |= {int(path.parent.name), *children(int(path.parent.name))}
    return found


def wait_for(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


def start_benchmark(folder: Path) -> subprocess.Popen[bytes]:
    """Starts `benchmarks shaped` and waits until its links and its ranks are there."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "shaped"],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: len(links_and_namespaces(process.pid)) == 5 and bool(children(process.pid)), STARTED_S)
    return process


def is_running(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


@pytest.fixture
def _can_shape() -> None:
    """Skips where network namespaces cannot be made."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("makes network namespaces")
    try:
        with shaped_links(1, mbit_per_s=100):
            pass
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.ci("engine")
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("_can_shape")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_benchmark_that_is_ended_leaves_no_links(number: signal.Signals, tmp_path: Path) -> None:
    process = start_benchmark(tmp_path)
    ranks = children(process.pid)
    process.send_signal(number)
    time.sleep(0.2)
    process.send_signal(number)  # a second one does not stop the removal
    assert process.wait(GONE_S) in (128 + number, -number)  # the second may arrive after the removal
    assert not links_and_namespaces(process.pid)
    wait_for(lambda: not any(map(is_running, ranks)), GONE_S)
    assert not list(tmp_path.glob("optimus-*"))


@pytest.mark.ci("engine")
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("_can_shape")
def test_links_of_a_killed_benchmark_are_swept_by_the_next(tmp_path: Path) -> None:
    process = start_benchmark(tmp_path)
    ranks = children(process.pid)
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(is_running, ranks)), GONE_S)
    assert len(links_and_namespaces(process.pid)) == 5
    with shaped_links(1, mbit_per_s=100) as names:
        assert not links_and_namespaces(process.pid)
        assert links_and_namespaces(os.getpid()) > set(names)  # its own, and those of the living, stay
    assert not links_and_namespaces(os.getpid())
