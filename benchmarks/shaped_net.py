"""Joins network namespaces of one host by links of a given bandwidth: veth, a bridge, tbf."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from optimus.errors import UserError

CLONE_NEWNET = 0x40000000
BURST_BYTES = 32 * 1024  # that pass without delay: two frames
FRAME_BYTES, BUFFER_BYTES = 16 * 1024, 4 * 1024 * 1024
LATENCY_MS = 50  # the longest that a frame may queue
PREFIX = "opt"  # of bridges, links and namespaces; the process that made them follows
NAMESPACES = Path("/var/run/netns")
INTERFACE = "eth0"  # of a rank, inside its namespace
RIGHTS = "run it as root; in a container with NET_ADMIN, SYS_ADMIN and SYS_NICE and a writable /proc/sys"


@contextmanager
def shaped_links(ranks: int, *, mbit_per_s: float) -> Iterator[list[str]]:
    """Makes one namespace per rank, each sending at `mbit_per_s`, and removes them at the end."""
    _refuse_without_rights()
    _sweep()
    prefix = f"{PREFIX}{os.getpid()}"
    names = [f"{prefix}n{rank}" for rank in range(ranks)]
    try:
        _ip("link", "add", prefix, "type", "bridge")
        _ip("link", "set", prefix, "up")
        for rank, name in enumerate(names):
            _ip("netns", "add", name)
            outside, inside = f"{prefix}v{rank}", f"{prefix}p{rank}"
            _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
            _ip("link", "set", outside, "master", prefix, "up")
            _ip("link", "set", inside, "netns", name)
            _ip("-n", name, "link", "set", inside, "name", INTERFACE)
            _ip("-n", name, "addr", "add", f"10.213.0.{rank + 1}/24", "dev", INTERFACE)
            # Frames no larger than tbf passes in one piece: cutting larger ones takes the core of a rank.
            _ip("-n", name, "link", "set", INTERFACE, "gso_max_size", str(FRAME_BYTES), "up")
            for buffer in ("tcp_wmem", "tcp_rmem"):  # a whole message fits, so a send returns at once
                size = f"echo 4096 {BUFFER_BYTES} {BUFFER_BYTES} > /proc/sys/net/ipv4/{buffer}"
                _ip("netns", "exec", name, "sh", "-c", size)
            _ip("-n", name, "link", "set", "lo", "up")
            shape = ["rate", f"{mbit_per_s:g}mbit", "burst", str(BURST_BYTES), "latency", f"{LATENCY_MS}ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *shape)
        yield names
    finally:
        _remove([f"{prefix}v{rank}" for rank in range(ranks)] + [prefix], names)


def _sweep() -> None:
    """Removes what a benchmark that was killed could not remove itself."""
    owner = re.compile(rf"{PREFIX}(\d+)(?:[nv]\d+)?")
    links = [path.name for path in Path("/sys/class/net").iterdir()]
    names = [path.name for path in NAMESPACES.iterdir()] if NAMESPACES.is_dir() else []

    def is_abandoned(name: str) -> bool:
        found = owner.fullmatch(name)
        return found is not None and not Path("/proc", found[1]).exists()

    _remove(filter(is_abandoned, links), filter(is_abandoned, names))


def _remove(links: Iterable[str], names: Iterable[str]) -> None:
    """Removes links, then namespaces, which remove their links too, but some time later."""
    for words in (*(("link", "del", link) for link in links), *(("netns", "del", name) for name in names)):
        with suppress(UserError):
            _ip(*words)


def enter_namespace(name: str) -> None:
    """Moves this process, and all it starts from now on, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (NAMESPACES / name).open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def _refuse_without_rights() -> None:
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise UserError(
                field="shaped",
                problem=f"needs `{tool}`, which is not here",
                hint="install iproute2",
            )
    if os.geteuid():
        raise UserError(
            field="shaped",
            problem="makes network namespaces, which this user may not",
            hint=RIGHTS,
        )
    try:  # gloo's threads get real-time priority
        before = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        os.sched_setscheduler(0, *before)
    except PermissionError:
        raise UserError(
            field="shaped",
            problem="gives threads real-time priority, which this user may not",
            hint=RIGHTS,
        ) from None


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    ran = subprocess.run(words, check=False, capture_output=True, text=True)
    if ran.returncode:
        output = (ran.stderr or ran.stdout).strip().splitlines()
        raise UserError(
            field="shaped",
            problem=f"could not run `{shlex.join(words)}`: {output[-1] if output else ran.returncode}",
            hint=RIGHTS,
        )
