"""Reads environment variables and the number of cores, and ties processes to those that started them."""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of Linux' prctl


def cache_candidates(variables: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Places for files that only save time when kept, best first; none is promised to be usable.

    `OPTIMUS_CACHE_DIR`, then `XDG_CACHE_HOME/optimus`, then `~/.cache/optimus`, then a directory of this
    user's own among the temporary files. What is not known is left out: there may be no home (a container
    with a bare user id) and no temporary directory (a read-only root).
    """
    candidates = []
    if chosen := variables.get("OPTIMUS_CACHE_DIR"):
        candidates.append(Path(chosen).absolute())
    if (xdg := Path(variables.get("XDG_CACHE_HOME", ""))).is_absolute():  # the XDG rule: ignore others
        candidates.append(xdg / "optimus")
    if (home := Path(_home(variables))).is_absolute():
        candidates.append(home / ".cache" / "optimus")
    try:
        candidates.append(Path(tempfile.gettempdir(), f"optimus-{os.geteuid()}"))
    except FileNotFoundError:
        pass
    return tuple(candidates)


def _home(variables: Mapping[str, str]) -> str:
    if home := variables.get("HOME"):
        return home
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return ""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """Rank and rendezvous of this process, as torchrun's environment variables state them."""

    rank: int
    world: int
    local_rank: int
    local_world: int  # 1 if nobody said
    restart: int  # as this node counts: other nodes may have counted otherwise
    run_id: str
    address: str  # of the store
    port: int
    store_is_hosted: bool  # by the launcher; otherwise by rank 0

    @property
    def one_host(self) -> bool:
        """All ranks are on this host."""
        return self.local_world == self.world


def launched(variables: Mapping[str, str] = os.environ) -> Launched | None:
    """The place of this process in a run of several; None if it was started by itself.

    A variable that is missing or not a number raises KeyError or ValueError: a launcher sets all of them.
    """
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    return Launched(
        rank=int(variables["RANK"]),
        world=int(variables["WORLD_SIZE"]),
        local_rank=int(variables.get("LOCAL_RANK", "0")),
        local_world=int(variables.get("LOCAL_WORLD_SIZE", "1")),
        restart=int(variables.get("TORCHELASTIC_RESTART_COUNT", "0")),
        run_id=variables.get("TORCHELASTIC_RUN_ID", "run"),
        address=variables["MASTER_ADDR"],
        port=int(variables["MASTER_PORT"]),
        store_is_hosted=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def for_rank(place: Launched, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of a rank that we launch: ours, NCCL's, what `launched` reads, and one BLAS thread."""
    rank_variables = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world,
        "TORCHELASTIC_RESTART_COUNT": place.restart,
        "TORCHELASTIC_RUN_ID": place.run_id,
        "MASTER_ADDR": place.address,
        "MASTER_PORT": place.port,
        "TORCHELASTIC_USE_AGENT_STORE": place.store_is_hosted,
        "OMP_NUM_THREADS": 1,
        "MKL_NUM_THREADS": 1,
        "OPENBLAS_NUM_THREADS": 1,
    }
    return {**NCCL_VARIABLES, **variables, **{name: str(value) for name, value in rank_variables.items()}}


def keep_gloo_on_loopback(variables: MutableMapping[str, str] = os.environ) -> None:
    """Tells gloo, which listens to nothing but this variable, to open no port to the network."""
    variables.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")


def keep_freed_memory(variables: MutableMapping[str, str] = os.environ) -> None:
    """Tells the C library of processes started from now on to keep freed memory.

    A step frees and takes the same large tensors over and over: page by page again, that costs some per cent.
    """
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        variables.setdefault(name, str(2**31))


# Of every rank, unless the environment says otherwise. A plan uses more queues of a GPU than the 8 that are
# CUDA's default; a communicator connects for all algorithms at once, since connecting at the first use of one
# blocks the host; an error of NCCL ends the process; a collective that times out leaves its events in a file;
# collectives get multiprocessors before compute that was launched earlier and is not resident yet.
NCCL_VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_DEBUG": "WARN",
    "NCCL_RUNTIME_CONNECT": "0",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
}

# What changes how CUDA and NCCL behave, and says nothing about whose machine it is.
TUNING = (
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "NCCL_ALGO", "NCCL_CTA_POLICY",
    "NCCL_CUMEM_ENABLE", "NCCL_LAUNCH_ORDER_IMPLICIT", "NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_NTHREADS", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL", "NCCL_PROTO", "NCCL_RUNTIME_CONNECT", "NCCL_SHM_DISABLE", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_HIGH_PRIORITY",
)  # fmt: skip


def tuning(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables of `TUNING` that are set, since measurements depend on them."""
    return {name: variables[name] for name in TUNING if name in variables}


# What else a bug report names. Variables that are in no list, tokens above all, are never read for one.
REPORTED = (
    "COLUMNS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "LANG", "LOCAL_WORLD_SIZE", "MKL_NUM_THREADS",
    "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NUMBA_NUM_THREADS", "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS", "OPTIMUS_CACHE_DIR", "RANK", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS",
    "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "WANDB_MODE",
    "WORLD_SIZE",
)  # fmt: skip


def reported(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables that a bug report may name, and their values."""
    names = sorted({*TUNING, *NCCL_VARIABLES, *REPORTED})
    return {name: variables[name] for name in names if name in variables}


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent(parent: int) -> None:
    """Lets the kernel kill this process when `parent`, which started it, dies, however that happens.

    In a container the parent may be process 1, which elsewhere adopts orphans.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before
            os._exit(os.EX_TEMPFAIL)
