"""Ranks of the trainer that die are restarted, ranks that hang are named, ranks that pause go on."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from pathlib import Path

import pytest
from faults import Prepared, Trainer, kill, prepare

ALL_STOPPED_S = 5.0
FIRST_STEP_S = {4: 20.0, 8: 30.0}
JOINING_S = {4: 6.0, 8: 11.0}  # from the start of processes to about the first step, on two cores
STEP_S = 0.5


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("four"), 4)


def check_kills(prepared: Prepared, folder: Path, kills: list[tuple[int, float | None, float]]) -> None:
    """Rank, when it is killed if while joining, and how long after the beginning of a step if not."""
    ranks, slow = prepared.ranks, []
    with Trainer(prepared, folder, restarts=len(kills)) as run:
        for attempt, (rank, joining_s, into_step_s) in enumerate(kills):
            stopped_s, step_s = kill(run, attempt, rank, joining_s=joining_s, into_step_s=into_step_s)
            when = f"{into_step_s:.2f} s into a step" if joining_s is None else f"{joining_s:.1f} s old"
            after = f"all stopped {stopped_s:.2f} s, step {step_s:.2f} s"
            print(f"{ranks} ranks, rank {rank} killed {when}: {after}", flush=True)  # noqa: T201
            if stopped_s >= ALL_STOPPED_S or step_s >= FIRST_STEP_S[ranks]:
                slow.append((rank, when, after))
    assert not slow, slow


@pytest.mark.alone
@pytest.mark.ci("engine")
def test_killed_ranks_restart(four: Prepared, tmp_path: Path) -> None:
    check_kills(four, tmp_path, [(2, 4.0, 0.0), (0, None, 0.2)])


@pytest.mark.alone
@pytest.mark.heavy
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("ranks", "encoder_pp"), [(4, 2), (8, 1)])
def test_every_killed_rank_restarts(ranks: int, encoder_pp: int, tmp_path: Path) -> None:
    draw = random.Random(ranks)
    kills = [
        (
            draw.randrange(ranks),
            draw.uniform(0.1, JOINING_S[ranks]) if number % 2 else None,
            draw.uniform(0, STEP_S),
        )
        for number in range(20)
    ]
    check_kills(prepare(tmp_path, ranks, encoder_pp=encoder_pp), tmp_path, kills)


def check_hang(run: Trainer, prepared: Prepared, rank: int) -> None:
    """Stops a rank for good: it is named with an op of its program, once, and all others end."""
    step_s = max(run.step_s[-5:])
    others = ", ".join(str(other) for other in range(run.ranks) if other != rank)
    stopped_s = run.hurt(0, rank, signal.SIGSTOP)
    verdict, named_s = run.wait_for_words(rf"rank {rank} stopped", 15.0)
    print(f"{run.ranks} ranks, named after {named_s - stopped_s:.1f} s: {verdict}", flush=True)  # noqa: T201
    assert named_s - stopped_s < 10.0 + step_s
    words = re.search(rf"rank {rank} stopped (?:in (.+?)|between ops): ranks {others} wait for it", verdict)
    assert words is not None and (words[1] is None or words[1] in prepared.lines_of(rank))
    waits = re.search(rf"; rank (\d) has waited \d+\.\d s in ([^;]+) for ranks? [^;]*{rank}", verdict)
    assert waits is not None and waits[2] in prepared.lines_of(int(waits[1]))
    run.wait_until_stopped(0, 4, apart_from=rank)  # torchrun kills a process that is stopped after 30 s
    assert sum("stopped in" in line or "stopped between" in line for line in run.lines) == 1


@pytest.mark.alone
@pytest.mark.ci("engine")
def test_a_pause_survives_and_a_hang_is_named(four: Prepared, tmp_path: Path) -> None:
    with Trainer(four, tmp_path) as run:
        run.wait_for_step(0, 60, more=3)
        began_s = run.hurt(0, 1, signal.SIGSTOP)
        time.sleep(1.0)  # rank 0 is now blocked in gloo
        run.hurt(0, 0, signal.SIGUSR1)
        run.wait_for_words(r"rank 0 on SIGUSR1", 2.0)
        (path,) = tmp_path.glob("ring-0-*.json")
        dump = json.loads(path.read_text())
        assert dump["ops"][-1]["end_s"] is None and dump["ops"][-1]["op"] in four.lines_of(0)
        assert dump["current"]["waits_for"]
        time.sleep(max(0.0, began_s + 3.0 - time.monotonic()))
        run.look()
        before = run.steps[0, 1][0]
        run.hurt(0, 1, signal.SIGCONT)
        run.wait_for_step(0, 10, more=before + 4)  # neither the pause nor the dump stopped anything

        check_hang(run, four, 3)
        dumps = [json.loads(path.read_text()) for path in tmp_path.glob("ring-*.json")]
        assert sum(dump["reason"] == "stall" for dump in dumps) >= 1


@pytest.mark.alone
@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "rank"), [(4, 0), (4, 1), (4, 2), (8, 0), (8, 5)])
def test_whichever_rank_hangs_is_named(ranks: int, rank: int, tmp_path: Path) -> None:
    prepared = prepare(tmp_path, ranks)
    with Trainer(prepared, tmp_path) as run:
        run.wait_for_step(0, 60, more=3)
        check_hang(run, prepared, rank)


@pytest.mark.heavy
def test_ranks_do_not_outlive_their_launcher(four: Prepared, tmp_path: Path) -> None:
    with Trainer(four, tmp_path) as run:
        run.wait_for_step(0, 60, more=3)
        run.process.kill()
        run.wait_until_stopped(0, ALL_STOPPED_S)
        assert any("lost the store, so its launcher has ended" in line for line in run.lines)
