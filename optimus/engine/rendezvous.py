"""Joins the ranks of a run into the default process group, the first time and after every restart."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from optimus.environment import NCCL_VARIABLES, Launched, keep_gloo_on_loopback, launched
from optimus.errors import OptimusError, UserError
from optimus.ir.plan import Plan

FAN_OUT = 16  # children of a rank in the tree that distributes the attempt's prefix
BACKLOG = 4096  # connections that may wait for the store


@dataclass(frozen=True, kw_only=True)
class RunMembership:
    """This process as a member of the run."""

    rank: int
    world: int
    local_rank: int
    restart: int  # counted by rank 0
    store: Any  # of this attempt only: keys of earlier attempts are not seen


class RendezvousTimeout(OptimusError):
    """A rank waited for another that did not join in time."""


def join_process_group(*, timeout_s: float, backend: str) -> RunMembership:
    """Joins the default process group: gloo on CPU, nccl on GPU.

    A restart reuses the store of the attempt that died, with addresses of dead processes in it: with torch's
    own `env://` no restart at 4 or more ranks succeeds. So each attempt works under its own prefix, which
    rank 0 draws. The launcher's restart count alone does not do as a prefix: torchrun's nodes count for
    themselves, and one that restarts because another failed does not count.

    `timeout_s` limits joining and, on gloo, every later op of the group; torch's default is 30 minutes.

    Any client that reaches the port of torchrun's store can run code in this process (it reads pickles), and
    TCPStore listens on all interfaces, whatever address it is given: keep such runs on an isolated network.
    If all ranks are on one host, gloo is kept on loopback, and so is a store that we host.
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
    prefix, restart = _agree_on_attempt(shared, place, timeout_s)
    store = PrefixStore(prefix, shared)
    device = torch.device("cuda", place.local_rank) if backend == "nccl" else None
    if device is not None:
        for name, value in NCCL_VARIABLES.items():  # a launcher of others sets none
            os.environ.setdefault(name, value)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=PrefixStore("groups", store),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=timeout_s),
        device_id=device,
    )
    return RunMembership(
        rank=place.rank, world=place.world, local_rank=place.local_rank, restart=restart, store=store
    )


def host_tcp_store(listening: socket.socket, timeout_s: float) -> TCPStore:
    """Hosts a store on a socket that already listens; clients that connected before are answered now."""
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
        return host_tcp_store(socket.create_server(("127.0.0.1", place.port), backlog=BACKLOG), timeout_s)
    return TCPStore(
        place.address,
        place.port,
        is_master=hosts,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def _agree_on_attempt(store: Any, place: Launched, timeout_s: float) -> tuple[str, int]:
    """Returns the prefix that rank 0 draws for this attempt, and its restart count; the same on all ranks.

    The prefix travels down a tree, so a rank contacts at most `FAN_OUT` others. The store may hold keys of
    ranks that are dead: every process therefore registers with a random token and is answered under that
    token, and its parent repeats the answer until the process confirms it.
    """
    greetings = PrefixStore(f"{place.run_id}/greetings", store)
    deadline = time.monotonic() + timeout_s
    if place.rank == 0:
        prefix = f"{place.run_id}/{place.restart}/{uuid.uuid4().hex[:12]}"
        restart = place.restart
    else:
        token = uuid.uuid4().hex
        greetings.set(f"{place.rank}", token)
        parent = (place.rank - 1) // FAN_OUT
        _wait(greetings, f"{place.rank}/{token}", timeout_s, f"rank {place.rank} waited for rank {parent}")
        count, prefix = greetings.get(f"{place.rank}/{token}").decode().split(" ", 1)
        restart = int(count)
        greetings.set(f"{place.rank}/{prefix}", "")
    first = place.rank * FAN_OUT + 1
    for child in range(first, min(first + FAN_OUT, place.world)):
        _pass_on(greetings, place.rank, child, restart, prefix, deadline)
    return prefix, restart


def _pass_on(greetings: Any, rank: int, child: int, restart: int, prefix: str, deadline: float) -> None:
    """Answers a child's registration until its process, not an earlier one, confirms the prefix."""
    waits = f"rank {rank} waited for rank {child}"
    confirm_s = 0.02
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise RendezvousTimeout(f"{waits}, which did not join again after a restart")
        _wait(greetings, f"{child}", left_s, waits)
        token = greetings.get(f"{child}").decode()
        greetings.set(f"{child}/{token}", f"{restart} {prefix}")
        repeat_at = time.monotonic() + min(confirm_s, left_s)
        while time.monotonic() < repeat_at:  # polls: a wait that times out makes TCPStore print warnings
            if greetings.check([f"{child}/{prefix}"]):
                return
            time.sleep(0.005)
        confirm_s = min(2 * confirm_s, 0.5)


def _wait(store: Any, key: str, timeout_s: float, waits: str) -> None:
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        raise RendezvousTimeout(f"{waits}, which did not join: has its node started?") from error


def is_first_to_report(text: str, *, timeout_s: float = 5.0) -> bool:
    """Returns whether no other rank of this attempt has reported this text; True if the store fails."""
    place = launched()
    if place is None or (place.rank == 0 and not place.store_is_hosted):
        return True
    key = f"{place.run_id}/{place.restart}/said/{hashlib.sha256(text.encode()).hexdigest()}"
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


def check_ranks_agree(store: Any, rank: int, world: int, name: str, value: str) -> None:
    """Raises the same error on all ranks unless all hold the same value; once per name and attempt.

    Every rank compares with rank 0's value, so its work does not grow with the world. A rank that differs
    writes the result; if none does, the last rank writes that all agree.
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
        result = store.get("verdict").decode()
    except dist.DistStoreError as error:
        raise RendezvousTimeout(
            f"rank {rank} waited to compare the {name}, but not all {world} ranks joined"
        ) from error
    if result != "all":
        other, different = result.split(" ", 1)
        raise UserError(
            field=name,
            value=different,
            problem=f"on rank {other} differs from {expected} on rank 0",
            hint="give all ranks the same files",
        )


def check_settings_agree(store: Any, rank: int, world: int, settings: Mapping[str, object]) -> None:
    """Raises the same error on all ranks unless all hold the same settings: it names one that differs."""
    shown = {name: str(value) for name, value in settings.items()}
    try:
        check_ranks_agree(store, rank, world, "settings", json.dumps(shown))
    except UserError:
        for name, value in shown.items():
            check_ranks_agree(store, rank, world, name, value)
        raise


def check_world_size(plan: Plan) -> None:
    """Raises, before any rank waits for another, if the plan is for another number of ranks."""
    place = launched()
    if place is not None and place.world != plan.ranks.world:
        raise UserError(
            field="plan",
            problem=f"is for {plan.ranks.world} ranks, and {place.world} were started",
            hint=f"start {plan.ranks.world} (torchrun --nproc-per-node), or plan for {place.world} GPUs",
        )


def has_gpus() -> bool:
    """Returns whether this host has a GPU for each of its ranks."""
    place = launched()
    return place is not None and torch.cuda.device_count() >= place.local_world
