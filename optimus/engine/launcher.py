"""Starts the ranks of a run on one host, without torchrun, and ends them together.

`python -m optimus.engine.launcher FOLDER` is one rank (`optimus.hf.train_folder` one with a model folder's
weights or with data). It reads its job and plan, which the launching process has checked, from the folder:
ranks load neither the command line nor the planner.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from optimus.engine.config import TrainingConfig, TrainingSummary
from optimus.engine.watchdog import EXIT_LOST, EXIT_REFUSED, EXIT_STALLED
from optimus.environment import Launched, end_with_parent, for_rank
from optimus.errors import OptimusError, show_line
from optimus.ir.files import write_file_atomically
from optimus.ir.plan import Plan
from optimus.job.job import Job

INPUTS, SUMMARY = "inputs", "summary.json"
POLL_S = 0.02
LAST_LINES = 20  # of standard error, repeated for the rank that failed first
SECOND_HAND = (EXIT_LOST, EXIT_STALLED)  # exit codes of ranks that stopped because of another
STOP_S = 120.0  # for ranks that are asked to end, to save a checkpoint
SETTLE_S = 1.0  # after such a rank has ended, for the one that failed itself
CLEAR_LINE = b"\r\x1b[2K"  # of a terminal, where a progress bar may be


# ---------------------------------------------------------------------------- training


def launch_training(
    job: Job, plan: Plan, plan_hash: str, config: TrainingConfig, folder: Path, *, restarts: int = 0
) -> tuple[int, TrainingSummary | None]:
    """Trains a checked plan; returns the exit code and the summary, if the run ended by itself.

    A run that a signal has stopped after a checkpoint has both. Restarts go on from the newest checkpoint.
    Only this user may write to `folder`: ranks unpickle a file in it, which can run code.
    """
    write_file_atomically(folder / INPUTS, pickle.dumps((os.getpid(), job, plan, plan_hash, config)))
    has_folder = config.model_dir is not None or config.data is not None
    entry = "optimus.hf.train_folder" if has_folder else "optimus.engine.launcher"
    stop_s = STOP_S if config.checkpoint.every else 0.0
    code = launch_processes(entry, [str(folder)], plan.ranks.world, restarts=restarts, stop_s=stop_s)
    if not (folder / SUMMARY).exists():
        return code, None
    summary = TrainingSummary.load(folder / SUMMARY)
    return code or (128 + summary.stopped_by if summary.stopped_by else 0), summary


def train_as_rank(folder: Path, train: Callable[..., TrainingSummary] | None = None) -> int:
    """Trains one rank in this process, by `train_rank` or another; rank 0 saves the summary."""
    launcher, job, plan, plan_hash, config = pickle.loads((folder / INPUTS).read_bytes())
    end_with_parent(launcher)
    from optimus.engine.rendezvous import is_first_to_report
    from optimus.engine.trainer import train_rank

    try:
        summary = (train or train_rank)(job, plan, plan_hash, config)
    except OptimusError as error:
        if is_first_to_report(str(error)):
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
        else:
            time.sleep(0.3)  # until the other rank has printed it: the first rank to exit ends all
        return EXIT_REFUSED
    if summary.rank == 0:
        summary.save(folder / SUMMARY)
    return 0


# ---------------------------------------------------------------------------- processes


@dataclass(kw_only=True)
class _RankProcess:
    """A rank's process, and the thread that forwards its standard error."""

    rank: int
    process: subprocess.Popen[bytes]
    last_lines: deque[bytes] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    reader: threading.Thread | None = None

    def forward_stderr(self) -> None:
        """Forwards standard error line by line, and keeps the last lines."""
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for written in lines:
                line = show_line(written.decode(errors="replace").rstrip()).encode() + b"\n"
                self.last_lines.append(line)
                with suppress(OSError):  # a terminal that is gone does not stop the rank
                    os.write(2, b"%s[%d] %s" % (CLEAR_LINE if os.isatty(2) else b"", self.rank, line))

    def signal(self, number: int) -> None:
        """Signals the rank and its children: each rank leads a process group of its own."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass


def launch_processes(
    entry: str,
    args: Sequence[str],
    ranks: int,
    *,
    restarts: int = 0,
    stop_s: float = 0.0,
    grace_s: float = 0.5,
    timeout_s: float = 60.0,
) -> int:
    """Runs `python -m entry args` as `ranks` processes; returns 0, or the code of the rank that failed first.

    When a rank fails, or this process is interrupted (Ctrl-C, SIGTERM, SIGHUP), the others are terminated,
    and killed after `grace_s`; no rank outlives this process, whatever kills it. SIGTERM and SIGHUP first ask
    the ranks to end by themselves, which may take `stop_s`. After a failure all ranks are started again, up
    to `restarts` times. A rank that a signal ended counts as 128 + its number, as in a shell. Standard output
    is shared, standard error is forwarded.
    """
    with _interruptions() as interruptions:
        for restart in range(restarts + 1):
            failed = _run_once(entry, args, ranks, restart, interruptions, stop_s, grace_s, timeout_s)
            if interruptions:
                return 128 + interruptions[0]
            code = 0 if failed is None else _report(failed)
            if code in (0, EXIT_REFUSED):
                break
            if restart < restarts:
                with suppress(OSError):
                    os.write(2, f"starts all ranks again ({restart + 1} of {restarts} times)\n".encode())
    return code


def _run_once(
    entry: str,
    args: Sequence[str],
    ranks: int,
    restart: int,
    interruptions: list[int],
    stop_s: float,
    grace_s: float,
    timeout_s: float,
) -> _RankProcess | None:
    """Starts all ranks and waits for their end; returns the one that failed first.

    The store listens on loopback only; it is created, and torch loaded for it, while the ranks load torch
    themselves.
    """
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    running: list[_RankProcess] = []
    whole = Launched(
        rank=0,
        world=ranks,
        local_rank=0,
        local_world=ranks,
        restart=restart,
        run_id=uuid.uuid4().hex[:12],
        address="127.0.0.1",
        port=listening.getsockname()[1],
        store_is_hosted=True,
    )
    try:
        places = (replace(whole, rank=rank, local_rank=rank) for rank in range(ranks))
        running.extend(_start(entry, args, place) for place in places)
        from optimus.engine.rendezvous import host_tcp_store  # loads torch

        store = host_tcp_store(listening, timeout_s)
        failed = _wait(running, interruptions)
        if stop_s and interruptions and interruptions[0] != signal.SIGINT:
            _ask_to_stop(running, interruptions, stop_s)
        del store  # not before the ranks have ended
    finally:
        _end(running, grace_s)
        listening.close()
    return failed


def _start(entry: str, args: Sequence[str], place: Launched) -> _RankProcess:
    process = subprocess.Popen(
        [sys.executable, "-m", entry, *args],
        env=for_rank(place),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        process_group=0,  # Ctrl-C reaches only this process, which forwards it
    )
    _pin(process.pid, place.rank, place.world)
    rank = _RankProcess(rank=place.rank, process=process)
    rank.reader = threading.Thread(target=rank.forward_stderr, daemon=True)
    rank.reader.start()
    return rank


def _pin(pid: int, rank: int, ranks: int) -> None:
    """Gives each rank its share of the usable cores; one, in turn, if there are not enough."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    first, last = rank * len(cores) // ranks, (rank + 1) * len(cores) // ranks
    share = cores[first:last] if len(cores) >= ranks else [cores[rank % len(cores)]]
    try:
        os.sched_setaffinity(pid, share)
    except ProcessLookupError:  # it has already ended
        pass


@contextmanager
def _interruptions() -> Iterator[list[int]]:
    """Collects SIGINT, SIGTERM and SIGHUP, so that this process does not end before the ranks."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.signal(number, lambda got, _: received.append(got)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def _wait(running: list[_RankProcess], interruptions: list[int]) -> _RankProcess | None:
    """Returns the rank that failed first, or None; of several, one that did not stop because of another."""
    settled_s = math.inf
    while not interruptions:
        codes = [rank.process.poll() for rank in running]
        failed = [rank for rank, code in zip(running, codes, strict=True) if code]
        causes = [rank for rank in failed if rank.process.returncode not in SECOND_HAND]
        if causes or (failed and time.monotonic() > settled_s):
            return (causes or failed)[0]
        if failed:
            settled_s = min(settled_s, time.monotonic() + SETTLE_S)
        if all(code == 0 for code in codes):
            break
        time.sleep(POLL_S)
    return None


def _ask_to_stop(running: list[_RankProcess], interruptions: list[int], stop_s: float) -> None:
    """Lets ranks, not their data workers, save what they have; returns when all have ended, or one failed.

    A second interruption ends the wait.
    """
    for rank in running:
        if rank.process.poll() is None:
            rank.process.send_signal(signal.SIGTERM)
    deadline, first = time.monotonic() + stop_s, len(interruptions)
    while len(interruptions) == first and time.monotonic() < deadline:
        codes = [rank.process.poll() for rank in running]
        if any(codes) or all(code == 0 for code in codes):
            return
        time.sleep(POLL_S)


def _end(running: list[_RankProcess], grace_s: float) -> None:
    """Terminates what still runs (not by SIGINT, for which Python prints a traceback), then kills it."""
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


def _report(failed: _RankProcess) -> int:
    code = int(failed.process.returncode)
    if code == EXIT_REFUSED:  # its message is complete
        return code
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    which = "stopped because of another rank" if code in SECOND_HAND else "failed first"
    lines = b"".join(b"  " + line for line in failed.last_lines) or b"  (none)\n"
    report = f"rank {failed.rank} {which}: it {how}; its last lines:\n".encode() + lines
    with suppress(OSError):
        os.write(2, report)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(train_as_rank(Path(sys.argv[1])))
