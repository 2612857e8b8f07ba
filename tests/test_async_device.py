"""The engine runs on streams as a GPU has them: with the same bits, and every forgotten event is named."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
import torch
from async_device import DEVICE, AsyncNetwork, BrokenOrder, installed
from stream_bugs import NAMED, STREAM_BUGS
from strict_network import run_strict_ranks
from test_equality import check
from torch import Tensor
from torch import distributed as dist
from worker_lines import run_worker

from benchmarks.ranks import run_processes
from optimus.engine.torch_private import default_store
from optimus.engine.watchdog import EXIT_STALLED, NO_OP, StreamRecorder, Watchdog

# ---------------------------------------------------------------------------- rules


def numbers() -> Tensor:
    return torch.arange(64, dtype=torch.float64).reshape(8, 8)


def forget_an_event() -> None:
    product = numbers() @ numbers()
    with torch.cuda.stream(torch.cuda.Stream()):
        product * 2


def forget_an_event_ops_later() -> None:
    first = numbers() @ numbers()
    for _ in range(20):
        numbers() @ numbers()
    with torch.cuda.stream(torch.cuda.Stream()):
        first * 2


def read_on_the_host_too_early() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        product = numbers() @ numbers()
    product.tolist()


def write_what_another_stream_reads() -> None:
    product, side = numbers() @ numbers(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        product * 2
    product.zero_()


def free_what_another_stream_reads() -> None:
    product, side = numbers() @ numbers(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        product * 2
    del product
    numbers()


def give_back_what_another_stream_reads() -> None:
    product, side = numbers() @ numbers(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        product * 2
    product.untyped_storage().resize_(0)
    numbers()


def wait_for_another_event() -> None:
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    product = numbers() @ numbers()
    side.wait_event(event)
    with torch.cuda.stream(side):
        product * 2


def keep_all_rules() -> list[list[float]]:
    """Two streams that hand tensors to each other and drop them; reads twice, at the end and before."""
    side, results = torch.cuda.Stream(), []
    for _ in range(3):
        product = numbers() @ numbers()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            doubled = product * 2
        product.record_stream(side)
        del product
        numbers().zero_()
        torch.cuda.current_stream().wait_stream(side)
        results.append((doubled + 1).sum(0).tolist())
        doubled.record_stream(torch.cuda.current_stream())
        doubled.untyped_storage().resize_(0)
        doubled.untyped_storage().resize_(doubled.nbytes)
        doubled.fill_(1.0)
        disjoint = torch.zeros(2, 64, dtype=torch.float64)
        side.wait_stream(torch.cuda.current_stream())
        disjoint[0].add_(1)
        with torch.cuda.stream(side):
            disjoint[1].add_(1)
        disjoint.record_stream(side)
    return results


def run_ahead() -> int:
    """Queues attention, products and look-ups behind an op that ends when the host says so."""
    go_on, queries = threading.Event(), torch.zeros(1, 2, 8, 16)
    DEVICE.post("wait", lambda: go_on.wait(20), reads=[], writes=[])
    with torch.enable_grad():
        weight = torch.ones(16, 16, requires_grad=True)
        attended = torch.nn.functional.scaled_dot_product_attention(queries @ weight, queries, queries)
        rows = attended.flatten(0, 2)[torch.tensor([3, 1])]
        (rows @ weight).sum().backward()
    queued = len(DEVICE.current)
    go_on.set()
    return queued


def read_memory_that_nothing_wrote() -> float:
    return float(torch.empty(8, dtype=torch.float64).sum())


def learn() -> list[Tensor]:
    """Trains a small network for three steps, by autograd and an optimizer of torch."""
    torch.manual_seed(0)
    linear = torch.nn.Linear
    network = torch.nn.Sequential(linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), linear(16, 8))
    optimizer = torch.optim.AdamW(network.parameters(), foreach=True)
    inputs = torch.randn(4, 8)
    for _ in range(3):
        optimizer.zero_grad()
        network(inputs).softmax(-1).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.01)
        optimizer.step()
    return [parameter.detach() for parameter in network.parameters()]


def compare_with_none() -> bool:
    expected = learn()
    with DEVICE.running():
        learned = learn()
    return all(torch.equal(each, other) for each, other in zip(learned, expected, strict=True))


def _main(rank: int, world: int, store: str, report: object, function: Callable[[], Any]) -> Any:
    torch.set_num_threads(1)
    with installed():
        try:
            if function is compare_with_none:
                return function()
            with DEVICE.running():
                return function()
        except BrokenOrder as broken:
            return str(broken)


def on_streams(function: Callable[[], Any]) -> Any:
    """Returns what a function returns on the asynchronous device of a process, or the rule that it broke."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["async_device"])
    return run_processes(context, _main, 1, function, timeout_s=60.0)[0]


@pytest.mark.ci("engine")
@pytest.mark.parametrize(
    ("function", "named"),
    [
        (forget_an_event, "aten.mul.Tensor on stream 1 at test_async_device.py"),
        (forget_an_event_ops_later, "aten.mul.Tensor on stream 1 at test_async_device.py"),
        (wait_for_another_event, "aten.mul.Tensor on stream 1 at test_async_device.py"),
        (read_on_the_host_too_early, "tolist on stream 0 at test_async_device.py"),
        (write_what_another_stream_reads, "aten.zero_.default on stream 0 at test_async_device.py"),
        (free_what_another_stream_reads, "memory of stream 0 is freed before aten.mul.Tensor on stream 1"),
        (give_back_what_another_stream_reads, "memory of stream 0 is freed before aten.mul.Tensor on stream"),
    ],
)
def test_a_forgotten_event_is_named(function: Callable[[], Any], named: str) -> None:
    assert named in on_streams(function)


@pytest.mark.ci("engine")
def test_ops_in_order_are_let_through() -> None:
    expected = (2 * numbers() @ numbers() + 1).sum(0).tolist()
    assert on_streams(keep_all_rules) == [expected] * 3


@pytest.mark.ci("engine")
def test_the_host_runs_ahead() -> None:
    assert on_streams(run_ahead) > 10


@pytest.mark.ci("engine")
def test_memory_that_nothing_wrote_is_no_number() -> None:
    found = on_streams(read_memory_that_nothing_wrote)
    assert found != found


@pytest.mark.ci("engine")
def test_streams_change_no_bit() -> None:
    assert on_streams(compare_with_none) is True


# ---------------------------------------------------------------------------- progress


def follow_the_device() -> list[tuple[int, int]]:
    """Ten lines of which the fourth waits for another rank; the host queues all at once."""
    recorder, come = StreamRecorder(torch.cuda.Event), threading.Event()
    recorder.marked_lines = frozenset([3])
    found = [recorder.current()[:2]]
    for line in range(10):
        recorder.begin(line)
        DEVICE.post("op", (lambda: None) if line != 3 else come.wait, reads=[], writes=[])
        recorder.end(line)
    while recorder.current()[0] < 4:
        time.sleep(0.01)
    found.append(recorder.current()[:2])
    assert [line for line, _, end_s in recorder.entries() if end_s] == list(range(10))  # on the host
    come.set()
    DEVICE.synchronize()
    found.append(recorder.current()[:2])
    recorder.begin(10)
    return [*found, recorder.current()[:2]]


@pytest.mark.ci("engine")
def test_a_recorder_follows_the_device() -> None:
    assert on_streams(follow_the_device) == [(0, NO_OP), (4, 3), (10, NO_OP), (11, 10)]


SENDS, COMPUTES, RECEIVES, LATER = range(4)
STUCK_S, LIMIT_S = 12.0, 1.0


def hang_on_the_device(rank: int) -> tuple[int, list[str]]:
    """Rank 1 computes for a long time before it sends to rank 0; both hosts have queued all lines.

    Returns how the watchdog ended each rank, and what it said.
    """
    AsyncNetwork().register("async")
    group = dist.new_group([0, 1], backend="async", group_desc="llm.forward")
    lines = [COMPUTES, SENDS] if rank else [RECEIVES]
    ended, said = Future[int](), list[str]()
    recorder = StreamRecorder(torch.cuda.Event)
    recorder.marked_lines = frozenset([RECEIVES])
    watchdog = Watchdog(
        rank=rank,
        world=2,
        recorder=recorder,
        store=default_store(),
        describe=lambda line: ("llm.send-f", "llm.F", "llm.F of what arrives", "llm.F")[line],
        waits_for=lambda line: (1,) if line == RECEIVES else (),
        timeout_s=LIMIT_S,
        exit_process=ended.set_result,
    )
    with patch.object(Watchdog, "_print", lambda self, text: said.append(text)):
        with DEVICE.running():
            message, other = torch.zeros(4), torch.zeros(4)
            works = []
            watchdog.start()
            for line in [*lines, *[LATER] * 40]:
                recorder.begin(line)
                if line == COMPUTES:
                    DEVICE.post("compute", lambda: time.sleep(STUCK_S), reads=[message], writes=[message])
                elif line == SENDS:
                    works.append(dist.isend(message, 0, group))
                elif line == RECEIVES:
                    works.append(dist.irecv(message, 1, group))
                    works[-1].wait()
                else:
                    other.add_(1)
                recorder.end(line)
            code = ended.result(STUCK_S)
        watchdog.stop()
    return code, said


@pytest.mark.ci("engine")
@pytest.mark.timeout(120)
def test_a_hang_is_named_by_where_the_device_is() -> None:
    """The host of rank 0 is forty lines ahead of the one that does not end, and waits for nothing itself."""
    (first, _), (second, _) = results = run_strict_ranks(hang_on_the_device, 2, around=installed)
    assert first == second == EXIT_STALLED
    said = "\n".join(chain.from_iterable(words for _, words in results))
    assert "rank 1 has been in llm.F for" in said and "waits for no other rank: rank 0 waits for it" in said
    assert "rank 0 has waited" in said and "in llm.F of what arrives for rank 1" in said


# ---------------------------------------------------------------------------- plans

QUICK = ("two by two interleaved", "tp: two stages, encoder too", "fsdp: four ranks, frozen trunk")
GROUPS = ("", "tp", "cp", "dealt", "systems", "sharded", "tp-sharded", "cp-sharded", "sixteen")


def check_streams(*names: str, timeout_s: float) -> int:
    lines = run_worker("engine_worker.py", "1", *names, timeout_s=timeout_s, NETWORK="async")
    for line in lines:
        check(line)
    return len(lines)


@pytest.mark.ci("engine")
@pytest.mark.timeout(240)
def test_plans_on_streams_give_the_same_bits() -> None:
    """The second step's too, in which memory of the first is used again."""
    loose, streams = (
        run_worker("engine_worker.py", "2", QUICK[1], timeout_s=110, NETWORK=network)
        for network in ("gloo", "async")
    )
    assert [line["digests"] for line in streams] == [line["digests"] for line in loose]
    check(streams[0])


@pytest.mark.heavy
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("name", GROUPS)
def test_all_plans_keep_the_order_of_streams(name: str) -> None:
    assert check_streams(*filter(None, [name]), timeout_s=3900) >= 9


QUICK_BUGS = ("compute does not wait for a message",)


def check_bugs(*names: str, timeout_s: float) -> int:
    lines = run_worker("engine_worker.py", "stream-bugs", *names, timeout_s=timeout_s, NETWORK="async")
    for line in lines:
        assert "BrokenOrder" in line.get("error", ""), line["name"]
        assert NAMED[line["name"]] in line["error"], (line["name"], line["error"])
        assert "of the program" in line["error"], line["name"]
    return len(lines)


@pytest.mark.ci("engine")
@pytest.mark.timeout(120)
def test_a_bug_on_streams_is_named_with_its_line() -> None:
    assert check_bugs(*QUICK_BUGS, timeout_s=110) == 1


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_all_bugs_on_streams_are_named_with_their_lines() -> None:
    assert check_bugs(timeout_s=590) == len(STREAM_BUGS) >= 12
