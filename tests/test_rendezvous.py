"""Ranks meet again after restarts, compare what they hold, and are started and ended together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from faults import ROOT, Run, alive
from machine import allowed_s
from torch.distributed import HashStore

from optimus.engine.launcher import launch_processes
from optimus.engine.rendezvous import (
    RendezvousTimeout,
    _agree_on_attempt,
    check_ranks_agree,
    host_tcp_store,
    join_process_group,
)
from optimus.environment import Launched, for_rank, launched
from optimus.errors import UserError


def place(rank: int, world: int, restart: int = 0) -> Launched:
    return Launched(
        rank=rank,
        world=world,
        local_rank=rank,
        local_world=world,
        restart=restart,
        run_id="r",
        address="127.0.0.1",
        port=1,
        store_is_hosted=True,
    )


def on_all(world: int, call: Callable[[int], Any]) -> list[Any]:
    """Results, or exceptions, of all ranks."""

    def one(rank: int) -> Any:
        try:
            return call(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def test_a_rank_is_told_what_it_reads() -> None:
    assert launched(for_rank(place(2, 4, restart=3), {})) == place(2, 4, restart=3)
    assert (
        for_rank(place(2, 4), {"A": "b"})["A"] == "b" and for_rank(place(2, 4), {})["OMP_NUM_THREADS"] == "1"
    )
    assert launched({}) is None
    assert place(0, 2).one_host


def test_a_process_alone_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match="start it with torchrun"):
        join_process_group(timeout_s=1, backend="gloo")


def test_every_attempt_has_a_name_of_its_own() -> None:
    store, world, names = HashStore(), 40, set()
    for attempt in range(4):

        def start(rank: int, attempt: int = attempt) -> tuple[str, int]:
            if rank == 3 and attempt == 2:
                time.sleep(0.3)  # meanwhile rank 0 finds the greeting of a rank 3 that is dead
            counted = attempt if rank < 20 else 0  # ranks of a node that was replaced have counted otherwise
            return _agree_on_attempt(store, place(rank, world, counted), 10.0)

        found = set(on_all(world, start))
        assert len(found) == 1
        name, restart = found.pop()
        assert restart == attempt
        names.add(name)
    assert len(names) == 4


def test_a_rank_that_does_not_come_is_named() -> None:
    store = HashStore()
    with pytest.raises(RendezvousTimeout, match="rank 0 waited for rank 1"):
        _agree_on_attempt(store, place(0, 2), 0.2)
    store.set("r/greetings/1", "a word of a dead process")
    with pytest.raises(RendezvousTimeout, match="rank 0 waited for rank 1, which did not join again"):
        _agree_on_attempt(store, place(0, 2), 0.2)


def test_ranks_that_agree_go_on_and_others_all_stop() -> None:
    world = 12
    store = HashStore()
    assert (
        on_all(world, lambda rank: check_ranks_agree(store, rank, world, "plan hash", "abc"))
        == [None] * world
    )
    keys = store.num_keys()
    results = on_all(
        world, lambda rank: check_ranks_agree(store, rank, world, "other", "abd" if rank == 7 else "abc")
    )
    assert {str(one) for one in results} == {
        "error: other = abd on rank 7 differs from abc on rank 0\nhint: give all ranks the same files"
    }
    assert store.num_keys() == 2 * keys == 6  # nothing in the store grows with the world


def test_our_store_is_not_open_to_the_network() -> None:
    store = host_tcp_store(socket.create_server(("127.0.0.1", 0)), 5.0)  # as the launcher makes it
    port = f":{store.port:04X}"
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    listening = [row[1] for row in rows if row[1].endswith(port) and row[3] == "0A"]
    assert listening == [f"0100007F{port}"]


ENTRY = """
import os, signal, sys, time
rank, how = int(os.environ["RANK"]), sys.argv[1]
print("rank", rank, "has", len(os.sched_getaffinity(0)), "of", os.cpu_count(), file=sys.stderr)
open(f"{sys.argv[2]}/{rank}.pid", "w").write(str(os.getpid()))
if how == "well":
    sys.exit(0)
while len([name for name in os.listdir(sys.argv[2]) if ".pid" in name]) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
if rank == 1 and how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1 and how == "fails":
    sys.exit("a mistake of rank 1")
if rank == 0 and how != "interrupted":
    time.sleep(0.1)
    os._exit(75)  # as one that lost another does
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "an_entry.py").write_text(ENTRY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return "an_entry"


def left(directory: Path) -> list[int]:
    return [pid for file in directory.glob("*.pid") if alive(pid := int(file.read_text()))]


@pytest.mark.parametrize(("how", "code"), [("well", 0), ("fails", 1), ("killed", 137)])
def test_ranks_end_together(
    how: str, code: int, entry: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begin_s = time.monotonic()
    assert launch_processes(entry, [how, str(tmp_path)], 3) == code
    assert time.monotonic() - begin_s < allowed_s(5.0)
    assert len(list(tmp_path.glob("*.pid"))) == 3 and not left(tmp_path)
    written = capfd.readouterr().err
    assert "[2] rank 2 has" in written
    if how != "well":
        assert "rank 1 failed first" in written
    if how == "fails":
        assert written.endswith("  a mistake of rank 1\n")


@pytest.mark.ci("engine")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_all_ranks(number: int, entry: str, tmp_path: Path) -> None:
    launching = f"launch_processes('{entry}', sys.argv[1:], 3)"
    call = f"import sys; from optimus.engine.launcher import launch_processes; sys.exit({launching})"
    process = subprocess.Popen([sys.executable, "-c", call, "interrupted", str(tmp_path)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("*.pid"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.1)
        process.send_signal(number)
        deadline = time.monotonic() + 8.0  # it may still load torch, for the store
        while left(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert process.wait(20) == 128 + number
    finally:
        process.kill()
        process.wait()


@pytest.mark.ci("engine")
def test_our_launcher_runs_the_worker(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    assert launch_processes("fault_worker", ["--fail-rank", "2"], 4) == 1
    out, written = capfd.readouterr()
    assert "restart 0 step 2 at" in out
    assert "rank 2 failed between ops: a mistake in the step" in written
    assert "rank 2 failed first: it ended with code 1" in written


@pytest.mark.heavy
@pytest.mark.timeout(240)
def test_nodes_that_count_restarts_differently_meet() -> None:
    """A node of torchrun does not count a restart that it makes because another node's ranks failed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = (
        "--nnodes",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"localhost:{port}",
        "--rdzv-id",
        "x",
    )

    def stepped(run: Run, processes: int) -> Callable[[], bool | None]:
        return lambda: True if len(run.stepped) == processes else None

    with Run(2, restarts=5, rendezvous=options) as one, Run(2, restarts=5, rendezvous=options) as two:
        for attempt in range(4):
            one.wait(f"step of attempt {attempt}", stepped(one, 2 * attempt + 2), 60)
            two.wait(f"step of attempt {attempt}", stepped(two, 2 * attempt + 2), 60)
            os.kill(two.stepped[-1], signal.SIGKILL)
