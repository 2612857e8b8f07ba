"""Watches the ops of a rank and reports, when one does not end, which rank stopped and which ranks wait.

A process blocked in gloo cannot be interrupted and runs no Python signal handler, so threads watch it. Every
rank publishes its status twice a second (less often in very large worlds) under its own key of the store;
no rank reads statuses unless an op takes too long. A rank whose status no longer changes has stopped, one
that still publishes is waiting: no clocks are compared.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from optimus.engine.hang_diagnosis import RankStatus, diagnose_hang, format_ranks, read_blocking_statuses
from optimus.errors import OptimusError, UserError, show_line
from optimus.ir.files import write_file_atomically

EXIT_REFUSED = 2  # the user's input was refused
EXIT_LOST = 75  # another rank, or the store, is gone: a restart may succeed
EXIT_STALLED = 76  # an op did not end in time

NOW_S = time.monotonic
NO_OP = -1  # between ops

TICK_S = 0.25
STATUSES_PER_S = 8192  # of all ranks together: one store takes some 100,000
LINES_PER_EVENT = 16  # of a stream, between lines that wait for other ranks
READ_ALL_UP_TO_RANKS = 64  # in larger worlds only the ranks on the way to the cause


class FlightRecorder:
    """The last ops of this rank, in preallocated columns: two writes of a few hundred nanoseconds per op."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._line = np.full(size, NO_OP, dtype=np.int64)
        self._begin_s = np.zeros(size)
        self._end_s = np.zeros(size)  # 0: has not ended
        self._running = NO_OP
        self._since_s = NOW_S()
        self.count = 0  # ops begun
        self.waiting_lines: frozenset[int] = frozenset()  # whose seconds are summed, in:
        self.waited_s = 0.0

    def begin(self, line: int) -> None:
        """Records that the op at a line of the program begins; ops do not nest."""
        at = self.count % self._size
        self._since_s = self._begin_s[at] = NOW_S()
        self._end_s[at] = 0.0
        self._line[at] = self._running = line
        self.count += 1

    def end(self, line: int) -> None:
        """Records that the op ends."""
        if line != self._running:
            raise RuntimeError(f"line {line} ends, but line {self._running} is the one that runs")
        now_s = NOW_S()
        if line in self.waiting_lines:
            self.waited_s += now_s - self._since_s
        self._end_s[(self.count - 1) % self._size] = self._since_s = now_s
        self._running = NO_OP

    def current(self) -> tuple[int, int, float]:
        """Returns the ops begun, the line that runs (or NO_OP) and since when; safe from any thread."""
        while True:
            count, line, since_s = self.count, self._running, self._since_s
            if (count, line) == (self.count, self._running):
                return count, line, since_s

    def entries(self) -> list[tuple[int, float, float | None]]:
        """Returns line, begin and end (None while it runs) of the recorded ops, oldest first."""
        count = self.count
        places = [number % self._size for number in range(max(0, count - self._size), count)]
        return [
            (int(self._line[at]), float(self._begin_s[at]), float(self._end_s[at]) or None) for at in places
        ]


class StreamRecorder(FlightRecorder):
    """Also follows the stream on which a host queues ops, steps ahead of the device.

    An event is recorded around every line of `marked_lines`, those that wait for other ranks, and behind
    every few others. `current` returns where the device is: the op behind the last event that was reached.
    `make_event` is `torch.cuda.Event`; this module is imported by launchers, which do without torch.
    """

    def __init__(self, make_event: Callable[[], Any], size: int = 4096) -> None:
        super().__init__(size)
        self._make_event = make_event
        self.marked_lines: frozenset[int] = frozenset()
        self._events: deque[tuple[int, Any]] = deque()  # ops begun before each, in order
        self._spare: list[Any] = []
        self._lock = threading.Lock()  # of those who ask
        self._marked = NO_OP  # ops begun before the last event
        self._passed = 0  # ops that the device has run
        self._passed_s = NOW_S()

    def begin(self, line: int) -> None:
        """Records that the host queues the op at a line of the program."""
        if line in self.marked_lines:
            self._mark()
        super().begin(line)

    def end(self, line: int) -> None:
        """Records that the host has queued the op."""
        super().end(line)
        if line in self.marked_lines or self.count % LINES_PER_EVENT == 0:
            self._mark()

    def current(self) -> tuple[int, int, float]:
        """Returns the ops that the device has begun, the line that runs there (or NO_OP), and since when."""
        with self._lock:
            while self._events and self._events[0][1].query():
                self._passed, event = self._events.popleft()
                self._passed_s = NOW_S()
                self._spare.append(event)
            if not self._events or self.count - self._passed > self._size:
                return super().current()
            return self._passed + 1, int(self._line[self._passed % self._size]), self._passed_s

    def _mark(self) -> None:
        if self._marked == self.count:
            return
        self._marked = self.count
        if not self._events:  # the device begins to run behind the host
            self._passed_s = NOW_S()
        event = self._spare.pop() if self._spare else self._make_event()
        event.record()
        self._events.append((self.count, event))


class Watchdog:
    """Ends this process with a report when its current op takes longer than `timeout_s`.

    `describe` formats a line (`llm.recv-f chunk 0 microbatch 5`); `waits_for` returns the ranks without which
    its op does not end. A pause of this process itself, e.g. of a whole suspended job, does not count. While
    the rank at the end of the waits makes progress, a wait may take four times as long: slow is not stuck.
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        recorder: FlightRecorder,
        store: Any,
        describe: Callable[[int], str],
        waits_for: Callable[[int], tuple[int, ...]],
        timeout_s: float = 8.0,
        dump_dir: Path | None = None,
        exit_process: Callable[[int], Any] = os._exit,
    ) -> None:
        self._rank, self._world, self._recorder = rank, world, recorder
        self._describe, self._waits_for = describe, waits_for
        self._dump_dir, self._exit_process = dump_dir, exit_process
        self.timeout_s = timeout_s  # may change while it watches: the first step takes an unknown time
        self._store = store.clone()  # a connection of its own: the other may be blocked
        self._publish_every_s = max(0.5, world / STATUSES_PER_S)
        self._beat = 0
        self._error = ""
        self._reporting = threading.Lock()  # never released: a process reports its end once
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"optimus {run.__name__}", daemon=True)
            for run in (self._watch, self._publish)
        ]
        self._signal_state: tuple[Any, int] | None = None

    def start(self) -> None:
        """Starts the threads; in the main thread also handles SIGUSR1, which dumps and stops nothing."""
        self._wake_read, self._wake_write = os.pipe()
        if threading.current_thread() is threading.main_thread():
            os.set_blocking(self._wake_write, False)
            # Python's own handler runs when a blocked gloo op returns, that is, too late; the byte that the
            # interpreter writes for it in the signal's context wakes the watching thread at once.
            handler = signal.signal(signal.SIGUSR1, lambda *_: None)
            self._signal_state = (handler, signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False))
            signal.siginterrupt(signal.SIGUSR1, False)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stops the threads, e.g. before the run ends and ranks exit one by one."""
        self._stopping.set()
        if self._signal_state is not None:
            handler, wakeup = self._signal_state
            signal.set_wakeup_fd(wakeup)
            signal.signal(signal.SIGUSR1, handler)
            self._signal_state = None
        for thread in self._threads:
            thread.join(2.0)
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self._wake_read)
            os.close(self._wake_write)

    def fail(self, error: BaseException) -> NoReturn:
        """Reports the op in which the step failed and the ranks it waited for, and ends the process."""
        if not self._reporting.acquire(blocking=False):
            time.sleep(5.0)  # the watching thread reports and will end the process
        self._error = (str(error).strip() or type(error).__name__).splitlines()[0]
        status = self._status()
        lost_peer = _is_lost_peer(error)
        code = EXIT_LOST if lost_peer else EXIT_REFUSED if isinstance(error, OptimusError) else 1
        report = f"rank {self._rank} failed {status.where}{_awaited(status)}: {self._error}"
        if isinstance(error, UserError):
            report += f"\nhint: {error.hint}"
        earlier: list[RankStatus] = []
        _call_within(1.0, lambda: earlier.extend(self._publish_failure(status)))
        for other in earlier:
            report += f"\n  rank {other.rank} had failed {other.where}{_awaited(other)}: {other.error}"
        if not lost_peer and not isinstance(error, OptimusError):
            report += "\n" + "".join(traceback.format_exception(error)).rstrip()
        self._print(report + self._try_dump("failure"))
        sys.stdout.flush()
        self._exit_process(code)
        raise SystemExit(code) from error  # where `exit_process` returned

    def dump(self, reason: str) -> Path | None:
        """Writes recorded ops as JSON to the dump directory, or standard error; times are monotonic."""
        texts: dict[int, str] = {}
        ops = [
            {"line": line, "op": texts.setdefault(line, self._describe(line)), "begin_s": begin, "end_s": end}
            for line, begin, end in self._recorder.entries()
        ]
        contents = json.dumps(
            {"schema": "optimus.ring/1", "rank": self._rank, "world": self._world, "reason": reason}
            | {"now_s": NOW_S(), "clock_s": time.time(), "current": self._status().as_dict(), "ops": ops}
        )
        if self._dump_dir is None:
            self._print(contents)
            return None
        self._dump_dir.mkdir(parents=True, exist_ok=True)
        path = self._dump_dir / f"ring-{self._rank}-{os.getpid()}-{self._recorder.count}.json"
        write_file_atomically(path, contents)
        return path

    def _status(self) -> RankStatus:
        count, line, since_s = self._recorder.current()
        return RankStatus(
            rank=self._rank,
            beat=self._beat,
            count=count,
            op="" if line == NO_OP else self._describe(line),
            for_s=round(NOW_S() - since_s, 3),
            waits_for=() if line == NO_OP else tuple(self._waits_for(line)),
            error=self._error,
        )

    # The publishing thread: the only one that may block on a store that does not answer.

    def _publish(self) -> None:
        failures = 0
        while True:
            try:
                self._beat += 1
                self._store.set(f"watch/{self._rank}", self._status().as_json())
                failures = 0
            except RuntimeError as error:
                failures += 1
                if failures == 4 and not self._stopping.is_set() and self._reporting.acquire(blocking=False):
                    reason = str(error).splitlines()[0]
                    self._print(f"rank {self._rank} lost the store, so its launcher has ended: {reason}")
                    self._exit_process(EXIT_LOST)
            if self._stopping.wait(self._publish_every_s):
                return

    def _read(self, rank: int) -> RankStatus | None:
        key = f"watch/{rank}"
        return RankStatus.from_json(self._store.get(key)) if self._store.check([key]) else None

    def _read_statuses(self) -> dict[int, RankStatus | None]:
        """Reads the ranks that this one waits for, directly or not; in a small world, all ranks."""
        statuses: dict[int, RankStatus | None] = {self._rank: self._status()}
        if self._world <= READ_ALL_UP_TO_RANKS:
            others = (rank for rank in range(self._world) if rank != self._rank)
            return statuses | {rank: self._read(rank) for rank in others}
        return read_blocking_statuses(statuses, self._rank, self._read)

    def _publish_failure(self, status: RankStatus) -> list[RankStatus]:
        """Publishes this rank's failure and returns earlier ones of ranks that it waited for."""
        self._beat += 1
        self._store.set(f"watch/{self._rank}", status.as_json())
        others = (self._read(rank) for rank in status.waits_for[:READ_ALL_UP_TO_RANKS])
        return [other for other in others if other is not None and other.error]

    # The watching thread: wakes every quarter of a second, and for SIGUSR1.

    def _watch(self) -> None:
        woke_s = awake_since_s = NOW_S()
        not_before_s = 0.0
        while not self._stopping.is_set():
            signals = b""
            if select.select([self._wake_read], [], [], TICK_S)[0]:
                signals = os.read(self._wake_read, 4096)
            if signal.SIGUSR1 in signals:
                self._print(f"rank {self._rank} on SIGUSR1{self._try_dump('SIGUSR1')}")
            now_s = NOW_S()
            if now_s - woke_s > 4 * TICK_S:  # this process was paused, and perhaps all were
                awake_since_s = now_s
            woke_s = now_s
            count, line, since_s = self._recorder.current()
            began_s = max(since_s, awake_since_s)
            if line == NO_OP or now_s < max(began_s + self.timeout_s, not_before_s):
                continue
            if not self._end_if_stalled(count, final=now_s - began_s > 4 * self.timeout_s):
                not_before_s = NOW_S() + 1.0

    def _end_if_stalled(self, count: int, final: bool) -> bool:
        """Reads other ranks' statuses and ends the process; returns False if there is progress."""
        diagnosis: list[Any] = []
        listen_s = max(1.2, 2.5 * self._publish_every_s)
        _call_within(listen_s + 1.5, lambda: self._diagnose(listen_s, diagnosis))
        if self._stopping.is_set() or self._recorder.current()[0] != count:
            return False
        status = self._status()
        wait = f"{status.for_s:.1f} s {status.where}{_awaited(status)}"
        if diagnosis:
            report, progress, first = diagnosis
            if progress and not final:
                return False
        else:
            report, first = f"the store does not answer; rank {self._rank} spent {wait}", True
        if not self._reporting.acquire(blocking=False):
            return False
        if not first:
            report = f"rank {self._rank} stops too: {wait}"
        self._print(report + self._try_dump("stall"))
        self._exit_process(EXIT_STALLED)
        return True

    def _diagnose(self, listen_s: float, diagnosis: list[Any]) -> None:
        before = self._read_statuses()
        time.sleep(listen_s)
        after = self._read_statuses()
        report, progress = diagnose_hang(self._rank, before, after)
        first = progress or self._store.add("watch/verdicts", 1) == 1
        diagnosis.extend((report, progress, first))

    def _try_dump(self, reason: str) -> str:
        """Dumps if there is a directory or SIGUSR1 asked for it; an error does not keep the process alive."""
        if self._dump_dir is None and reason != "SIGUSR1":
            return ""
        try:
            path = self.dump(reason)
        except OSError as error:
            return f"\n  no dump: {error}"
        return "" if path is None else f"\n  last ops in {path}"

    def _print(self, text: str) -> None:
        """Writes at once and in one piece: the blocked thread may hold the lock of sys.stderr.

        A launcher that is gone reads nothing any more, and this process must end all the same.
        """
        with suppress(OSError):
            os.write(2, "".join(f"{show_line(line)}\n" for line in text.split("\n")).encode())


def _awaited(status: RankStatus) -> str:
    return f", which waits for {format_ranks(status.waits_for)}" if status.waits_for else ""


def _is_lost_peer(error: BaseException) -> bool:
    words = ("closed by peer", "reset by peer", "broken pipe", "timed out", "timeout", "refused", "remote")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def _call_within(timeout_s: float, call: Callable[[], Any]) -> None:
    """Calls what may block or fail; returns after `timeout_s` in any case."""

    def ignore_errors() -> None:
        try:
            call()
        except RuntimeError:  # all errors of c10d
            pass

    thread = threading.Thread(target=ignore_errors, daemon=True)
    thread.start()
    thread.join(timeout_s)
