"""Network namespaces for ranks of one host, joined by links that are really slow: veth, a bridge, tbf."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from optimus.errors import UserError

CLONE_NEWNET = 0x40000000
BURST_BYTES = 32 * 1024  # that may pass at once: two frames
FRAME_BYTES, BUFFER_BYTES = 16 * 1024, 4 * 1024 * 1024
LATENCY_MS = 50  # that a frame may wait for its turn
INTERFACE = "eth0"  # of a rank, inside its namespace
RIGHTS = "run it as root; in a container with NET_ADMIN, SYS_ADMIN and SYS_NICE and a writable /proc/sys"


@contextmanager
def shaped_links(ranks: int, *, mbit_per_s: float) -> Iterator[list[str]]:
    """Namespaces, one for each rank; what a rank sends leaves at `mbit_per_s`. All is gone at the end."""
    _refuse_without_rights()
    own = f"opt{os.getpid() % 100_000}"
    names = [f"{own}n{rank}" for rank in range(ranks)]
    try:
        _ip("link", "add", own, "type", "bridge")
        _ip("link", "set", own, "up")
        for rank, name in enumerate(names):
            _ip("netns", "add", name)
            outside, inside = f"{own}v{rank}", f"{own}p{rank}"
            _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
            _ip("link", "set", outside, "master", own, "up")
            _ip("link", "set", inside, "netns", name)
            _ip("-n", name, "link", "set", inside, "name", INTERFACE)
            _ip("-n", name, "addr", "add", f"10.213.0.{rank + 1}/24", "dev", INTERFACE)
            # Frames that tbf lets pass whole: to cut larger ones would take the core of a rank.
            _ip("-n", name, "link", "set", INTERFACE, "gso_max_size", str(FRAME_BYTES), "up")
            for buffer in ("tcp_wmem", "tcp_rmem"):  # a whole message, handed over at once
                size = f"echo 4096 {BUFFER_BYTES} {BUFFER_BYTES} > /proc/sys/net/ipv4/{buffer}"
                _ip("netns", "exec", name, "sh", "-c", size)
            _ip("-n", name, "link", "set", "lo", "up")
            shape = ["rate", f"{mbit_per_s:g}mbit", "burst", str(BURST_BYTES), "latency", f"{LATENCY_MS}ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *shape)
        yield names
    finally:
        # Links by name: those of a deleted namespace go with it, but some time later.
        gone = [("link", "del", f"{own}v{rank}") for rank in range(ranks)]
        gone += [("netns", "del", name) for name in names]
        for words in (*gone, ("link", "del", own)):
            with suppress(UserError):
                _ip(*words)


def enter_namespace(name: str) -> None:
    """This process, and all it starts from now on, sees the network of a namespace only."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/var/run/netns", name).open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def _refuse_without_rights() -> None:
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise UserError(
                field="bench shaped", problem=f"needs `{tool}`, which is not here", hint="install iproute2"
            )
    if os.geteuid():
        raise UserError(
            field="bench shaped", problem="makes network namespaces, which this user may not", hint=RIGHTS
        )
    try:  # threads of communication go first
        before = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        os.sched_setscheduler(0, *before)
    except PermissionError:
        raise UserError(
            field="bench shaped", problem="gives threads real-time priority, which it may not", hint=RIGHTS
        ) from None


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    ran = subprocess.run(words, check=False, capture_output=True, text=True)
    if ran.returncode:
        said = (ran.stderr or ran.stdout).strip().splitlines()
        raise UserError(
            field="bench shaped",
            problem=f"could not run `{shlex.join(words)}`: {said[-1] if said else ran.returncode}",
            hint=RIGHTS,
        )
