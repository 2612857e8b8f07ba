"""Describes user modules by measured seconds, where the cost model has no formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of a stage or block on one microbatch; `weight_s` of `backward_s` can be deferred."""

    forward_s: float
    backward_s: float  # 0 if frozen
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
