"""Defines what AdamW does to each parameter: rates, their schedule, and which parameters decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

SCHEDULES = ("constant", "cosine")
DECAYED = ("matrices", "all")
PROJECTOR = "projector"


class ParamGroup(NamedTuple):
    """Holds what AdamW applies to a parameter; `lr` is the rate before the schedule."""

    weight_decay: float
    lr: float


@dataclass(frozen=True, kw_only=True)
class ModuleOptimizer:
    """Settings of one module that differ from those of the others."""

    lr: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The `run.optimizer` section of a job file.

    `modules` are encoders, `ENCODER.projector` and `llm`. An encoder is without its projector there, as it is
    where modules are frozen.
    """

    lr: float = 1e-4
    warmup_steps: int = 0
    schedule: str = "constant"
    min_lr: float = 0.0  # of a cosine schedule, at its end and behind it
    decay_steps: int = 0  # of a cosine schedule: the step that reaches `min_lr`, counted from step 0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decayed: str = "matrices"  # parameters that decay: those of two or more dimensions, or all
    clip: float = 1.0  # the largest norm of all gradients; 0 does not clip
    modules: Mapping[str, ModuleOptimizer] = field(default_factory=dict)

    def lr_factor(self, step: int) -> float:
        """Returns what a step multiplies all rates with, as transformers' schedules do up to their end.

        The rate rises linearly from 0 in step 0 to its full value in step `warmup_steps`. A cosine falls from
        there to `min_lr` in step `decay_steps`, and stays there; modules keep their ratio to `lr`.
        """
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        progress = (step - self.warmup_steps) / max(1, self.decay_steps - self.warmup_steps)
        floor = self.min_lr / self.lr if self.lr else 0.0
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))

    def group_of(self, name: str, dims: int) -> ParamGroup:
        """Returns the group of a parameter by its global name and its number of dimensions."""
        module, _, rest = name.partition(".")
        own = f"{module}.{PROJECTOR}" if rest.startswith(f"{PROJECTOR}.") else module
        settings = self.modules.get(own, ModuleOptimizer())
        decay = self.weight_decay if settings.weight_decay is None else settings.weight_decay
        return ParamGroup(
            weight_decay=decay if dims > 1 or self.decayed == "all" else 0.0,
            lr=self.lr if settings.lr is None else settings.lr,
        )

    def settings(self) -> dict[str, object]:
        """Returns what must be the same on all ranks, by its name in a job file."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["modules"] = sorted(self.modules.items())
        return {f"run.optimizer.{name}": value for name, value in values.items()}
