"""A measured profile: where it has a number, it beats the formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from optimus.program.op import Kind


@dataclass(frozen=True, kw_only=True)
class KernelKey:
    """What was measured: one kernel of one module at one size."""

    module: str
    kind: Kind
    kernel: str
    tokens: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured seconds of kernels; empty for a purely analytic price."""

    seconds: Mapping[KernelKey, float] = field(default_factory=dict)
    source: str = "analytic, uncalibrated"

    def measured_s(self, key: KernelKey) -> float | None:
        return self.seconds.get(key)
