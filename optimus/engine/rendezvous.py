"""Brings the ranks of a run together, the first time and after every restart."""

from __future__ import annotations

import hashlib
import socket
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from optimus.environment import Launched, keep_gloo_on_loopback, launched
from optimus.errors import OptimusError, UserError

FAN_OUT = 16  # ranks that one rank greets
BACKLOG = 4096  # connections that may wait for the store


@dataclass(frozen=True, kw_only=True)
class Membership:
    """This process as a member of the run."""

    rank: int
    world: int
    local_rank: int
    restart: int  # as rank 0 counts
    store: Any  # of this attempt only: what earlier attempts left is not seen


class RendezvousTimeout(OptimusError):
    """A rank waited for another that did not come in time."""


def join(*, timeout_s: float, backend: str) -> Membership:
    """Joins the default process group: gloo on CPU, nccl on GPU.

    A restart meets the store of the attempt that died, and in it addresses of dead processes: with torch's
    own `env://` no restart at 4 or more ranks succeeds. So each attempt works under a prefix of its own,
    which rank 0 draws. The launcher's restart count alone does not do as a prefix: torchrun's nodes count
    for themselves, and one that restarts because another failed does not count.

    `timeout_s` limits joining and, on gloo, every later op of the group; torch's default is 30 minutes.

    Whoever reaches the port of torchrun's store can run code in this process (it reads pickles), and
    TCPStore listens on all interfaces, whatever address it is given: keep such runs on an isolated network.
    Where all ranks are on one host, gloo is kept on loopback, and so is a store that we host.
    """
    place = launched()
    if place is None:
        raise UserError(
            field="rank",
            problem="is not known: this process was not started as one of several",
            hint="start it with torchrun, or with optimus train",
        )
    if place.one_host and backend == "gloo":
        keep_gloo_on_loopback()
    shared = _connect(place, timeout_s)
    attempt, restart = _attempt(shared, place, timeout_s)
    store = PrefixStore(attempt, shared)
    device = torch.device("cuda", place.local_rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=PrefixStore("groups", store),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=timeout_s),
        device_id=device,
    )
    return Membership(
        rank=place.rank, world=place.world, local_rank=place.local_rank, restart=restart, store=store
    )


def host_store(listening: socket.socket, timeout_s: float) -> TCPStore:
    """A store on a socket that already listens: who connected before is answered now."""
    host, port = listening.getsockname()
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),  # bound by us: TCPStore itself would bind to all interfaces
    )


def _connect(place: Launched, timeout_s: float) -> TCPStore:
    hosts = place.rank == 0 and not place.store_is_hosted
    if hosts and place.one_host and place.address in ("127.0.0.1", "localhost"):
        return host_store(socket.create_server(("127.0.0.1", place.port), backlog=BACKLOG), timeout_s)
    return TCPStore(
        place.address,
        place.port,
        is_master=hosts,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def _attempt(store: Any, place: Launched, timeout_s: float) -> tuple[str, int]:
    """The prefix that rank 0 draws for this attempt, and its restart count; the same on all ranks.

    It travels down a tree, so no rank does more than greet `FAN_OUT` others. The store may hold greetings of
    ranks that are dead: every process therefore signs with a word of its own and is answered by that word,
    and a rank greets until the new process behind each number has confirmed.
    """
    greetings = PrefixStore(f"{place.run_id}/greetings", store)
    deadline = time.monotonic() + timeout_s
    if place.rank == 0:
        name = f"{place.run_id}/{place.restart}/{uuid.uuid4().hex[:12]}"
        restart = place.restart
    else:
        word = uuid.uuid4().hex
        greetings.set(f"{place.rank}", word)
        parent = (place.rank - 1) // FAN_OUT
        _wait(greetings, f"{place.rank}/{word}", timeout_s, f"rank {place.rank} waited for rank {parent}")
        count, name = greetings.get(f"{place.rank}/{word}").decode().split(" ", 1)
        restart = int(count)
        greetings.set(f"{place.rank}/{name}", "")
    first = place.rank * FAN_OUT + 1
    for child in range(first, min(first + FAN_OUT, place.world)):
        _greet(greetings, place.rank, child, f"{restart} {name}", deadline)
    return name, restart


def _greet(greetings: Any, rank: int, child: int, news: str, deadline: float) -> None:
    name = news.split(" ", 1)[1]
    who = f"rank {rank} waited for rank {child}"
    patience_s = 0.02
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise RendezvousTimeout(f"{who}, which did not come again after a restart")
        _wait(greetings, f"{child}", left_s, who)
        greetings.set(f"{child}/{greetings.get(f'{child}').decode()}", news)
        give_up = time.monotonic() + min(patience_s, left_s)
        while time.monotonic() < give_up:  # polls: a wait that times out makes TCPStore print warnings
            if greetings.check([f"{child}/{name}"]):
                return
            time.sleep(0.005)
        patience_s = min(2 * patience_s, 0.5)


def _wait(store: Any, key: str, timeout_s: float, who: str) -> None:
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        raise RendezvousTimeout(f"{who}, which did not come: has its node started?") from error


def first_to_report(words: str, *, timeout_s: float = 5.0) -> bool:
    """Whether no other rank of this attempt has these words to say; in doubt, yes."""
    place = launched()
    if place is None or (place.rank == 0 and not place.store_is_hosted):
        return True
    key = f"{place.run_id}/{place.restart}/said/{hashlib.sha256(words.encode()).hexdigest()}"
    try:
        store = TCPStore(
            place.address,
            place.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
        return bool(store.add(key, 1) == 1)
    except RuntimeError:  # all errors of c10d
        return True


def agree(store: Any, rank: int, world: int, name: str, value: str) -> None:
    """Raises the same error on all ranks unless all hold the same value; once per name and attempt.

    Every rank compares with rank 0's value, so its work does not grow with the world; one that differs says
    so for all, and the last one that does not says that all agree.
    """
    store = PrefixStore(f"agree/{name}", store)
    if rank == 0:
        store.set("value", value)
    try:
        expected = store.get("value").decode()
        if value != expected:
            store.compare_set("verdict", "", f"{rank} {value}")
        if store.add("ranks", 1) == world:
            store.compare_set("verdict", "", "all")
        verdict = store.get("verdict").decode()
    except dist.DistStoreError as error:
        raise RendezvousTimeout(
            f"rank {rank} waited to compare the {name}, but not all {world} ranks came"
        ) from error
    if verdict != "all":
        other, theirs = verdict.split(" ", 1)
        raise UserError(
            field=name,
            value=theirs,
            problem=f"on rank {other} differs from {expected} on rank 0",
            hint="give all ranks the same files",
        )
