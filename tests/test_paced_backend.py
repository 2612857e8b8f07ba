"""Transfers of the paced network take latency, bytes over bandwidth, and the queue before them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytest
import torch
from machine import allowed_s
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.paced_backend import PacedNetwork, run_paced_ranks
from benchmarks.paced_clock import Draws, PacedClock, PacedLink
from benchmarks.ranks import run_pinned_ranks
from optimus.models.collectives import all_gather_single, reduce_scatter_single

LINK = PacedLink(latency_s=0.005, bandwidth_bytes_per_s=1e5, bytes_scale=10.0)
MESSAGE = torch.arange(50, dtype=torch.float32)  # 200 bytes that stand for 2000
MESSAGE_S = 0.005 + 2000 / 1e5
NEAR_S = 0.003
ROUNDS = 12  # those in which the host of some rank was too late to catch up say nothing


# ---------------------------------------------------------------- without processes


class Host:
    """A host whose clock moves when one sleeps, or when work is done."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def work(self, duration_s: float) -> None:
        self.now_s += duration_s

    def clock(self, time_scale: float = 1.0) -> PacedClock:
        return PacedClock(time_scale=time_scale, catch_up_s=0.03, now=lambda: self.now_s, sleep=self.work)


def test_overhead_is_caught_up() -> None:
    host = Host()
    clock = host.clock()
    for _ in range(10):
        host.work(0.012)  # math, and what the host adds to it
        clock.compute(0.01 if host.now_s < 100.05 else 0.02)
    assert host.now_s - 100 == pytest.approx(clock.ideal_s - 100)
    assert clock.lost_s == 0


def test_only_so_much_is_caught_up() -> None:
    host = Host()
    clock = host.clock()
    host.work(0.1)
    clock.compute(0.02)  # 80 ms late, of which 30 may be made up for
    assert (clock.ideal_s - 100, clock.lost_s) == pytest.approx((0.07, 0.05))
    clock.compute(0.05)
    assert host.now_s - 100 == pytest.approx(0.12)


def test_in_slow_motion_a_second_takes_several_and_lateness_of_the_host_counts_as_less() -> None:
    host = Host()
    clock = host.clock(time_scale=4.0)
    begin_s = clock.ideal_s
    clock.compute(0.5)
    assert (host.now_s - 100, clock.ideal_s - begin_s) == pytest.approx((2.0, 0.5))
    host.work(0.07)
    clock.compute(0.01)  # as long as 40 ms of the host, which is 30 late: just what it may make up for
    assert clock.lost_s == pytest.approx(0, abs=1e-12)
    host.work(0.09)
    clock.compute(0.01)  # 80 ms late, 50 for good
    assert clock.lost_s == pytest.approx(0.05 / 4)


def test_an_event_in_the_past_costs_nothing() -> None:
    host = Host()
    clock = host.clock()
    clock.compute(1.0)
    clock.wait_until(100.5)
    assert clock.ideal_s == host.now_s == 101.0
    clock.wait_until(101.25)
    assert clock.ideal_s == host.now_s == 101.25


def test_draws_are_a_function_of_what_they_are_for() -> None:
    draws = Draws(seed=3)
    what: dict[str, Any] = {"module": "llm", "kind": "F", "virtual_stage": 2, "microbatch": 5}
    assert draws.factor(**what) == Draws(seed=3).factor(**what) == pytest.approx(1.0027516, abs=1e-6)
    others = [{**what, "kind": "B"}, {**what, "microbatch": 6}, {**what, "virtual_stage": 3}]
    others += [{**what, "module": "vision"}, {**what, "phase": 1}]
    assert len({draws.factor(**other) for other in [what, *others]}) == 6
    assert Draws(seed=4).factor(**what) != draws.factor(**what)
    assert Draws(seed=3, sigma=0.0).factor(**what) == 1.0


def test_draws_keep_the_mean() -> None:
    draws = Draws(seed=0)
    found = [
        draws.factor(module="llm", kind="F", virtual_stage=0, microbatch=number) for number in range(20_000)
    ]
    mean = fmean(found)
    assert mean == pytest.approx(1, abs=0.004)
    assert fmean((factor - mean) ** 2 for factor in found) ** 0.5 == pytest.approx(0.15, abs=0.005)


# ---------------------------------------------------------------- four ranks


class Stopwatch:
    """Ideal and real seconds since all ranks started together."""

    def __init__(self, network: PacedNetwork) -> None:
        self._clock = network.clock
        dist.barrier()
        self._clock.restart()
        dist.barrier()
        self._start_s = self._clock.ideal_s

    def read(self) -> tuple[float, float]:
        return self._clock.ideal_s - self._start_s, time.monotonic() - self._start_s


def _one_message(rank: int, network: PacedNetwork) -> tuple[float, float]:
    watch = Stopwatch(network)
    if rank == 0:
        dist.isend(MESSAGE.clone(), 1).wait()
    elif rank == 1:
        found = torch.zeros(50)
        dist.irecv(found, 0).wait()
        assert torch.equal(found, MESSAGE)
    return watch.read()


def _queue(rank: int, network: PacedNetwork) -> list[tuple[float, float]]:
    """Rank 0 sends twice at once; rank 1 computes meanwhile and asks for the second first."""
    watch = Stopwatch(network)
    if rank == 0:
        works = [dist.isend(MESSAGE + number, 1) for number in range(2)]
        return [watch.read() for work in works if work.wait()]
    if rank == 1:
        found = torch.zeros(2, 50)
        works = [dist.irecv(row, 0) for row in found]
        network.clock.compute(0.01)
        works[1].wait()
        read = watch.read()
        works[0].wait()
        assert torch.equal(found, torch.stack([MESSAGE, MESSAGE + 1]))
        return [read, watch.read()]
    return []


def _both_ways(rank: int, network: PacedNetwork) -> tuple[float, float]:
    watch = Stopwatch(network)
    found = torch.tensor(0.0)
    ops = [
        dist.P2POp(dist.isend, torch.tensor(float(rank)), (rank + 1) % 4),
        dist.P2POp(dist.irecv, found, (rank - 1) % 4),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert float(found) == (rank - 1) % 4
    return watch.read()


def _all_reduce(rank: int, network: PacedNetwork) -> tuple[float, float]:
    """Starts with the last, rank 3; the others compute in the meantime."""
    watch = Stopwatch(network)
    network.clock.compute(0.01 * rank)
    total = MESSAGE * rank
    work = dist.all_reduce(total, async_op=True)
    network.clock.compute(0.02)
    work.wait()
    assert torch.equal(total, MESSAGE * 6)
    return watch.read()


def _collectives(rank: int, network: PacedNetwork) -> Callable[[], dict[str, float]]:
    """Groups of two ranks, one with a link of its own: ideal seconds of each; two are launched at once."""
    first = rank // 2 * 2
    ranks = [first, first + 1]
    pair = dist.new_group(ranks, backend="paced", use_local_synchronization=True)
    time_scale = dist.new_group(
        ranks,
        backend="paced",
        use_local_synchronization=True,
        pg_options=PacedLink(latency_s=0.02, bandwidth_bytes_per_s=1e9),
    )

    def run() -> dict[str, float]:
        whole, part, mine = torch.zeros(100), torch.zeros(25), torch.full((50,), float(rank))
        found = {}

        def timed(name: str, collective: Callable[[], object]) -> None:
            before_s = network.clock.ideal_s
            collective()
            found[name] = network.clock.ideal_s - before_s

        Stopwatch(network)
        timed("all_gather", lambda: all_gather_single(whole, mine, group=pair))
        assert whole.tolist() == [float(first)] * 50 + [float(first + 1)] * 50
        timed("reduce_scatter", lambda: reduce_scatter_single(part, mine, group=pair))
        assert part.tolist() == [2.0 * first + 1] * 25
        timed("broadcast", lambda: dist.broadcast(mine, first, group=pair))
        assert mine.tolist() == [float(first)] * 50
        timed("barrier", lambda: dist.barrier(time_scale))
        works = [dist.all_reduce(torch.zeros(50), group=pair, async_op=True) for _ in range(2)]
        timed("two all_reduces", works[1].wait)
        assert works[0].wait() and works[0].is_completed()
        return found

    return run


def _dtensor(rank: int, network: PacedNetwork) -> Callable[[], float]:
    """torch's tensor parallelism takes the same links, through functional collectives in C++."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows = DTensor.from_local(torch.full((25, 2), float(rank % 2)), mesh["tp"], [Shard(0)], run_check=False)

    def run() -> float:
        watch = Stopwatch(network)
        whole = rows.redistribute(placements=[Replicate()]).to_local()
        assert float(whole.sum()) == 50
        assert functional.all_reduce(torch.ones(50), "sum", mesh["tp"].get_group()).tolist() == [2.0] * 50
        return watch.read()[0]

    return run


def _lanes(rank: int, network: PacedNetwork) -> tuple[Callable[[], float], Callable[[], float]]:
    """Two groups that share a lane: what is launched on both at once follows each other."""
    link = PacedLink(latency_s=0.03, bandwidth_bytes_per_s=1e9, lane="p2p")
    groups = [dist.new_group([0, 1, 2, 3], backend="paced", pg_options=link) for _ in range(2)]

    def messages() -> float:
        watch = Stopwatch(network)
        if rank == 0:
            dist.isend(MESSAGE[:0], 1, groups[0])
            dist.isend(MESSAGE[:0], 2, groups[1])
        elif rank < 3:
            dist.irecv(torch.zeros(0), 0, groups[rank - 1]).wait()
        return watch.read()[0]

    def barriers() -> float:
        watch = Stopwatch(network)
        for work in [dist.barrier(group, async_op=True) for group in groups]:
            work.wait()
        return watch.read()[0]

    return messages, barriers


Rounds = list[tuple[float, Any]]  # what a rank gave up in each, and what it read


def _everything(rank: int, network: PacedNetwork) -> dict[str, Rounds]:
    messages, barriers = _lanes(rank, network)
    experiments: dict[str, Callable[[], Any]] = {
        "message": lambda: _one_message(rank, network),
        "queue": lambda: _queue(rank, network),
        "both ways": lambda: _both_ways(rank, network),
        "all_reduce": lambda: _all_reduce(rank, network),
        "collectives": _collectives(rank, network),
        "dtensor": _dtensor(rank, network),
        "messages of a lane": messages,
        "barriers of a lane": barriers,
    }
    found: dict[str, Rounds] = {name: [] for name in experiments}
    for name, run in experiments.items():
        for _ in range(ROUNDS):
            read = run()
            found[name].append((network.clock.lost_s, read))
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Rounds]]:
    return run_paced_ranks(_everything, 4, LINK)


def _calm(ranks: list[dict[str, Rounds]], name: str) -> list[list[Any]]:
    """What every rank read, in rounds in which the hosts of all of them kept up."""
    rounds = list(zip(*(found[name] for found in ranks), strict=True))
    calm = [one for one in rounds if not any(lost_s for lost_s, _ in one)]
    assert calm, f"the host was too late in all of {ROUNDS} rounds: nothing was measured"
    return [[read for _, read in reads] for reads in zip(*calm, strict=True)]


def _near(reads: list[tuple[float, float]], wanted_s: float) -> None:
    """Ideal time is exact; real time is never before it, and near it if nothing else ran."""
    assert [ideal for ideal, _ in reads] == pytest.approx([wanted_s] * len(reads), abs=1e-6)
    assert all(real >= ideal for ideal, real in reads)
    assert min(real for _, real in reads) == pytest.approx(wanted_s, abs=allowed_s(NEAR_S))


@pytest.mark.alone
@pytest.mark.heavy
def test_a_message_takes_latency_plus_bytes_over_bandwidth(ranks: list[dict[str, Rounds]]) -> None:
    for reads, wanted_s in zip(_calm(ranks, "message"), [MESSAGE_S, MESSAGE_S, 0.0, 0.0], strict=True):
        _near(reads, wanted_s)


@pytest.mark.alone
@pytest.mark.heavy
def test_messages_queue(ranks: list[dict[str, Rounds]]) -> None:
    sender, receiver, *_ = _calm(ranks, "queue")
    _near([first for first, _ in sender], MESSAGE_S)
    _near([second for _, second in sender], 2 * MESSAGE_S)
    _near([read for reads in receiver for read in reads], 2 * MESSAGE_S)


@pytest.mark.alone
@pytest.mark.heavy
def test_directions_do_not_disturb_each_other(ranks: list[dict[str, Rounds]]) -> None:
    for reads in _calm(ranks, "both ways"):
        _near(reads, 0.005 + 40 / 1e5)


@pytest.mark.alone
@pytest.mark.heavy
def test_an_all_reduce_starts_with_the_last_and_hides_behind_compute(ranks: list[dict[str, Rounds]]) -> None:
    for reads in _calm(ranks, "all_reduce"):
        _near(reads, 0.03 + max(0.02, 0.005 + 2 * 3 / 4 * 2000 / 1e5))


@pytest.mark.alone
@pytest.mark.heavy
def test_collectives_of_a_pair(ranks: list[dict[str, Rounds]]) -> None:
    wanted = {
        "all_gather": 0.005 + 4000 / 2 / 1e5,
        "reduce_scatter": 0.005 + 2000 / 2 / 1e5,
        "broadcast": MESSAGE_S,
        "barrier": 0.02,
        "two all_reduces": 2 * (0.005 + 2000 / 1e5),
    }
    for reads in _calm(ranks, "collectives"):
        for read in reads:
            assert read == pytest.approx(wanted, abs=1e-6)


@pytest.mark.alone
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "wanted_s"),
    [
        ("dtensor", [(0.005 + 4000 / 2 / 1e5) + (0.005 + 2000 / 1e5)] * 4),
        ("messages of a lane", [0, 0.03, 0.06, 0]),
        ("barriers of a lane", [0.06] * 4),
    ],
)
def test_dtensor_takes_the_same_links_and_groups_may_share_a_lane(
    ranks: list[dict[str, Rounds]], name: str, wanted_s: list[float]
) -> None:
    for reads, rank_s in zip(_calm(ranks, name), wanted_s, strict=True):
        assert reads == pytest.approx([rank_s] * len(reads), abs=1e-6)


def _third_fails(rank: int, network: PacedNetwork) -> None:
    if rank == 2:
        raise ValueError("no third rank")


def _dies(rank: int, report: object) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.heavy
def test_a_rank_that_is_killed_is_named_at_once() -> None:
    start_s = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank [01]: "):
        run_pinned_ranks(_dies, 2)
    assert time.monotonic() - start_s < 60


@pytest.mark.heavy
def test_a_failure_is_raised_at_once_and_ends_all_ranks() -> None:
    start_s = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 2: (?s:.)*no third rank"):
        run_paced_ranks(_third_fails, 3, LINK)
    assert time.monotonic() - start_s < 30
    assert not multiprocessing.active_children()
