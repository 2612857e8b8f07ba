"""Ranks that die are restarted, ranks that hang are named, ranks that pause go on."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from pathlib import Path

import pytest
from faults import WORKER, Run, kill

ALL_STOPPED_S = 5.0
FIRST_STEP_S = {4: 20.0, 8: 30.0}


def check_kills(ranks: int, kills: list[int]) -> None:
    with Run(ranks, restarts=len(kills)) as run:
        for attempt, rank in enumerate(kills):
            stopped_s, step_s = kill(run, attempt, rank)
            print(f"{ranks} ranks, rank {rank} killed: all stopped {stopped_s:.2f} s, step {step_s:.2f} s")  # noqa: T201
            assert stopped_s < ALL_STOPPED_S
            assert step_s < FIRST_STEP_S[ranks]


@pytest.mark.ci("engine")
def test_killed_ranks_restart() -> None:
    check_kills(4, [0, 2])


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "kills"), [(4, 20), (8, 10)])
def test_every_killed_rank_restarts(ranks: int, kills: int) -> None:
    draw = random.Random(ranks)
    check_kills(ranks, [draw.randrange(ranks) for _ in range(kills)])


@pytest.mark.ci("engine")
def test_a_pause_survives_and_a_hang_is_named(tmp_path: Path) -> None:
    with Run(4, worker=(*WORKER, "--dump-into", str(tmp_path))) as run:
        run.wait_for_step(0, 60, more=3)
        run.hurt(0, 1, signal.SIGSTOP)
        time.sleep(3.0)
        before = run.steps[0, 1][0]
        run.hurt(0, 1, signal.SIGCONT)
        run.wait_for_step(0, 5, more=before + 5)

        stopped_s = run.hurt(0, 3, signal.SIGSTOP)
        verdict, named_s = run.wait_for_words(r"rank 3 stopped", 12.0)
        assert named_s - stopped_s < 10.5
        assert re.search(r"rank 3 stopped (in llm\.\S+ chunk 0 microbatch \d|between ops)", verdict)
        assert "ranks 0, 1, 2 wait for it" in verdict
        assert re.search(
            r"has waited \d+\.\d s in llm\.(recv|send)-f chunk 0 microbatch \d for rank 3", verdict
        )
        run.wait_until_stopped(0, 3, apart_from=3)  # torchrun kills a process that is stopped after 30 s
        assert sum("stopped in" in line or "stopped between" in line for line in run.lines) == 1
        dumps = [json.loads(path.read_text()) for path in tmp_path.glob("ring-*.json")]
        assert dumps and all(dump["reason"] == "stall" and len(dump["ops"]) > 30 for dump in dumps)


@pytest.mark.ci("engine")
def test_a_blocked_rank_dumps_on_sigusr1(tmp_path: Path) -> None:
    with Run(2, worker=(*WORKER, "--dump-into", str(tmp_path), "--limit-s", "60")) as run:
        run.wait_for_step(0, 60, more=3)
        run.hurt(0, 1, signal.SIGSTOP)
        time.sleep(0.3)  # rank 0 is now blocked in gloo
        run.hurt(0, 0, signal.SIGUSR1)
        run.wait_for_words(r"rank 0 on SIGUSR1", 2.0)
        (path,) = tmp_path.glob("ring-0-*.json")
        dump = json.loads(path.read_text())
        assert dump["ops"][-1]["end_s"] is None and dump["current"]["waits_for"] == [1]
        before = run.steps[0, 0][0]
        run.hurt(0, 1, signal.SIGCONT)
        run.wait_for_step(0, 5, more=before + 5)  # neither the signal nor the dump stopped anything
        assert run.process.poll() is None


@pytest.mark.heavy
def test_ranks_do_not_outlive_their_launcher() -> None:
    with Run(4) as run:
        run.wait_for_step(0, 60, more=3)
        run.process.kill()
        run.wait_until_stopped(0, ALL_STOPPED_S)
        assert any("lost the store, so whoever launched it has ended" in line for line in run.lines)
