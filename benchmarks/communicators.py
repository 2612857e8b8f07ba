"""Groups of a bench: communicators of its own, and where all ranks meet."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import distributed as dist

TIMEOUT_S = 300.0  # later than any bench gives up


def group_among(parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """A communicator for this rank's part; all ranks are in one, and call it with the same parts."""
    timeout = timedelta(seconds=TIMEOUT_S)
    if dist.get_backend() == "nccl":
        return dist.split_group(split_ranks=[list(part) for part in parts], timeout=timeout)
    mine = next(part for part in parts if dist.get_rank() in part)
    return dist.new_group(list(mine), timeout=timeout, use_local_synchronization=True)


def meet(host: dist.ProcessGroup | None) -> None:
    """Nobody goes on before all are here. No barrier: in a group beside NCCL's it would want a GPU."""
    dist.all_reduce(torch.zeros(1), group=host)
