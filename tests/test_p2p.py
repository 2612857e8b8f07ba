"""Tensors that ops hand to each other: taken once, waited for, and never left behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Event
from typing import Any

import pytest
import torch
from torch import distributed as dist

from optimus.engine.p2p import Key, P2PMailbox, TensorSpec

FIRST: Key = ("forward", "llm", 1, 0)
SECOND: Key = ("backward", "llm", 0, 3)


class Work:
    """A transfer that ends when somebody waits for it, or when it is told to."""

    def __init__(self) -> None:
        self.waited, self.done = 0, False

    def wait(self) -> None:
        self.waited += 1
        self.done = True

    def is_completed(self) -> bool:
        return self.done


class Wire:
    """What was asked of torch.distributed."""

    def __init__(self) -> None:
        self.backend = "nccl"
        self.sent: list[tuple[torch.Tensor, int, Work]] = []
        self.posted: list[tuple[torch.Tensor, int, Work]] = []

    def isend(self, tensor: torch.Tensor, other: int, group: Any) -> Work:
        self.sent.append((tensor, other, Work()))
        return self.sent[-1][2]

    def irecv(self, tensor: torch.Tensor, other: int, group: Any) -> Work:
        self.posted.append((tensor, other, Work()))
        return self.posted[-1][2]


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    found = Wire()
    monkeypatch.setattr(dist, "isend", found.isend)
    monkeypatch.setattr(dist, "irecv", found.irecv)
    monkeypatch.setattr(dist, "get_backend", lambda group: found.backend)
    return found


@pytest.fixture
def mail() -> P2PMailbox:
    return P2PMailbox(torch.device("cpu"))


GROUP: Any = None


def kept(mail: P2PMailbox) -> list[torch.Tensor]:
    """What is being sent."""
    return [tensor for _, tensor in mail._sends._pending]


def test_what_is_put_is_taken_once(mail: P2PMailbox) -> None:
    tensors = (torch.ones(2), torch.zeros(1))
    mail.put(FIRST, tensors)
    assert mail.take(FIRST) is tensors
    with pytest.raises(KeyError):
        mail.take(FIRST)
    mail.finish()


def test_what_nobody_took_is_an_error_that_names_it(mail: P2PMailbox) -> None:
    mail.put(SECOND, (torch.ones(1),))
    mail.put(FIRST, (torch.ones(1),))
    with pytest.raises(AssertionError, match=r"left behind.*backward.*forward"):
        mail.finish()


def test_a_receive_that_nobody_takes_is_left_behind(mail: P2PMailbox, wire: Wire) -> None:
    mail.receive(FIRST, (TensorSpec(shape=(1,), dtype=torch.float32),), 1, GROUP)
    with pytest.raises(AssertionError, match=r"left behind.*forward"):
        mail.finish()


def test_a_receive_is_waited_for_where_it_is_taken(mail: P2PMailbox, wire: Wire) -> None:
    specs = (TensorSpec(shape=(2, 3), dtype=torch.float64), TensorSpec(shape=(4,), dtype=torch.int64))
    mail.receive(FIRST, specs, 5, GROUP)
    assert [(tuple(t.shape), t.dtype, other) for t, other, _ in wire.posted] == [
        ((2, 3), torch.float64, 5),
        ((4,), torch.int64, 5),
    ]
    assert not any(work.waited for _, _, work in wire.posted)
    taken = mail.take(FIRST)
    assert all(got is posted for got, (posted, _, _) in zip(taken, wire.posted, strict=True))
    assert all(work.waited == 1 for _, _, work in wire.posted)
    mail.finish()


def test_a_send_goes_out_whole_and_stays_alive_until_it_has_ended(mail: P2PMailbox, wire: Wire) -> None:
    rows = torch.arange(6.0).reshape(2, 3).T
    mail.put(FIRST, (rows,))
    mail.send(FIRST, 4, GROUP)
    ((tensor, other, work),) = wire.sent
    assert other == 4 and tensor.is_contiguous() and torch.equal(tensor, rows)
    assert kept(mail)[0] is tensor and not work.done
    mail.finish()
    assert [each.waited for _, _, each in wire.sent] == [1] and not kept(mail)


def test_sends_that_have_ended_are_let_go_in_order(mail: P2PMailbox, wire: Wire) -> None:
    for number in range(3):
        mail.put(("forward", "llm", 1, number), (torch.ones(1),))
    mail.send(("forward", "llm", 1, 0), 1, GROUP)
    mail.send(("forward", "llm", 1, 1), 1, GROUP)
    wire.sent[0][2].done = True
    mail.send(("forward", "llm", 1, 2), 1, GROUP)
    assert [id(tensor) for tensor in kept(mail)] == [id(tensor) for tensor, _, _ in wire.sent[1:]]
    mail.finish()
    assert [work.waited for _, _, work in wire.sent] == [0, 1, 1]


class Silent(Work):
    """As gloo's: it says that it is over only to who waits, and that may take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = Event()

    def wait(self) -> None:
        assert self.arrived.wait(10)
        super().wait()

    def is_completed(self) -> bool:
        return bool(self.waited)


class Lost(Silent):
    def wait(self) -> None:
        super().wait()
        raise RuntimeError("the other end is gone")


def test_what_gloo_has_sent_is_let_go_when_it_has_arrived(
    mail: P2PMailbox, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although nobody here waits for it; an error is told to whoever comes next."""
    works = [Silent(), Silent(), Lost()]
    wire.backend, left = "gloo", iter(works)
    monkeypatch.setattr(dist, "isend", lambda tensor, other, group: next(left))
    for number in range(3):
        mail.put(("forward", "llm", 1, number), (torch.ones(1),))
        mail.send(("forward", "llm", 1, number), 1, GROUP)
    mail._sends.release_completed()
    assert len(kept(mail)) == 3
    works[0].arrived.set()
    wait_until(works[0].is_completed)
    over = mail._sends._pending[0][0]
    assert isinstance(over, Future)
    wait_until(over.done)
    mail._sends.release_completed()
    assert len(kept(mail)) == 2
    works[1].arrived.set()
    works[2].arrived.set()
    with pytest.raises(RuntimeError, match="gone"):
        mail.finish()


def wait_until(holds: Callable[[], Any]) -> None:
    end_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_what_was_received_can_be_sent_on(mail: P2PMailbox, wire: Wire) -> None:
    mail.receive(FIRST, (TensorSpec(shape=(1,), dtype=torch.float32),), 1, GROUP)
    mail.send(FIRST, 2, GROUP)
    assert [work.waited for _, _, work in wire.posted] == [1]
    assert wire.sent[0][0] is wire.posted[0][0]
    mail.finish()
