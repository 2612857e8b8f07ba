"""Starts the ranks of a run on one host, where torchrun is more than is needed, and ends them together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from optimus.engine.watchdog import EXIT_LOST, EXIT_REFUSED, EXIT_STALLED
from optimus.environment import Launched, for_rank

POLL_S = 0.02
LAST_LINES = 20
SECOND_HAND = (EXIT_LOST, EXIT_STALLED)  # codes of ranks that stopped because of another


@dataclass(kw_only=True)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    last_lines: deque[bytes] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    reader: threading.Thread | None = None

    def pass_on(self) -> None:
        """Forwards what the rank writes to standard error, line by line, and remembers the end of it."""
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.last_lines.append(line)
                os.write(2, b"[%d] %s" % (self.rank, line))

    def signal(self, number: int) -> None:
        """To the rank and what it started: each rank leads a process group of its own."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass


def launch(
    entry: str, args: Sequence[str], ranks: int, *, grace_s: float = 0.5, timeout_s: float = 60.0
) -> int:
    """Runs `python -m entry args` as `ranks` processes; 0, or the exit code of the rank that failed first.

    When a rank fails, or this process is interrupted (Ctrl-C, SIGTERM), the others are told, and killed after
    `grace_s`. A rank that a signal ended counts as 128 + its number, as in a shell. Standard output is
    shared, standard error goes through here. The store listens on loopback only; it is made, and torch
    loaded for it, while the ranks load torch themselves.
    """
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listening.getsockname()[1]
    run_id = uuid.uuid4().hex[:12]
    running: list[_Rank] = []
    with _interruptions() as interruptions:
        try:
            for rank in range(ranks):
                place = Launched(
                    rank=rank,
                    world=ranks,
                    local_rank=rank,
                    local_world=ranks,
                    restart=0,
                    run_id=run_id,
                    address="127.0.0.1",
                    port=port,
                    store_is_hosted=True,
                )
                running.append(_start(entry, args, place))
            store = _store_on(listening, timeout_s)
            failed = _wait(running, interruptions)
            del store  # not before the ranks have ended
        finally:
            _end(running, grace_s)
            listening.close()
    if interruptions:
        return 128 + interruptions[0]
    return 0 if failed is None else _report(failed)


def _start(entry: str, args: Sequence[str], place: Launched) -> _Rank:
    process = subprocess.Popen(
        [sys.executable, "-m", entry, *args],
        env=for_rank(place),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        process_group=0,  # Ctrl-C reaches only this process, which forwards it
    )
    _pin(process.pid, place.rank, place.world)
    rank = _Rank(rank=place.rank, process=process)
    rank.reader = threading.Thread(target=rank.pass_on, daemon=True)
    rank.reader.start()
    return rank


def _pin(pid: int, rank: int, ranks: int) -> None:
    """Gives each rank its share of the cores that we may use; one, in turn, if there are not enough."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    first, last = rank * len(cores) // ranks, (rank + 1) * len(cores) // ranks
    mine = cores[first:last] if len(cores) >= ranks else [cores[rank % len(cores)]]
    try:
        os.sched_setaffinity(pid, mine)
    except ProcessLookupError:  # it has already ended
        pass


@contextmanager
def _interruptions() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that nothing ends before the ranks have."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda got, _: received.append(got)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _wait(running: list[_Rank], interruptions: list[int]) -> _Rank | None:
    """The rank that failed first, or None if all ended well; of several, one that stopped by itself."""
    while not interruptions:
        codes = [rank.process.poll() for rank in running]
        failed = [rank for rank, code in zip(running, codes, strict=True) if code]
        if failed:
            return min(failed, key=lambda rank: rank.process.returncode in SECOND_HAND)
        if all(code == 0 for code in codes):
            break
        time.sleep(POLL_S)
    return None


def _store_on(listening: socket.socket, timeout_s: float) -> object:
    from optimus.engine.rendezvous import host_store  # loads torch

    return host_store(listening, timeout_s)


def _end(running: list[_Rank], grace_s: float) -> None:
    """Ends what still runs: asks (not by SIGINT, of which Python speaks at length), then kills."""
    for rank in running:
        if rank.process.poll() is None:
            rank.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(rank.process.poll() is None for rank in running) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for rank in running:
        if rank.process.poll() is None:
            rank.signal(signal.SIGKILL)
        rank.process.wait()
    for rank in running:
        if rank.reader is not None:
            rank.reader.join(1.0)


def _report(failed: _Rank) -> int:
    code = int(failed.process.returncode)
    if code == EXIT_REFUSED:  # it has said all there is to say
        return code
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    lines = b"".join(b"  " + line for line in failed.last_lines) or b"  (none)\n"
    os.write(2, b"rank %d failed first: it %s; its last lines:\n%s" % (failed.rank, how.encode(), lines))
    return 128 - code if code < 0 else code
