"""Watches the ops of a rank and says, when one does not end, who waits for whom and which rank stopped.

A process blocked in gloo cannot be interrupted and runs no Python signal handler, so all this happens in
threads beside it. Every rank posts what it does twice a second (very large worlds: less often), under its own
key; nobody reads that unless an op takes too long. A rank whose posts cease has stopped, one that still
posts is waiting: no clocks are compared.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from optimus.engine.hang_diagnosis import RankStatus, behind, diagnose_hang, format_ranks
from optimus.errors import OptimusError, UserError

EXIT_REFUSED = 2  # a mistake of the user
EXIT_LOST = 75  # another rank, or the store, is gone; start again
EXIT_STALLED = 76  # an op did not end in time

NOW_S = time.monotonic
NO_OP = -1  # between ops

TICK_S = 0.25
POSTS_PER_S = 8192  # of all ranks together: one store takes some 100,000
READ_ALL_UP_TO = 64  # ranks; in larger worlds only those that somebody on the way waits for


class FlightRecorder:
    """The last ops of this rank, in columns made once: two writes of a few hundred nanoseconds per op."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._line = np.full(size, NO_OP, dtype=np.int64)
        self._begin_s = np.zeros(size)
        self._end_s = np.zeros(size)  # 0: has not ended
        self._open = NO_OP
        self._since_s = NOW_S()
        self.count = 0  # of ops begun

    def begin(self, line: int) -> None:
        """The op of this line of the program begins; ops do not nest."""
        at = self.count % self._size
        self._since_s = self._begin_s[at] = NOW_S()
        self._end_s[at] = 0.0
        self._line[at] = self._open = line
        self.count += 1

    def end(self, line: int) -> None:
        """It ends."""
        if line != self._open:
            raise RuntimeError(f"line {line} ends, but line {self._open} is the one that runs")
        self._end_s[(self.count - 1) % self._size] = self._since_s = NOW_S()
        self._open = NO_OP

    def current(self) -> tuple[int, int, float]:
        """Ops begun, the line that runs (or NO_OP) and since when; may be asked from any thread."""
        while True:
            count, line, since_s = self.count, self._open, self._since_s
            if (count, line) == (self.count, self._open):
                return count, line, since_s

    def entries(self) -> list[tuple[int, float, float | None]]:
        """Line, begin and end (None: runs) of the ops that are still known, oldest first."""
        count = self.count
        places = [number % self._size for number in range(max(0, count - self._size), count)]
        return [
            (int(self._line[at]), float(self._begin_s[at]), float(self._end_s[at]) or None) for at in places
        ]


class Watchdog:
    """Ends this process with a verdict when its current op takes longer than `limit_s`.

    `text` gives a line's words (`llm.recv-f chunk 0 microbatch 5`), `waits_for` the ranks without which its
    op does not end. A pause of this process itself, e.g. of a whole suspended job, does not count. While the
    rank at the end of the waits makes progress, a wait may take four times as long: slow is not stuck.
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        ring: FlightRecorder,
        store: Any,
        text: Callable[[int], str],
        waits_for: Callable[[int], tuple[int, ...]],
        limit_s: float = 8.0,
        dump_into: Path | None = None,
        leave: Callable[[int], Any] = os._exit,
    ) -> None:
        self._rank, self._world, self._ring = rank, world, ring
        self._text, self._waits_for = text, waits_for
        self._dump_into, self._leave = dump_into, leave
        self.limit_s = limit_s  # may change while it watches: nobody knows how long the first step takes
        self._store = store.clone()  # a connection of its own: the other may be blocked
        self._beat_s = max(0.5, world / POSTS_PER_S)
        self._beat = 0
        self._error = ""
        self._speaking = threading.Lock()  # never released: the last words are spoken once
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"optimus {run.__name__}", daemon=True)
            for run in (self._watching, self._posting)
        ]
        self._before: tuple[Any, int] | None = None

    def start(self) -> None:
        """Begins to watch; in the main thread it also takes SIGUSR1, for a dump that stops nothing."""
        self._wake_read, self._wake_write = os.pipe()
        if threading.current_thread() is threading.main_thread():
            os.set_blocking(self._wake_write, False)
            # Python's own handler runs when a blocked gloo op returns, that is, too late; the byte that the
            # interpreter writes for it in the signal's context wakes the watching thread at once.
            handler = signal.signal(signal.SIGUSR1, lambda *_: None)
            self._before = (handler, signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False))
            signal.siginterrupt(signal.SIGUSR1, False)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the watch, e.g. before the run ends and the ranks leave one by one."""
        self._stopping.set()
        if self._before is not None:
            handler, wakeup = self._before
            signal.set_wakeup_fd(wakeup)
            signal.signal(signal.SIGUSR1, handler)
            self._before = None
        for thread in self._threads:
            thread.join(2.0)
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self._wake_read)
            os.close(self._wake_write)

    def failed(self, error: BaseException) -> NoReturn:
        """Says in which op the step failed and for whom that waited, and ends the process."""
        if not self._speaking.acquire(blocking=False):
            time.sleep(5.0)  # the watching thread is speaking and will leave
        self._error = (str(error).strip() or type(error).__name__).splitlines()[0]
        post = self._post()
        lost_peer = _is_lost_peer(error)
        code = EXIT_LOST if lost_peer else EXIT_REFUSED if isinstance(error, OptimusError) else 1
        words = f"rank {self._rank} failed {post.where}{_whom(post)}: {self._error}"
        if isinstance(error, UserError):
            words += f"\nhint: {error.hint}"
        earlier: list[RankStatus] = []
        _within(1.0, lambda: earlier.extend(self._tell_failure(post)))
        for other in earlier:
            words += f"\n  rank {other.rank} had failed {other.where}{_whom(other)}: {other.error}"
        if not lost_peer and not isinstance(error, OptimusError):
            words += "\n" + "".join(traceback.format_exception(error)).rstrip()
        self._say(words + self._dumped("failure"))
        sys.stdout.flush()
        self._leave(code)
        raise SystemExit(code) from error  # where `leave` returned

    def dump(self, reason: str) -> Path | None:
        """Writes the ring as JSON into the directory given, else to standard error; times are monotonic."""
        lines: dict[int, str] = {}
        ops = [
            {"line": line, "op": lines.setdefault(line, self._text(line)), "begin_s": begin, "end_s": end}
            for line, begin, end in self._ring.entries()
        ]
        contents = json.dumps(
            {"schema": "optimus.ring/1", "rank": self._rank, "world": self._world, "reason": reason}
            | {"now_s": NOW_S(), "clock_s": time.time(), "current": self._post().as_dict(), "ops": ops}
        )
        if self._dump_into is None:
            self._say(contents)
            return None
        self._dump_into.mkdir(parents=True, exist_ok=True)
        path = self._dump_into / f"ring-{self._rank}-{os.getpid()}-{self._ring.count}.json"
        path.write_text(contents)
        return path

    def _post(self) -> RankStatus:
        count, line, since_s = self._ring.current()
        return RankStatus(
            rank=self._rank,
            beat=self._beat,
            count=count,
            op="" if line == NO_OP else self._text(line),
            for_s=round(NOW_S() - since_s, 3),
            waits_for=() if line == NO_OP else tuple(self._waits_for(line)),
            error=self._error,
        )

    # The posting thread: the only one that may block on a store that does not answer.

    def _posting(self) -> None:
        failures = 0
        while True:
            try:
                self._beat += 1
                self._store.set(f"watch/{self._rank}", self._post().as_json())
                failures = 0
            except RuntimeError as error:
                failures += 1
                if failures == 4 and not self._stopping.is_set() and self._speaking.acquire(blocking=False):
                    reason = str(error).splitlines()[0]
                    self._say(f"rank {self._rank} lost the store, so whoever launched it has ended: {reason}")
                    self._leave(EXIT_LOST)
            if self._stopping.wait(self._beat_s):
                return

    def _read(self, rank: int) -> RankStatus | None:
        key = f"watch/{rank}"
        return RankStatus.from_json(self._store.get(key)) if self._store.check([key]) else None

    def _read_those_before(self) -> dict[int, RankStatus | None]:
        """This rank, whom it waits for, whom those wait for ...; in a small world, all."""
        posts: dict[int, RankStatus | None] = {self._rank: self._post()}
        if self._world <= READ_ALL_UP_TO:
            others = (rank for rank in range(self._world) if rank != self._rank)
            return posts | {rank: self._read(rank) for rank in others}
        return behind(posts, self._rank, self._read)

    def _tell_failure(self, post: RankStatus) -> list[RankStatus]:
        self._beat += 1
        self._store.set(f"watch/{self._rank}", post.as_json())
        others = (self._read(rank) for rank in post.waits_for[:READ_ALL_UP_TO])
        return [other for other in others if other is not None and other.error]

    # The watching thread: wakes every quarter of a second, and for SIGUSR1.

    def _watching(self) -> None:
        woke_s = awake_since_s = NOW_S()
        not_before_s = 0.0
        while not self._stopping.is_set():
            signals = b""
            if select.select([self._wake_read], [], [], TICK_S)[0]:
                signals = os.read(self._wake_read, 4096)
            if signal.SIGUSR1 in signals:
                self._say(f"rank {self._rank} on SIGUSR1{self._dumped('SIGUSR1')}")
            now_s = NOW_S()
            if now_s - woke_s > 4 * TICK_S:  # this process was paused, and perhaps all were
                awake_since_s = now_s
            woke_s = now_s
            count, line, since_s = self._ring.current()
            began_s = max(since_s, awake_since_s)
            if line == NO_OP or now_s < max(began_s + self.limit_s, not_before_s):
                continue
            if not self._stalled(count, final=now_s - began_s > 4 * self.limit_s):
                not_before_s = NOW_S() + 1.0

    def _stalled(self, count: int, final: bool) -> bool:
        """Asks the others and ends the process; comes back, with False, only if there is progress."""
        found: list[Any] = []
        listen_s = max(1.2, 2.5 * self._beat_s)
        _within(listen_s + 1.5, lambda: self._ask(listen_s, found))
        if self._stopping.is_set() or self._ring.count != count:
            return False
        if found:
            verdict, progress, first = found
            if progress and not final:
                return False
        else:
            post, first = self._post(), True
            verdict = (
                f"the store is silent; rank {self._rank} spent {post.for_s:.1f} s {post.where}{_whom(post)}"
            )
        if not self._speaking.acquire(blocking=False):
            return False
        if not first:
            post = self._post()
            verdict = f"rank {self._rank} stops too: {post.for_s:.1f} s {post.where}{_whom(post)}"
        self._say(verdict + self._dumped("stall"))
        self._leave(EXIT_STALLED)
        return True

    def _ask(self, listen_s: float, found: list[Any]) -> None:
        before = self._read_those_before()
        time.sleep(listen_s)
        after = self._read_those_before()
        verdict, progress = diagnose_hang(self._rank, before, after)
        first = progress or self._store.add("watch/verdicts", 1) == 1
        found.extend((verdict, progress, first))

    def _dumped(self, reason: str) -> str:
        """Dumps if there is a directory or SIGUSR1 asked for it; never stands in the way of leaving."""
        if self._dump_into is None and reason != "SIGUSR1":
            return ""
        try:
            path = self.dump(reason)
        except OSError as error:
            return f"\n  no dump: {error}"
        return "" if path is None else f"\n  last ops in {path}"

    def _say(self, words: str) -> None:
        """At once and in one piece: the blocked thread may hold the lock of sys.stderr."""
        os.write(2, (words + "\n").encode())


def _whom(post: RankStatus) -> str:
    if not post.waits_for:
        return ""
    return f", which waits for {format_ranks(post.waits_for)}"


def _is_lost_peer(error: BaseException) -> bool:
    words = ("closed by peer", "reset by peer", "broken pipe", "timed out", "timeout", "refused", "remote")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def _within(limit_s: float, call: Callable[[], Any]) -> None:
    """Gives a call that may block, or fail, some time; goes on without it after that."""

    def quietly() -> None:
        try:
            call()
        except RuntimeError:  # all errors of c10d
            pass

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(limit_s)
