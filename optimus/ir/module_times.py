"""Seconds of modules that the cost model does not know: what a plan for them is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """One stage or block on one microbatch; of `backward_s`, the whole, `weight_s` can be deferred."""

    forward_s: float
    backward_s: float  # 0: it is frozen
    weight_s: float = 0.0
    send_s: float = 0.0  # of its output to another rank
    gather_s: float = 0.0  # of its parameters, if they are sharded over its replicas
    reduce_s: float = 0.0  # of its gradients over them


@dataclass(frozen=True, kw_only=True)
class EncoderBlocks:
    """One encoder as blocks in order; `pieces` are its microbatches in one of the LLM's."""

    blocks: Sequence[Seconds]
    pp: int = 1
    pieces: int = 1
