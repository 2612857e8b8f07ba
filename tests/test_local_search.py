"""Looking ahead: no schedule gets longer, none breaks a rule, and small ones come to their optimum."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from optimus.ir.op import Ints, Lane, OpKind, Schedule
from optimus.schedule.local_search import reorder_schedule, shorten_schedule
from optimus.schedule.schedule_builder import edges_to_csr
from optimus.schedule.simulator import simulate_schedule

NONE: Ints = np.zeros((0, 2), np.int64)


def made(
    devices: list[int], seconds: list[float], waits: list[tuple[int, int]], meeting: list[int] | None = None
) -> Schedule:
    """Compute ops; `waits` are pairs (op, the op it waits for)."""
    zeros = np.zeros(len(devices), np.int64)
    dep_offset, deps = edges_to_csr(np.array(waits, np.int64).reshape(-1, 2), len(devices))
    return Schedule(
        modules=("llm",),
        num_devices=max(devices) + 1,
        kind=zeros + OpKind.FORWARD,
        module=zeros,
        chunk=zeros,
        segment=zeros,
        microbatch=zeros,
        device=np.array(devices),
        lane=zeros + Lane.COMPUTE,
        communicator=zeros - 1,
        bytes=zeros,
        duration_s=np.array(seconds),
        dep_offset=dep_offset,
        deps=deps,
        meeting=None if meeting is None else np.array(meeting),
    )


def random_schedule(rng: Random) -> Schedule:
    """Ops of three devices that wait for a few before them; some of neighbours meet."""
    count = rng.randint(6, 30)
    devices, meeting = [rng.randrange(3) for _ in range(count)], [-1] * count
    for number in range(1, count):
        if devices[number] != devices[number - 1] and meeting[number - 1] < 0 and rng.random() < 0.2:
            meeting[number - 1] = meeting[number] = number
    waits = {(op, rng.randrange(op)) for op in range(1, count) for _ in range(rng.randint(0, 2))}
    apart = [(op, dep) for op, dep in sorted(waits) if meeting[op] < 0 or meeting[op] != meeting[dep]]
    seconds = [float(rng.choice((0, 1, 2, 3, 5))) for _ in range(count)]
    for number in range(1, count):
        if meeting[number] >= 0 and meeting[number] == meeting[number - 1]:
            seconds[number] = seconds[number - 1]
    return made(devices, seconds, apart, meeting)


@pytest.mark.parametrize("seed", range(60))
def test_a_schedule_never_gets_longer(seed: int) -> None:
    """Nor does it deadlock: the new order is played as it stands."""
    schedule = random_schedule(Random(seed))
    first = np.arange(len(schedule))
    steps = [simulate_schedule(schedule).step_s]
    for rounds in (1, 5, 40):
        turn = shorten_schedule(schedule, NONE, first, rounds=rounds)
        assert sorted(turn.tolist()) == first.tolist()
        steps.append(simulate_schedule(reorder_schedule(schedule, turn)).step_s)
    assert steps == sorted(steps, reverse=True)


def test_a_line_waits_for_a_more_important_one_that_is_not_ready_yet() -> None:
    """Device 0 has a long op that is ready and one, ready at 1, which device 1 waits for."""
    schedule = made([0, 1, 0, 1], [6.0, 1.0, 1.0, 6.0], [(2, 1), (3, 2)])
    assert simulate_schedule(schedule).step_s == 13.0
    turn = shorten_schedule(schedule, NONE, np.arange(4), rounds=10)
    assert simulate_schedule(reorder_schedule(schedule, turn)).step_s == 8.0
    assert turn[2] < turn[0]


def test_chains_keep_their_order() -> None:
    """The same, but the long op comes first by decree."""
    schedule = made([0, 1, 0, 1], [6.0, 1.0, 1.0, 6.0], [(2, 1), (3, 2)])
    turn = shorten_schedule(schedule, np.array([[2, 0]]), np.arange(4), rounds=10)
    assert simulate_schedule(reorder_schedule(schedule, turn)).step_s == 13.0


def test_who_meets_finds_a_common_gap() -> None:
    """Op 3 of device 0 and op 4 of device 1 start together, at 2, not behind the long ones."""
    schedule = made([0, 1, 0, 0, 1], [2.0, 1.0, 4.0, 1.0, 1.0], [(3, 1), (4, 1)], [-1, -1, -1, 0, 0])
    turn = shorten_schedule(schedule, NONE, np.arange(5), rounds=10)
    timeline = simulate_schedule(reorder_schedule(schedule, turn))
    assert timeline.start_s[turn[3]] == timeline.start_s[turn[4]]
    assert timeline.step_s == 7.0
