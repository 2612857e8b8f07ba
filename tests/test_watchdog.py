"""The ring is cheap, verdicts name the rank that others wait for, watches end a process only if they must."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machine import allowed_s
from torch.distributed import HashStore

from optimus.engine.hang_diagnosis import RankStatus, diagnose_hang, read_blocking_statuses
from optimus.engine.watchdog import EXIT_LOST, EXIT_STALLED, NO_OP, FlightRecorder, Watchdog


def post(
    rank: int, *waits_for: int, beat: int = 1, count: int = 1, error: str = "", op: str | None = None
) -> RankStatus:
    op = f"llm.F chunk 0 microbatch {rank}" if op is None else op
    return RankStatus(rank=rank, beat=beat, count=count, op=op, for_s=8.0, waits_for=waits_for, error=error)


def verdict(
    rank: int, after: dict[int, RankStatus | None], stopped: tuple[int, ...] = ()
) -> tuple[str, bool]:
    before = {
        one: None if at is None else post(one, *at.waits_for, beat=at.beat - (one not in stopped), op=at.op)
        for one, at in after.items()
    }
    return diagnose_hang(rank, before, after)


def test_a_ring_keeps_the_last_ops() -> None:
    ring = FlightRecorder(4)
    assert ring.current()[:2] == (0, NO_OP) and ring.entries() == []
    for line in range(6):
        ring.begin(line)
        assert ring.current()[:2] == (line + 1, line)
        if line < 5:
            ring.end(line)
    assert [line for line, _, _ in ring.entries()] == [2, 3, 4, 5]
    assert [end is None for _, _, end in ring.entries()] == [False, False, False, True]
    with pytest.raises(RuntimeError, match="line 3 ends, but line 5"):
        ring.end(3)


def test_an_entry_costs_less_than_a_microsecond() -> None:
    ring = FlightRecorder()
    best_s = 1.0
    for _ in range(20):
        begin_s = time.perf_counter()
        for line in range(500):
            ring.begin(line)
            ring.end(line)
        best_s = min(best_s, (time.perf_counter() - begin_s) / 1000)
    assert best_s < allowed_s(1e-6)


def test_the_stopped_rank_is_named_from_every_rank() -> None:
    after: dict[int, RankStatus | None] = {0: post(0, 3), 1: post(1, 0), 2: post(2, 1), 3: post(3)}
    for rank in range(3):
        words, progress = verdict(rank, after, stopped=(3,))
        assert words.startswith(
            "rank 3 stopped in llm.F chunk 0 microbatch 3: ranks 0, 1, 2 wait for it; "
            "rank 0 has waited 8.0 s in llm.F chunk 0 microbatch 0 for rank 3"
        )
        assert not progress


def test_members_of_a_collective_that_wait_for_each_other_are_not_blamed() -> None:
    after: dict[int, RankStatus | None] = {rank: post(rank, *({0, 1, 2, 3} - {rank})) for rank in range(4)}
    assert verdict(0, after, stopped=(2,))[0].startswith("rank 2 stopped in")
    assert verdict(0, after)[0].startswith("ranks 0, 1, 2, 3 wait for each other; rank 0 has waited 8.0 s")
    after[3] = None
    assert verdict(0, after)[0].startswith("rank 3 stopped before its first op: ranks 0, 1, 2 wait for it")


def test_a_rank_that_lives_and_waits_for_nobody_is_named() -> None:
    after: dict[int, RankStatus | None] = {0: post(0, 1), 1: post(1, 2), 2: post(2, op="")}
    words, progress = verdict(0, after)
    assert words.startswith(
        "rank 2 has been between ops for 8.0 s and waits for no other rank: ranks 0, 1 wait for it"
    )
    assert not progress
    after[2] = post(2, error="a mistake")
    assert verdict(0, after)[0].startswith(
        "rank 2 failed in llm.F chunk 0 microbatch 2 (a mistake): ranks 0, 1"
    )


def test_slow_is_not_stuck() -> None:
    before: dict[int, RankStatus | None] = {0: post(0, 1), 1: post(1, beat=1, count=7)}
    after: dict[int, RankStatus | None] = {0: post(0, 1), 1: post(1, beat=3, count=9)}
    assert diagnose_hang(0, {**before, 0: post(0, 1, beat=0)}, after)[1]


def test_a_large_world_is_followed_not_read() -> None:
    asked: list[int] = []

    def read(rank: int) -> RankStatus:
        asked.append(rank)
        return post(rank, rank + 1)

    posts = read_blocking_statuses({5000: post(5000, 5001)}, 5000, read)
    assert asked == list(range(5001, 5065)) and len(posts) == 65
    assert "and 57 more wait; in the end for rank 5065, whose status was not read" in verdict(5000, posts)[0]


def test_a_chain_is_followed_past_many_replicas() -> None:
    """A stage waits for the one before it, and for parameters that hundreds of replicas bring."""

    def read(rank: int) -> RankStatus:
        return post(rank, *(() if rank == 9007 else (rank + 1, *range(300))))

    posts = read_blocking_statuses({9000: post(9000, 9001, *range(300))}, 9000, read)
    assert len(posts) == 65 and {9000 + stage for stage in range(8)} <= set(posts)


def test_of_those_who_wait_for_each_other_who_stood_first_is_named_first() -> None:
    after: dict[int, RankStatus | None] = {
        rank: replace(post(rank, 1 - rank), for_s=8.0 + rank) for rank in range(2)
    }
    words = verdict(0, after)[0]
    assert (
        words.startswith("ranks 0, 1 wait for each other; rank 1 has waited 9.0 s in") and "; rank 0" in words
    )


class Ranks:
    """Watches of several ranks in one process; `left` says which rank ended and how."""

    def __init__(
        self, world: int, waits_for: dict[int, tuple[int, ...]], limit_s: float, into: Path | None
    ) -> None:
        self.left: dict[int, int] = {}
        self.store = HashStore()
        self.rings = [FlightRecorder(64) for _ in range(world)]
        self.watches = [
            Watchdog(
                rank=rank,
                world=world,
                recorder=self.rings[rank],
                store=self.store,
                describe=lambda line: f"llm.recv-f chunk 0 microbatch {line}",
                waits_for=lambda line, rank=rank: waits_for[rank],  # type: ignore[misc]
                timeout_s=limit_s,
                dump_dir=into,
                exit_process=lambda code, rank=rank: self._leave(rank, code),  # type: ignore[misc]
            )
            for rank in range(world)
        ]

    def _leave(self, rank: int, code: int) -> None:
        self.left[rank] = code
        self.watches[rank]._stopping.set()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for watch in reversed(self.watches):
            if watch._threads[0].ident is not None:
                watch.stop()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    words: list[str] = []
    monkeypatch.setattr(Watchdog, "_print", lambda self, one: words.append(one))
    return words


def wait(until: Any, limit_s: float = 8.0) -> None:
    deadline = time.monotonic() + limit_s
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.ci("engine")
def test_a_watch_ends_all_that_wait_with_one_verdict(said: list[str], tmp_path: Path) -> None:
    with Ranks(3, {0: (2,), 1: (0,), 2: ()}, 0.6, tmp_path) as ranks:
        for rank in (0, 1):
            ranks.rings[rank].begin(5)
            ranks.watches[rank].start()
        begin_s = time.monotonic()
        wait(lambda: len(ranks.left) == 2)
        assert 1.5 < time.monotonic() - begin_s < 4.0
    assert ranks.left == {0: EXIT_STALLED, 1: EXIT_STALLED}
    verdicts = [words for words in said if "rank 2 stopped" in words]
    assert len(verdicts) == 1 and "ranks 0, 1 wait for it; rank 0 has waited" in verdicts[0]
    assert "in llm.recv-f chunk 0 microbatch 5 for rank 2" in verdicts[0]
    assert any("stops too" in words for words in said)
    assert len(list(tmp_path.glob("ring-*.json"))) == 2


@pytest.mark.ci("engine")
def test_a_watch_lets_slow_ranks_be(said: list[str]) -> None:
    with Ranks(2, {0: (1,), 1: ()}, 0.6, None) as ranks:
        ranks.rings[0].begin(1)
        for watch in ranks.watches:
            watch.start()
        for line in range(20):  # 2 s
            ranks.rings[1].begin(line)
            time.sleep(0.1)
            ranks.rings[1].end(line)
        ranks.rings[0].end(1)
        time.sleep(1.5)  # between ops nothing is too long
    assert not ranks.left and not said


def test_a_failure_says_what_waited_for_whom(said: list[str], tmp_path: Path) -> None:
    with Ranks(2, {0: (1,), 1: ()}, 8.0, tmp_path) as ranks:
        ranks.rings[1].begin(3)
        with pytest.raises(SystemExit):
            ranks.watches[1].fail(ValueError("a mistake\nof two lines"))
        ranks.rings[0].begin(4)
        with pytest.raises(SystemExit):
            ranks.watches[0].fail(RuntimeError("Connection closed by peer"))
    assert ranks.left == {0: EXIT_LOST, 1: 1}
    assert said[0].startswith(
        "rank 1 failed in llm.recv-f chunk 0 microbatch 3: a mistake\nValueError: a mistake"
    )
    assert said[1].splitlines()[:2] == [
        "rank 0 failed in llm.recv-f chunk 0 microbatch 4, which waits for rank 1: Connection closed by peer",
        "  rank 1 had failed in llm.recv-f chunk 0 microbatch 3: a mistake",
    ]
    dump = json.loads(next(tmp_path.glob("ring-0-*.json")).read_text())
    assert dump["reason"] == "failure" and dump["ops"][0]["op"] == "llm.recv-f chunk 0 microbatch 4"


def test_sigusr1_dumps_and_the_old_handler_comes_back(said: list[str], tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with Ranks(1, {0: ()}, 8.0, tmp_path) as ranks:
        ranks.watches[0].start()
        os.kill(os.getpid(), signal.SIGUSR1)
        wait(lambda: said)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait(lambda: len(said) == 2)
    assert signal.getsignal(signal.SIGUSR1) == before
    assert json.loads(next(tmp_path.glob("ring-0-*.json")).read_text())["ops"] == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("optimus")]
